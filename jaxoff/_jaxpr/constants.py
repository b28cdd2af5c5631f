"""Constants of calls, such as a mask in NumPy that a model under `jax.jit` closes over.

The forward pass and the backward pass of such a model are calls with constants of their own. With the
constants outside, the equations of the calls may stand in their place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jaxoff._jaxpr.inline import Renamed, instantiate, resolve
from jaxoff._jaxpr.primitives import holds

type _Find = Callable[
    [Var, Any], Var
]  # a constant's variable in a call, and its value -> its variable around


def lift_constants(closed: ClosedJaxpr) -> ClosedJaxpr:
    """A program with the equations of the calls that have constants, at all levels.

    The program has the constants of its own calls, each once. A program inside has an equation for each
    constant: a call without operands.
    """
    jaxpr = closed.jaxpr
    if not _holds_constants(jaxpr):
        return closed
    known = {id(value): v for v, value in zip(jaxpr.constvars, closed.consts, strict=True)}
    constvars, consts = list(jaxpr.constvars), list(closed.consts)

    def find(v: Var, value: Any) -> Var:
        if id(value) not in known:
            known[id(value)] = Var(v.aval)
            constvars.append(known[id(value)])
            consts.append(value)
        return known[id(value)]

    lifted = _Lifting().lift(jaxpr, find)
    return ClosedJaxpr(lifted.replace(constvars=constvars), consts)


class _Lifting:
    def __init__(self):
        self._makers: dict[int, JaxprEqn] = {}  # by constant

    def lift(self, jaxpr: Jaxpr, find: _Find) -> Jaxpr:
        """A program with the equations of calls with constants, for which `find` has variables."""
        renamed: Renamed = {}
        eqns = self._lift_all(jaxpr.eqns, renamed, find)
        return jaxpr.replace(eqns=eqns, outvars=[resolve(renamed, v) for v in jaxpr.outvars])

    def _lift_all(self, eqns: Iterable[JaxprEqn], renamed: Renamed, find: _Find) -> list[JaxprEqn]:
        lifted: list[JaxprEqn] = []
        for eqn in eqns:
            here = eqn.replace(invars=[resolve(renamed, v) for v in eqn.invars])
            called = compat.called_program(eqn)
            if called is None or not (called.consts or _holds_constants(called.jaxpr)):
                lifted.append(compat.map_programs(here, self._lift_inside))
                continue
            own = [find(v, value) for v, value in zip(called.jaxpr.constvars, called.consts, strict=True)]
            body = compat.move_constants_to_arguments(called).jaxpr
            inner, outs = instantiate(body, [*own, *here.invars], like=here)
            within: Renamed = {}
            lifted += self._lift_all(inner, within, find)
            renamed.update((v, resolve(within, out)) for v, out in zip(eqn.outvars, outs, strict=True))
        return lifted

    def _lift_inside(self, jaxpr: Jaxpr) -> Jaxpr:
        if not _holds_constants(jaxpr):
            return jaxpr
        made: dict[int, JaxprEqn] = {}

        def find(_: Var, value: Any) -> Var:
            if id(value) not in made:
                maker = self._makers.setdefault(id(value), _make(value))  # one program, wherever it is called
                made[id(value)] = maker.replace(outvars=[Var(maker.outvars[0].aval)])
            return made[id(value)].outvars[0]

        lifted = self.lift(jaxpr, find)
        return lifted.replace(eqns=[*made.values(), *lifted.eqns])


def _make(value: Any) -> JaxprEqn:
    """A call without operands whose result is a constant."""
    (maker,) = jax.make_jaxpr(jax.jit(lambda: value))().jaxpr.eqns
    return maker


def _holds_constants(jaxpr: Jaxpr) -> bool:
    """Whether a call with constants and operands is in a program, at any level."""

    def has_constants(eqn: JaxprEqn) -> bool:
        called = compat.called_program(eqn) if eqn.invars else None
        return called is not None and bool(called.consts)

    return holds(jaxpr, has_constants)
