"""The costs of a layer's values: bytes, and the time to keep or to repeat each."""

from __future__ import annotations

import dataclasses
import fnmatch
import itertools
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jaxoff._budget.calibrations import STREAMED_SHARE
from jaxoff._budget.joint_graph import JointGraph
from jaxoff._budget.labels import label, map_makers_inside
from jaxoff._budget.limits import UnmatchedError
from jaxoff._budget.row_statistics import find_row_statistics
from jaxoff._budget.segments import Segments
from jaxoff._device.flops import product_flops
from jaxoff._device.kernel_time import step_kernel_ms
from jaxoff._device.profile import Device
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jaxoff._jaxpr.dataflow import map_makers, mark_dependents, variables
from jaxoff._jaxpr.float8 import LEAST_BLOCK, can_compress, chooses, compressed_nbytes
from jaxoff._jaxpr.joined_conditions import join_conditions
from jaxoff._jaxpr.kernels import KernelGraph, find_compute_operands, index_between_strides
from jaxoff._jaxpr.merged_maps import merge_shard_maps
from jaxoff._jaxpr.primitives import (
    CONSTRAINTS,
    RANDOM,
    VIEWS,
    is_collective,
    is_compute,
    is_condition,
    is_fused,
    is_shard_map,
)
from jaxoff._jaxpr.split_conditions import as_selection, list_branches, open_conditions
from jaxoff._jaxpr.split_maps import look_inside, open_map
from jaxoff._report.near_miss import near_miss

# How often memory takes a stack of a loop in a layer: it is copied to a stack of all layers, and from there.
_STACK_PASSES = 4
# Primitives whose result is the buffer of their operand, or a part of it.
_ALIASES = VIEWS | CONSTRAINTS


@dataclasses.dataclass(frozen=True)
class Costs:
    """The costs of a layer's values.

    Attributes:
      pair: the loops.
      nbytes: value to keep -> bytes of an iteration.
      saving_ms: value to keep -> milliseconds to write an iteration's row of the stack and to read it.
      equation_ms: index of an equation of `pair.pure` -> milliseconds of a repetition.
      ready_ms: value to keep -> the compute of a forward iteration before and in the value's kernel.
      forward_ms, backward_ms: compute of an iteration, without repetitions.
      state_ms: copies of an iteration's rows of the state that the backward loop updates, both ways.
      kernels: the number of kernels of an iteration, forward and backward.
      segments: the parts of a layer which the backward pass may make one at a time, with the bytes of their
        values in memory then. Values between elementwise kernels are not: XLA computes them in their readers.
      compressible: value that may be kept in float8 -> its bytes there.
      only_with: value -> another, without which it may not be kept.
      nested: of the loops in the layer, those of an iteration.
    """

    pair: JointGraph
    nbytes: dict[Var, int]
    saving_ms: dict[Var, float]
    equation_ms: tuple[float, ...]
    ready_ms: dict[Var, float]
    forward_ms: float
    backward_ms: float
    state_ms: float
    kernels: int
    segments: Segments
    compressible: Mapping[Var, int]
    only_with: Mapping[Var, Var]
    nested: tuple[Costs, ...] = ()

    @staticmethod
    def of(pair: JointGraph, device: Device, compress: Sequence[str] = ()) -> Costs:
        """The costs at a device's rates; `compress`: patterns of values that may be kept in float8."""
        pair, placed = _look_inside(pair), pair
        pure = pair.pure
        outs = {v for v in pair.results if isinstance(v, Var)}
        graph = KernelGraph(pure, frozenset(outs | pair.needed))
        times = [0.0] * len(pure)
        for i in graph.kernels:
            times[i] = step_kernel_ms(graph, i, device)
        times = _share_branches(placed.pure, times)
        rest = KernelGraph(placed.rest, frozenset(v for v in pair.outs if isinstance(v, Var)))
        # Values of weights and constants alone are conversions and the like: cheap to repeat. Which operands
        # of a section are weights is not known. Random numbers are not cheap: dropout masks may be kept.
        # Nor are gathered weights, products of weights, or of rows of a batch in a loop over its parts.
        is_dear = [product_flops(eqn) > 0 or is_collective(eqn) for eqn in pair.eqns]
        costly = [d or e.primitive.name in RANDOM for d, e in zip(is_dear, pair.eqns, strict=True)]
        made = {v for eqn in itertools.compress(pair.eqns, costly) for v in eqn.outvars}
        depends = mark_dependents(pair.eqns, made.union(pair.carried))
        chosen = [pair.is_section or any(either) for either in zip(depends, is_dear, strict=True)]
        layers = [eqn for eqn in itertools.compress(pair.eqns, chosen) if not compat.has_side_effects(eqn)]
        statistics = find_row_statistics(pair)
        inside = statistics.values | statistics.wide
        values = [*pair.carried, *(v for eqn in layers for v in eqn.outvars if v not in inside)]
        nbytes = {v: compat.nbytes(v.aval) for v in values if hasattr(v.aval, "shape") and v not in pair.free}
        forward = times[: len(pair.eqns)]  # the first of `pure`
        ready = dict.fromkeys(pair.carried, 0.0)
        for eqn, ms in zip(pair.eqns, itertools.accumulate(forward), strict=True):
            ready.update(dict.fromkeys(eqn.outvars, ms))
        into_kernels, makers = find_compute_operands(pair.rest), map_makers(pair.eqns)
        stored = frozenset(v for i in graph.kernels for v in pure[i].outvars)
        made_inside = {v for eqn in filter(is_condition, placed.pure) for v in eqn.outvars}
        if pair.has_stacks:
            conditions = filter(is_condition, (*placed.pure, *placed.rest))
            copied = into_kernels.union(*map(variables, conditions))
            passes = {v: _count_passes(v, makers, copied, made_inside) for v in nbytes}
        else:
            passes = {v: _count_stores(v, makers, stored) + (v in made_inside) for v in nbytes}
        saving = {v: passes[v] * device.pass_ms(n) for v, n in nbytes.items()}
        into_kernels |= find_compute_operands(pure)
        into_kernels.update(v for i in index_between_strides(pure) for v in pure[i].outvars)
        segments = Segments.of(placed, nbytes)
        nested = tuple(Costs.of(inner.graph, device) for inner in placed.nested)
        for inner, costs in zip(placed.nested, nested, strict=True):
            for v in inner.residuals:
                nbytes.pop(v, None)
            for v, stack in inner.stacks.items():
                if v in costs.nbytes:
                    nbytes[stack] = inner.graph.count * costs.nbytes[v]
                    saving[stack] = _STACK_PASSES * device.pass_ms(nbytes[stack])
                    ready[stack] = ready[inner.forward.outvars[0]]
        for i, eqn in enumerate(pure):
            in_readers = is_fused(eqn) and into_kernels.isdisjoint(eqn.outvars)
            if i in statistics.differences:
                times[i] = device.pass_ms(compat.nbytes_of(eqn.outvars))  # a softmax's kernel
            elif in_readers or i in statistics.reductions:
                times[i] = 0.0  # inside of its readers
        sends = [eqn for eqn in pair.rest if compat.transfer_in(eqn) == "D2H"]
        return Costs(
            placed,
            nbytes,
            saving,
            tuple(times),
            ready,
            sum(forward),
            sum(step_kernel_ms(rest, i, device) for i in rest.kernels),
            streamed_ms(sum(compat.nbytes_of(eqn.outvars) for eqn in sends), device),
            len(graph.kernels) + len(rest.kernels),
            segments,
            _find_compressible(pair, nbytes, compress),
            statistics.sums,
            nested,
        )


def _look_inside(pair: JointGraph) -> JointGraph:
    """A layer whose `jax.shard_map`s of a single elementwise equation, or a move, are this equation.

    So are the parts of conditions, whatever their equation. In `rest` all branches of a condition run. The
    parts of a `jax.shard_map` in a loop's body are joined, as they will be.
    """

    def merge(program: Jaxpr) -> Jaxpr:
        return join_conditions(merge_shard_maps(ClosedJaxpr(program, ()))).jaxpr

    def look(eqn: JaxprEqn) -> JaxprEqn:
        if compat.is_loop(eqn):
            return compat.map_programs(eqn, merge)
        inner = as_selection(look_inside(eqn))
        return eqn if is_shard_map(eqn) and is_compute(inner) else inner

    if not any(is_shard_map(e) or is_condition(e) or compat.is_loop(e) for e in (*pair.pure, *pair.rest)):
        return pair
    return dataclasses.replace(
        pair,
        eqns=tuple(map(look, pair.eqns)),
        only_backward=tuple(map(look, pair.only_backward)),
        rest=tuple(open_conditions(pair.rest)),
    )


def _share_branches(eqns: Sequence[JaxprEqn], times: Sequence[float]) -> list[float]:
    """The times of equations; those of a condition's parts are the mean of the branches that compute."""
    paths = [list_branches(open_map(eqn)) for eqn in eqns]
    shared = [ms / _compare_choice(eqn) for eqn, ms in zip(eqns, times, strict=True)]
    for depth in reversed(range(max(map(len, paths), default=0))):
        inside = [(tuple(path[:depth]), *path[depth]) if len(path) > depth else None for path in paths]
        sums: dict[Any, dict[int, float]] = {}  # a condition -> the times of its branches
        for place, ms in zip(inside, shared, strict=True):
            if place is not None:
                of_branches = sums.setdefault(place[:2], {})
                of_branches[place[2]] = of_branches.get(place[2], 0.0) + ms
        counts = {condition: compat.count_computing(found.values()) for condition, found in sums.items()}
        shared = [
            ms if place is None else ms / counts[place[:2]] for place, ms in zip(inside, shared, strict=True)
        ]
    return shared


def _compare_choice(eqn: JaxprEqn) -> float:
    """The passes of memory to select among values of branches, as a multiple of those to copy one; else 1.

    The branch that runs reads and writes its own value, a selection would read all.
    """
    inside = look_inside(eqn)
    selection = as_selection(inside)
    return 1.0 if selection is inside else max(1.0, len(selection.invars) / 2)


def streamed_ms(nbytes: int, device: Device) -> float:
    """The time to bring bytes of state to the device and back, both at a time."""
    return device.both_ms(nbytes) / STREAMED_SHARE


def _label_compressible(pair: JointGraph, values: Iterable[Var]) -> Iterator[tuple[Var, str]]:
    """The values of a loop fit for float8, with their words in the plan's table; none outside of loops.

    Values behind a choice, such as the experts of a token, are not: a choice computed again by rounded values
    may be another.
    """
    makers, inside = map_makers(pair.eqns), map_makers_inside(pair.eqns)
    behind: set[Var] = set()
    for eqn in reversed(pair.pure):
        if chooses(eqn) or not behind.isdisjoint(eqn.outvars):
            behind.update(variables(eqn))
    fit = (v for v in values if pair.has_stacks and can_compress(v.aval) and v not in behind)
    return ((v, label(pair, v, makers, inside)) for v in fit)


def _find_compressible(pair: JointGraph, values: Iterable[Var], patterns: Sequence[str]) -> dict[Var, int]:
    found = _label_compressible(pair, values) if patterns else ()
    return {
        v: compressed_nbytes(v.aval)
        for v, text in found
        if any(fnmatch.fnmatchcase(text, pattern) for pattern in patterns)
    }


def refuse_unmatched(costs: Sequence[Costs], patterns: Sequence[str]) -> None:
    """Raises for patterns of values to compress that match none.

    Raises:
      UnmatchedError: for a pattern without a value of a loop that can be compressed.
    """
    if not patterns:
        return
    found = {text for cost in costs for _, text in _label_compressible(cost.pair, cost.nbytes)}
    for pattern in patterns:
        if not fnmatch.filter(found, pattern):
            names = ", ".join(sorted(found)) or "none"
            raise UnmatchedError(
                "compress lists values of loops over layers, floating-point with a last axis divisible by "
                f"{LEAST_BLOCK}, and no operands of choices (top_k, sort); {pattern!r} matches none "
                f"of them ({names}).{near_miss(pattern, sorted(found))}"
            )


def _count_passes(
    v: Var, makers: Mapping[Var, JaxprEqn], copied: set[Var], made_inside: Container[Var]
) -> int:
    """How often memory takes a row of a value's stack: written in the forward, read in the backward loop.

    A product and the like write a buffer of their own, copied to the stack: two passes. A fused kernel writes
    the stack itself: one pass more than without. A product reads a copy of the row, too; a fused kernel reads
    the stack, as it would read what is recomputed.

    Args:
      v: the value.
      makers: value -> its equation in the layer.
      copied: values that are copied for their readers.
      made_inside: results of conditions, which a branch computes or fills, and which are copied to the stack.
    """
    reads = 2 if v in copied else 0
    if v in made_inside:
        return 3 + reads
    origin = v
    while origin in makers and makers[origin].primitive.name in _ALIASES and variables(makers[origin]):
        origin = variables(makers[origin])[0]
    writes = 2 if origin not in makers or is_compute(makers[origin]) else 1
    return writes + reads


def _count_stores(v: Var, makers: Mapping[Var, JaxprEqn], stored: Container[Var]) -> int:
    """How often memory takes a value outside of loops: not at all, unless only fused kernels read the value.

    A slice is read in place, and kept it is a copy.

    Args:
      v: the value.
      makers: value -> its equation in the layer.
      stored: results of kernels.
    """
    while v in makers and makers[v].primitive.name in _ALIASES and variables(makers[v]):
        if makers[v].primitive.name == "slice":
            return 2
        if v in stored:
            return 0
        v = variables(makers[v])[0]
    return 0 if v in stored or v not in makers else 1
