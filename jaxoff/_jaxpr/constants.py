"""Constants of calls, such as a mask in NumPy that a model under `jax.jit` closes over.

The forward pass and the backward pass of such a model are calls with constants of their own. A program that
has the constants itself can have the equations of the calls, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import ClosedJaxpr, JaxprEqn, Var
from jaxoff._jaxpr.inline import Renamed, instantiate, resolve


def lift_constants(closed: ClosedJaxpr) -> ClosedJaxpr:
    """A program with the equations of the calls that have constants, and with the constants, each once."""
    jaxpr = closed.jaxpr
    if not any(map(_calls_with_constants, jaxpr.eqns)):
        return closed
    known = {id(value): v for v, value in zip(jaxpr.constvars, closed.consts, strict=True)}
    constvars, consts = list(jaxpr.constvars), list(closed.consts)

    def find(v: Var, value: Any) -> Var:
        if id(value) not in known:
            known[id(value)] = Var(v.aval)
            constvars.append(known[id(value)])
            consts.append(value)
        return known[id(value)]

    def lift(eqns: Iterable[JaxprEqn], renamed: Renamed) -> list[JaxprEqn]:
        lifted: list[JaxprEqn] = []
        for eqn in eqns:
            here = eqn.replace(invars=[resolve(renamed, v) for v in eqn.invars])
            called = compat.called_program(eqn)
            if called is None or not _has_constants(called):
                lifted.append(here)
                continue
            own = [find(v, value) for v, value in zip(called.jaxpr.constvars, called.consts, strict=True)]
            body = compat.move_constants_to_arguments(called).jaxpr
            inner, outs = instantiate(body, [*own, *here.invars], like=here)
            within: Renamed = {}
            lifted += lift(inner, within)
            renamed.update((v, resolve(within, out)) for v, out in zip(eqn.outvars, outs, strict=True))
        return lifted

    renamed: Renamed = {}
    eqns = lift(jaxpr.eqns, renamed)
    outs = [resolve(renamed, v) for v in jaxpr.outvars]
    return ClosedJaxpr(jaxpr.replace(constvars=constvars, eqns=eqns, outvars=outs), consts)


def _calls_with_constants(eqn: JaxprEqn) -> bool:
    called = compat.called_program(eqn)
    return called is not None and _has_constants(called)


def _has_constants(called: ClosedJaxpr) -> bool:
    return bool(called.consts) or any(map(_calls_with_constants, called.jaxpr.eqns))
