"""The machine and this process as data: versions, devices, memory, flags, the link."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxoff._runtime.flags import parse_xla_flags
from jaxoff._runtime.host import find_gpu_nodes, find_host_bytes, find_processor_nodes
from jaxoff._runtime.link import Link, measure_link

# Packages whose versions are recorded.
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
# Environment variables with an effect on offload.
VARIABLES = (
    "JAX_PLATFORMS",
    "XLA_CLIENT_MEM_FRACTION",
    "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
)
# Options of `jax.config` with an effect on offload.
CONFIG = ("jax_compiler_enable_remat_pass", "jax_optimization_level", "jax_remat3")


type Texts = Mapping[str, str]
type Nodes = Mapping[str, Sequence[int]]


@dataclasses.dataclass(frozen=True)
class DeviceInfo:
    """A device of jax.

    Attributes:
      platform: "gpu", "tpu" or "cpu".
      kind: the maker's name for the device.
      memory_bytes: device memory that jax may use; None where the backend does not tell.
      memory_kinds: names of memories, for a sharding.
    """

    platform: str
    kind: str
    memory_bytes: int | None = None
    memory_kinds: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Environment:
    """The input of `diagnose`.

    Attributes:
      python: the interpreter's version.
      packages: installed package -> version.
      devices: the devices of `jax.devices()`.
      backend_error: why there are no devices, where jax could not start its backend.
      nvidia_gpu: whether the machine has an NVIDIA GPU, whether or not jax uses the GPU.
      host_bytes: the memory that this process may use, physical or its container's; None where unknown.
      nodes: "gpus" -> the memory node (NUMA) of each NVIDIA GPU, none where the system does not say;
        "process" -> those of the processors that this process may run on.
      xla_flags: flag of `XLA_FLAGS`, without dashes -> value.
      config: jax's own option -> value.
      variables: environment variable, if set -> value.
      link: measured on the first device; None without a measurement.
      link_skipped: why there is no measurement.
    """

    python: str
    packages: Texts
    devices: tuple[DeviceInfo, ...]
    backend_error: str | None = None
    nvidia_gpu: bool = False
    host_bytes: int | None = None
    nodes: Nodes = dataclasses.field(default_factory=dict)
    xla_flags: Texts = dataclasses.field(default_factory=dict)
    config: Texts = dataclasses.field(default_factory=dict)
    variables: Texts = dataclasses.field(default_factory=dict)
    link: Link | None = None
    link_skipped: str | None = None

    @property
    def backend(self) -> str:
        """The platform of the first device, or "none"."""
        return self.devices[0].platform if self.devices else "none"


def collect(*, link: bool = True) -> Environment:
    """Reads the environment of this process.

    Args:
      link: whether to measure the link, on a GPU: a few seconds and 2 GB of its memory.

    Returns:
      An `Environment`. The record includes the error of a backend, and why the link was not measured.
    """
    devices, backend_error = _find_devices()
    speed, skipped = _measure_first_link(devices, link)
    return Environment(
        python=platform.python_version(),
        packages={name: version for name in PACKAGES if (version := _version_of(name)) is not None},
        devices=tuple(map(_describe, devices)),
        backend_error=backend_error,
        nvidia_gpu=any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists(),
        host_bytes=find_host_bytes(),
        nodes={"gpus": find_gpu_nodes(), "process": find_processor_nodes()},
        xla_flags=parse_xla_flags(os.environ.get("XLA_FLAGS", "")),
        config={name: value for name in CONFIG if (value := _read_option(name)) is not None},
        variables={name: os.environ[name] for name in VARIABLES if name in os.environ},
        link=speed,
        link_skipped=skipped,
    )


def _read_option(name: str) -> str | None:
    """The value of an option of jax, or None where it has none; jax calls a level that is not set UNKNOWN."""
    value = str(jax.config.values.get(name, "UNKNOWN"))
    return None if value == "UNKNOWN" else value


def _find_devices() -> tuple[list[Any], str | None]:
    """The devices of jax, or the reason why there are none."""
    try:
        return jax.devices(), None
    except RuntimeError as error:  # a platform of JAX_PLATFORMS does not start
        return [], str(error).splitlines()[0]
    except AssertionError:  # no plugin offers the platform: jax's error has no text
        return [], f"no plugin offers a platform of JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')}"


def _describe(device: Any) -> DeviceInfo:
    stats = device.memory_stats() or {}
    kinds = tuple(memory.kind for memory in device.addressable_memories())
    return DeviceInfo(device.platform, device.device_kind, stats.get("bytes_limit"), kinds)


def _measure_first_link(devices: list[Any], wanted: bool) -> tuple[Link | None, str | None]:
    """The link of the first device, or the reason why the link was not measured."""
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


def _version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
