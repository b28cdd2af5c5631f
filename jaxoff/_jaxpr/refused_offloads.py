"""Offloads refused by XLA's GPU compiler, saved on the device instead.

XLA compiles copies to the host in a loop, whose stacks stay on the host until a later loop reads the rows.
XLA refuses a stack in host memory leaving two levels of control flow (a loop inside of a loop), or a
condition.
"""

from __future__ import annotations

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import ClosedJaxpr, JaxprEqn
from jaxoff._jaxpr.host_values import HostValues, move_to_device


def save_refused(closed: ClosedJaxpr) -> tuple[ClosedJaxpr, list[JaxprEqn]]:
    """A program without the offloads refused by XLA, and the removed copies to the host."""
    values = HostValues(closed.jaxpr)
    refused = values.list_refused()
    if not refused:
        return closed, []
    moves = values.collect(eqn.outvars[0] for eqn in refused)
    jaxpr = compat.rewrite_jaxprs(values.program, lambda jaxpr: move_to_device(jaxpr, moves.__contains__))
    return closed.replace(jaxpr=jaxpr), refused
