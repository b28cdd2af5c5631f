"""Whether offloaded residuals change a bit of the training, and whether host memory grows over many steps."""

from __future__ import annotations

import argparse
import functools
import gc
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bench.grouped_mlp import describe, say
from bench.step_models import Workload
from bench.step_variants import DETERMINISTIC, VARIANTS, Program, Step, Variant, compile_all, step_of

type Row = dict[str, Any]

SERIALIZE = {"xla_gpu_command_buffer_scheduling_mode": "SERIALIZE"}
# Growth of allocators without a leak.
STEADY_NBYTES = 64 * 2**20
_SAMPLES = 50
_SAVE_EVERY = 10


def twin_steps(workload: Workload, variant: Variant) -> dict[str, Step]:
    """A variant and its saved twin, the same names on the device, both with deterministic kernels."""
    twin = Variant("twin", "twin", variant.form, "device", naming=variant.naming)
    return {
        "moved": step_of(workload, variant, DETERMINISTIC),
        "saved": step_of(workload, twin, DETERMINISTIC),
    }


def order_steps(workload: Workload, variant: Variant) -> dict[str, Step]:
    """A program under its own order of CUDA graphs, CONCURRENT for loops, and under SERIALIZE."""
    return {
        "chosen": step_of(workload, variant, DETERMINISTIC),
        "serialize": step_of(workload, variant, DETERMINISTIC | SERIALIZE),
    }


def compare_bits(
    workload: Workload,
    first: Program,
    second: Program,
    steps: int,
    seed: int,
    on_step: Callable[[dict[str, Any]], None] = lambda found: None,
) -> dict[str, Any]:
    """Trains, and compares the loss and every gradient of two programs in each step, bit for bit.

    Both run on the same weights and a new input in each step; the weights follow the second program's
    gradients.

    Args:
      workload: the workload of both programs.
      first, second: programs of the same form.
      steps: the number of steps.
      seed: of weights and inputs.
      on_step: receives the findings so far, after each step.

    Returns:
      `steps` done, `equal_steps`, the `first_difference` (step, and number of differing elements by result),
      whether all losses and gradients were `finite`, the first and last loss, and the number of `losses` that
      differ from the previous loss: equal results prove nothing if all losses are the same number.
    """
    found: dict[str, Any] = {"seed": seed, "steps": 0, "equal_steps": 0, "first_difference": None}
    found |= {"finite": True, "losses": 0}
    weights, last = workload.weights(first.form, seed), None
    for step in range(steps):
        x = workload.inputs(seed * steps + step)
        got, want = first.call(weights, x), second.call(weights, x)
        differing, finite = _count_differences(got, want)
        counts = {
            jax.tree_util.keystr(path): int(np.sum(n, dtype=np.int64))
            for path, n in jax.tree.leaves_with_path(jax.device_get(differing))
        }
        loss, (gradients, _) = want
        # The gradient of a mean is small: a step of this length moves every weight by about a percent.
        weights = _descend(weights, gradients)
        now = float(loss)
        found["losses"] += now != last
        found["steps"], last = step + 1, now
        found.setdefault("first_loss", now)
        found["last_loss"] = now
        found["finite"] &= bool(finite)
        if not any(counts.values()):
            found["equal_steps"] += 1
        elif found["first_difference"] is None:
            found["first_difference"] = {"step": step, "elements": {k: n for k, n in counts.items() if n}}
        on_step(found)
        del got, want, gradients  # their memory is for the next step's
    return found | {"ok": found["equal_steps"] == steps and found["finite"]}


@jax.jit
def _count_differences(got, want):
    def bits(x):
        return lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))

    def by_row(a, b):  # all weights of the experts have more elements than int32 counts
        return jnp.sum(bits(a) != bits(b), axis=tuple(range(1, a.ndim)))

    differing = jax.tree.map(by_row, got, want)
    return differing, jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(want)]))


@functools.partial(jax.jit, donate_argnums=0)
def _descend(weights, gradients):
    def one(w, g):
        wide, g = w.astype(jnp.float32), g.astype(jnp.float32)
        size = jnp.sqrt(jnp.mean(wide * wide) / jnp.maximum(jnp.mean(g * g), 1e-30))
        return (wide - 0.01 * size * g).astype(w.dtype)

    return jax.tree.map(one, weights, gradients)


def steady(
    workload: Workload, program: Program, steps: int, on_sample: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Runs many steps, and samples the host memory of this process and its device memory.

    Returns:
      The samples, and the growth: the median of the last fifth over the median of the second fifth, in bytes;
      the first fifth is warming up.
    """
    arguments = workload.arguments(program.form)
    samples: list[dict[str, Any]] = []
    every = max(1, steps // _SAMPLES)
    found: dict[str, Any] = {"steps": 0, "samples": samples}
    for step in range(steps):
        jax.block_until_ready(program.call(*arguments))
        found["steps"] = step + 1
        if found["steps"] % every == 0:
            samples.append({"step": found["steps"]} | memory_now())
            on_sample(found)
    fifth = max(1, len(samples) // 5)
    early, late = samples[fifth : 2 * fifth] or samples, samples[-fifth:]
    for key in ("host_bytes", "device_bytes"):
        known = all(sample[key] is not None for sample in samples)
        found[f"{key[:-6]}_growth_bytes"] = _median(late, key) - _median(early, key) if known else None
    growth = found["host_growth_bytes"]
    return found | {"ok": None if growth is None else growth <= STEADY_NBYTES}


def _median(samples: list[dict[str, Any]], key: str) -> float:
    return statistics.median(sample[key] for sample in samples)


def memory_now() -> dict[str, int | None]:
    """Bytes held by this process: host memory, pinned memory included, and device memory."""
    gc.collect()
    status = Path("/proc/self/status")
    host = None
    if status.exists():
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        # Locked pages mapped by a driver may be missing from the resident set: count the larger figure.
        host = max(int(fields[key].split()[0]) * 1024 for key in ("VmRSS", "VmPin", "VmLck"))
    return {"host_bytes": host, "device_bytes": (jax.devices()[0].memory_stats() or {}).get("bytes_in_use")}


def run_checks(
    workload: Workload,
    o: argparse.Namespace,
    result: dict[str, Any],
    over: Callable[[], bool],
    save: Callable[[], None],
) -> None:
    """Runs the requested checks of a workload, adding to the result.

    Args:
      workload: the workload to train.
      o: `variants`, `seeds`, `jobs`, and steps of `bits`, `order` and `steady`; 0 is none.
      result: gains rows under "bits", "order" and "steady".
      over: whether time is up.
      save: called after each new row.
    """

    def record(kind: str, row: Row, run: Callable[[Callable[[Row], None]], Row]) -> None:
        def keep(so_far: Row) -> None:
            row.update(so_far)
            if row["steps"] % _SAVE_EVERY == 0:
                save()

        result[kind].append(row)
        try:
            row |= run(keep)
        except Exception as error:  # out of memory, or a failed compilation
            row |= {"error": describe(error), "ok": False}
        save()
        say(f"  {kind}: { {key: value for key, value in row.items() if key != 'samples'} }")

    def compile_steps(steps: dict[str, Step]) -> dict[str, Program]:
        errors: list[str] = []
        programs = compile_all(workload, steps, o.jobs, lambda _, got: errors.extend(_errors(got)))
        if errors:
            raise RuntimeError(errors[0])
        return programs

    for name in o.variants:
        at, variant = {"workload": workload.name, "variant": name}, VARIANTS[name]
        for kind, count, steps_of in (("bits", o.bits, twin_steps), ("order", o.order, order_steps)):
            if not count or over():
                continue
            try:
                first, second = compile_steps(steps_of(workload, variant)).values()
            except RuntimeError as error:
                result[kind].append({**at, "error": str(error), "ok": False})
                continue
            for seed in o.seeds if not over() else ():
                compare = functools.partial(compare_bits, workload, first, second, count, seed)
                record(kind, dict(at), compare)
                gc.collect()
        if o.steady and not over():

            def run(keep: Callable[[Row], None], name: str = name, variant: Variant = variant) -> Row:
                programs = compile_steps({name: step_of(workload, variant)})
                return steady(workload, programs[name], o.steady, keep)

            record("steady", dict(at), run)


def _errors(got: Program | Row) -> list[str]:
    return [] if isinstance(got, Program) else [got["error"]]
