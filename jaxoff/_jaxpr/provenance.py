"""The origin of a value: the equation, argument or constant behind its calls, loops and views."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.primitives import VIEWS
from jaxoff._jaxpr.tag import Tag

# Primitives with a result equal to the operand, moved or rounded.
_SAME_VALUE = frozenset(
    {
        "device_put",
        "reduce_precision",
        "optimization_barrier",
        "copy",
        "copy_p",
        "pvary",
        "layout_constraint",
        "sharding_constraint",
        "reshard",
    }
)


@dataclasses.dataclass(eq=False)
class Scope:
    """A jaxpr at a call site.

    Attributes:
      jaxpr: the jaxpr.
      parent: scope of the calling equation; None for the outermost jaxpr.
      eqn: the calling equation; None for the outermost jaxpr.
    """

    jaxpr: compat.Jaxpr
    parent: Scope | None = None
    eqn: compat.JaxprEqn | None = None
    _entered: dict[tuple[int, int], Scope] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def definitions(self) -> dict[compat.Var, tuple[compat.JaxprEqn, int]]:
        """Variable -> the equation with this result, and the index among its results."""
        return {v: (eqn, i) for eqn in self.jaxpr.eqns for i, v in enumerate(eqn.outvars)}

    @functools.cached_property
    def positions(self) -> dict[int, int]:
        """`id` of an equation -> index in the jaxpr."""
        return {id(eqn): i for i, eqn in enumerate(self.jaxpr.eqns)}

    @functools.cached_property
    def inputs(self) -> dict[compat.Var, int]:
        """Argument of the jaxpr -> index."""
        return {v: i for i, v in enumerate(self.jaxpr.invars)}

    def enter(self, eqn: compat.JaxprEqn, index: int = 0) -> Scope:
        """Enters a jaxpr of an equation.

        Each call site has a single Scope object, so values compare by the identities of scope and variable.
        """
        key = id(eqn), index
        if key not in self._entered:
            self._entered[key] = Scope(compat.sub_jaxprs(eqn)[index], self, eqn)
        return self._entered[key]


def find_line(scope: Scope | None, eqn: compat.JaxprEqn | None) -> str:
    """The user's line behind an equation, `file:line (function)`, or ''.

    An equation in a `jax.jit` function of a library has no line in the user's code; the innermost call around
    the equation with such a line counts.
    """
    while eqn is not None:
        if line := compat.source_line(eqn):
            return line
        scope, eqn = (None, None) if scope is None else (scope.parent, scope.eqn)
    return ""


@dataclasses.dataclass(frozen=True)
class Origin:
    """The origin of a value.

    Attributes:
      kind: "name" (a `checkpoint_name` equation), "op" (another equation), "carry" (an input of the body of a
        loop), "argument" or "constant".
      scope, var: the variable at the origin, and its scope.
      eqn: the equation with the result `var`; of a carry, the loop; else None.
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
        """Key of the value: equal for equal scope and variable."""
        return id(self.scope), id(self.var)


def trace_origin(scope: Scope, atom, *, through_views: bool = False, through_names: bool = False) -> Origin:
    """Follows a value back to its equation, argument or constant, through calls and copies.

    Args:
      scope: scope of the value.
      atom: the value.
      through_views: whether to go on to the operand of a view.
      through_names: whether to go on to the operand of a `checkpoint_name` equation.
    """
    while True:
        if isinstance(atom, compat.Literal):
            return Origin("constant", scope, atom)
        if atom in scope.definitions:
            eqn, index = scope.definitions[atom]
            step = _step_in(scope, eqn, index, through_views, through_names)
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
        step = _step_out(scope, scope.inputs[atom])
        if step is None:
            return Origin("carry", scope, atom, scope.eqn)
        scope, atom = step


def _step_in(scope: Scope, eqn, index: int, through_views: bool, through_names: bool):
    """Steps from a result of an equation to the equal operand or inner result. Returns None at the origin."""
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
    # A residual of a cond's branch is zeros in the other branches: follow the branch with the computation.
    made = [s for s in inner if trace_origin(*s).kind != "constant" and not _is_fill(*s)]
    return (made or inner)[0]


def _is_fill(scope: Scope, atom) -> bool:
    origin = trace_origin(scope, atom, through_views=True)
    return origin.kind == "constant" or (
        origin.eqn is not None and origin.eqn.primitive.name in ("empty", "empty2", "iota")
    )


def _step_out(scope: Scope, index: int):
    """Steps from an input of a jaxpr to the operand of the calling equation; None for a loop's carry."""
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
