"""The time to trace and lower a step by `jaxoff.jit`, against `jax.jit` of the same function.

Steps: the benchmarks' layers in a `jaxoff.scan`, layers in a Python loop by `jaxoff.layers`, and the train
step of `models.train` (preset `tiny`). Each sample is a fresh function, the two wrappers alternate, and the
table shows medians. Nothing is compiled; no GPU is needed. With `--target` the steps are lowered for a GPU,
with the kernels that they have there.

    python -m bench.trace_time --out trace_time.json
    JAX_PLATFORMS=cpu python -m bench.trace_time --target h200 --steps nano-scan,mixtral-scan,models.train
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

import jaxoff
from bench.long import cudnn_attention
from bench.options import one_of
from bench.provenance import provenance
from bench.step_models import Workload, loss
from models.options import Options
from models.program import Program

type Lower = Callable[[Any], Any]  # lowers a step by the given jit


def scan_step(text: str) -> Lower:
    """A stack of layers in a `jaxoff.scan`, the workload's values offloaded."""
    workload = Workload.parse(text)

    def lower(jit):
        def stack(layer, carry, weights):
            return jaxoff.scan(lambda c, w: (layer(w, c), None), carry, weights, policy=_policy(workload))[0]

        fun = loss(workload, "planned", stack)
        return jit(jax.value_and_grad(fun)).lower(*workload.shapes("scanned"))

    return lower


def layers_step(text: str) -> Lower:
    """The same layers one after the other by `jaxoff.layers`."""
    workload = Workload.parse(text)

    def lower(jit):
        def stack(layer, carry, weights):
            return jaxoff.layers(layer, carry, weights, policy=_policy(workload))

        fun = loss(workload, "planned", stack)
        return jit(jax.value_and_grad(fun)).lower(*workload.shapes("unrolled"))

    return lower


def train_step(_: str) -> Lower:
    """The train step of `models.train`."""

    def lower(jit):
        program = Program(Options.of("tiny"), jaxoff.policy(offload=["attn.norm_in"], save=["moe.act"]))
        step = program.step
        return jit(step.__wrapped__, donate_argnums=0).lower(program.state_shapes, program.tokens_shape)

    return lower


STEPS: dict[str, tuple[Callable[[str], Lower], str]] = {
    "dense-scan": (scan_step, "dense-b4-l12"),
    "nano-scan": (scan_step, "nano-b4-l4"),
    "mixtral-scan": (scan_step, "mixtral-b4-l2"),
    "dense-layers-12": (layers_step, "dense-b4-l12"),
    "dense-layers-24": (layers_step, "dense-b4-l24"),
    "dense-layers-48": (layers_step, "dense-b4-l48"),
    "models.train": (train_step, ""),
}


def _policy(workload: Workload) -> jaxoff.Policy:
    placed = workload.placed_names("planned")
    return jaxoff.policy(offload=placed.offload, save=placed.save)


@dataclasses.dataclass(frozen=True)
class _LoweredFor:
    """A function of `jax.jit` or `jaxoff.jit` that is lowered for a GPU which is not there."""

    target: jaxoff.Target
    jitted: Any

    def lower(self, *args: Any) -> jax.stages.Lowered:
        with cudnn_attention():
            return self.target.lower(self.jitted, *args)


def lower_for(target: jaxoff.Target | None, jit: Callable[..., Any]) -> Callable[..., Any]:
    """A jit whose functions are lowered for a target, or for this machine without one."""
    return jit if target is None else lambda fun, **options: _LoweredFor(target, jit(fun, **options))


def time_lowering(lower: Lower, samples: int, target: jaxoff.Target | None = None) -> dict[str, float]:
    """Medians in seconds: `jax.jit`, `jaxoff.jit`, and the ratio of the two."""
    times: dict[str, list[float]] = {"stock_s": [], "ours_s": []}
    for _ in range(samples):
        for key, jit in (("stock_s", jax.jit), ("ours_s", jaxoff.jit)):
            jax.clear_caches()
            gc.collect()
            start = time.process_time()
            lower(lower_for(target, jit))
            times[key].append(time.process_time() - start)
    found = {key: statistics.median(values) for key, values in times.items()}
    return found | {"ratio": found["ours_s"] / found["stock_s"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, help="the JSON file to write")
    parser.add_argument("--samples", type=int, default=3, help="samples of each step and wrapper")
    parser.add_argument("--steps", type=one_of(STEPS), default=tuple(STEPS), help="steps, by comma")
    parser.add_argument("--target", help="the GPU to lower for, a name that jaxoff.target takes")
    options = parser.parse_args()
    target = jaxoff.target(options.target) if options.target else None
    rows = {}
    for name in options.steps:
        make, text = STEPS[name]
        rows[name] = time_lowering(make(text), options.samples, target)
        row = rows[name]
        print(
            f"{name:18} jax.jit {row['stock_s']:6.2f} s  jaxoff.jit {row['ours_s']:6.2f} s  "
            f"ratio {row['ratio']:.2f}",
            flush=True,
        )
    if options.out:
        options.out.write_text(json.dumps(provenance(vars(options)) | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
