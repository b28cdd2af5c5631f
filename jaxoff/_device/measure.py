"""Measures the rates of a GPU: products, memory, and the link, alone and shared with GPUs of its host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxoff._device.calibration import H200_CALIBRATION
from jaxoff._device.profile import Device, SharedLink
from jaxoff._runtime.link import Link, measure_links

# Rows, width and hidden width of an MLP. Its products reach the rate of large products.
_MLP = (16384, 4096, 16384)
# Seconds of products until an H200 is at its power limit.
_STEADY_S = 1.0
# Bytes of the array that times the memory.
_MEMORY_NBYTES = 1 << 28


def measure_device() -> Device:
    """See `Device.measure`."""
    gpus = [device for device in jax.local_devices() if device.platform == "gpu"]
    if not gpus:
        raise RuntimeError(
            f"Device.measure times a GPU, and jax runs on {jax.default_backend()} here. A profile made "
            "elsewhere is read with Device.of(path); that of an H200 is Device.of('h200')."
        )
    counts = [n for n in (2, 4, 8) if n <= len(gpus)]
    alone, shared = measure_links(gpus[:1]), [(n, measure_links(gpus[:n])) for n in counts]
    return Device(
        flops=H200_CALIBRATION.measured_flops_share.value * matrix_flops(gpus[0]),
        memory_gbps=memory_gbps(gpus[0]),
        d2h_gbps=alone.d2h_gbps,
        h2d_gbps=alone.h2d_gbps,
        both_gbps=alone.both_gbps,
        shared_links=tuple(_share_link(n, link) for n, link in shared),
        name=gpus[0].device_kind,
        source=(
            f"measured: jaxoff.Device.measure(), jax {jax.__version__}, copies of {alone.nbytes} bytes; "
            "calibration: the H200's"
        ),
    )


def _share_link(gpus: int, link: Link) -> SharedLink:
    return SharedLink(gpus, link.d2h_gbps, link.h2d_gbps, link.both_gbps)


def matrix_flops(device: Any, mlp: tuple[int, int, int] = _MLP, steady_s: float = _STEADY_S) -> float:
    """Measures the operations a second of an MLP's 16-bit products, forward and backward.

    The shapes are of layers: square products are 3% faster on an H200 (682 TFLOP/s against 662). The elements
    are random: equal elements take less power, and the clock stays higher (831 TFLOP/s).

    Args:
      device: a GPU.
      mlp: rows, width and hidden width.
      steady_s: seconds of products before the timed products.
    """
    rows, width, hidden = mlp
    shapes = (rows, width), (rows, hidden), (width, hidden), (hidden, width)
    x, act, up, down = (
        jax.device_put(jax.random.normal(key, shape, jnp.bfloat16), device)
        for key, shape in zip(jax.random.split(jax.random.key(0), 4), shapes, strict=True)
    )

    def products(x, act, up, down):
        made = x @ up, act @ down, x @ down.T, act @ up.T, x.T @ act, act.T @ x
        return [lax.optimization_barrier(product)[0, 0] for product in made]

    seconds = _seconds(jax.jit(products), (x, act, up, down), steady_s)
    return 6 * 2.0 * rows * width * hidden / seconds


def memory_gbps(device: Any, nbytes: int = _MEMORY_NBYTES, steady_s: float = _STEADY_S / 4) -> float:
    """Measures the GB/s of an elementwise float32 kernel; XLA's 16-bit kernels reach less.

    Args:
      device: a GPU.
      nbytes: bytes read, and bytes written.
      steady_s: seconds of kernels before the timed kernels.
    """
    x = jax.device_put(jnp.zeros(nbytes // 4, jnp.float32), device)
    return 2 * nbytes / _seconds(jax.jit(lambda x: x + 1), (x,), steady_s) / 1e9


def _seconds(fun: Callable[..., Any], args: Sequence[Any], steady_s: float, repeats: int = 5) -> float:
    """The median time of a call in a queue of calls, after `steady_s` seconds of calls."""
    jax.block_until_ready(fun(*args))

    def run(calls: int) -> float:
        start, out = time.perf_counter(), None
        for _ in range(calls):
            out = fun(*args)
        jax.block_until_ready(out)
        return time.perf_counter() - start

    calls = max(1, round(steady_s / repeats / run(1)))
    run(calls * repeats)
    return statistics.median(run(calls) for _ in range(repeats)) / calls
