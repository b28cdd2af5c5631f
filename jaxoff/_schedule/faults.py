"""Faults of jaxoff's own: the user's step runs as it is written, and a finding says so."""

from __future__ import annotations

import traceback

from jaxoff._report.finding import Finding, FindingCode

# What a rewriting of a program raises by mistake. It refuses a program by ValueError or RuntimeError.
FAULTS = (ArithmeticError, AssertionError, AttributeError, LookupError, NotImplementedError, TypeError)


def describe_fault(fault: BaseException, doing: str) -> Finding:
    """The finding of a step that runs as it is written, after a fault while jaxoff was `doing` something."""
    frames = traceback.extract_tb(fault.__traceback__)
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    said = " ".join(str(fault).split())[:200]
    return Finding(
        FindingCode.RUNS_AS_WRITTEN,
        f"{doing} failed by a fault of jaxoff ({type(fault).__name__}: {said}{place}), and the step runs as "
        "it is written. Results are right; copies may not overlap, and memory is that of jax.jit. Please "
        "report the program.",
    )
