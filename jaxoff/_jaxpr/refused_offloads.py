"""Offloads refused by XLA's GPU compiler, saved on the device instead.

XLA compiles copies to the host in a loop, whose stacks stay on the host until a later loop reads the rows.
XLA refuses a value in host memory as a result of a loop around another loop or a condition, and of a
condition with a branch whose result is on the device. The results of a condition divided over devices by
the compiler are gathered on the host.
"""

from __future__ import annotations

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import ClosedJaxpr, JaxprEqn
from jaxoff._jaxpr.host_values import HostValues, move_vars_to_device


def save_refused(closed: ClosedJaxpr, *, one_device: bool) -> tuple[ClosedJaxpr, list[JaxprEqn]]:
    """A program without the offloads refused by XLA, and the removed copies to the host.

    Args:
      closed: the program.
      one_device: whether the program runs on a single device.
    """
    values = HostValues(closed.jaxpr)
    refused = values.list_refused(one_device=one_device)
    if not refused:
        return closed, []
    moves = values.collect(eqn.outvars[0] for eqn in refused)
    jaxpr = compat.rewrite_jaxprs(
        values.program, lambda jaxpr: move_vars_to_device(jaxpr, moves.__contains__)
    )
    return closed.replace(jaxpr=jaxpr), refused
