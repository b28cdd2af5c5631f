"""Control flow that is settled before a program runs, without which copies to the host compile.

XLA's GPU compiler (jaxlib 0.11.2) refuses copies to host memory in conditions and in unrolled loops. The
branch of a condition may be known: `jax.lax.platform_dependent` takes the platform's, and an index may be
constant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jaxoff._jaxpr.dataflow import drop_dead
from jaxoff._jaxpr.inline import instantiate, write_otherwise
from jaxoff._jaxpr.primitives import holds_copies, is_condition

# The operations by which an index is computed, on numbers: nothing of a program runs while it is traced.
_OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "add": np.add,
    "and": np.bitwise_and,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "convert_element_type": np.asarray,
    "copy": np.asarray,
    "eq": np.equal,
    "ge": np.greater_equal,
    "gt": np.greater,
    "le": np.less_equal,
    "lt": np.less,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "ne": np.not_equal,
    "not": np.invert,
    "or": np.bitwise_or,
    "pvary": np.asarray,
    "select_n": lambda which, *cases: cases[int(which)],
    "sub": np.subtract,
    "xor": np.bitwise_xor,
}


def choose_known_branches(closed: ClosedJaxpr, platform: str) -> ClosedJaxpr:
    """A program with the conditions whose branch is known replaced by the branch, at all levels.

    Args:
      closed: the program.
      platform: the platform it runs on, as `jax.lax.platform_dependent` calls it: "cuda".
    """
    chosen = compat.map_open(closed, _Choice(platform).choose)
    # The residuals of the other branches are arrays without contents.
    return closed if chosen is closed else compat.map_open(chosen, drop_dead)


class _Choice:
    def __init__(self, platform: str):
        self._platform = platform
        self._values: dict[Var, Any] = {}  # of the scalars that are computed from literals alone

    def choose(self, jaxpr: Jaxpr) -> Jaxpr:
        """A program with the known branches of its conditions."""
        return write_otherwise(jaxpr, self._write)

    def _write(self, eqn: JaxprEqn) -> JaxprEqn | tuple[Sequence[JaxprEqn], Sequence[Any]]:
        self._evaluate(eqn)
        branch = self._find_branch(eqn)
        if branch is None:
            return self._choose_inside(eqn)
        body, results = instantiate(branch, eqn.invars[1:], like=eqn)
        inner = self.choose(branch.replace(invars=[], constvars=[], eqns=body, outvars=results))
        return inner.eqns, inner.outvars

    def _choose_inside(self, eqn: JaxprEqn) -> JaxprEqn:
        """An equation with the known branches of its programs. A loop's constants are known inside."""
        layout = compat.scan_in(eqn)
        constants = eqn.invars if layout is None else eqn.invars[: layout.num_consts]
        passed = [] if compat.control_flow(eqn) and layout is None else constants

        def choose(program: Jaxpr) -> Jaxpr:
            for v, given in zip(program.invars, passed, strict=False):
                self._note(v, self._find_value(given))
            return self.choose(program)

        return compat.map_programs(eqn, choose)

    def _find_branch(self, eqn: JaxprEqn) -> Jaxpr | None:
        """The branch that a condition takes; None if not known, or with constants or mutable arrays."""
        if not is_condition(eqn) or any(compat.is_ref(v.aval) for v in eqn.invars):
            return None
        branches, by_platform = eqn.params["branches"], eqn.params.get("branches_platforms")
        index = self._find_value(eqn.invars[0])
        if by_platform is not None:
            matches = (i for i, names in enumerate(by_platform) if names is None or self._platform in names)
            index = next(matches, None)
        if index is None:
            return None
        branch = branches[min(max(int(index), 0), len(branches) - 1)]
        return None if branch.consts else branch.jaxpr

    def _evaluate(self, eqn: JaxprEqn) -> None:
        """Notes the result of an equation of scalars whose operands are known."""
        operation = _OPERATIONS.get(eqn.primitive.name)
        if operation is None or len(eqn.outvars) != 1 or not _is_index(eqn.outvars[0]):
            return
        operands, value = [self._find_value(v) for v in eqn.invars], None
        if all(operand is not None for operand in operands):
            with np.errstate(all="ignore"):  # integers wrap around
                value = np.asarray(operation(*operands)).astype(compat.struct_of(eqn.outvars[0].aval).dtype)
        self._note(eqn.outvars[0], value)

    def _note(self, v: Var, value: Any) -> None:
        """Notes the value of a variable, of a program that several calls may share; None: not known."""
        self._values.pop(v, None)
        if value is not None:
            self._values[v] = value

    def _find_value(self, v: Any) -> Any:
        """The value of a scalar that is computed from literals alone; None for another value."""
        if not isinstance(v, Literal):
            return self._values.get(v)
        return np.asarray(v.val, compat.struct_of(v.aval).dtype) if compat.shape_of(v.aval) == () else None


def _is_index(v: Var) -> bool:
    """Whether a value may be the index of a branch: an integer or a Boolean."""
    if getattr(v.aval, "shape", None) != ():
        return False
    dtype = compat.struct_of(v.aval).dtype
    return any(jnp.issubdtype(dtype, kind) for kind in (jnp.integer, jnp.bool_))


def roll_loops_with_copies(closed: ClosedJaxpr) -> ClosedJaxpr:
    """A program whose scans with copies between device and host run an iteration at a time."""

    def roll(jaxpr: Jaxpr) -> Jaxpr:
        return compat.replace_equations(jaxpr, map(_roll, jaxpr.eqns))

    return compat.rewrite_jaxprs(closed, roll)


def _roll(eqn: JaxprEqn) -> JaxprEqn:
    layout = compat.scan_in(eqn)
    if layout is None or layout.unroll in (1, False) or not holds_copies(eqn.params["jaxpr"].jaxpr):
        return eqn
    return eqn.replace(params=eqn.params | {"unroll": 1})
