"""What offload needs of the software under it: versions, and XLA's pool of pinned host memory."""

from __future__ import annotations

from collections.abc import Mapping

OLDEST_JAX = (0, 11, 1)  # before it, wrong gradients of offloaded scan residuals: openxla/xla#46231
FIRST_UNKNOWN_JAX = (0, 13)
POOL_VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
DEFAULT_POOL_GIB = 64


def release(version: str) -> tuple[int, ...]:
    """The release part of a version: "0.12.0.1" and "0.11.2rc1" give (0, 12, 0, 1) and (0, 11, 2)."""
    numbers: list[int] = []
    for part in version.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
        if digits != part:
            break
    return tuple(numbers)


def dotted(version: tuple[int, ...]) -> str:
    """A release as it is written: (0, 11, 1) gives "0.11.1"."""
    return ".".join(map(str, version))


def pinned_pool_bytes(variables: Mapping[str, str]) -> int:
    """The most pinned host memory that XLA's GPU client gives a process with these environment variables."""
    text = variables.get(POOL_VARIABLE, "").strip()
    return (int(text) if text.lstrip("-").isdigit() else DEFAULT_POOL_GIB) << 30


def pool_to_set(nbytes: int) -> int:
    """The value of `POOL_VARIABLE`, in GiB, for so many bytes of pinned host memory."""
    return -(-nbytes // 2**30) + 1


def refuse_small_pool(nbytes: int, variables: Mapping[str, str], platform: str) -> None:
    """Raises where XLA's pool of pinned host memory cannot hold what a program keeps there.

    Args:
      nbytes: what the program holds in host memory at once.
      variables: the environment's.
      platform: that the program runs on, e.g. "gpu"; others have no such pool.

    Raises:
      RuntimeError: for a GPU and a pool that is too small.
    """
    limit = pinned_pool_bytes(variables)
    if platform != "gpu" or nbytes <= limit:
        return
    now = f"is {variables[POOL_VARIABLE]}" if POOL_VARIABLE in variables else "is not set"
    raise RuntimeError(
        f"The program puts {nbytes:,} bytes into pinned host memory at once, and XLA's pool ends at "
        f"{limit:,}: the step would die with RESOURCE_EXHAUSTED. {POOL_VARIABLE} {now}, which gives "
        f"{limit >> 30} GiB: set it to {pool_to_set(nbytes)} or more before the process starts, or offload "
        "less."
    )
