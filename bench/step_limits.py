"""Limits of device memory and pinned host memory, checked before a step runs."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

import jaxoff
from bench.step_models import FORMS, Form, Workload, loss
from bench.step_variants import VARIANTS, Program, Variant, stack_of

_POOL = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"


def set_defaults() -> None:
    """Environment variables read by XLA's allocators when jax starts its device. A set variable stays."""
    if "XLA_CLIENT_MEM_FRACTION" not in os.environ:
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    # The deepest workload offloads 77 GB; by default XLA stops at 64.
    os.environ.setdefault(_POOL, "96")


def gigabytes(nbytes: float) -> str:
    return f"{nbytes / 1e9:.1f} GB"


def device_limit() -> int | None:
    """The limit of the device's allocator, in bytes; None where the allocator has no limit."""
    return (jax.devices()[0].memory_stats() or {}).get("bytes_limit")


def nbytes_of(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def residual_bytes(workload: Workload, variant: Variant) -> int:
    """Bytes waiting for the backward pass on the device, beside the arguments, if nothing is offloaded."""
    kept = dataclasses.replace(variant, strategy=None, placement="device")
    fun = loss(workload, variant.naming, stack_of(kept, workload.placed_names(variant.naming)))
    arguments = workload.shapes(variant.form)
    residuals = jax.eval_shape(lambda *values: jax.vjp(fun, *values)[1], *arguments)
    return max(0, nbytes_of(residuals) - nbytes_of(arguments))


def planned_host_bytes(workload: Workload, variant: Variant) -> int:
    """Bytes offloaded by a variant's policy."""
    fun = loss(workload, variant.naming, stack_of(variant, workload.placed_names(variant.naming)))
    return jaxoff.explain(fun, *workload.shapes(variant.form)).host_bytes


def least_device_bytes(workload: Workload, variant: Variant) -> int:
    """The least bytes of a step: arguments, their gradients, and residuals kept on the device."""
    stays = variant.placement in ("none", "device")
    both = 2 * nbytes_of(workload.shapes(variant.form))
    return both + (residual_bytes(workload, variant) if stays else 0)


def too_large(workload: Workload, name: str, limit: int | None) -> str | None:
    """The reason not to compile a variant, or None where the step may fit the device's bytes."""
    variant = VARIANTS[name]
    need = least_device_bytes(workload, variant)
    if limit is not None and need > limit:
        return f"skipped: needs at least {gigabytes(need)} of device memory, {gigabytes(limit)} can be had"
    if variant.placement == "host":
        need, pool = planned_host_bytes(workload, variant), float(os.environ[_POOL]) * 2**30
        if need > pool:
            return f"skipped: needs {gigabytes(need)} of pinned host memory, {_POOL} allows {gigabytes(pool)}"
    return None


def groups(workload: Workload, programs: Mapping[str, Program]) -> list[list[str]]:
    """Groups of variants timed together: all, or each form alone where both do not fit at once."""
    by_form = [{name: p for name, p in programs.items() if p.form == form} for form in FORMS]
    hopeless = {name for alone in by_form for name in too_large_beside(workload, alone)}
    fitting = {name: program for name, program in programs.items() if name not in hopeless}
    together = [programs] if not too_large_beside(workload, fitting) else by_form
    return [list(group) for group in together if group]


def too_large_beside(workload: Workload, programs: Mapping[str, Program]) -> dict[str, str]:
    """By name, why programs do not fit beside the arguments of all, by the compiler's figures."""
    limit, reasons = device_limit(), {}
    forms: set[Form] = {program.form for program in programs.values()}
    held = sum(nbytes_of(workload.shapes(form)) for form in forms)
    for name, program in programs.items():
        memory: Any = program.call.memory_analysis()
        need = held + memory.output_size_in_bytes + memory.temp_size_in_bytes
        if limit is not None and need > limit:
            reasons[name] = (
                f"skipped: needs {gigabytes(need)} of device memory, {gigabytes(limit)} can be had"
            )
    return reasons


def fill_pinned_pool(nbytes: int) -> dict[str, Any] | None:
    """Makes XLA's pool of pinned memory grow before the timing; returns the seconds of two equal copies."""
    if jax.default_backend() != "gpu" or not nbytes:
        return None
    pinned = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    zeros, seconds = np.zeros(nbytes, np.uint8), []
    for _ in range(2):  # the second time there is memory, and only the copy is left
        start = time.perf_counter()
        jax.block_until_ready(jax.device_put(zeros, pinned))
        seconds.append(time.perf_counter() - start)
    return {"bytes": nbytes, "first_s": seconds[0], "again_s": seconds[1]}
