"""The profiler's figures of a program that runs: its copies, and what of them no kernel hid."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import jax

import jaxoff


def trace_call(call: Callable[[], Any], calls: int) -> list[dict[str, float]] | None:
    """The profiler's figures of a call, by GPU: milliseconds of kernels, and of copies, busy and exposed.

    None off GPUs.
    """
    if jax.default_backend() != "gpu":
        return None
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(calls):
                jax.block_until_ready(call())
        gpus = [times.per_call(calls) for times in jaxoff.read_trace(folder).times()]
    return [
        {
            "exposed_ms": gpu.exposed_ms,
            "d2h_busy_ms": gpu.d2h.busy_ms,
            "h2d_busy_ms": gpu.h2d.busy_ms,
            "d2h_exposed_ms": gpu.d2h.exposed_ms,
            "h2d_exposed_ms": gpu.h2d.exposed_ms,
            "kernel_ms": gpu.kernel_ms,
        }
        for gpu in gpus
    ]
