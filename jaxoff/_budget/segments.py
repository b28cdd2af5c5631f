"""Segments of a loop's body, for example the layers of a group: how much the backward pass makes at once.

An iteration of the backward pass makes the values of two neighbouring segments at once, unless all values
passed between the two are kept. Then it makes the segments again in turn.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Container, Iterator, Mapping, Sequence, Set

import numpy as np

from jaxoff._budget.joint_graph import JointGraph
from jaxoff._budget.repeats import LayerRun, find_runs
from jaxoff._budget.sections import cut_stretch
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import Var
from jaxoff._jaxpr.dataflow import index_last_readers
from jaxoff._jaxpr.kernels import find_stored

# Part of a body's values above which the largest segment spares too little.
_LARGEST_SHARE = 0.75


@dataclasses.dataclass(frozen=True)
class Segments:
    """The segments of a body, in program order.

    Attributes:
      nbytes: of each segment, the bytes of its values in memory when its backward pass runs.
      passed: for each cut, the values made ahead of the cut and read behind it.
    """

    nbytes: tuple[float, ...]
    passed: tuple[frozenset[Var], ...] = ()

    @staticmethod
    def of(pair: JointGraph, nbytes: Mapping[Var, int]) -> Segments:
        """The segments of a layer between its cuts; `nbytes`: value to keep -> its bytes."""
        in_memory = find_stored(pair.needed, (*pair.pure, *pair.rest))
        own = _count_in_memory(pair, nbytes, in_memory)
        if not pair.cuts:
            return Segments(
                (float(own.sum()) + sum(nbytes.get(v, 0) for v in pair.carried if v in in_memory),)
            )
        last_readers = index_last_readers(pair.eqns)
        made_at = {v: i for i, eqn in enumerate(pair.eqns) for v in eqn.outvars if v in nbytes}
        ends = [0, *pair.cuts, len(pair.eqns)]
        return Segments(
            tuple(float(own[start:end].sum()) for start, end in itertools.pairwise(ends)),
            tuple(
                frozenset(v for v, i in made_at.items() if i < cut <= last_readers.get(v, -1))
                for cut in pair.cuts
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
        """The bytes made at once beyond the largest segment's, where some values are kept."""
        joined = [i for i, values in enumerate(self.passed) if not values <= kept]
        found = (nbytes for between, nbytes in self.list_joined() if all(i in joined for i in between))
        return max(found, default=0.0)


def find_cuts(pair: JointGraph) -> Sequence[int]:
    """The cuts of a loop's body, as `JointGraph.cuts`; none where segments spare too little memory.

    Segments are layers within the layer, or cut for the least memory.
    """
    if len(pair.eqns) < 2:
        return ()
    nbytes = {v: compat.nbytes_of([v]) for eqn in pair.eqns for v in eqn.outvars}
    own = _count_in_memory(pair, nbytes, find_stored(pair.needed, (*pair.pure, *pair.rest)))
    starts = {start for run in find_runs(pair.eqns) for start in range(run.start, run.end + 1, run.length)}
    if not starts:
        last_readers = index_last_readers(pair.eqns)
        reads = [
            (i, last_readers.get(v, i), pair.count * nbytes[v])
            for i, eqn in enumerate(pair.eqns)
            for v in eqn.outvars
        ]
        starts = {run.start for run in cut_stretch(LayerRun(0, len(pair.eqns), 1), reads, own, 0.0)}
    cuts = sorted(starts - {0, len(pair.eqns)})
    largest = max(own[start:end].sum() for start, end in itertools.pairwise([0, *cuts, len(pair.eqns)]))
    return cuts if largest <= _LARGEST_SHARE * own.sum() else ()


def _count_in_memory(pair: JointGraph, nbytes: Mapping[Var, int], in_memory: Container[Var]) -> np.ndarray:
    """The bytes of each equation's values in memory when the layer's backward pass runs, all made again."""
    return np.array([sum(nbytes.get(v, 0) for v in eqn.outvars if v in in_memory) for eqn in pair.eqns])
