"""Segments of a loop's body, such as the layers of a group: how much of it the backward pass makes at once.

Where the values passed from one segment to the next are kept, an iteration of the backward pass makes the
other values of one segment at a time; without, those of both at once.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Container, Iterator, Mapping, Sequence, Set

import numpy as np

from jaxoff._budget.joint_graph import JointGraph
from jaxoff._budget.repeats import Run, find_runs
from jaxoff._budget.sections import cut_stretch
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import Var
from jaxoff._jaxpr.dataflow import variables
from jaxoff._jaxpr.kernels import find_stored

# Part of a body's values above which the largest segment spares too little.
_LARGEST_SHARE = 0.75


@dataclasses.dataclass(frozen=True)
class Segments:
    """The segments of a body, in program order.

    Attributes:
      nbytes: of each segment, the bytes of its values in memory when its backward pass runs.
      passed: for each two segments one after the other, the values that pass from one to the other.
    """

    nbytes: tuple[float, ...]
    passed: tuple[frozenset[Var], ...] = ()

    @staticmethod
    def of(pair: JointGraph, nbytes: Mapping[Var, int]) -> Segments:
        """The segments of a layer by `find_cuts`; `nbytes` has the bytes of each value that may be kept."""
        in_memory = find_stored(pair.needed, (*pair.pure, *pair.rest))
        own = _count_in_memory(pair, nbytes, in_memory)
        if not (cuts := find_cuts(pair)):
            return Segments(
                (float(own.sum()) + sum(nbytes.get(v, 0) for v in pair.carried if v in in_memory),)
            )
        last_reads = _index_last_reads(pair)
        made_at = {v: i for i, eqn in enumerate(pair.eqns) for v in eqn.outvars if v in nbytes}
        ends = [0, *cuts, len(pair.eqns)]
        return Segments(
            tuple(float(own[start:end].sum()) for start, end in itertools.pairwise(ends)),
            tuple(
                frozenset(v for v, i in made_at.items() if i < cut <= last_reads.get(v, -1)) for cut in cuts
            ),
        )

    @functools.cached_property
    def largest_nbytes(self) -> float:
        """The bytes of the largest segment."""
        return max(self.nbytes)

    def list_joined(self) -> Iterator[tuple[range, float]]:
        """Segments that may be made at once: the places between, and bytes beyond the largest segment's."""
        total = [0.0, *itertools.accumulate(self.nbytes)]
        for start, end in itertools.combinations(range(len(total)), 2):
            if total[end] - total[start] > self.largest_nbytes:
                yield range(start, end - 1), total[end] - total[start] - self.largest_nbytes

    def excess_nbytes(self, kept: Set[Var]) -> float:
        """The bytes beyond the largest segment's, of what is made at once where some values are kept."""
        joined = [i for i, values in enumerate(self.passed) if not values <= kept]
        found = (nbytes for between, nbytes in self.list_joined() if all(i in joined for i in between))
        return max(found, default=0.0)


def find_cuts(pair: JointGraph) -> Sequence[int]:
    """The indices of equations with which all segments but the first begin; none where they spare too little.

    Segments are layers within the layer, or cut for the least memory.
    """
    if not pair.has_stacks or len(pair.eqns) < 2:
        return ()
    nbytes = {v: compat.nbytes_of([v]) for eqn in pair.eqns for v in eqn.outvars}
    own = _count_in_memory(pair, nbytes, find_stored(pair.needed, (*pair.pure, *pair.rest)))
    starts = {start for run in find_runs(pair.eqns) for start in range(run.start, run.end + 1, run.length)}
    if not starts:
        last_reads = _index_last_reads(pair)
        reads = [
            (i, last_reads.get(v, i), pair.count * nbytes[v])
            for i, eqn in enumerate(pair.eqns)
            for v in eqn.outvars
        ]
        starts = {run.start for run in cut_stretch(Run(0, len(pair.eqns), 1), reads, own, 0.0)}
    cuts = sorted(starts - {0, len(pair.eqns)})
    largest = max(own[start:end].sum() for start, end in itertools.pairwise([0, *cuts, len(pair.eqns)]))
    return cuts if largest <= _LARGEST_SHARE * own.sum() else ()


def _count_in_memory(pair: JointGraph, nbytes: Mapping[Var, int], in_memory: Container[Var]) -> np.ndarray:
    """The bytes of each equation's values in memory when the layer's backward pass runs, all made again."""
    return np.array([sum(nbytes.get(v, 0) for v in eqn.outvars if v in in_memory) for eqn in pair.eqns])


def _index_last_reads(pair: JointGraph) -> dict[Var, int]:
    return {v: i for i, eqn in enumerate(pair.eqns) for v in variables(eqn)}
