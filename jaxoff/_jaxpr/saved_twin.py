"""The saved twin of a program: the same program, its offloaded values on the device instead."""

from __future__ import annotations

from collections.abc import Callable

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import ClosedJaxpr, JaxprEqn, Var
from jaxoff._jaxpr.host_values import HostValues, is_copied_by_policy, move_vars_to_device
from jaxoff._jaxpr.scopes import is_recomputed, is_transposed


def build_saved_twin(closed: ClosedJaxpr) -> ClosedJaxpr | None:
    """A program without the copies to the host, and back, that policies ask for.

    What the user's own `jax.device_put` copies stays on the host, unless the program has no other copies.

    Args:
      closed: a program with offloaded residuals.

    Returns:
      The twin with the same arguments and results; None if an argument, a result or a constant would have to
      move from host memory.
    """
    values = HostValues(closed.jaxpr)
    by_policies = [eqn.outvars[0] for eqn in values.sends if _is_by_policy(eqn)]
    if not by_policies or all(map(is_copied_by_policy, values.sends)):
        moved = move_all_to_device(closed)
        if moved is not None or not by_policies:
            return moved
    return _move(closed.replace(jaxpr=values.program), values.collect(by_policies).__contains__)


def move_all_to_device(closed: ClosedJaxpr) -> ClosedJaxpr | None:
    """A program without copies between device and host memory; None as for `build_saved_twin`."""
    return _move(closed, lambda v: compat.is_host(v.aval))


def _is_by_policy(send: JaxprEqn) -> bool:
    """Whether a copy to the host is a policy's, and no transpose of the user's copy from the host."""
    return is_copied_by_policy(send) and (is_recomputed(send) or not is_transposed(send))


def _move(closed: ClosedJaxpr, moves: Callable[[Var], bool]) -> ClosedJaxpr | None:
    outside = (*closed.jaxpr.invars, *closed.jaxpr.constvars, *closed.jaxpr.outvars)
    if any(isinstance(v, Var) and moves(v) for v in outside):
        return None
    return closed.replace(jaxpr=compat.rewrite_jaxprs(closed.jaxpr, lambda j: move_vars_to_device(j, moves)))
