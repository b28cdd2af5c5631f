"""Statistics of rows that XLA computes in the kernel of their readers: the maximum in a softmax.

XLA fuses a reduction over the last axis with the elementwise equations that broadcast its result back, and
reads a row once. A kept statistic takes the kernel apart: its reduction is a kernel of its own, and values in
between are stored. Of a BERT layer with the maxima kept, XLA compiled none of the softmax kernels of the
plain step, and stored the exponentials in float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jaxoff._budget.joint_graph import JointGraph
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import JaxprEqn, Var
from jaxoff._jaxpr.dataflow import index_readers, map_makers, variables
from jaxoff._jaxpr.primitives import is_compute, is_fused

_REDUCTIONS = frozenset({"reduce_max", "reduce_min", "reduce_sum"})
# The most elements of a row in one kernel: a softmax over 16,384 is one, over 32,768 five (jaxlib 0.11.2).
_LONGEST_ROW = 16_384


class RowStatistics(NamedTuple):
    """The statistics of a layer that no kernel stores.

    Attributes:
      values: the results of the reductions, and of elementwise equations on these, row by row.
      reductions: indices of the reductions in `JointGraph.pure`.
      differences: indices of the equations that broadcast a maximum over its row. XLA stores what the kernel
        makes of them, the exponentials or the weights of a softmax: no reader computes a maximum again.
      sums: the sums of these rows, and results of elementwise equations on a sum -> the row. To keep a sum
        takes the kernel apart as well, unless its row is kept.
      wide: rows with more bytes than the scores that they are made of: exponentials in float32 of scores in
        bfloat16. XLA stores none, and computes them in each reader. To keep them takes the kernels of the
        forward and of the backward softmax apart: of a U-Net's five attentions over 1,024 pixels, 18 GB of
        traffic, where to make scores, exponentials and weights again takes 6.
    """

    values: frozenset[Var]
    reductions: frozenset[int]
    differences: frozenset[int]
    sums: Mapping[Var, Var]
    wide: frozenset[Var]


def find_row_statistics(pair: JointGraph) -> RowStatistics:
    """Finds the statistics of rows that are read in the layer alone, to be broadcast over the rows.

    Statistics with a name, or read by the backward pass beside the row, are left out: to keep a statistic may
    spare the row. So are statistics whose rows no product reads, as in a cross entropy: XLA makes no kernel
    of the row.
    """
    return _Search(pair).run()


class _Search:
    """The search for the statistics of a layer."""

    def __init__(self, pair: JointGraph):
        self._eqns = pair.pure
        self._readers = index_readers(self._eqns)
        self._makers = map_makers(self._eqns)
        self._names = pair.names
        self._outside = {*pair.needed, *(v for v in pair.results if isinstance(v, Var)), *pair.names}

    def run(self) -> RowStatistics:
        values: set[Var] = set()
        reductions: set[int] = set()
        differences: set[int] = set()
        for i, eqn in enumerate(self._eqns):
            found = self._follow(eqn) if _is_over_rows(eqn) else None
            if found is not None:
                statistics, readers = found
                values |= statistics
                reductions.add(i)
                if eqn.primitive.name == "reduce_max":
                    differences |= readers
        starts = (v for i in sorted(differences) for v in self._eqns[i].outvars)
        rows = {v: self._list_derived([v], _size(v)) for v in starts}
        return RowStatistics(
            frozenset(values),
            frozenset(reductions),
            frozenset(differences),
            self._find_sums(rows),
            frozenset(self._find_wide(rows)),
        )

    def _find_sums(self, rows: Mapping[Var, list[Var]]) -> dict[Var, Var]:
        """The sums of `rows`, with the row of each."""
        made = {v for derived in rows.values() for v in derived}
        sums = ((e.outvars[0], e.invars[0]) for e in self._eqns if _is_over_rows(e) and e.invars[0] in made)
        return {v: row for total, row in sums for v in self._list_derived([total], _size(total))}

    def _find_wide(self, rows: Mapping[Var, list[Var]]) -> Iterator[Var]:
        """The rows with more bytes an element than their scores; no rows without scores."""
        for difference, derived in rows.items():
            width = sum(map(_element_nbytes, self._find_scores(difference)))
            yield from (v for v in derived if 0 < width < _element_nbytes(v) and v not in self._names)

    def _find_scores(self, row: Var) -> Iterator[Var]:
        """What elementwise equations make a row of, but for what is broadcast: readers read less of it."""
        todo, seen = [row], {row}
        while todo:
            v = todo.pop()
            maker = self._makers.get(v)
            if maker is None or not is_fused(maker):
                yield v
                continue
            whole = {x for x in variables(maker) if _size(x) >= _size(row)} - seen
            seen |= whole
            todo += whole

    def _follow(self, reduction: JaxprEqn) -> tuple[set[Var], set[int]] | None:
        """The values made of a reduction row by row, and the equations on these values with rows as results.

        None unless a product reads the rows.
        """
        each, whole = _size(reduction.outvars[0]), _size(reduction.invars[0])
        found: set[Var] = set()
        rows: set[int] = set()
        todo = list(reduction.outvars)
        while todo:
            v = todo.pop()
            if v in found:
                continue
            if v in self._outside:
                return None
            found.add(v)
            for i in self._readers.get(v, ()):
                reader = self._eqns[i]
                sizes = {_size(out) for out in reader.outvars}
                if not is_fused(reader) or not sizes <= {each, whole}:
                    return None
                if sizes == {each}:
                    todo += reader.outvars
                else:
                    rows.add(i)
        made = [v for i in sorted(rows) for v in self._eqns[i].outvars]
        return (found, rows) if self._reach_product(made) else None

    def _reach_product(self, values: list[Var]) -> bool:
        """Whether a product reads an elementwise function of values, which is in memory then."""
        return any(is_compute(eqn) for v in self._list_derived(values) for eqn in self._read(v))

    def _list_derived(self, values: list[Var], size: int | None = None) -> list[Var]:
        """Values, and what elementwise equations make of them; of `size` elements each, if given."""
        found: dict[Var, None] = {}
        todo = list(values)
        while todo:
            v = todo.pop()
            if v not in found:
                found[v] = None
                made = [out for eqn in self._read(v) if is_fused(eqn) for out in eqn.outvars]
                todo += [out for out in made if size in (None, _size(out))]
        return list(found)

    def _read(self, v: Var) -> list[JaxprEqn]:
        return [self._eqns[i] for i in self._readers.get(v, ())]


def _is_over_rows(eqn: JaxprEqn) -> bool:
    if eqn.primitive.name not in _REDUCTIONS:
        return False
    shape = compat.shape_of(eqn.invars[0].aval)
    return tuple(eqn.params["axes"]) == (len(shape) - 1,) and 1 < shape[-1] <= _LONGEST_ROW


def _size(v: Any) -> int:
    return math.prod(compat.shape_of(v.aval))


def _element_nbytes(v: Var) -> float:
    return compat.nbytes(v.aval) / max(_size(v), 1)
