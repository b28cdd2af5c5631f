"""Steps within budgets, run in processes whose allocator has no more memory than the budget.

    python -m bench.allocator decoder-scan=30,20 vit=25 --together 3 --out allocator.json
    python -m bench.allocator decoder-scan=31 linen-scan=31 --divide rows --out allocator2.json

Each budget is that of a process of its own, with `XLA_CLIENT_MEM_FRACTION` at the budget's part of the card.
There `jaxoff.jit(device_bytes=)` gets what the allocator has, and the step runs `--steps` times from a
made-up state, whose arrays are made one by one in the memories that the plan wants. So what is proven is
memory alone: holes between buffers, workspaces of libraries, and what the compiler did not count. Processes
run together where their budgets fit the card, so times say nothing. With `--divide`, state and batch are
divided over all GPUs by the compiler, and the budget is that of each.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax

import jaxoff
from bench.client_steps import PROGRAMS
from bench.clients import DIVISIONS, divide_over_all, grow_batch
from bench.provenance import provenance
from jaxoff._runtime.program_memory import program_nbytes

_RESULT = "result: "
_STEPS = 100


def parse_budgets(word: str) -> list[tuple[str, float]]:
    """Program and gigabytes of each budget in a word like `vit=40,25`."""
    name, _, budgets = word.partition("=")
    if name not in PROGRAMS or not budgets:
        raise argparse.ArgumentTypeError(
            f"PROGRAM=GB,GB with a program of {', '.join(PROGRAMS)}; got {word!r}"
        )
    return [(name, float(gigabytes)) for gigabytes in budgets.split(",")]


def make_array(struct: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding) -> jax.Array:
    """An array of small positive numbers, as an optimizer's second moments must be; integers are 0."""

    def make() -> jax.Array:
        if not jax.numpy.issubdtype(struct.dtype, jax.numpy.floating):
            return jax.numpy.zeros(struct.shape, struct.dtype)
        return jax.random.uniform(jax.random.key(0), struct.shape, struct.dtype, 0, 0.02)

    return jax.device_put(jax.jit(make)(), sharding)


def run_one(name: str, layers: int | None, steps: int, division: str | None) -> dict[str, Any]:
    """Runs a program within what this process' allocator has."""
    program = dataclasses.replace(PROGRAMS[name], offloads=None)
    sizes = dataclasses.replace(program.sizes, **({"layers": layers} if layers else {}))
    devices = jax.local_devices()
    sizes = grow_batch(sizes, division, len(devices))
    step = program.build(sizes, attention="cudnn")
    limit = min(device.memory_stats()["bytes_limit"] for device in devices)
    structs, results = (step.state, step.batch), {}
    if division:
        shardings, of_batch = divide_over_all(step, division)
        places = shardings, jax.tree.map(lambda _: of_batch, step.batch)
        structs = jax.tree.map(lambda struct, place: struct.update(sharding=place), structs, places)
        results = {"out_shardings": (shardings, None)}
    function = step.jit(jaxoff.jit, device_bytes=limit, **results)
    compiled = function.lower(*structs).compile()
    memory, plan = compiled.memory_analysis(), function.plan
    row = {
        "limit_bytes": limit,
        "compiled_peak_bytes": program_nbytes(compiled),
        "host_bytes": memory.host_argument_size_in_bytes + memory.host_temp_size_in_bytes,
        "recipe": function.recipe,
        "programs": plan.programs,
    }
    state_places, batch_places = plan.in_shardings
    batch = jax.device_put(step.make_batch(jax.random.key(1)), batch_places)
    state = jax.tree.map(make_array, step.state, state_places)
    started = time.perf_counter()
    for _ in range(steps):
        state, loss = function(state, batch)
    loss = float(loss)
    return row | {
        "steps": steps,
        "seconds": time.perf_counter() - started,
        "last_loss": loss,
        "allocator_peak_bytes": max(device.memory_stats()["peak_bytes_in_use"] for device in devices),
    }


def spawn(name: str, gigabytes: float, card_bytes: float, options: argparse.Namespace) -> dict[str, Any]:
    """Runs a program within a budget in a process of its own."""
    command = [sys.executable, "-m", "bench.allocator", "--one", name, "--steps", str(options.steps)]
    command += ["--layers", str(options.layers[name])] if name in options.layers else []
    command += ["--divide", options.divide] if options.divide else []
    limits = {"XLA_CLIENT_MEM_FRACTION": f"{1e9 * gigabytes / card_bytes:.6f}"}
    left = {key: value for key, value in os.environ.items() if not key.startswith("XLA_PYTHON_CLIENT_")}
    done = subprocess.run(command, env=left | limits, capture_output=True, text=True)
    row: dict[str, Any] = {"program": name, "budget_gb": gigabytes, "layers": options.layers.get(name)}
    found = [line for line in done.stdout.splitlines() if line.startswith(_RESULT)]
    if found:
        return row | json.loads(found[-1].removeprefix(_RESULT))
    return row | {"error": done.stderr.strip().splitlines()[-1:], "returncode": done.returncode}


def read_card_bytes() -> float:
    """The memory of the first GPU, as its driver says."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    return 2**20 * float(
        subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    )


def main(arguments: list[str] | None = None) -> None:
    """Runs all budgets and writes their rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("budgets", nargs="*", type=parse_budgets, metavar="PROGRAM=GB,GB")
    parser.add_argument("--one", choices=PROGRAMS, help="in this process, within its allocator's limit")
    parser.add_argument(
        "--layers", nargs="*", default=[], metavar="PROGRAM=N", help="fewer layers than its sizes say"
    )
    parser.add_argument("--divide", choices=DIVISIONS, help="state and batch over all GPUs, by the compiler")
    parser.add_argument("--steps", type=int, default=_STEPS)
    parser.add_argument(
        "--together", type=int, default=2, help="processes at a time; their budgets fit the card"
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    if options.one:
        layers = int(options.layers[0]) if options.layers else None
        print(_RESULT + json.dumps(run_one(options.one, layers, options.steps, options.divide)))
        return
    os.environ.setdefault(
        "XLA_PYTHON_CLIENT_PREALLOCATE", "false"
    )  # this process only asks for the card's name
    options.layers = {name: int(n) for name, n in (word.split("=") for word in options.layers)}
    budgets = [budget for word in options.budgets for budget in word]
    card_bytes, rows = read_card_bytes(), []
    with concurrent.futures.ThreadPoolExecutor(options.together) as pool:
        runs = [pool.submit(spawn, name, nbytes, card_bytes, options) for name, nbytes in budgets]
        for run in concurrent.futures.as_completed(runs):
            rows.append(run.result())
            print(rows[-1], flush=True)
            if options.out:
                origin = provenance(vars(options))
                options.out.write_text(json.dumps({"provenance": origin, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
