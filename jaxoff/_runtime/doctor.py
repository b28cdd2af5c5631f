"""Diagnoses an environment: whether offload computes right gradients and saves memory there."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from jaxoff._runtime.environment import Environment
from jaxoff._runtime.judgements import JudgedSetting, judge
from jaxoff._runtime.pinned_pool import DEFAULT_POOL_GIB, POOL_VARIABLE, pinned_pool_bytes
from jaxoff._runtime.versions import FIRST_UNKNOWN_JAX, OLDEST_JAX, format_release, parse_release

# Bytes.
GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Problem:
    """A fault of an environment.

    Attributes:
      code: short and stable, for scripts.
      fatal: whether offload is wrong or useless because of it.
      message: the fault and its fix.
    """

    code: str
    fatal: bool
    message: str

    def __str__(self) -> str:
        return self.message


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """An environment, its settings judged, and its problems.

    Attributes:
      environment: the input.
      settings: the flags and options with an effect on offload.
      pinned_pool_bytes: the most pinned host memory that XLA allocates.
      problems: fatal ones first.
    """

    environment: Environment
    settings: tuple[JudgedSetting, ...]
    pinned_pool_bytes: int
    problems: tuple[Problem, ...]

    @property
    def exit_status(self) -> int:
        """1 where offload would be wrong or useless, else 0."""
        return int(any(problem.fatal for problem in self.problems))

    def to_dict(self) -> dict[str, Any]:
        """The diagnosis as JSON-ready values."""
        return {**dataclasses.asdict(self), "exit_status": self.exit_status}


def diagnose(environment: Environment) -> Diagnosis:
    """Finds the reasons why offload is wrong or useless in an environment.

    Args:
      environment: from `jaxoff._runtime.environment.collect`, or made by hand.

    Returns:
      A `Diagnosis`, a function of the argument alone.

    Example:
      >>> from jaxoff._runtime.environment import DeviceInfo, Environment
      >>> versions = {"jax": "0.11.2", "jaxlib": "0.11.2"}
      >>> laptop = Environment(python="3.12.1", packages=versions, devices=(DeviceInfo("cpu", "cpu"),))
      >>> [problem.code for problem in diagnose(laptop).problems]
      ['no-gpu']
    """
    settings = judge(environment)
    pool = pinned_pool_bytes(environment.variables)
    checks = (
        *_check_versions(environment),
        *_check_backend(environment),
        *_check_pool(environment, pool),
        *_check_nodes(environment),
        *_check_settings(environment, settings),
    )
    problems = sorted(checks, key=lambda problem: not problem.fatal)
    return Diagnosis(environment, settings, pool, tuple(problems))


def _check_versions(environment: Environment) -> Iterator[Problem]:
    supported = f">={format_release(OLDEST_JAX)},<{format_release(FIRST_UNKNOWN_JAX)}"
    fix = f"pip install 'jax{supported}'"
    jaxlib = environment.packages.get("jaxlib")
    if environment.backend == "gpu" and jaxlib is not None and parse_release(jaxlib) < OLDEST_JAX:
        yield Problem(
            "wrong-gradients",
            True,
            f"jaxlib {jaxlib} computes wrong gradients from offloaded residuals of scanned layers on a GPU "
            f"(openxla/xla#46231), {format_release(OLDEST_JAX)} does not: {fix}.",
        )
    for package in ("jax", "jaxlib"):
        version = environment.packages.get(package)
        if version is None:
            yield Problem("unsupported-version", True, f"{package} is not installed: {fix}.")
        elif not OLDEST_JAX <= parse_release(version) < FIRST_UNKNOWN_JAX:
            yield Problem(
                "unsupported-version",
                True,
                f"jaxoff is tested with {package}{supported}, got {version}: {fix}.",
            )
    for package, version in environment.packages.items():
        if (
            package.startswith("jax-cuda")
            and jaxlib is not None
            and parse_release(version) != parse_release(jaxlib)
        ):
            yield Problem(
                "mixed-versions",
                True,
                f"{package} {version} is not of the release of jaxlib {jaxlib}, so jax may leave the GPU "
                f"unused: pip install '{_extra_of(package)}=={jaxlib}'.",
            )


def _check_backend(environment: Environment) -> Iterator[Problem]:
    if environment.backend_error is not None:
        yield Problem("no-backend", True, f"jax could not start a backend: {environment.backend_error}")
    elif environment.backend == "cpu":
        yield Problem("no-gpu", True, _explain_no_gpu(environment))
    elif not all("pinned_host" in device.memory_kinds for device in environment.devices):
        kinds = ", ".join(sorted({kind for device in environment.devices for kind in device.memory_kinds}))
        yield Problem(
            "no-pinned-host",
            True,
            f"Offloaded values live in pinned_host memory, which a device here lacks; got {kinds or 'none'}.",
        )


def _explain_no_gpu(environment: Environment) -> str:
    useless = (
        "no GPU: on the CPU an offloaded program computes the same values and moves nothing, so offload is "
        "useless here."
    )
    if not environment.nvidia_gpu:
        return f"{useless} Tests and jaxoff.explain work as anywhere."
    platforms = environment.variables.get("JAX_PLATFORMS")
    if platforms and "cuda" not in platforms:
        return f"{useless} The machine has an NVIDIA GPU: JAX_PLATFORMS={platforms} leaves it out."
    if not any(package.startswith("jax-cuda") for package in environment.packages):
        return f"{useless} For the machine's NVIDIA GPU jax has no plugin: pip install 'jaxoff[cuda13]'."
    return (
        f"{useless} jax's plugin for the machine's NVIDIA GPU did not start: see its warning and nvidia-smi."
    )


def _check_pool(environment: Environment, pool: int) -> Iterator[Problem]:
    if environment.backend != "gpu":
        return
    text = environment.variables.get(POOL_VARIABLE)
    if text is not None and not text.strip().lstrip("-").isdigit():
        yield Problem(
            "pool-not-a-number",
            False,
            f"{POOL_VARIABLE} is a whole number of GiB, got {text!r}: XLA takes {DEFAULT_POOL_GIB}.",
        )
    if pool <= 0:
        yield Problem(
            "no-pinned-pool",
            True,
            f"{POOL_VARIABLE}={text} leaves no pinned host memory: unset it or raise it.",
        )
    if environment.host_bytes is not None and pool > environment.host_bytes:
        yield Problem(
            "pool-beyond-memory",
            False,
            f"XLA's pinned pool may grow to {pool / GIB:.0f} GiB and this process may use "
            f"{environment.host_bytes / GIB:.0f} GiB: past that it is killed without an error. Lower "
            f"{POOL_VARIABLE}.",
        )


def _check_nodes(environment: Environment) -> Iterator[Problem]:
    gpus, process = (environment.nodes.get(key, ()) for key in ("gpus", "process"))
    near, far = (", ".join(map(str, nodes)) for nodes in (process, sorted({*gpus} - {*process})))
    if environment.backend == "gpu" and near and far:
        yield Problem(
            "far-host-memory",
            False,
            f"A GPU is at memory node {far}, and this process runs on processors of node {near} only: pinned "
            "memory is allocated there, and copies cross the link between processors. Start a GPU's process "
            "by numactl --cpunodebind=N --membind=N, with the GPU's node N.",
        )


def _check_settings(environment: Environment, settings: tuple[JudgedSetting, ...]) -> Iterator[Problem]:
    for setting in settings:
        gpu_only = setting.name.startswith("xla_gpu") or setting.name == "jax_optimization_level"
        if setting.verdict == "harms" and (environment.backend == "gpu" or not gpu_only):
            yield Problem(
                "harmful-setting", True, f"{setting.name}={setting.value} ({setting.source}): {setting.why}"
            )


def _extra_of(package: str) -> str:
    return f"jax[{package.split('-')[1]}]"
