"""The saved twin of a program: the same program, its offloaded values on the device instead."""

from __future__ import annotations

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
        return closed.replace(jaxpr=compat.rewrite_jaxprs(jaxpr, _move_to_device))
    except _CopiesTogetherError:
        return None


class _CopiesTogetherError(Exception):
    """One equation copies several values between memories."""


def _move_to_device(jaxpr: Jaxpr) -> Jaxpr:
    values = (*jaxpr.constvars, *jaxpr.invars, *(v for eqn in jaxpr.eqns for v in eqn.outvars))
    if not any(compat.is_host(v.aval) for v in values):
        return jaxpr
    renamed: Renamed = {}

    def move(v: Var) -> Var:
        if compat.is_host(v.aval):
            renamed[v] = Var(v.aval.update(memory_space=jax.memory.Space.Device))
        return renamed.get(v, v)

    constvars, invars = [move(v) for v in jaxpr.constvars], [move(v) for v in jaxpr.invars]
    eqns = []
    for eqn in jaxpr.eqns:
        if compat.transfer_in(eqn):
            renamed[eqn.outvars[0]] = resolve(renamed, eqn.invars[0])
            continue
        touches_host = any(compat.is_host(v.aval) for v in (*eqn.invars, *eqn.outvars))
        if touches_host and eqn.primitive.name == "device_put":
            raise _CopiesTogetherError
        operands = [resolve(renamed, v) for v in eqn.invars]
        eqns.append(eqn.replace(invars=operands, outvars=[move(v) for v in eqn.outvars]))
    outs = [resolve(renamed, v) for v in jaxpr.outvars]
    return jaxpr.replace(constvars=constvars, invars=invars, eqns=eqns, outvars=outs)
