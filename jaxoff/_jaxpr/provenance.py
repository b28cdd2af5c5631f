"""Reading jaxprs.

Where a value comes from, through every call, loop and view between its use and its making.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.primitives import VIEWS
from jaxoff._jaxpr.tag import Tag

# Equations whose result is their operand, moved or rounded.
_SAME_VALUE = frozenset(
    {
        "device_put",
        "reduce_precision",
        "optimization_barrier",
        "copy",
        "copy_p",
        "pvary",
        "sharding_constraint",
        "reshard",
    }
)


@dataclasses.dataclass(eq=False)
class Scope:
    """A jaxpr and how it was entered: the equation that calls it, in the scope of that equation."""

    jaxpr: compat.Jaxpr
    parent: Scope | None = None
    eqn: compat.JaxprEqn | None = None
    _entered: dict[tuple[int, int], Scope] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def definitions(self) -> dict[compat.Var, tuple[compat.JaxprEqn, int]]:
        return {v: (eqn, i) for eqn in self.jaxpr.eqns for i, v in enumerate(eqn.outvars)}

    @functools.cached_property
    def positions(self) -> dict[int, int]:
        return {id(eqn): i for i, eqn in enumerate(self.jaxpr.eqns)}

    @functools.cached_property
    def inputs(self) -> dict[compat.Var, int]:
        return {v: i for i, v in enumerate(self.jaxpr.invars)}

    def enter(self, eqn: compat.JaxprEqn, index: int = 0) -> Scope:
        """The scope of an equation's jaxpr.

        One object a call site, so that values can be compared by scope and variable.
        """
        key = id(eqn), index
        if key not in self._entered:
            self._entered[key] = Scope(compat.sub_jaxprs(eqn)[index], self, eqn)
        return self._entered[key]


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where a value was made.

    Attributes:
      kind: "name" (by a tag), "op" (by another equation), "carry" (the input of a scanned body),
        "argument" or "constant".
      scope, var: the value there, before views and copies were looked through from its use.
      eqn: the equation that made it, if any.
      tag: the innermost tag of a named value.
    """

    kind: str
    scope: Scope
    var: Any
    eqn: compat.JaxprEqn | None = None
    tag: Tag | None = None

    @property
    def aval(self):
        return self.var.aval

    @property
    def identity(self) -> tuple[int, int]:
        return id(self.scope), id(self.var)


def trace_origin(scope: Scope, atom, *, through_views: bool = False, through_names: bool = False) -> Origin:
    """Follows a value back to the equation, argument or constant that made it."""
    while True:
        if isinstance(atom, compat.Literal):
            return Origin("constant", scope, atom)
        if atom in scope.definitions:
            eqn, index = scope.definitions[atom]
            step = _into(scope, eqn, index, through_views, through_names)
            if step is None:
                tag = compat.name_in(eqn)
                return Origin(
                    "op" if tag is None else "name", scope, atom, eqn, None if tag is None else Tag.of(tag)
                )
            scope, atom = step
            continue
        if atom not in scope.inputs:
            return Origin("constant", scope, atom)
        if scope.parent is None or scope.eqn is None:
            return Origin("argument", scope, atom)
        step = _out_of(scope, scope.inputs[atom])
        if step is None:
            return Origin("carry", scope, atom, scope.eqn)
        scope, atom = step


def _into(scope: Scope, eqn, index: int, through_views: bool, through_names: bool):
    """The value that an equation's result is, one step closer to its making, or None at the maker."""
    prim = eqn.primitive.name
    if prim in _SAME_VALUE:
        return scope, eqn.invars[index if len(eqn.invars) == len(eqn.outvars) else 0]
    if compat.name_in(eqn) is not None:
        return (scope, eqn.invars[0]) if through_names else None
    if prim in VIEWS:
        return (scope, eqn.invars[0]) if through_views else None
    bodies = compat.sub_jaxprs(eqn)
    matching = [i for i, body in enumerate(bodies) if len(body.outvars) == len(eqn.outvars)]
    if not matching or prim in ("while", "pallas_call", "custom_linear_solve"):
        return None
    inner = [(scope.enter(eqn, i), bodies[i].outvars[index]) for i in matching]
    # A residual of one branch of a cond is zeros in the others: follow the branch that makes it.
    made = [s for s in inner if trace_origin(*s).kind != "constant" and not _is_fill(*s)]
    return (made or inner)[0]


def _is_fill(scope: Scope, atom) -> bool:
    origin = trace_origin(scope, atom, through_views=True)
    return origin.kind == "constant" or (
        origin.eqn is not None and origin.eqn.primitive.name in ("empty", "empty2", "iota")
    )


def _out_of(scope: Scope, index: int):
    """The operand of the calling equation behind an input of its jaxpr, or None for a loop's carry."""
    eqn, parent = scope.eqn, scope.parent
    assert eqn is not None and parent is not None
    scan = compat.scan_in(eqn)
    if scan is not None:
        if scan.num_consts <= index < scan.num_consts + scan.num_carry:
            return None
        return parent, eqn.invars[index]
    if eqn.primitive.name == "while":
        return None
    offset = len(eqn.invars) - len(scope.jaxpr.invars)  # a cond's index comes first
    return parent, eqn.invars[index + max(offset, 0)]
