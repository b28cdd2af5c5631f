"""What this machine and this process offer to offload: versions, devices, memory, flags, the link."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import shlex
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

PACKAGES = (
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "jax-cuda13-pjrt",
    "jax-cuda12-plugin",
    "jax-cuda12-pjrt",
    "flax",
    "numpy",
)
VARIABLES = (
    "JAX_PLATFORMS",
    "XLA_CLIENT_MEM_FRACTION",
    "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
)
CONFIG = ("jax_compiler_enable_remat_pass", "jax_optimization_level", "jax_remat3")
LINK_NBYTES = 512 * 10**6  # smaller copies are bound by their launch: 64 MB runs at 70% of the link


@dataclasses.dataclass(frozen=True)
class Device:
    """One device that jax computes on.

    Attributes:
      platform: "gpu", "tpu" or "cpu".
      kind: the maker's name for it.
      memory_bytes: what jax may use of its memory; None where the backend does not tell.
      memory_kinds: the memories that a sharding can name.
    """

    platform: str
    kind: str
    memory_bytes: int | None = None
    memory_kinds: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Link:
    """Measured bandwidth between one device and pinned host memory, in GB/s (10^9 bytes).

    Attributes:
      d2h_gbps: device to host.
      h2d_gbps: host to device.
      both_gbps: the sum of the two directions, copying at once.
      nbytes: the size of each copy.
    """

    d2h_gbps: float
    h2d_gbps: float
    both_gbps: float
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Environment:
    """Everything that `diagnose` looks at.

    Attributes:
      python: the interpreter's version.
      packages: version by name, of those that are installed.
      devices: what `jax.devices()` gave.
      backend_error: why there are no devices, where jax could not start its backend.
      nvidia_gpu: whether the machine has an NVIDIA GPU, whether or not jax uses it.
      host_bytes: the memory that this process may use, physical or its container's; None where unknown.
      xla_flags: value by name, without dashes, from `XLA_FLAGS`.
      config: value by name, of jax's own options.
      variables: value by name, of the environment variables that are set.
      link: measured on the first device; None where it was not.
      link_skipped: why it was not.
    """

    python: str
    packages: Mapping[str, str]
    devices: tuple[Device, ...]
    backend_error: str | None = None
    nvidia_gpu: bool = False
    host_bytes: int | None = None
    xla_flags: Mapping[str, str] = dataclasses.field(default_factory=dict)
    config: Mapping[str, str] = dataclasses.field(default_factory=dict)
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    link: Link | None = None
    link_skipped: str | None = None

    @property
    def backend(self) -> str:
        return self.devices[0].platform if self.devices else "none"


def collect(*, link: bool = True) -> Environment:
    """Looks at this process.

    Args:
      link: whether to measure the link, on a GPU: a few seconds and 2 GB of its memory.

    Returns:
      An `Environment`. A backend that does not start and a link that cannot be measured are recorded in it.
    """
    devices, backend_error = _devices()
    speed, skipped = _link(devices, link)
    return Environment(
        python=platform.python_version(),
        packages={name: version for name in PACKAGES if (version := _version(name)) is not None},
        devices=tuple(map(_describe, devices)),
        backend_error=backend_error,
        nvidia_gpu=any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists(),
        host_bytes=_host_bytes(),
        xla_flags=parse_xla_flags(os.environ.get("XLA_FLAGS", "")),
        config={name: str(jax.config.values[name]) for name in CONFIG if name in jax.config.values},
        variables={name: os.environ[name] for name in VARIABLES if name in os.environ},
        link=speed,
        link_skipped=skipped,
    )


def parse_xla_flags(text: str) -> dict[str, str]:
    """The flags that XLA reads in `XLA_FLAGS`.

    They stand in the text itself or, where it does not begin with a dash, in the file that it names. A flag
    without a value is "true". The last of two settings counts.
    """
    text = text.strip()
    if text and not text.startswith("-"):
        path = Path(text)
        text = path.read_text() if path.is_file() else ""
    flags = (word.lstrip("-").partition("=") for word in shlex.split(text) if word.startswith("-"))
    return {name: value if equals else "true" for name, equals, value in flags}


def measure_link(device: Any, *, nbytes: int = LINK_NBYTES, repeats: int = 7) -> Link:
    """Times copies between a device and pinned host memory, each way and both ways at once.

    Args:
      device: a `jax.Device` with a `pinned_host` memory.
      nbytes: the size of each copy, in bytes.
      repeats: how many timings the median is taken of.

    Returns:
      A `Link`.
    """
    return measure_links([device], nbytes=nbytes, repeats=repeats)


def measure_links(devices: Sequence[Any], *, nbytes: int = LINK_NBYTES, repeats: int = 7) -> Link:
    """Times copies of several devices at once, as `measure_link` does those of one.

    Returns:
      A `Link`: what one of the devices gets.
    """
    down, up = [], []
    for device in devices:
        on_device = SingleDeviceSharding(device, memory_kind="device")
        on_host = SingleDeviceSharding(device, memory_kind="pinned_host")
        below = jax.device_put(jnp.zeros(nbytes, jnp.uint8), on_device)
        down.append((below, on_host))
        up.append((jax.device_put(below, on_host), on_device))

    def seconds(moves) -> float:
        times = []
        for _ in range(repeats + 2):  # the first ones allocate pinned memory
            start = time.perf_counter()
            jax.block_until_ready([jax.device_put(x, sharding) for x, sharding in moves])
            times.append(time.perf_counter() - start)
        return statistics.median(times[2:])

    d2h, h2d, both = seconds(down), seconds(up), seconds([*down, *up])
    gb = nbytes / 1e9
    return Link(d2h_gbps=gb / d2h, h2d_gbps=gb / h2d, both_gbps=2 * gb / both, nbytes=nbytes)


def _devices() -> tuple[list[Any], str | None]:
    try:
        return jax.devices(), None
    except RuntimeError as error:  # a platform of JAX_PLATFORMS that does not start
        return [], str(error).splitlines()[0]
    except AssertionError:  # one that no plugin offers: jax says nothing more
        return [], f"no plugin offers a platform of JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')}"


def _describe(device: Any) -> Device:
    stats = device.memory_stats() or {}
    kinds = tuple(memory.kind for memory in device.addressable_memories())
    return Device(device.platform, device.device_kind, stats.get("bytes_limit"), kinds)


def _link(devices: list[Any], wanted: bool) -> tuple[Link | None, str | None]:
    if not devices or devices[0].platform != "gpu":
        return None, "no GPU"
    if not wanted:
        return None, "not asked for"
    if "pinned_host" not in _describe(devices[0]).memory_kinds:
        return None, "no pinned_host memory"
    try:
        return measure_link(devices[0]), None
    except jax.errors.JaxRuntimeError as error:  # another process holds the memory
        return None, str(error).splitlines()[0]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _host_bytes() -> int | None:
    """The smaller of the machine's memory and the limit of the container around this process."""
    sizes = []
    if "SC_PHYS_PAGES" in os.sysconf_names:
        sizes.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        path = Path(limit)
        if path.is_file() and (text := path.read_text().strip()).isdigit():
            sizes.append(int(text))
    return min(sizes, default=None)
