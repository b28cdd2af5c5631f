"""Joins conditions with the same index: the parts of a condition that was split, in a written program."""

from __future__ import annotations

import collections
import functools
from collections.abc import Container, Sequence
from typing import Any

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jaxoff._jaxpr.dataflow import drop_dead, take_alike, variables
from jaxoff._jaxpr.inline import Renamed, make_program, resolve
from jaxoff._jaxpr.primitives import holds, is_condition


def join_conditions(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Joins the conditions of a program with the same index, at all levels.

    A condition stays apart if other equations make an operand from the results of an earlier condition.
    """
    return compat.rewrite_jaxprs(closed, _join_level) if holds(closed.jaxpr, is_condition) else closed


def _join_level(program: Jaxpr) -> Jaxpr:
    """Joins the conditions among a program's own equations; the same object where none are joined."""
    eqns, rest = list[JaxprEqn](), list(program.eqns)
    count = collections.Counter(eqn.invars[0] for eqn in rest if _may_join(eqn))
    while rest:
        first = rest.pop(0)
        group = [first]
        if _may_join(first) and count[first.invars[0]] > 1:
            before, group, rest = take_alike(first, rest, functools.partial(_is_alike, first))
            eqns += before
        if len(group) > 1:
            read = {v for v in program.outvars if isinstance(v, Var)}.union(*map(variables, rest))
            eqns.append(_join(group, read))
        else:
            eqns.append(first)
    return compat.replace_equations(program, eqns)


def _may_join(eqn: JaxprEqn) -> bool:
    if not is_condition(eqn) or not isinstance(eqn.invars[0], Var) or compat.has_side_effects(eqn):
        return False
    return not any(getattr(branch, "consts", ()) for branch in compat.sub_jaxprs(eqn))


def _is_alike(first: JaxprEqn, eqn: JaxprEqn) -> bool:
    """Whether a condition chooses among as many branches by the same index as another."""
    same = _may_join(eqn) and eqn.invars[0] is first.invars[0]
    return same and len(eqn.params["branches"]) == len(first.params["branches"])


def _join(group: Sequence[JaxprEqn], read: Container[Var]) -> JaxprEqn:
    """A condition in the place of a group, with the results among the variables `read`."""
    made = {v for eqn in group for v in eqn.outvars}
    results = [v for eqn in group for v in eqn.outvars if v in read]
    operands = [v for eqn in group for v in eqn.invars[1:] if isinstance(v, Var) and v not in made]
    arguments, last = [*dict.fromkeys(operands)], group[-1]
    programs = [_join_branch(group, k, arguments, results) for k in range(len(last.params["branches"]))]
    used = {v for program in programs for eqn in program.eqns for v in variables(eqn)}
    used.update(v for program in programs for v in program.outvars if isinstance(v, Var))
    kept = [i for i in range(len(arguments)) if any(program.invars[i] in used for program in programs)]
    pruned = [make_program(p, [p.invars[i] for i in kept], p.eqns, p.outvars) for p in programs]
    return last.replace(
        invars=[last.invars[0], *(arguments[i] for i in kept)],
        outvars=results,
        params=last.params | {"branches": tuple(ClosedJaxpr(program, ()) for program in pruned)},
        effects=frozenset[Any]().union(*(program.effects for program in pruned)),
    )


def _join_branch(
    group: Sequence[JaxprEqn], k: int, arguments: Sequence[Var], results: Sequence[Var]
) -> Jaxpr:
    """The `k`-th branches of the conditions of a group, in turn."""
    values: Renamed = {v: Var(v.aval) for v in arguments}
    invars, eqns = [values[v] for v in arguments], list[JaxprEqn]()
    for eqn in group:
        branch = compat.sub_jaxprs(eqn)[k]
        inner: Renamed = dict(zip(branch.invars, (resolve(values, v) for v in eqn.invars[1:]), strict=True))
        for each in branch.eqns:
            operands = [resolve(inner, v) for v in each.invars]
            inner.update((v, Var(v.aval)) for v in each.outvars)
            eqns.append(each.replace(invars=operands, outvars=[inner[v] for v in each.outvars]))
        values.update(zip(eqn.outvars, (resolve(inner, v) for v in branch.outvars), strict=True))
    like = compat.sub_jaxprs(group[-1])[k]
    program = make_program(like, invars, eqns, [resolve(values, v) for v in results])
    return drop_dead(_join_level(program))  # the parts of conditions in the branch
