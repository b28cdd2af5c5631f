"""The releases of JAX that offload is right under."""

from __future__ import annotations

# The oldest supported release. Older jaxlibs compute wrong gradients of offloaded scan residuals on a GPU
# (openxla/xla#46231).
OLDEST_JAX = (0, 11, 1)
# The first release without tests: `pyproject.toml` has the same range.
FIRST_UNKNOWN_JAX = (0, 13)


def parse_release(version: str) -> tuple[int, ...]:
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


def format_release(version: tuple[int, ...]) -> str:
    """A release as text: (0, 11, 1) gives "0.11.1"."""
    return ".".join(map(str, version))


def refuse_wrong_jaxlib(version: str, platform: str) -> None:
    """Raises where offloaded residuals get wrong gradients.

    Args:
      version: of jaxlib.
      platform: the platform of the program, e.g. "gpu".

    Raises:
      RuntimeError: for a GPU and a jaxlib older than `OLDEST_JAX`.
    """
    if platform == "gpu" and parse_release(version) < OLDEST_JAX:
        raise RuntimeError(
            f"Offloading on a GPU needs jaxlib {format_release(OLDEST_JAX)} or newer, got {version}: older "
            "releases compute wrong gradients for offloaded residuals of scanned layers (openxla/xla#46231). "
            "Upgrade jax."
        )
