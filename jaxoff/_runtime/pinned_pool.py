"""XLA's pool of pinned host memory: its size, and the refusal of programs beyond its size."""

from __future__ import annotations

from collections.abc import Mapping

POOL_VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
# GiB. XLA's own default, also where the variable is no whole number.
DEFAULT_POOL_GIB = 64


def pinned_pool_bytes(variables: Mapping[str, str]) -> int:
    """The size of the pool of XLA's GPU client, in bytes, by environment variables."""
    text = variables.get(POOL_VARIABLE, "").strip()
    return (int(text) if text.lstrip("-").isdigit() else DEFAULT_POOL_GIB) << 30


def pool_to_set(nbytes: int) -> int:
    """The value of `POOL_VARIABLE`, in GiB, for a program with this much pinned host memory."""
    return -(-nbytes // 2**30) + 1


def refuse_small_pool(
    nbytes: int, variables: Mapping[str, str], platform: str, host_nbytes: int | None = None
) -> None:
    """Raises where XLA's pool of pinned host memory, or the host, is smaller than a program's host memory.

    Args:
      nbytes: the most host memory that the program holds at any time.
      variables: environment variables by name.
      platform: the platform of the program, e.g. "gpu"; only GPUs have this pool.
      host_nbytes: the memory that the process may use; None where unknown.

    Raises:
      RuntimeError: for a GPU, and a smaller pool or host.
    """
    if platform == "gpu" and host_nbytes is not None and nbytes > host_nbytes:
        raise RuntimeError(
            f"The program puts {nbytes:,} bytes into pinned host memory at once, and this process may use "
            f"{host_nbytes:,} of the host's: the system would kill it. Offload less; with device_bytes=, "
            "host_bytes= is the most."
        )
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
