"""The makers, readers, ancestors and dependents of the variables of a program."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import Jaxpr, JaxprEqn, Var


def variables(eqn: JaxprEqn) -> list[Var]:
    """The variables among the operands of an equation, in order, with repeats."""
    return [v for v in eqn.invars if isinstance(v, Var)]


def list_results(eqn: JaxprEqn) -> list[tuple[Var, list[Var]]]:
    """Each result of an equation, with the variables of its value: of a barrier, the operand in its place."""
    if eqn.primitive.name == "optimization_barrier":
        pairs = zip(eqn.outvars, eqn.invars, strict=True)
        return [(made, [v] if isinstance(v, Var) else []) for made, v in pairs]
    return [(made, variables(eqn)) for made in eqn.outvars]


def index_makers(eqns: Iterable[JaxprEqn]) -> dict[Var, int]:
    """Maps each result of an equation to the index of the equation."""
    return {v: i for i, eqn in enumerate(eqns) for v in eqn.outvars}


def map_makers(eqns: Iterable[JaxprEqn]) -> dict[Var, JaxprEqn]:
    """Maps each result of an equation to the equation."""
    return {v: eqn for eqn in eqns for v in eqn.outvars}


def index_readers(eqns: Iterable[JaxprEqn]) -> dict[Var, list[int]]:
    """Maps each variable to the indices of its readers: the equations with this operand, with repeats."""
    readers: dict[Var, list[int]] = {}
    for i, eqn in enumerate(eqns):
        for v in variables(eqn):
            readers.setdefault(v, []).append(i)
    return readers


def index_last_readers(eqns: Iterable[JaxprEqn]) -> dict[Var, int]:
    """Maps each variable to the index of its last reader."""
    return {v: i for i, eqn in enumerate(eqns) for v in variables(eqn)}


def count_reads(eqns: Iterable[JaxprEqn], outs: Iterable[Any]) -> collections.Counter[Any]:
    """Maps each variable of a program to its number of reads. A result of the program counts as a read."""
    read = (v for eqn in eqns for v in variables(eqn))
    return collections.Counter([*read, *(v for v in outs if isinstance(v, Var))])


def find_ancestors(v: Var, makers: Mapping[Var, JaxprEqn]) -> set[Var]:
    """Finds all variables from which a variable is computed. The variable itself counts."""
    found, todo = set(), [v]
    while todo:
        w = todo.pop()
        if w not in found:
            found.add(w)
            todo += variables(makers[w]) if w in makers else []
    return found


def mark_dependents(eqns: Sequence[JaxprEqn], sources: set[Var]) -> list[bool]:
    """For each equation, whether its results depend on any of the variables `sources`."""
    found, out = set(sources), []
    for eqn in eqns:
        depends = any(v in found for v in variables(eqn))
        out.append(depends)
        if depends:
            found.update(eqn.outvars)
    return out


def mark_ancestors(eqns: Sequence[JaxprEqn], values: Iterable[Var]) -> list[bool]:
    """For each equation, whether any of the variables `values` are computed from its results."""
    needed, marks = set(values), [False] * len(eqns)
    for i in reversed(range(len(eqns))):
        if needed.intersection(eqns[i].outvars):
            needed.update(variables(eqns[i]))
            marks[i] = True
    return marks


def drop_dead(program: Jaxpr) -> Jaxpr:
    """A program without the equations that none of its results need; its arguments stay."""
    return compat.dce_jaxpr(program, [True] * len(program.outvars), instantiate=True)[0]


def join_unpassed(eqns: Sequence[JaxprEqn], passes: Callable[[Var], bool]) -> list[list[JaxprEqn]]:
    """Joins the equations between which a value stands where no array outside of their program can hold it.

    Args:
      eqns: equations, in program order.
      passes: whether an array outside can hold a value.

    Returns:
      The equations in parts, in order.
    """
    readers = index_last_readers(eqns)
    ends = [(i, readers.get(v, -1)) for v, i in index_makers(eqns).items() if not passes(v)]
    parts = list[list[JaxprEqn]]()
    for i, eqn in enumerate(eqns):
        if any(first < i <= last for first, last in ends):
            parts[-1].append(eqn)
        else:
            parts.append([eqn])
    return parts


def take_alike(
    first: JaxprEqn, eqns: Sequence[JaxprEqn], is_alike: Callable[[JaxprEqn], bool], *, in_turn: bool = True
) -> tuple[list[JaxprEqn], list[JaxprEqn], list[JaxprEqn]]:
    """Takes the equations that may run at once with a first one, of the equations behind it.

    Args:
      first: an equation without side effects.
      eqns: the equations behind, in program order.
      is_alike: whether an equation is to run with the first.
      in_turn: whether an equation taken may read the results of those taken before. It never reads what other
        equations make of them.

    Returns:
      The equations ahead of those taken, the taken ones with `first`, and the equations behind.
    """
    group, made = [first], {*first.outvars}
    late = set[Var]()  # values of equations that read the group's, or have effects
    is_behind, end = list[bool](), 0
    for i, eqn in enumerate(eqns):
        reads = variables(eqn)
        is_behind.append(False)
        if is_alike(eqn) and late.isdisjoint(reads) and (in_turn or made.isdisjoint(reads)):
            group.append(eqn)
            made.update(eqn.outvars)
            end = i + 1
        elif compat.has_side_effects(eqn) or not late.isdisjoint(reads) or not made.isdisjoint(reads):
            late.update(eqn.outvars)
            is_behind[i] = True
    members = set(map(id, group))
    between = [pair for pair in zip(eqns[:end], is_behind, strict=False) if id(pair[0]) not in members]
    before = [eqn for eqn, behind in between if not behind]
    return before, group, [*(eqn for eqn, behind in between if behind), *eqns[end:]]
