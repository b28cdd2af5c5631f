"""Placements for the values of a layer, and the program written with these placements."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxoff._budget.joint_graph import JointGraph, Placements, list_recomputed
from jaxoff._budget.loop_pairs import LoopPair, find_loop_pairs, holds_loop_pairs
from jaxoff._budget.sequenced import Sequenced
from jaxoff._budget.sequences import find_sequences
from jaxoff._budget.write_sequences import write_sequences
from jaxoff._jaxpr import compat, meshes
from jaxoff._jaxpr.compat import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jaxoff._jaxpr.dataflow import drop_dead, index_last_readers, variables
from jaxoff._jaxpr.faults import FAULTS
from jaxoff._jaxpr.float8 import pack, unpack
from jaxoff._jaxpr.inline import Renamed, inline_program, resolve, trace_call
from jaxoff._jaxpr.own_primitives import allocate
from jaxoff._jaxpr.primitives import holds, is_shard_map
from jaxoff._jaxpr.split_maps import split_shard_maps
from jaxoff._report.progress import Progress


class LayeredProgram:
    """A differentiated program, whose layers are found once for all programs with other placements.

    Attributes:
      closed: the program. Its values are on the device.
      is_opened: whether loops within the backward pass of a loop are placed in that loop's stead.
      sends_apart: whether a barrier stands ahead of the copies to the host in loops. XLA refuses a copy of a
        value that a loop inside of the loop makes or reads.
    """

    def __init__(self, closed: ClosedJaxpr, *, is_opened: bool = False, sends_apart: bool = False):
        self.closed, self.is_opened, self.sends_apart = closed, is_opened, sends_apart
        self._levels: dict[int, _Level] = {}  # by id of the program

    @staticmethod
    def of(closed: ClosedJaxpr, **options: bool) -> LayeredProgram:
        """The layers of a program, with each `jax.shard_map` in a layer split; options as above.

        Where a fault of jaxoff prevents that, the program has values of whole `jax.shard_map`s.
        """
        layered = LayeredProgram(closed, **options)
        if layered.is_manual:
            return layered
        try:
            split = split_shard_maps(closed, layered.holds_layers)
        except (ValueError, *FAULTS) as fault:  # ValueError: of `jax.shard_map`
            Progress().say(f"no value in a jax.shard_map is placed ({type(fault).__name__}: {fault})")
            return layered
        return layered if split is closed else LayeredProgram(split, **options)

    def holds_layers(self, program: Jaxpr) -> bool:
        """Whether layers are among the equations of a program."""
        found = self._find_level(program)
        return bool(found.loops or found.sequenced)

    def list_joint_graphs(self) -> list[JointGraph]:
        """The layers, in the order in which `write` asks for their placements."""
        graphs: list[JointGraph] = []
        self.write(graphs.append)  # returns None: leaves the layers
        if sum(bool(level.sequenced or level.loops) for level in self._levels.values()) > 1:
            return [dataclasses.replace(graph, end=math.inf) for graph in graphs]
        return graphs

    @functools.cached_property
    def is_manual(self) -> bool:
        """Whether all layers are in a `jax.shard_map`; of a program without layers, whether it has one."""
        graphs = self.list_joint_graphs()
        return all(graph.is_manual for graph in graphs) if graphs else holds(self.closed.jaxpr, is_shard_map)

    def write(
        self,
        decide: Callable[[JointGraph], Placements | None],
        *,
        fills: bool = True,
        waits_for_sums: bool = False,
    ) -> ClosedJaxpr:
        """The program with other placements of the values of its layers, in loops and one after the other.

        Args:
          decide: the placements for a pair of loops or a sequence of layers, or None to leave the layers.
            They come in a fixed order; loops inside of layers are left.
          fills: whether loops fill their stacks before they write them. Without, the program has to be that
            of one device.
          waits_for_sums: as for `write_sequences`.
        """

        def write(program: Jaxpr, runs: int = 1, is_manual: bool = False) -> Jaxpr:
            def decide_here(graph: JointGraph) -> Placements | None:
                return decide(dataclasses.replace(graph, runs=runs, is_manual=is_manual))

            def write_inner(eqn: JaxprEqn) -> JaxprEqn:
                flow = compat.control_flow(eqn)
                inner_runs = runs * (flow.iterations if flow else 1)
                manual = is_manual or is_shard_map(eqn)
                return compat.map_programs(eqn, lambda inner: write(inner, inner_runs, manual))

            found = self._find_level(program)
            sequences = found.inlined, found.sequenced, decide_here
            level = _write_sequences(*sequences, waits_for_sums=waits_for_sums)
            by_eqn, paired = {}, set()
            loops = found.loops
            if level is not found.inlined:  # the equations that read values of the sequences are others now
                left = {pair.forward.outvars[0] for pair in loops}
                loops = [pair for pair in find_loop_pairs(level) if pair.forward.outvars[0] in left]
            for pair in loops:
                paired.update((id(pair.forward), id(pair.backward)))
                if (placements := decide_here(pair)) is not None:
                    by_eqn[id(pair.forward)] = by_eqn[id(pair.backward)] = pair, placements
            inner = {id(eqn): eqn if id(eqn) in paired else write_inner(eqn) for eqn in level.eqns}
            same = all(inner[id(eqn)].params == eqn.params for eqn in level.eqns)
            if level is found.inlined and not by_eqn and same:
                return program
            return _write_level(level, by_eqn, inner, fills=fills, sends_apart=self.sends_apart)

        return compat.map_open(self.closed, write)

    def _find_level(self, program: Jaxpr) -> _Level:
        if id(program) not in self._levels:
            self._levels[id(program)] = _Level.of(program, self.is_opened)
        return self._levels[id(program)]


@dataclasses.dataclass(frozen=True)
class _Level:
    """A program, and the layers among its own equations.

    Attributes:
      program: the program.
      inlined: the program with its calls inlined.
      sequenced: its layers one after the other; None without.
      loops: its pairs of loops outside of these layers.
    """

    program: Jaxpr
    inlined: Jaxpr
    sequenced: Sequenced | None
    loops: Sequence[LoopPair]

    @staticmethod
    def of(program: Jaxpr, is_opened: bool) -> _Level:
        inlined = inline_program(program)
        loops = find_loop_pairs(inlined)
        found = find_sequences(inlined, loops)
        if is_opened:
            loops = [pair for pair in loops if not holds_loop_pairs(pair.backward)]
        return _Level(
            program,
            inlined,
            found,
            [pair for pair in loops if not found or pair.forward.outvars[0] not in found.values],
        )


def _write_sequences(
    level: Jaxpr,
    found: Sequenced | None,
    decide: Callable[[JointGraph], Placements | None],
    *,
    waits_for_sums: bool,
) -> Jaxpr:
    groups = [group for sequence in (found.sequences if found else ()) for group in sequence.split()]
    decided = [(group, placed) for group in groups if (placed := decide(group)) is not None]
    if not found or len(decided) < len(groups):
        return level
    return write_sequences(level, found, decided, waits_for_sums=waits_for_sums)


def _write_level(
    level: Jaxpr,
    by_eqn: dict[int, tuple[LoopPair, Placements]],
    inner: dict[int, JaxprEqn],
    *,
    fills: bool,
    sends_apart: bool,
) -> Jaxpr:
    eqns: list[JaxprEqn] = []
    renamed: Renamed = {}
    stacks: dict[int, list[Any]] = {}  # of kept values, by pair
    for eqn in level.eqns:
        here = inner[id(eqn)].replace(invars=[resolve(renamed, v) for v in eqn.invars])
        if id(eqn) not in by_eqn:
            eqns.append(here)
            continue
        pair, placements = by_eqn[id(eqn)]
        plain = fills or bool(placements.offloaded)  # loops with copies are scheduled as scans
        if eqn is pair.forward:
            written, results = _write_forward(
                pair, placements, here.invars, fills=plain, sends_apart=sends_apart
            )
            whole = [i for i in range(len(eqn.outvars)) if i not in pair.residuals]
            renamed.update(zip((eqn.outvars[i] for i in whole), results[: len(whole)], strict=True))
            stacks[id(pair)] = results[len(whole) :]
        else:
            operands = {v: resolve(renamed, operand) for v, operand in pair.free.items()}
            written, results = _write_backward(
                pair, placements, here.invars, operands, stacks[id(pair)], fills=plain
            )
            renamed.update(zip(eqn.outvars, results, strict=True))
        eqns += written
    return level.replace(eqns=eqns, outvars=[resolve(renamed, v) for v in level.outvars])


def _write_forward(
    pair: LoopPair, placements: Placements, operands: Sequence[Any], *, fills: bool, sends_apart: bool
) -> tuple[list[JaxprEqn], list[Any]]:
    """The forward loop: its results without the old residuals, then the stacks of kept values.

    A compressed value has two stacks.
    """
    layout = pair.layout
    outs = [v for i, v in enumerate(pair.body.outvars) if i not in pair.residuals]
    body = drop_dead(pair.body.replace(outvars=[*outs, *placements.list_kept(pair)]))
    run = compat.jaxpr_as_fun(ClosedJaxpr(body, ()))
    compressed, saved = placements.list_compressed(), len(placements.saved)

    def step(consts, carry, rows):
        values = run(*consts, *carry, *rows)
        kept = values[len(outs) :]
        on_device = pack(kept[:saved], compressed[:saved])
        moved = pack(kept[saved:], compressed[saved:])
        moved = jax.lax.optimization_barrier(moved) if sends_apart and moved else moved
        host = [jax.device_put(v, jax.memory.Space.Host) for v in moved]
        values = [*values[: len(outs)], *on_device, *host]
        return tuple(values[: layout.num_carry]), tuple(values[layout.num_carry :])

    first, row = layout.num_consts, layout.num_consts + layout.num_carry
    parts = operands[:first], operands[first:row], operands[row:]
    return _trace_scan(step, *parts, pair.forward, fills=fills)


def _write_backward(
    pair: LoopPair,
    placements: Placements,
    operands: Sequence[Any],
    free: dict[Var, Any],
    stacks: Sequence[Any],
    *,
    fills: bool,
) -> tuple[list[JaxprEqn], list[Any]]:
    """The backward loop: reads the stacks of kept values and recomputes other values."""
    own, theirs = pair.backward_layout, compat.as_open(pair.backward.params["jaxpr"])
    recomputed, all_kept = list_recomputed(pair, placements), placements.list_kept(pair)
    read = {v for e in (*recomputed, *pair.rest) for v in variables(e)}
    read.update(v for v in pair.outs if isinstance(v, Var))
    forward_consts = pair.body.invars[: pair.layout.num_consts]
    used = [v for v in free if v in read and v not in all_kept]
    free_consts = [v for v in used if v in forward_consts]
    free_rows = [v for v in used if v not in forward_consts]
    operand_of = dict(zip(theirs.invars, operands, strict=True)) | free
    carry = list(theirs.invars[own.num_consts : own.num_consts + own.num_carry])
    given = [v for v in pair.given if v not in carry]
    own_consts = [v for v in given if v in theirs.invars[: own.num_consts]]
    consts, rows = [*own_consts, *free_consts], [*(v for v in given if v not in own_consts), *free_rows]
    flags = dict(zip(all_kept, placements.list_compressed(), strict=True))
    kept = [v for v in all_kept if v in read]
    compressed, num_rows = [flags[v] for v in kept], len(rows)

    arguments = [*consts, *carry, *rows, *kept]
    eqns, outs = _Backward(pair, recomputed, kept).write()
    body = theirs.replace(constvars=[], invars=arguments, eqns=eqns, outvars=outs)
    run = compat.jaxpr_as_fun(ClosedJaxpr(body, ()))

    def step(consts, carry, rows):
        of_kept = rows[num_rows:]
        arrived = [
            jax.device_put(v, jax.memory.Space.Device) if compat.is_host(v.aval) else v for v in of_kept
        ]
        values = run(*consts, *carry, *rows[:num_rows], *unpack(arrived, kept, compressed))
        return tuple(values[: own.num_carry]), tuple(values[own.num_carry :])

    left = iter(stacks)
    stacks_of = {v: [next(left) for _ in range(1 + is_compressed)] for v, is_compressed in flags.items()}
    all_rows = [*(operand_of[v] for v in rows), *(stack for v in kept for stack in stacks_of[v])]
    initial = [operand_of[v] for v in carry]
    fills = fills or any(compat.is_host(v.aval) for v in all_rows)  # state updated in the loop
    return _trace_scan(step, [operand_of[v] for v in consts], initial, all_rows, pair.backward, fills=fills)


class _Backward:
    """Writes the equations of a backward body: each recomputed value as late as its first reader allows.

    The values of a segment are made again when those of the segment behind are no longer needed: its kept
    operands wait for what the backward pass has made so far, or XLA would make several segments at once.
    """

    def __init__(self, pair: LoopPair, recomputed: Sequence[JaxprEqn], kept: Sequence[Var]):
        self._pair, self._recomputed, self._kept = pair, recomputed, frozenset(kept)
        self._makers = {v: i for i, eqn in enumerate(recomputed) for v in eqn.outvars}
        self._segments = _number_segments(pair, recomputed)
        self._segment = max(self._segments, default=0)  # the earliest of those begun
        self._eqns: list[JaxprEqn] = []
        self._done: set[int] = set()  # of the recomputed equations
        self._made: list[Var] = []  # by the equations with cotangents among their ancestors
        self._delayed: Renamed = {}
        results = {v: len(pair.rest) for v in pair.outs if isinstance(v, Var)}
        self._last_readers = index_last_readers(pair.rest) | results

    def write(self) -> tuple[list[JaxprEqn], list[Any]]:
        """The equations, and the results."""
        rest, outs = self._pair.rest, self._pair.outs
        for i, eqn in enumerate(rest):
            self._make_again(variables(eqn), i, eqn)
            self._add(eqn)
            self._made += eqn.outvars
        self._make_again([v for v in outs if isinstance(v, Var)], len(rest), self._pair.backward)
        return self._eqns, [resolve(self._delayed, v) for v in outs]

    def _add(self, eqn: JaxprEqn) -> None:
        self._eqns.append(eqn.replace(invars=[resolve(self._delayed, v) for v in eqn.invars]))

    def _make_again(self, values: Sequence[Var], reader: int, like: JaxprEqn) -> None:
        """Writes the equations that make values again, for equation `reader` of `JointGraph.rest`."""
        todo, found = [v for v in values if v in self._makers], set()
        while todo:
            i = self._makers[todo.pop()]
            if i not in self._done:
                self._done.add(i)
                found.add(i)
                todo += [v for v in variables(self._recomputed[i]) if v in self._makers]
        segment = min((self._segments[i] for i in found), default=self._segment)
        if segment < self._segment:
            begun = [i for i, number in enumerate(self._segments) if segment <= number < self._segment]
            self._segment = segment
            self._wait([v for i in begun for v in variables(self._recomputed[i])], reader, like)
        for i in sorted(found):
            self._add(self._recomputed[i])

    def _wait(self, operands: Sequence[Var], reader: int, like: JaxprEqn) -> None:
        """Writes a barrier for the kept values among operands, and for what was made and is still read."""
        kept = [v for v in dict.fromkeys(operands) if v in self._kept and _is_array(v)]
        made = [v for v in self._made if self._last_readers.get(v, -1) >= reader and _is_array(v)]
        if kept and made:
            each = [*kept, *made]
            outs, barrier = compat.make_barrier([resolve(self._delayed, v) for v in each], like=like)
            self._eqns.append(barrier)
            self._delayed.update(zip(each, outs, strict=True))


def _is_array(v: Var) -> bool:
    """Whether a value is an array of numbers, which random keys are not."""
    return hasattr(v.aval, "dtype") and not jnp.issubdtype(
        compat.struct_of(v.aval).dtype, jax.dtypes.extended
    )


def _number_segments(pair: LoopPair, recomputed: Sequence[JaxprEqn]) -> list[int]:
    """The number of each recomputed equation's segment.

    An equation that the backward pass alone has belongs to the last segment of its operands.
    """
    segments: dict[Var, int] = {}
    own = {id(eqn): bisect.bisect_right(pair.cuts, i) for i, eqn in enumerate(pair.eqns)}
    for eqn in pair.pure:
        number = own.get(id(eqn), max((segments.get(v, 0) for v in variables(eqn)), default=0))
        segments.update(dict.fromkeys(eqn.outvars, number))
    return [segments[eqn.outvars[0]] for eqn in recomputed]


def _trace_scan(
    step: Callable[..., Any],
    consts: Sequence[Any],
    initial: Sequence[Any],
    rows: Sequence[Any],
    loop: JaxprEqn,
    *,
    fills: bool,
) -> tuple[list[JaxprEqn], list[Any]]:
    """The equations of a scan like `loop`, of a function (constants, carry, rows) -> (carry, rows).

    `jax.lax.scan` fills the stacks of its results before it writes them. Without `fills`, the loop is a
    `jax.lax.while_loop` with stacks that are only allocated.
    """
    layout = compat.scan_in(loop)
    assert layout is not None
    length, reverse = layout.length, loop.params["reverse"]

    def scan(consts, initial, rows):
        return jax.lax.scan(
            lambda carry, row: step(consts, carry, row),
            tuple(initial),
            tuple(rows),
            length=length,
            reverse=reverse,
        )

    def run(consts, initial, rows):
        first_rows = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in rows]
        _, made = jax.eval_shape(lambda *state: step(consts, *state), tuple(initial), first_rows)
        if any(jnp.issubdtype(x.dtype, jax.dtypes.extended) for x in made):  # random keys
            return scan(consts, initial, rows)
        # The allocation waits for the carry: XLA would allocate at the start of the step.
        scalars = [compat.empty_scalar(jax.typeof(jnp.zeros((), x.dtype))) for x in made]
        scalars, initial = jax.lax.optimization_barrier((scalars, tuple(initial)))

        def iterate(state):
            i, carry, stacks = state
            k = length - 1 - i if reverse else i
            row = [jax.lax.dynamic_index_in_dim(x, k, keepdims=False) for x in rows]
            carry, values = step(consts, carry, row)
            pairs = zip(stacks, values, strict=True)
            return i + 1, carry, [jax.lax.dynamic_update_index_in_dim(s, v, k, 0) for s, v in pairs]

        stacks = [
            allocate(
                scalar,
                (length, *x.shape),
                jax.typeof(scalar).sharding.update(spec=jax.P(*[None] * (1 + len(x.shape)))),
            )
            for scalar, x in zip(scalars, made, strict=True)
        ]
        state = jax.lax.while_loop(lambda state: state[0] < length, iterate, (jnp.int32(0), initial, stacks))
        return state[1], tuple(state[2])

    avals = [v.aval for v in (*consts, *initial, *rows)]
    fills = fills or not length or any(compat.varying_axes(v) or meshes.explicit_mesh(v) for v in avals)
    return trace_call(scan if fills else run, [list(consts), list(initial), list(rows)], like=loop)
