"""Which equation makes a variable, which equations read it, and what depends on what."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxoff._jaxpr.compat import JaxprEqn, Var


def variables(eqn: JaxprEqn) -> list[Var]:
    """The operands of an equation that are variables, in order, with repeats."""
    return [v for v in eqn.invars if isinstance(v, Var)]


def index_makers(eqns: Iterable[JaxprEqn]) -> dict[Var, int]:
    """Maps each result of a program to the index of the equation that makes it."""
    return {v: i for i, eqn in enumerate(eqns) for v in eqn.outvars}


def map_makers(eqns: Iterable[JaxprEqn]) -> dict[Var, JaxprEqn]:
    """Maps each result of a program to the equation that makes it."""
    return {v: eqn for eqn in eqns for v in eqn.outvars}


def index_readers(eqns: Iterable[JaxprEqn]) -> dict[Var, list[int]]:
    """Maps each variable to the indices of the equations that read it, with repeats."""
    readers: dict[Var, list[int]] = {}
    for i, eqn in enumerate(eqns):
        for v in variables(eqn):
            readers.setdefault(v, []).append(i)
    return readers


def count_reads(eqns: Iterable[JaxprEqn], outs: Iterable[Any]) -> collections.Counter[Any]:
    """Maps each variable of a program to how often it is read; a result of the program counts as a read."""
    read = (v for eqn in eqns for v in variables(eqn))
    return collections.Counter([*read, *(v for v in outs if isinstance(v, Var))])


def find_ancestors(v: Var, makers: Mapping[Var, JaxprEqn]) -> set[Var]:
    """A variable and all variables from which equations compute it."""
    found, todo = set(), [v]
    while todo:
        w = todo.pop()
        if w not in found:
            found.add(w)
            todo += variables(makers[w]) if w in makers else []
    return found


def mark_dependents(eqns: Sequence[JaxprEqn], of: set[Var]) -> list[bool]:
    """For each equation, whether it depends on any of the variables `of`."""
    found, out = set(of), []
    for eqn in eqns:
        depends = any(v in found for v in variables(eqn))
        out.append(depends)
        if depends:
            found.update(eqn.outvars)
    return out
