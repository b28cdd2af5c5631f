"""Merges the backward loops of the same forward loop.

Two pullbacks of the same `jax.vjp`, as of methods which weigh the gradients of several losses, are two loops
over the residuals of the layers. In a single loop a value which the backward pass makes again serves both.
"""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Sequence
from typing import Any

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jaxoff._jaxpr.dataflow import take_alike
from jaxoff._jaxpr.inline import Renamed, inline_program, resolve, trace_scan
from jaxoff._jaxpr.primitives import plain_scan_in
from jaxoff._jaxpr.scopes import is_transposed


def merge_backward_loops(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Merges backward loops over the stacks of the same loop, which need no results of each other.

    Returns:
      The program with the same results; `closed` itself where nothing is merged.
    """

    return compat.rewrite_jaxprs(closed, _merge_level)


def _find_stacks(eqn: JaxprEqn) -> set[Var]:
    """The stacks which a backward loop reads; none of another equation."""
    layout = plain_scan_in(eqn)
    if layout is None or not is_transposed(eqn):
        return set()
    return {v for v in eqn.invars[layout.num_consts + layout.num_carry :] if isinstance(v, Var)}


def _is_alike(first: JaxprEqn, stacks: set[Var], eqn: JaxprEqn) -> bool:
    layout, other = compat.scan_in(eqn), compat.scan_in(first)
    if layout is None or other is None or not stacks.intersection(_find_stacks(eqn)):
        return False
    return layout.length == other.length and eqn.params["reverse"] == first.params["reverse"]


def _merge_level(program: Jaxpr) -> Jaxpr:
    """A program with the backward loops among its own equations merged; itself where none are."""
    level = inline_program(program)
    made = [v for eqn in level.eqns if compat.scan_in(eqn) for v in eqn.outvars]
    reads = collections.Counter(v for eqn in level.eqns for v in _find_stacks(eqn))
    shared = {v for v in made if reads[v] > 1}
    if not shared:
        return program
    eqns, rest = list[JaxprEqn](), list(level.eqns)
    renamed: Renamed = {}
    while rest:
        first = rest.pop(0)
        if not (stacks := _find_stacks(first) & shared):
            eqns.append(first)
            continue
        is_alike = functools.partial(_is_alike, first, stacks)
        before, group, rest = take_alike(first, rest, is_alike, in_turn=False)
        eqns += before
        if len(group) > 1:
            merged, results = _merge(group)
            eqns += merged
            rest = [eqn.replace(invars=[resolve(results, v) for v in eqn.invars]) for eqn in rest]
            renamed |= results
        else:
            eqns.append(first)
    outs = [resolve(renamed, v) for v in level.outvars]
    return level.replace(eqns=eqns, outvars=outs) if renamed else program


def _merge(group: Sequence[JaxprEqn]) -> tuple[list[JaxprEqn], Renamed]:
    """The equations of several loops as a single loop, and result of a loop -> result of the single loop."""
    parts = [_divide(eqn) for eqn in group]
    bodies = [compat.jaxpr_as_fun(eqn.params["jaxpr"]) for eqn in group]
    sizes = [[len(values) for values in part] for part in parts]

    def run(*operands: Any) -> list[Any]:
        given = iter(operands)
        kinds = [[[next(given) for _ in range(size[k])] for size in sizes] for k in range(3)]
        made = [
            body(*itertools.chain(*own)) for body, own in zip(bodies, zip(*kinds, strict=True), strict=True)
        ]
        return _take_turns(made, sizes)

    consts, carry, rows = ([v for part in parts for v in part[k]] for k in range(3))
    length = group[0].params["length"]
    eqns, results = trace_scan(run, (consts, carry, rows), like=group[0], length=length)
    outs = _take_turns([eqn.outvars for eqn in group], sizes)
    return eqns, dict(zip(outs, results, strict=True))


def _take_turns(results: Sequence[Sequence[Any]], sizes: Sequence[Sequence[int]]) -> list[Any]:
    """The results of loops in the order of a single loop: the carries of all ahead of the stacks of all."""
    pairs = [(values, size[1]) for values, size in zip(results, sizes, strict=True)]
    carry = [value for values, count in pairs for value in values[:count]]
    return carry + [value for values, count in pairs for value in values[count:]]


def _divide(loop: JaxprEqn) -> tuple[list[Any], list[Any], list[Any]]:
    """The operands of a loop: constants, carry and rows."""
    layout = compat.scan_in(loop)
    assert layout is not None
    first = layout.num_consts + layout.num_carry
    return loop.invars[: layout.num_consts], loop.invars[layout.num_consts : first], loop.invars[first:]
