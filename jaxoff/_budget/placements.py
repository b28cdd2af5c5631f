"""Placements for the values of a layer, and the program written with these placements."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

from jaxoff._budget.joint_graph import JointGraph, Placements
from jaxoff._budget.loop_pairs import LoopPair, holds_loop_pairs
from jaxoff._budget.nested import find_layers, write_nested
from jaxoff._budget.sequenced import Sequenced
from jaxoff._budget.sequences import find_sequences
from jaxoff._budget.write_loops import LoopWriter
from jaxoff._budget.write_sequences import write_sequences
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import ClosedJaxpr, Jaxpr, JaxprEqn
from jaxoff._jaxpr.faults import FAULTS
from jaxoff._jaxpr.inline import inline_program, resolve
from jaxoff._jaxpr.primitives import holds, is_shard_map
from jaxoff._jaxpr.split_conditions import split_conditions
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
        """The layers of a program, with `jax.shard_map`s and conditions in layers split; options as above.

        Where a fault of jaxoff prevents that, the program has values of whole ones.
        """
        layered = LayeredProgram(closed, **options)
        are_inside = not layered.list_joint_graphs()  # layers, if any, are divided between `jax.shard_map`s
        conditions = "a condition", split_conditions  # also in a `jax.shard_map`, and with one in a branch
        maps = "a jax.shard_map", split_shard_maps
        # The backward passes of layers one after the other may be in one `jax.shard_map`.
        apart = "a jax.shard_map", functools.partial(split_shard_maps, joins_backward=False)
        left = set[str]()
        for whole, split in (conditions, maps, apart, conditions):
            graphs = layered.list_joint_graphs()
            if split is maps[1]:
                is_done = bool(graphs) and layered.is_manual
            else:
                is_done = split is apart[1] and not (are_inside and all(g.is_section for g in graphs))
            if is_done or whole in left:
                continue
            try:
                found = split(layered.closed, layered.holds_layers)
            except (ValueError, *FAULTS) as fault:  # ValueError: of `jax.shard_map`
                Progress().say(f"no value in {whole} is placed ({type(fault).__name__}: {fault})")
                left.add(whole)
                continue
            layered = layered if found is layered.closed else LayeredProgram(found, **options)
        return layered

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
            placed, paired = [], set()
            loops = found.loops
            if level is not found.inlined:  # the equations that read values of the sequences are others now
                left = {pair.forward.outvars[0] for pair in loops}
                loops = [pair for pair in find_layers(level) if pair.forward.outvars[0] in left]
            for pair in loops:
                paired.update((id(pair.forward), id(pair.backward)))
                if (placements := decide_here(pair)) is not None:
                    placed.append(write_nested(pair, placements))
            inner = {id(eqn): eqn if id(eqn) in paired else write_inner(eqn) for eqn in level.eqns}
            same = all(inner[id(eqn)].params == eqn.params for eqn in level.eqns)
            if level is found.inlined and not placed and same:
                return program
            writer = LoopWriter(placed, fills=fills, sends_apart=self.sends_apart)
            eqns = writer.write(inner[id(eqn)] for eqn in level.eqns)
            return level.replace(eqns=eqns, outvars=[resolve(writer.renamed, v) for v in level.outvars])

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
        loops = find_layers(inlined)
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
