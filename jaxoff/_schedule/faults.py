"""Faults of jaxoff's own: the user's step runs as it is written, and a finding says so."""

from __future__ import annotations

import traceback

from jaxoff._device.profile import Device
from jaxoff._jaxpr.compat import ClosedJaxpr
from jaxoff._jaxpr.faults import FAULTS
from jaxoff._report.finding import Finding, FindingCode
from jaxoff._schedule.call import Place
from jaxoff._schedule.problem import DEFAULT_ORDER, OrderOptions
from jaxoff._schedule.rewrite import Rewritten, rewrite
from jaxoff._schedule.sharding_marks import Lower, find_loop_shardings


def describe_fault(fault: BaseException, doing: str) -> Finding:
    """The finding of a step run as written, after a fault while jaxoff was `doing` something."""
    return Finding(
        FindingCode.RUNS_AS_WRITTEN,
        f"{name_fault(fault, doing)}, and the step runs as it is written. Results are right; copies may not "
        "overlap, and memory is that of jax.jit. Please report the program.",
    )


def describe_symbolic(shape: str, *, has_budget: bool) -> Finding:
    """The finding of a step traced for an argument whose shape has dimensions that are not numbers.

    Raises:
      ValueError: for a step within a budget.
    """
    if has_budget:
        raise ValueError(
            f"device_bytes= places values by their bytes; got an argument of the shape {shape}. Export for "
            "shapes of numbers, or without device_bytes."
        )
    return Finding(
        FindingCode.RUNS_AS_WRITTEN,
        f"the step is traced for an argument of the shape {shape}. The order of copies needs numbers, so the "
        "step is as jax.jit makes it. Export for shapes of numbers to hide its copies.",
    )


def name_fault(fault: BaseException, doing: str) -> str:
    """The beginning of a sentence: what failed, and how."""
    frames = traceback.extract_tb(fault.__traceback__)
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    said = " ".join(str(fault).split())[:200]
    return f"{doing} failed by a fault of jaxoff ({type(fault).__name__}: {said}{place})"


def rewrite_safely(
    given: ClosedJaxpr,
    device: Device,
    place: Place,
    lower_marked: Lower | None,
    *,
    in_order: bool = False,
    options: OrderOptions = DEFAULT_ORDER,
) -> tuple[Rewritten, list[Finding]]:
    """`rewrite`, or the program as it is given with the finding of a fault.

    Args:
      given, device: as for `rewrite`.
      place: where the program runs.
      lower_marked: lowers a program with marks, by which the compiler tells how loops are divided; or None.
      in_order, options: as for `rewrite`.
    """
    try:
        shardings = None if lower_marked is None else find_loop_shardings(given, lower_marked)
        at = {"one_device": place.devices == 1, "on_gpus": place.are_gpus}
        return rewrite(given, device, shardings=shardings, in_order=in_order, options=options, **at), []
    except (ValueError, *FAULTS) as fault:  # ValueError: of JAX, for example over what differs by device
        return Rewritten.as_given(given), [describe_fault(fault, "the order of its copies")]
