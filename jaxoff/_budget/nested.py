"""Loops in the layers of a loop: groups of layers, or layers that a pipeline runs at each of its ticks.

A loop in a layer keeps residuals of its own in stacks, which are values of the layer: without a choice inside
of the loop all are kept, or the loop is repeated. Here the loop and that of its backward pass become a graph
in the layer's, and each value of an iteration may be kept or recomputed, whatever becomes of the others.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any

from jaxoff._budget.joint_graph import Nested, Placements, find_needed
from jaxoff._budget.loop_pairs import LoopPair, find_loop_pairs
from jaxoff._budget.write_loops import LoopWriter
from jaxoff._jaxpr.compat import Jaxpr, Var
from jaxoff._jaxpr.dataflow import mark_ancestors, variables
from jaxoff._jaxpr.inline import resolve


def find_layers(program: Jaxpr) -> list[LoopPair]:
    """The pairs of loops among the equations of a program, with the loops in their layers."""
    return [_add_nested(pair) for pair in find_loop_pairs(program)]


def _add_nested(pair: LoopPair) -> LoopPair:
    results = [v for i, v in enumerate(pair.results) if i not in pair.residuals]
    eqns, outs = [*pair.pure, *pair.rest], [*results, *pair.outs]
    marks = mark_ancestors(eqns, (v for v in outs if isinstance(v, Var)))  # without readers of residuals
    program = pair.body.replace(eqns=[*itertools.compress(eqns, marks)], outvars=outs)
    forward, backward = ({id(eqn) for eqn in eqns} for eqns in (pair.eqns, pair.rest))
    nested = tuple(
        _make_nested(inner)
        for inner in find_loop_pairs(program)
        if id(inner.forward) in forward and id(inner.backward) in backward
    )
    residuals = frozenset[Var]().union(*(inner.residuals for inner in nested))
    return dataclasses.replace(pair, nested=nested, needed=pair.needed - residuals) if nested else pair


def _make_nested(inner: LoopPair) -> Nested:
    read = {v for eqn in (*inner.pure, *inner.rest) for v in variables(eqn)} | inner.needed
    places = [i for i, v in enumerate(inner.values) if v in read and hasattr(v.aval, "shape")]
    writer = LoopWriter([(inner, Placements(saved=tuple(places)))])
    writer.write([inner.forward])
    values = (inner.values[i] for i in places)
    stacks = dict(zip(values, writer.stacks[id(inner)], strict=True))
    residuals = frozenset(inner.forward.outvars[i] for i in inner.residuals)
    return Nested(inner, inner.forward, residuals, stacks)


def write_nested(pair: LoopPair, placements: Placements) -> tuple[LoopPair, Placements]:
    """A pair whose loops are written with the placements of their values, and the placements of its own."""
    if not pair.nested:
        return pair, placements
    loops = [inner.graph for inner in pair.nested]
    placed = [Placements(saved=places) for places in placements.nested]
    writer = LoopWriter(
        (loop, own) for loop, own in zip(loops, placed, strict=True) if isinstance(loop, LoopPair)
    )
    eqns, only_backward, rest = (writer.write(part) for part in (pair.eqns, pair.only_backward, pair.rest))
    results, outs = ([resolve(writer.renamed, v) for v in part] for part in (pair.results, pair.outs))
    written = dataclasses.replace(
        pair,
        eqns=tuple(eqns),
        results=tuple(results),
        only_backward=tuple(only_backward),
        rest=tuple(rest),
        outs=tuple(outs),
        needed=find_needed((*eqns, *only_backward), pair.carried, rest, outs),
        names={resolve(writer.renamed, v): name for v, name in pair.names.items()},
        body=pair.body.replace(eqns=eqns, outvars=results),
        nested=(),
    )
    stacks: dict[Var, Any] = {v: None for inner in pair.nested for v in inner.stacks.values()}
    for inner, places in zip(pair.nested, placements.nested, strict=True):
        kept = (inner.stacks[inner.graph.values[i]] for i in places)
        stacks.update(zip(kept, writer.stacks[id(inner.graph)], strict=True))
    positions = {v: i for i, v in enumerate(written.values)}

    def find(places: Iterable[int]) -> dict[int, None]:
        """The positions in the written pair; none of stacks that no loop reads.

        A result that a loop passes through is the loop's operand, which may be kept already.
        """
        values = (stacks.get(v := pair.values[i], v) for i in places)
        return dict.fromkeys(positions[resolve(writer.renamed, v)] for v in values if v is not None)

    saved, offloaded = find(placements.saved), find(placements.offloaded)
    moved = tuple(i for i in offloaded if i not in saved)
    return written, Placements(tuple(saved), moved, frozenset(find(placements.compressed)))
