"""Steps with their optimizer's state on the host, beside the same steps with all of it on the device.

    python -m bench.state --program decoder-scan --device-gb 60 40 26 --out state.json
    python -m bench.state --divide rows --device-gb 28 20 --out state2.json  # on all GPUs, by the compiler

Variants: "device", the step by `jax.jit` with everything recomputed; "edges", the same with the state
brought to the device at the step's beginning and back at its end (`jax.device_put` in the step, MaxText's
way); and `jaxoff.jit(device_bytes=)` for each budget. One variant after the other, each from the same state
and twice, in turn: two states do not fit one card.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

import jaxoff
from bench.client_steps import PROGRAMS
from bench.client_steps.step import ClientStep
from bench.clients import DIVISIONS, divide
from bench.provenance import provenance
from jaxoff._runtime.program_memory import program_nbytes

WARMUPS = 2


def put_at_edges(step: ClientStep) -> Callable[..., Any]:
    """The step, of a state whose optimizer's part is on the host, brought to the device all at once."""

    def fun(state: Any, batch: Any) -> Any:
        params, rest = state
        rest = jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device) if x.ndim else x, rest)
        (params, rest), loss = step.fun((params, rest), batch)
        return (
            params,
            jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Host) if x.ndim else x, rest),
        ), loss

    return fun


def move_to_host(state: Any) -> Any:
    """The state with its optimizer's part on the host."""
    params, rest = state

    def move(x: jax.Array) -> jax.Array:
        moved = jax.device_put(x, x.sharding.with_memory_kind("pinned_host")) if x.ndim else x
        if x.ndim:
            moved.block_until_ready()
            x.delete()
        return moved

    return params, jax.tree.map(move, rest)


def time_variant(function: Any, state: Any, batch: Any, steps: int) -> dict[str, Any]:
    """Times single steps: the median of their milliseconds, and the losses."""
    samples, losses = [], []
    for i in range(WARMUPS + steps):
        started = time.perf_counter()
        state, loss = function(state, batch)
        jax.block_until_ready((state, loss))
        if i >= WARMUPS:
            samples.append(1e3 * (time.perf_counter() - started))
        losses.append(float(loss))
    jax.tree.map(lambda x: x.delete(), state)
    return {"ms": statistics.median(samples), "samples_ms": samples, "losses": losses}


def describe(function: Any, state: Any, batch: Any) -> dict[str, Any]:
    """The memory of a function's program, and its plan."""
    started = time.perf_counter()
    compiled = function.lower(state, batch).compile()
    planned_s = time.perf_counter() - started
    memory: Any = compiled.memory_analysis()
    row: dict[str, Any] = {
        "plan_s": planned_s,
        "peak_bytes": program_nbytes(compiled),
        "host_bytes": memory.host_argument_size_in_bytes + memory.host_temp_size_in_bytes,
    }
    plan = getattr(function, "plan", None)
    if plan is not None:
        row |= {"predicted_ms": plan.step_ms, "plan": str(plan), "recipe": function.recipe}
    return row


def main(arguments: list[str] | None = None) -> None:
    """Runs a program in all variants and writes their rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--program", choices=PROGRAMS, default="decoder-scan")
    parser.add_argument("--sizes", choices=["full", "tiny"], default="full")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--microbatches", type=int, help="each of two sequences; for accumulation")
    parser.add_argument("--unclipped", action="store_true", help="AdamW on gradients as they are")
    parser.add_argument("--divide", choices=DIVISIONS, help="state and batch over all devices, each as large")
    parser.add_argument("--device-gb", type=float, nargs="*", default=[])
    parser.add_argument("--variants", nargs="*", choices=["device", "edges"], default=["device", "edges"])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    if options.microbatches and options.program != "accumulation":
        parser.error("--microbatches is for --program accumulation: no other program divides its batch")
    program = dataclasses.replace(PROGRAMS[options.program], offloads=None)
    program = program.shrink() if options.sizes == "tiny" else program
    changes: dict[str, int] = {"layers": options.layers} if options.layers else {}
    if options.microbatches:
        changes |= {"microbatches": options.microbatches, "batch": 2 * options.microbatches}
    sizes = dataclasses.replace(program.sizes, **changes, clipped=not options.unclipped)
    if options.divide:
        sizes = dataclasses.replace(sizes, batch=sizes.batch * jax.device_count())
    step = program.build(sizes, attention="cudnn" if jax.default_backend() == "gpu" else "xla")
    batch, shardings = step.make_batch(jax.random.key(1)), None
    if options.divide:
        shardings, batch = divide(step, batch, options.divide)
    initialize = jax.jit(step.initialize, out_shardings=shardings)
    functions: dict[str, Any] = {}
    for name in options.variants:
        fun = step.fun if name == "device" else put_at_edges(step)
        functions[name] = jax.jit(fun, donate_argnums=0)
    for gigabytes in options.device_gb:
        make = functools.partial(jaxoff.jit, device_bytes=1e9 * gigabytes)
        functions[f"planned-{gigabytes:g}"] = step.jit(make)
    rows: dict[str, dict[str, Any]] = {}
    for turn in range(2):
        for name, function in functions.items():
            state = initialize(jax.random.key(0))
            state = move_to_host(state) if name == "edges" else state
            try:
                if turn == 0:
                    rows[name] = describe(function, state, batch)
                elif "error" in rows[name]:
                    continue
                rows[name][f"turn{turn}"] = time_variant(function, state, batch, options.steps)
            except (jaxoff.BudgetError, jax.errors.JaxRuntimeError) as error:
                rows[name] = {"error": str(error).splitlines()[0]}
            print(name, {k: v for k, v in rows[name].items() if k != "plan"}, flush=True)
            del state
            if options.out:
                result = {"provenance": provenance(vars(options)), "sizes": dataclasses.asdict(sizes)}
                options.out.write_text(json.dumps(result | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
