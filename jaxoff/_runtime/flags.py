"""XLA options by what a program contains, and options that harm it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jaxoff._runtime import requirements
from jaxoff._runtime.settings import (
    CAPTURED_BY_DEFAULT,
    COMMAND_BUFFER,
    DISABLED_PASSES,
    PIPELINING,
    PIPELINING_LEVELS,
    SCHEDULING_MODE,
    is_true,
)

# Edges of CUDA graphs by use of data instead of by the scheduler's order. Collectives have to be in the
# graph, too, or the copies of a loop wait for them.
_CONCURRENT = (
    (SCHEDULING_MODE, "CONCURRENT"),
    (COMMAND_BUFFER, ",".join(sorted(CAPTURED_BY_DEFAULT | {"COLLECTIVES"}))),
)
# Where collectives have kernels of their own, and at CUB's sorts, XLA cuts the graph of an iteration. Copies,
# those on the device, too, and collectives then share a few streams and wait for each other: 8% of a step on
# two H200s, a copy of each iteration on one (bench/LOG.md).
_ONE_GRAPH = (("xla_gpu_experimental_use_collective_kernels", ""), ("xla_gpu_enable_cub_radix_sort", False))
# Passes that undo an order. Near the device's limit XLA computes values again by itself, which took up to
# 2.9 GB more (bench/LOG.md). When memory is assigned, a tuple is what is left of a barrier, and the order
# that is seen; from jaxlib 0.12 on a pass takes such tuples away before, which nothing else needs.
_REMATERIALIZATION = "rematerialization"
_TUPLES = "tuple-simplifier"
_PIPELINED = "xla_gpu_enable_pipelined_host_offloading"


def for_program(
    *, loops: int = 0, scanned: int = 0, flat: bool = False, jaxlib: str, disabled: str = ""
) -> tuple[tuple[str, Any], ...]:
    """The options for a program that was put in order, pairs of a name and a value; none for another.

    Outside of loops the scheduler's order stands, which barriers fix.

    Args:
      loops: how many are written out.
      scanned: how many move residuals.
      flat: whether it moves residuals outside of loops.
      jaxlib: its version.
      disabled: the passes that the process leaves out of all programs, with commas between.
    """
    if not (loops or scanned or flat):
        return ()
    passes = [*filter(None, disabled.split(",")), _REMATERIALIZATION]
    if (loops or scanned) and requirements.release(jaxlib) >= (0, 12):
        passes.append(_TUPLES)
    return (*(_CONCURRENT + _ONE_GRAPH if scanned else ()), (DISABLED_PASSES, ",".join(passes)))


def harms(given: Mapping[str, Any], *, scanned: bool, level: str = "") -> Iterator[str]:
    """What is wrong with the settings of a caller whose program moves residuals.

    Args:
      given: the caller's compiler options.
      scanned: whether it moves them in loops.
      level: jax's own, `jax.config.jax_optimization_level`.
    """
    if level in PIPELINING_LEVELS:
        yield f"jax_optimization_level={level} {PIPELINING}"
    if is_true(str(given.get(_PIPELINED, "false"))):
        yield (
            f"{_PIPELINED} is on: it computed wrong results in several releases of XLA. Leave it out: the "
            "copies overlap without it."
        )
    mode = given.get(SCHEDULING_MODE)
    if mode is not None and scanned and mode != "CONCURRENT":
        yield (
            f"{SCHEDULING_MODE}={mode} puts the copies of scanned layers in line with the kernels. Leave it "
            "out."
        )
    if mode == "CONCURRENT" and not scanned:
        yield (
            f"{SCHEDULING_MODE}=CONCURRENT on a program without a loop gives up the reuse of memory. Leave "
            "it out, or put the layers into jaxoff.scan."
        )


def refuse_wrong_jaxlib(version: str, platform: str) -> None:
    """Raises where offloaded residuals get wrong gradients.

    Args:
      version: of jaxlib.
      platform: that the program runs on, e.g. "gpu".

    Raises:
      RuntimeError: for a GPU and a jaxlib that is too old.
    """
    if platform == "gpu" and requirements.release(version) < requirements.OLDEST_JAX:
        oldest = requirements.dotted(requirements.OLDEST_JAX)
        raise RuntimeError(
            f"Offloading on a GPU needs jaxlib {oldest} or newer, got {version}: older ones compute wrong "
            "gradients for offloaded residuals of scanned layers (openxla/xla#46231). Upgrade jax."
        )
