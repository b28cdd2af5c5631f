"""The choice of placements: the least time in a given memory, by an integer program.

The model ranks, compilation judges: `jaxoff._budget.search` compiles each choice, and corrects the memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from jaxoff._budget.calibrations import (
    COMPRESSING_PASSES,
    EXPOSED_STATE_SHARE,
    HIDING_SHARE,
    ORDERED_KERNEL_MS,
)
from jaxoff._budget.costs import Costs
from jaxoff._budget.integer_program import IntegerProgram
from jaxoff._budget.joint_graph import JointGraph, Nested, Placements
from jaxoff._budget.segments import Segments
from jaxoff._device.profile import Device
from jaxoff._jaxpr.compat import Var
from jaxoff._jaxpr.dataflow import variables
from jaxoff._jaxpr.tag import Tag

# Values below this size are not offloaded: a copy has a latency of some 10 us.
_LEAST_OFFLOADED_NBYTES = 1 << 20
# Buffers on the device for an offloaded value: a copy reads the first while a kernel fills the second.
_BUFFERS = 2
# Of values as fast to save, the smaller: added passes over a row for each saved value.
_SAVING_SHARE = 0.02
_MB = 1e6
# Part of the least memory by which a choice may exceed the least, for time.
_LEAST_SLACK = 1e-3


def choose_placements(
    costs: Sequence[Costs], device: Device, device_nbytes: float | None, host_nbytes: float | None = None
) -> tuple[list[Placements], float] | None:
    """The fastest placements within a memory, by the model.

    Args:
      costs: of each pair of loops.
      device: rates.
      device_nbytes: the most memory of kept values on the device, as counted by `saved_nbytes`; None for the
        least, with the fewest bytes kept: what the count takes for free may not be.
      host_nbytes: the most memory of kept values on the host; None for any.

    Returns:
      Placements by pair, and the time added to a step, in ms; None if nothing fits.
    """
    if not costs:
        return [], 0.0
    program = IntegerProgram(_MB)
    memory = [_Memory([], []) for _ in costs]
    host: list[tuple[int, float]] = []
    added = [_add_pair(program, cost, device, own, host) for cost, own in zip(costs, memory, strict=True)]
    chosen = [pair.kept for pair in added]
    if host_nbytes is not None:
        program.add_upper_bound(host, host_nbytes / _MB)
    most = program.add_variable(upper=math.inf)
    for peak in _list_peaks(costs):
        held = [term for i in peak.held for term in memory[i].kept]
        held += memory[peak.held[-1]].passing if peak.held else []
        if peak.made is not None:
            held.append((_add_excess(program, costs[peak.made].segments, chosen[peak.made]), 1.0))
        program.add_lower_bound(most, held, peak.nbytes / _MB)
    if device_nbytes is not None:
        limit = device_nbytes / _MB
    elif (found := program.minimise({most: 1.0})) is not None:
        limit = (1 + _LEAST_SLACK) * float(found[most])
    else:
        return None
    program.add_upper_bound([(most, 1.0)], limit)
    if device_nbytes is None:
        kept = dict(term for own in memory for term in own.kept + own.passing)
        fewest = program.minimise(kept)
        assert fewest is not None  # the least fits
        total = sum(factor * fewest[i] for i, factor in kept.items())
        program.add_upper_bound(list(kept.items()), (1 + _LEAST_SLACK) * total)
    found = program.minimise(program.cost)
    if found is None:
        return None
    placements = []
    for cost, own in zip(costs, added, strict=True):
        taken = [
            (p, way)
            for p, v in enumerate(cost.pair.values)
            for way in own.kept.get(v, ())
            if found[way.variable] > 0.5
        ]
        saved, moved = (tuple(p for p, way in taken if way.offloads is moves) for moves in (False, True))
        compressed = frozenset(p for p, way in taken if way.compresses)
        nested = tuple(
            tuple(p for p, v in enumerate(inner.graph.values) if v in kept and found[kept[v]] > 0.5)
            for inner, kept in zip(cost.pair.nested, own.nested, strict=True)
        )
        placements.append(Placements(saved, moved, compressed, nested))
    return placements, float(sum(factor * found[i] for i, factor in program.cost.items()))


def saved_nbytes(costs: Sequence[Costs], placements: Sequence[Placements]) -> float:
    """Bytes of kept values on the device at the most, by the count of `choose_placements`.

    The kept values of all layers are held as the backward pass begins; in a step with several gradients, one
    after the other, those of each. When the backward pass of a section runs, the kept values of what is ahead
    are held and all of its own, kept or recomputed; of its own bytes, those above a layer's count. Offloaded
    values of a section count beside its neighbor alone, on their way. Of a layer in segments the bytes count
    that are made at once.
    """
    each = list(zip(costs, placements, strict=True))
    kept = [_kept_nbytes(cost, placed) for cost, placed in each]
    passing = [_passing_nbytes(cost, placed) for cost, placed in each]
    excess = [cost.segments.excess_nbytes({*placed.list_kept(cost.pair)}) for cost, placed in each]
    sizes = [
        sum(kept[i] for i in peak.held)
        + (passing[peak.held[-1]] if peak.held else 0.0)
        + peak.nbytes
        + (0.0 if peak.made is None else excess[peak.made])
        for peak in _list_peaks(costs)
    ]
    return max(sizes, default=0.0)


def exposed_state_ms(costs: Costs) -> float:
    """The time of an iteration's copies of state in the open, in a layer that repeats nothing, in ms."""
    hidden_ms = HIDING_SHARE * costs.backward_ms
    return max(EXPOSED_STATE_SHARE * costs.state_ms, costs.state_ms - hidden_ms)


def _kept_nbytes(cost: Costs, placed: Placements) -> float:
    buffers = 0 if cost.pair.is_section else _BUFFERS
    total, values = 0.0, cost.pair.values
    for times, places in ((cost.pair.count, placed.saved), (buffers, placed.offloaded)):
        for i in places:
            total += times * (cost.compressible if i in placed.compressed else cost.nbytes)[values[i]]
    for inner, places in zip(cost.nested, placed.nested, strict=True):
        total += inner.pair.count * sum(inner.nbytes[inner.pair.values[i]] for i in places)
    return total


def _passing_nbytes(cost: Costs, placed: Placements) -> float:
    return sum(cost.nbytes[cost.pair.values[i]] for i in placed.offloaded if cost.pair.is_section)


class _Peak(NamedTuple):
    """A moment of the backward pass.

    Attributes:
      held: indices of the layers with kept values in memory, in the order of the forward pass.
      nbytes: further bytes.
      made: index of the layer in segments whose backward pass runs, or None.
    """

    held: tuple[int, ...]
    nbytes: float
    made: int | None = None


def _list_peaks(costs: Sequence[Costs]) -> list[_Peak]:
    """The moments at which memory may be largest: as a backward pass begins, and at each section."""
    sections = [i for i, cost in enumerate(costs) if cost.pair.is_section]
    layers = [i for i, cost in enumerate(costs) if not cost.pair.is_section]
    # A layer's own values are no part of the count: compilation teaches what they take.
    usual = max((costs[i].segments.largest_nbytes for i in layers or sections), default=0)

    in_order = sorted(range(len(costs)), key=lambda i: costs[i].pair.position)

    def list_ahead(position: float) -> tuple[int, ...]:
        """The layers with kept values in memory ahead of a place of the forward pass."""
        return tuple(i for i in in_order if costs[i].pair.position < position < costs[i].pair.end)

    # Behind the last section of a gradient are its last layers, or the loss.
    behind = [list_ahead(cost.pair.position + 0.5) for cost in costs]
    most = {held for held in behind if not any({*held} < {*other} for other in behind)}
    peaks = [_Peak(held, 0.0) for held in sorted(most)]
    peaks += [
        _Peak(list_ahead(costs[i].pair.position), costs[i].segments.largest_nbytes - usual) for i in sections
    ]
    peaks += [_Peak(behind[i], 0.0, i) for i, cost in enumerate(costs) if cost.segments.passed]
    return peaks


def _add_excess(program: IntegerProgram, segments: Segments, kept: Mapping[Var, Sequence[_Way]]) -> int:
    """Adds a variable for the bytes made at once beyond the largest segment's, and returns its index.

    Args:
      program: the integer program.
      segments: of a layer.
      kept: value -> the ways to keep the value.
    """
    excess = program.add_variable(upper=math.inf)
    apart = [program.add_variable() for _ in segments.passed]
    for between, values in zip(apart, segments.passed, strict=True):
        for v in values:
            program.add_upper_bound([(between, 1.0), *((way.variable, -1.0) for way in kept[v])], 0.0)
    for joined, nbytes in segments.list_joined():
        size = nbytes / _MB
        program.add_lower_bound(excess, [(apart[i], -size) for i in joined], size)
    return excess


class _Memory(NamedTuple):
    """Terms of the integer program, variables with megabytes: the device memory of a layer's kept values.

    Attributes:
      kept: between the forward pass and the backward pass of the layer.
      passing: further memory right behind the one and ahead of the other, for copies.
    """

    kept: list[tuple[int, float]]
    passing: list[tuple[int, float]]


class _Way(NamedTuple):
    """A way to keep a value: its variable in the integer program, and where and how the value is kept."""

    variable: int
    offloads: bool
    compresses: bool


# A variable of the integer program, and its factor.
type _Term = tuple[int, float]


class _Added(NamedTuple):
    """The variables of a pair of loops.

    Attributes:
      kept: value -> the ways to keep the value.
      nested: for each loop in the layer, value of an iteration -> whether the loop's backward pass reads it.
    """

    kept: dict[Var, list[_Way]]
    nested: list[dict[Var, int]]


def _add_pair(
    program: IntegerProgram,
    costs: Costs,
    device: Device,
    memory: _Memory,
    host: list[tuple[int, float]],
) -> _Added:
    """Adds the variables and constraints of a pair of loops."""
    pair, length = costs.pair, costs.pair.count
    times_run = length * pair.runs
    kept: dict[Var, list[_Way]] = {}
    copies_out: list[tuple[int, float, float]] = []  # variable, time of the copy, earliest start
    copies_back: list[tuple[int, float]] = []
    for v, whole in costs.nbytes.items():
        ways_of = kept[v] = []
        small = costs.compressible.get(v)
        for nbytes, compresses in [(whole, False), *([] if small is None else [(small, True)])]:
            pass_ms = device.pass_ms(nbytes)
            # A value is read and its numbers are written, then read and written as the value.
            added = COMPRESSING_PASSES * device.pass_ms(whole) if compresses else 0.0
            save = program.add_variable(integer=True)
            ways_of.append(_Way(save, False, compresses))
            memory.kept.append((save, length * nbytes / _MB))
            saving = costs.saving_ms[v] * nbytes / max(whole, 1) + _SAVING_SHARE * pass_ms
            program.cost[save] += times_run * (saving + added)
            if nbytes < _LEAST_OFFLOADED_NBYTES or _is_marked(pair, v):
                continue
            move = program.add_variable(integer=True)
            ways_of.append(_Way(move, True, compresses))
            if pair.is_section:
                memory.passing.append((move, nbytes / _MB))
            else:
                memory.kept.append((move, _BUFFERS * nbytes / _MB))
            host.append((move, (length + 1) * nbytes / _MB))  # a stack has a spare row
            copies_out.append((move, device.d2h_ms(nbytes), costs.ready_ms[v]))
            copies_back.append((move, device.h2d_ms(nbytes)))
            program.cost[move] += times_run * (pass_ms + added)

    for v, other in costs.only_with.items():
        without = [(way.variable, -1.0) for way in kept.get(other, ())]
        program.add_upper_bound([(way.variable, 1.0) for way in kept.get(v, ())] + without, 0.0)
    repeated, ways = _add_repetitions(
        program, costs, times_run, lambda v: [(way.variable, -1.0) for way in kept.get(v, ())]
    )
    nested = [
        _add_nested(program, inner, own, device, times_run, memory, ways)
        for inner, own in zip(pair.nested, costs.nested, strict=True)
    ]

    if copies_back:
        copying = program.add_variable(integer=True)
        program.cost[copying] += ORDERED_KERNEL_MS * times_run * costs.kernels
        for move, _ in copies_back:
            program.add_lower_bound(copying, [(move, 1.0)])
    if copies_back or costs.state_ms:
        exposed = program.add_variable(upper=float("inf"))
        program.cost[exposed] += times_run
        times = [(i, -HIDING_SHARE * ms) for i, ms in zip(repeated, costs.equation_ms, strict=True) if ms]
        hidden_ms = HIDING_SHARE * costs.backward_ms
        program.add_lower_bound(exposed, [*copies_back, *times], costs.state_ms - hidden_ms)
        if costs.state_ms:  # reloads wait behind the state's in the link's queue
            program.add_lower_bound(exposed, copies_back, EXPOSED_STATE_SHARE * costs.state_ms)
        # A copy to the host starts when its value is there, and the iteration waits for its end.
        exposed = program.add_variable(upper=float("inf"))
        program.cost[exposed] += times_run
        for ready in sorted({ms for _, _, ms in copies_out}):
            later = [(move, copy_ms) for move, copy_ms, ms in copies_out if ms >= ready]
            program.add_lower_bound(exposed, later, -HIDING_SHARE * (costs.forward_ms - ready))
    return _Added(kept, nested)


def _add_nested(
    program: IntegerProgram,
    inner: Nested,
    costs: Costs,
    device: Device,
    times_run: int,
    memory: _Memory,
    ways_around: Callable[[Var], list[_Term]],
) -> dict[Var, int]:
    """Adds the variables and constraints of a loop in a layer.

    Args:
      program: the integer program.
      inner: the loop.
      costs: of an iteration.
      device: rates.
      times_run: how often the layer runs in a step.
      memory: of the layer's kept values.
      ways_around: value of the layer -> the variables for ways to have it, with the factor -1.

    Returns:
      value of an iteration -> the variable of whether the loop's backward pass reads its stack.
    """
    pair, times = inner.graph, times_run * inner.graph.count
    kept: dict[Var, int] = {}
    for v, nbytes in costs.nbytes.items():
        if v not in inner.stacks:
            continue
        kept[v] = program.add_variable(integer=True)
        memory.kept.append((kept[v], pair.count * nbytes / _MB))  # of a single layer at a time
        program.cost[kept[v]] += times * (costs.saving_ms[v] + _SAVING_SHARE * device.pass_ms(nbytes))
        program.add_upper_bound([(kept[v], 1.0), *ways_around(inner.stacks[v])], 0.0)
    for v, other in costs.only_with.items():
        if v in kept:
            program.add_upper_bound([(kept[v], 1.0), *([(kept[other], -1.0)] if other in kept else [])], 0.0)

    def ways_of_free(v: Var) -> list[_Term]:
        operand = pair.free[v]
        return ways_around(operand) if isinstance(operand, Var) else []

    def list_keepers(v: Var) -> list[_Term]:
        return [(kept[v], -1.0)] if v in kept else []

    _add_repetitions(program, costs, times, list_keepers, ways_of_free)
    return kept


def _add_repetitions(
    program: IntegerProgram,
    costs: Costs,
    times: int,
    list_keepers: Callable[[Var], list[_Term]],
    ways_of_free: Callable[[Var], list[_Term]] = lambda v: [],
) -> tuple[list[int], Callable[[Var], list[_Term]]]:
    """Adds the variables for repeated equations: each value that the backward pass reads is kept or repeated.

    Args:
      program: the integer program.
      costs: of the layer.
      times: how often the layer runs in a step.
      list_keepers: value -> the variables for ways to keep it, with the factor -1.
      ways_of_free: argument within reach of the backward pass -> the ways to have it; none where it is there.

    Returns:
      By equation of `JointGraph.pure`, the variable of whether it is repeated; and value -> the variables for
      ways to have it in the backward pass, with the factor -1.
    """
    pair = costs.pair
    repeated = [program.add_variable() for _ in pair.pure]
    at = {id(eqn): i for i, eqn in enumerate(pair.pure)}
    maker = {v: at[id(eqn)] for v, eqn in pair.makers.items()}

    def ways(v: Var) -> list[_Term]:
        if v in pair.free:
            return ways_of_free(v)
        return list_keepers(v) + ([(repeated[maker[v]], -1.0)] if v in maker else [])

    # In the order of the program: the solver's choice among equals would differ from run to run.
    for v in dict.fromkeys((*pair.carried, *(v for eqn in pair.pure for v in eqn.outvars))):
        if v in pair.needed and v not in pair.free:
            program.add_upper_bound(ways(v), -1.0)
    for i, eqn in enumerate(pair.pure):
        program.cost[repeated[i]] += times * (costs.equation_ms[i] + 1e-6)
        for v in dict.fromkeys(variables(eqn)):
            if (had := ways(v)) or v not in pair.free:
                program.add_upper_bound([(repeated[i], 1.0), *had], 0.0)
    return repeated, ways


def _is_marked(pair: JointGraph, v: Var) -> bool:
    """Whether `jaxoff.mark_not_offload` keeps a value off the host."""
    name = pair.names.get(v)
    return name is not None and Tag.of(name).mark == "not_offload"
