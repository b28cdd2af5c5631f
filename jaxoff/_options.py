"""XLA options by what a program contains, and options that harm it."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from jaxoff import _requirements
from jaxoff._settings import CAPTURED_BY_DEFAULT, COMMAND_BUFFER, SCHEDULING_MODE, is_true

# Edges of CUDA graphs by use of data instead of by the scheduler's order. Collectives have to be in the graph,
# too, or the copies of a loop wait for them.
_CONCURRENT = (
    (SCHEDULING_MODE, "CONCURRENT"),
    (COMMAND_BUFFER, ",".join(sorted(CAPTURED_BY_DEFAULT | {"COLLECTIVES"}))),
)
_PIPELINED = "xla_gpu_enable_pipelined_host_offloading"


def for_program(scanned: int, flat: bool) -> tuple[tuple[str, Any], ...]:
    """The options for a program.

    Args:
      scanned: how many loops in it move residuals.
      flat: whether it moves residuals outside of loops.

    Returns:
      Pairs of a name and a value. Outside of loops XLA's order stands, which barriers fix.
    """
    return _CONCURRENT if scanned else ()


def harms(given: Mapping[str, Any], *, scanned: bool) -> Iterator[str]:
    """What is wrong with options that a caller set on a program that moves residuals."""
    if is_true(str(given.get(_PIPELINED, "false"))):
        yield (
            f"{_PIPELINED} is on: it computed wrong results in several releases of XLA. Leave it out: the "
            "copies overlap without it."
        )
    mode = given.get(SCHEDULING_MODE)
    if mode is not None and scanned and mode != "CONCURRENT":
        yield f"{SCHEDULING_MODE}={mode} puts the copies of scanned layers in line with the kernels. Leave it out."
    if mode == "CONCURRENT" and not scanned:
        yield (
            f"{SCHEDULING_MODE}=CONCURRENT on a program without a loop gives up the reuse of memory. Leave it "
            "out, or put the layers into jaxoff.scan."
        )


def refuse_wrong_jaxlib() -> None:
    """Raises where offloaded residuals get wrong gradients."""
    version = importlib.metadata.version("jaxlib")
    if jax.default_backend() == "gpu" and _requirements.release(version) < _requirements.OLDEST_JAX:
        oldest = _requirements.dotted(_requirements.OLDEST_JAX)
        raise RuntimeError(
            f"Offloading on a GPU needs jaxlib {oldest} or newer, got {version}: older ones compute wrong "
            "gradients for offloaded residuals of scanned layers (openxla/xla#46231). Upgrade jax."
        )
