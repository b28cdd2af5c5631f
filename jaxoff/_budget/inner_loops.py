"""Loops inside of a layer, which the backward pass of `jax.checkpoint` runs once more with further results.

Differentiation of a loop stacks the loop's residuals. The forward pass under `jax.checkpoint` runs the loop
without the stacks, the backward pass repeats the loop with them: two different equations. Here the loop with
the stacks takes the place of the loop in the forward pass, so that results and residuals may be kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxoff._budget.numbering import Numbering
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import Jaxpr, JaxprEqn, Var
from jaxoff._jaxpr.inline import Renamed, inline_calls, resolve

# Equations whose results are their operands, value by value.
_ALIASES = frozenset({"name", "optimization_barrier"})


class InnerLoops:
    """The loops of a forward pass.

    Attributes:
      widened: id of a loop -> the loop with more results that takes its place. `numbering` has its values.
    """

    def __init__(self, numbering: Numbering):
        self.widened: dict[int, JaxprEqn] = {}
        self._numbering = numbering
        self._loops: dict[Any, list[JaxprEqn]] = {}

    def add(self, eqn: JaxprEqn) -> None:
        """Adds an equation of the forward pass, if it is a loop."""
        if compat.scan_in(eqn) is not None:
            self._loops.setdefault(self._numbering.identify(eqn.invars), []).append(eqn)

    def find(self, eqn: JaxprEqn, operands: Sequence[Any]) -> tuple[JaxprEqn, JaxprEqn] | None:
        """A loop of the forward pass that a loop with more results repeats, and its wider form; or None."""
        if compat.scan_in(eqn) is None:
            return None
        for loop in self._loops.get(self._numbering.identify(operands), ()):
            if id(loop) not in self.widened and (wide := _widen(loop, eqn)) is not None:
                self.widened[id(loop)] = wide
                self._numbering.add(wide)
                return loop, wide
        return None

    def widen(self, eqn: JaxprEqn, operands: Sequence[Any]) -> list[Var] | None:
        """The results of the wider form of the loop repeated by `eqn`; None if `eqn` repeats no loop."""
        found = self.find(eqn, operands)
        return None if found is None else list(found[1].outvars)


def _widen(loop: JaxprEqn, repeated: JaxprEqn) -> JaxprEqn | None:
    """A loop with the results of another, its own among them; None unless they are."""
    layout = compat.scan_in(loop)
    if layout is None or layout != compat.scan_in(repeated):
        return None
    if loop.params["reverse"] != repeated.params["reverse"] or compat.has_side_effects(repeated):
        return None
    closed = [eqn.params["jaxpr"] for eqn in (loop, repeated)]
    if any(program.consts for program in closed):
        return None
    (body, _), (theirs, _) = (inline_body(program.jaxpr) for program in closed)
    numbering = Numbering(theirs.invars, theirs.eqns)
    same: Renamed = dict(zip(body.invars, theirs.invars, strict=True))
    for eqn in body.eqns:
        values = numbering.find(eqn, [resolve(same, v) for v in eqn.invars])
        if values is None:
            return None
        same.update(zip(eqn.outvars, values, strict=True))
    made = [resolve(numbering.aliases, v) for v in theirs.outvars]
    outs: list[Var] = [Var(v.aval) for v in repeated.outvars]
    taken: set[int] = set()
    for i, v in enumerate(body.outvars):
        value = resolve(numbering.aliases, resolve(same, v))
        places = [i] if i < layout.num_carry else range(layout.num_carry, len(made))
        place = next((k for k in places if made[k] is value and k not in taken), None)
        if place is None:
            return None
        taken.add(place)
        outs[place] = loop.outvars[i]
    return loop.replace(params=repeated.params, outvars=outs)


def inline_body(body: Jaxpr) -> tuple[Jaxpr, dict[Var, str]]:
    """A body with its calls inlined and without names and barriers; and the names, by variable."""
    renamed: Renamed = {}
    eqns, names = [], {}
    for eqn in inline_calls(body.eqns, renamed):
        operands = [_follow(renamed, v) for v in eqn.invars]
        if eqn.primitive.name in _ALIASES and len(operands) == len(eqn.outvars):
            renamed.update(zip(eqn.outvars, operands, strict=True))
            if (name := compat.name_in(eqn)) is not None and isinstance(operands[0], Var):
                names[operands[0]] = name
        else:
            eqns.append(eqn.replace(invars=operands))
            if eqn.primitive.name == "reduce_precision" and operands[0] in names:  # pins a rounding
                names[eqn.outvars[0]] = names[operands[0]]
    return body.replace(eqns=eqns, outvars=[_follow(renamed, v) for v in body.outvars]), names


def _follow(renamed: Renamed, atom: Any) -> Any:
    while (found := resolve(renamed, atom)) is not atom:
        atom = found
    return atom
