"""Pieces of a program with layers outside of loops, cut where few bytes pass."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import Jaxpr, JaxprEqn, Var
from jaxoff._jaxpr.dataflow import index_last_readers
from jaxoff._jaxpr.primitives import DOTS

# Products of a piece: a layer's forward pass has about as many, and its backward pass two to three pieces.
_PRODUCTS = 8
# A loop's body with more products holds several layers: a layer has up to thirty, backward pass included.
_PRODUCTS_OF_LAYER = 40


def holds_layers(body: Jaxpr) -> bool:
    """Whether the body of a loop, for example over microbatches, holds several layers one by one."""
    return sum(eqn.primitive.name in DOTS for eqn in body.eqns) > _PRODUCTS_OF_LAYER


def cut_into_pieces(jaxpr: Jaxpr) -> Iterator[Jaxpr]:
    """The pieces of a program in order, each with the results that later pieces read.

    From a layer to the next few bytes pass beside the values that wait for the backward pass. So in each
    series of products the place with the fewest bytes in memory is one between layers, or between the parts
    of a layer.

    Args:
      jaxpr: a program, its calls inlined.
    """
    outs = {v for v in jaxpr.outvars if isinstance(v, Var)}
    last_reads = index_last_readers(jaxpr.eqns)
    for start, end in itertools.pairwise(_list_cuts(jaxpr.eqns, last_reads)):
        eqns = jaxpr.eqns[start:end]
        made = [v for eqn in eqns for v in eqn.outvars if v in outs or last_reads.get(v, -1) >= end]
        yield jaxpr.replace(eqns=eqns, outvars=made)


def _list_cuts(eqns: Sequence[JaxprEqn], last_reads: dict[Var, int]) -> list[int]:
    """The indices of the equations at which pieces begin, and the number of equations."""
    change = np.zeros(len(eqns) + 1)
    for i, eqn in enumerate(eqns):
        for v in eqn.outvars:
            last = last_reads.get(v, i)
            change[i + 1] += compat.nbytes(v.aval)
            change[last + 1] -= compat.nbytes(v.aval)
    live = change.cumsum()  # ahead of each equation
    products = np.cumsum([eqn.primitive.name in DOTS for eqn in eqns], dtype=int)  # of no equations, too
    series = (products - 1) // _PRODUCTS
    places = [np.flatnonzero(series == n) for n in range(1, series.max(initial=0) + 1)]
    return [0, *(int(among[live[among].argmin()]) for among in places), len(eqns)]
