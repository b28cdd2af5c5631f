"""Train steps in other people's styles: saved, offloaded by `jax.jit`, and by `jaxoff.jit`.

    python -m bench.clients --program decoder-scan --out results.json

`--sizes tiny` runs on a CPU. `bench.client_steps.PROGRAMS` has the programs. With `--processes 2`, start it
with `--process 0` and with `--process 1`, side by side.
Variants alternate in one process, each sample a few steps; times are medians. Peaks are the compiler's.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoff
from bench.client_steps import PROGRAMS, ClientStep
from bench.client_steps.step import Sizes
from bench.grouped_mlp import describe
from bench.options import one_of
from bench.provenance import provenance
from bench.rounds import time_in_rounds
from bench.traced import trace_call
from jaxoff._runtime.flags import COMMAND_BUFFER

WARMUPS = 2
"""Rounds before the samples."""

_COORDINATOR = "localhost:12355"
"""Where processes that run a step together meet."""

_LIMIT = 0.98
"""Part of a card's memory that a program may take to be timed: the allocator cannot fill every hole."""

TUNING_STEPS = 24
"""Steps until `jaxoff.jit(tune=True)` has compared at most six programs."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """A way to run a step: the residuals' placement, and the transform that compiles the step.

    Attributes:
      policy: "offloads" or "saves" for the program's own policy or its saved twin; else a key of
        `POLICIES`.
      transform: `jax.jit` or the like.
      options: its keywords.
    """

    policy: str
    transform: Callable[..., Any]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


POLICIES = {
    "recompute": None,
    "save-everything": jax.checkpoint_policies.everything_saveable,
    "save-dots": jax.checkpoint_policies.dots_saveable,
    "save-dots-no-batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "offload-dots-no-batch": jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
}
"""Policies of JAX for every layer."""

RIVALS = tuple(name for name in POLICIES if name != "recompute")
"""Variants by `jax.jit` under a policy of JAX, to compare budgets with."""

VARIANTS = {
    "saved": Variant("saves", jax.jit),
    "recomputed": Variant("recompute", jax.jit),
    "stock": Variant("offloads", jax.jit),
    "stock-no-graphs": Variant("offloads", jax.jit, {"compiler_options": {COMMAND_BUFFER: ""}}),
    "jaxoff": Variant("offloads", jaxoff.jit),
    "tuned": Variant("offloads", jaxoff.jit, {"tune": True}),
    "concurrent": Variant("offloads", jaxoff.jit, {"recipe": "concurrent"}),
    "early": Variant("offloads", jaxoff.jit, {"recipe": "early"}),
    "ordered": Variant("offloads", jaxoff.jit, {"recipe": "ordered"}),
    "recipe-stock": Variant("offloads", jaxoff.jit, {"recipe": "stock"}),
    **{name: Variant(name, jax.jit) for name in RIVALS},
    "offload-dots-no-batch-jaxoff": Variant("offload-dots-no-batch", jaxoff.jit),
}


DIVISIONS = ("rows", "columns", "tensor")

CONTRACTED = ("embed", "o", "down")
"""Weights of a decoder whose rows are divided where its products are (tensor parallel), not their columns."""


def make_shardings(step: ClientStep, mesh: jax.sharding.Mesh, division: str) -> tuple[Any, Any]:
    """Shardings of the state and of the batch over all devices, for the compiler to propagate (Auto axes).

    Args:
      step: the step. Of each array of the state, one axis is divided that all devices divide evenly and that
        has at least 512 elements.
      mesh: the devices, in one axis.
      division: "rows" divides the first such axis (fully sharded data parallel), "columns" the last one, both
        the batch. "tensor" divides a decoder's matrices so that its products are divided, and not the batch.
    """
    (name,) = mesh.axis_names

    def shard(path: Any, leaf: Any) -> NamedSharding:
        axes = [i for i, size in enumerate(leaf.shape) if size % mesh.size == 0 and size >= 512]
        if division == "tensor":
            axes = axes if len(axes) > 1 else []
            is_first = path[-1] in [jax.tree_util.DictKey(key) for key in CONTRACTED]
        else:
            is_first = division == "rows"
        divided = axes[0 if is_first else -1] if axes else None
        return NamedSharding(mesh, P(*(name if i == divided else None for i in range(leaf.ndim))))

    of_batch = P() if division == "tensor" else P(name)
    return jax.tree_util.tree_map_with_path(shard, step.state), NamedSharding(mesh, of_batch)


def divide_over_all(step: ClientStep, division: str) -> tuple[Any, Any]:
    """Shardings of the state and of the batch over all devices; `make_shardings` says how."""
    auto = (jax.sharding.AxisType.Auto,)
    return make_shardings(step, jax.make_mesh((jax.device_count(),), ("devices",), axis_types=auto), division)


def divide(step: ClientStep, batch: Any, division: str) -> tuple[Any, Any]:
    """Shardings of the state over all devices, and the batch divided over them; `make_shardings` says how."""
    shardings, of_batch = divide_over_all(step, division)
    return shardings, jax.device_put(batch, of_batch)


def grow_batch(sizes: Sizes, division: str | None, devices: int) -> Sizes:
    """The sizes with a batch for each device, where a division divides the batch."""
    divides = division in ("rows", "columns")
    return dataclasses.replace(sizes, batch=sizes.batch * devices) if divides else sizes


def find_limit() -> float:
    """Bytes that the allocator of the first device has; infinite without such a limit."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", math.inf)


def make_function(variant: Variant, step: ClientStep, shardings: Any = None) -> Any:
    """The step's function, its results sharded as its state."""
    results = {} if shardings is None else {"out_shardings": (shardings, None)}
    return step.jit(variant.transform, **variant.options, **results)


def describe_variant(variant: Variant, jitted: Any, state: Any, batch: Any) -> dict[str, Any]:
    """The row of a step's function: seconds to lower and to compile, peak, recipe, findings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        started = time.perf_counter()
        lowered = jitted.lower(state, batch)
        lowered_at = time.perf_counter()
        compiled = lowered.compile()
    row = {
        "lower_s": lowered_at - started,
        "compile_s": time.perf_counter() - lowered_at,
        "recipe": getattr(jitted, "recipe", ""),
        "findings": [str(finding) for finding in getattr(jitted, "findings", ())],
        "tuned_ms": dict(getattr(jitted, "tuned", {})),
    }
    if jax.default_backend() == "gpu":
        facts = jaxoff.verify(
            compiled,
            compiler_options=getattr(jitted, "options", None) or variant.options.get("compiler_options"),
        )
        row |= {
            "peak_bytes": facts.device_peak_bytes,
            "temp_bytes": facts.device_temp_bytes,
            "host_bytes": facts.host_bytes,
            "copies": len(facts.copies),
            "exposed": sum(not copy.overlaps for copy in facts.copies),
            "kernels": sum(copy.via == "kernel" for copy in facts.copies),
        }
    return row


def time_variants(
    functions: dict[str, Callable[..., Any]], state: Any, batch: Any, steps: int, samples: int
) -> dict[str, dict[str, Any]]:
    """Times functions that alternate; each takes over the state that the previous function left.

    Returns:
      name -> ms of a step, the median; the samples; the last loss; on GPUs the ms of copies that no kernel
      hid, by a profile, of the GPU with most of them.
    """
    losses: dict[str, jax.Array] = {}
    on_device = jax.tree.map(lambda leaf: leaf.sharding, state)

    def prepare(name: str) -> Any:
        """Puts the state where the variant's plan wants it, else on the device."""
        nonlocal state
        plan = getattr(functions[name], "plan", None)
        places = plan.in_shardings[0] if plan else None
        is_hosted = any(place.memory_kind == "pinned_host" for place in jax.tree.leaves(places))
        state = jax.device_put(state, places if is_hosted else on_device)
        return state

    def make_call(name: str) -> Callable[[], jax.Array]:
        def call() -> jax.Array:
            nonlocal state
            for _ in range(steps):
                state, losses[name] = functions[name](state, batch)
            return losses[name]

        return call

    calls = {name: make_call(name) for name in functions}
    time_in_rounds(calls, WARMUPS, prepare)
    samples_of = time_in_rounds(calls, samples, prepare)
    rows: dict[str, dict[str, Any]] = {}
    for name, found in samples_of.items():
        rows[name] = {
            "ms": statistics.median(found) / steps,
            "samples_ms": [ms / steps for ms in found],
            "loss": float(losses[name]),
        }
    for name, row in rows.items():
        prepare(name)
        try:
            if gpus := trace_call(calls[name], 1):
                row["exposed_ms"] = max(gpu["exposed_ms"] for gpu in gpus) / steps
        except Exception as error:  # a profile that cannot be read costs its figure only
            row["trace_error"] = describe(error)
    return rows


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--program", choices=PROGRAMS, default="decoder-scan")
    parser.add_argument("--variants", type=one_of(VARIANTS), default=tuple(VARIANTS))
    parser.add_argument(
        "--sizes", choices=["full", "tiny"], default="full", help="full: an 80 GB card; tiny: a CPU"
    )
    parser.add_argument("--divide", choices=DIVISIONS, help="divide the state and the batch over all devices")
    parser.add_argument(
        "--device-gb", type=float, nargs="*", default=[], help="budgets for jaxoff.jit(device_bytes=), GB"
    )
    parser.add_argument("--layers", type=int, help="the number of layers")
    parser.add_argument("--processes", type=int, default=1, help="processes of a GPU each, started alike")
    parser.add_argument("--process", type=int, default=0, help="the number of this process among them")
    parser.add_argument("--steps", type=int, default=3, help="steps of a sample")
    parser.add_argument("--samples", type=int, default=6)
    parser.add_argument("--out", type=Path)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Runs a program in all variants and writes their rows."""
    options = parse(arguments)
    if options.processes > 1:
        jax.distributed.initialize(_COORDINATOR, options.processes, options.process, options.process)
    program = PROGRAMS[options.program]
    if options.sizes == "tiny":
        program = program.shrink()
    sizes = dataclasses.replace(program.sizes, layers=options.layers or program.sizes.layers)
    sizes = grow_batch(sizes, options.divide, jax.device_count())
    attention = "cudnn" if jax.default_backend() == "gpu" else "xla"
    variants = {name: VARIANTS[name] for name in options.variants}
    for gigabytes in options.device_gb:
        budget = {"device_bytes": 1e9 * gigabytes}
        variants[f"planned-{gigabytes:g}"] = Variant("recompute", jaxoff.jit, budget)
    policies = {"offloads": program.offloads, "saves": program.saves} | POLICIES
    steps: dict[str, ClientStep] = {}
    for policy in {"offloads", *(variant.policy for variant in variants.values())}:
        given = dataclasses.replace(program, offloads=policies[policy])
        steps[policy] = given.build(sizes, attention=attention)
    batch = steps["offloads"].make_batch(jax.random.key(1))
    shardings = None
    if options.divide:
        shardings, batch = divide(steps["offloads"], batch, options.divide)
    state = jax.jit(steps["offloads"].initialize, out_shardings=shardings)(jax.random.key(0))
    functions, rows = {}, {}
    for name, variant in variants.items():
        functions[name] = make_function(variant, steps[variant.policy], shardings)
        if variant.options.get("tune"):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the row has the findings
                for _ in range(TUNING_STEPS):
                    state, _ = functions[name](state, batch)
        try:
            rows[name] = describe_variant(variant, functions[name], state, batch)
        except (jaxoff.BudgetError, jax.errors.JaxRuntimeError) as error:
            print(name, str(error).splitlines()[0], flush=True)
            del functions[name]
            continue
        print(name, rows[name], flush=True)
        if rows[name].get("peak_bytes", 0) > _LIMIT * find_limit():
            print(name, "is not timed: it does not fit the card", flush=True)
            del functions[name]
    for name, figures in time_variants(functions, state, batch, options.steps, options.samples).items():
        rows[name] |= figures
        peak = rows[name].get("peak_bytes", 0) / 1e9
        print(f"{name:16s} {rows[name]['ms']:8.1f} ms {peak:6.2f} GB {rows[name]['recipe']}")
    if options.out:
        result = {"provenance": provenance(vars(options)), "sizes": dataclasses.asdict(sizes), "rows": rows}
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
