"""Measures the PCIe link between devices and pinned host memory."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

# Bytes of a copy. The launch bounds smaller copies: 64 MB reach 70% of an H200's link.
LINK_NBYTES = 512 * 10**6
# Copies before the timed copies: they allocate pinned memory.
_WARMUP = 2


@dataclasses.dataclass(frozen=True)
class Link:
    """Measured bandwidth between a device and pinned host memory, in GB/s (10^9 bytes).

    Attributes:
      d2h_gbps: device to host.
      h2d_gbps: host to device.
      both_gbps: the sum of the two directions, copying at the same time.
      nbytes: the size of each copy.
    """

    d2h_gbps: float
    h2d_gbps: float
    both_gbps: float
    nbytes: int


def measure_link(device: Any, *, nbytes: int = LINK_NBYTES, repeats: int = 7) -> Link:
    """Times copies between a device and pinned host memory: each direction, then both at the same time.

    Holds three arrays of `nbytes` in device memory at most.

    Args:
      device: a `jax.Device` with a `pinned_host` memory.
      nbytes: the size of each copy, in bytes.
      repeats: the number of timings of which the median is taken.

    Returns:
      A `Link`.
    """
    return measure_links([device], nbytes=nbytes, repeats=repeats)


def measure_links(devices: Sequence[Any], *, nbytes: int = LINK_NBYTES, repeats: int = 7) -> Link:
    """Times copies of several devices at the same time, as `measure_link` does for a single device.

    Returns:
      A `Link`: the bandwidth of each device.
    """
    sends, reloads = [], []
    for device in devices:
        on_device = SingleDeviceSharding(device, memory_kind="device")
        on_host = SingleDeviceSharding(device, memory_kind="pinned_host")
        array = jax.device_put(jnp.zeros(nbytes, jnp.uint8), on_device)
        sends.append((array, on_host))
        reloads.append((jax.device_put(array, on_host), on_device))

    def time_copies(copies) -> float:
        times = []
        for _ in range(repeats + _WARMUP):
            start = time.perf_counter()
            jax.block_until_ready([jax.device_put(x, sharding) for x, sharding in copies])
            times.append(time.perf_counter() - start)
        return statistics.median(times[_WARMUP:])

    d2h, h2d, both = time_copies(sends), time_copies(reloads), time_copies([*sends, *reloads])
    gb = nbytes / 1e9
    return Link(d2h_gbps=gb / d2h, h2d_gbps=gb / h2d, both_gbps=2 * gb / both, nbytes=nbytes)
