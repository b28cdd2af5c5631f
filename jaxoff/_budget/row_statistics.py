"""Statistics of rows that XLA computes in the kernel of their readers: the maximum in a softmax.

XLA fuses a reduction over the last axis with the elementwise equations that broadcast its result back, and
reads a row once. A kept statistic takes the kernel apart: its reduction is a kernel of its own, and values in
between are stored. Of a BERT layer with the maxima kept, XLA compiled none of the softmax kernels of the
plain step, and stored the exponentials in float32.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from jaxoff._budget.joint_graph import JointGraph
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import JaxprEqn, Var
from jaxoff._jaxpr.dataflow import index_readers
from jaxoff._jaxpr.primitives import is_fused

_REDUCTIONS = frozenset({"reduce_max", "reduce_min", "reduce_sum"})


class RowStatistics(NamedTuple):
    """The statistics of a layer that no kernel stores.

    Attributes:
      values: the results of the reductions, and what elementwise equations make of them row by row.
      reductions: indices of the reductions in `JointGraph.pure`.
    """

    values: frozenset[Var]
    reductions: frozenset[int]


def find_row_statistics(pair: JointGraph) -> RowStatistics:
    """Finds the statistics of rows that are read in the layer alone, to be broadcast over the rows.

    Statistics with a name, and those that the backward pass reads beside the row, are left out: to keep them
    may spare the row.
    """
    eqns = pair.pure
    readers = index_readers(eqns)
    outside = {*pair.needed, *pair.results, *pair.names}
    values: set[Var] = set()
    reductions: set[int] = set()
    for i, eqn in enumerate(eqns):
        found = _follow(eqn, eqns, readers, outside) if _is_over_rows(eqn) else None
        if found is not None:
            values |= found
            reductions.add(i)
    return RowStatistics(frozenset(values), frozenset(reductions))


def _is_over_rows(eqn: JaxprEqn) -> bool:
    if eqn.primitive.name not in _REDUCTIONS:
        return False
    shape = compat.shape_of(eqn.invars[0].aval)
    return tuple(eqn.params["axes"]) == (len(shape) - 1,) and shape[-1] > 1


def _follow(
    reduction: JaxprEqn, eqns: tuple[JaxprEqn, ...], readers: dict[Var, list[int]], outside: set[Var]
) -> set[Var] | None:
    """The values made of a reduction row by row; None if one has a reader that does not broadcast it."""
    each, whole = _size(reduction.outvars[0]), _size(reduction.invars[0])
    found: set[Var] = set()
    todo = list(reduction.outvars)
    while todo:
        v = todo.pop()
        if v in found:
            continue
        if v in outside:
            return None
        found.add(v)
        for reader in (eqns[j] for j in readers.get(v, ())):
            sizes = {_size(out) for out in reader.outvars}
            if not is_fused(reader) or not sizes <= {each, whole}:
                return None
            if sizes == {each}:
                todo += reader.outvars
    return found


def _size(v: Any) -> int:
    return math.prod(compat.shape_of(v.aval))
