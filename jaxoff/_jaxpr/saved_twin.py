"""The saved twin of a program: the same program, its offloaded values on the device instead."""

from __future__ import annotations

from collections.abc import Callable

import jax

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import ClosedJaxpr, Jaxpr, Var
from jaxoff._jaxpr.inline import Renamed, resolve


def build_saved_twin(closed: ClosedJaxpr) -> ClosedJaxpr | None:
    """A program without its copies between device and host memory.

    Args:
      closed: a program with offloaded residuals.

    Returns:
      The twin with the same arguments and results; None if arguments, results or constants are in host
      memory, or if values are copied there several at a time.
    """
    jaxpr = closed.jaxpr
    if any(compat.is_host(v.aval) for v in (*jaxpr.invars, *jaxpr.outvars, *jaxpr.constvars)):
        return None
    try:
        moves = lambda v: compat.is_host(v.aval)  # noqa: E731
        return closed.replace(jaxpr=compat.rewrite_jaxprs(jaxpr, lambda j: move_to_device(j, moves)))
    except CopiesTogetherError:
        return None


class CopiesTogetherError(Exception):
    """One equation copies several values between memories."""


def move_to_device(jaxpr: Jaxpr, moves: Callable[[Var], bool]) -> Jaxpr:
    """A program with some variables of host memory on the device; the programs inside are done already.

    Raises:
      CopiesTogetherError: if one equation copies several values between memories.
    """
    values = (*jaxpr.constvars, *jaxpr.invars, *(v for eqn in jaxpr.eqns for v in eqn.outvars))
    if not any(map(moves, values)):
        return jaxpr
    renamed: Renamed = {}

    def move(v: Var) -> Var:
        if moves(v):
            renamed[v] = Var(v.aval.update(memory_space=jax.memory.Space.Device))
        return renamed.get(v, v)

    constvars, invars = [move(v) for v in jaxpr.constvars], [move(v) for v in jaxpr.invars]
    eqns = []
    for eqn in jaxpr.eqns:
        touched = [v for v in (*eqn.invars, *eqn.outvars) if isinstance(v, Var) and moves(v)]
        if touched and compat.transfer_in(eqn):
            renamed[eqn.outvars[0]] = resolve(renamed, eqn.invars[0])
            continue
        if touched and eqn.primitive.name == "device_put":
            raise CopiesTogetherError
        operands = [resolve(renamed, v) for v in eqn.invars]
        eqns.append(eqn.replace(invars=operands, outvars=[move(v) for v in eqn.outvars]))
    outs = [resolve(renamed, v) for v in jaxpr.outvars]
    return jaxpr.replace(constvars=constvars, invars=invars, eqns=eqns, outvars=outs)
