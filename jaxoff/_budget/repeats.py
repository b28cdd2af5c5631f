"""Repeated runs of equations: the layers of a model in a row."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxoff._device.flops import product_flops
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import JaxprEqn, Var
from jaxoff._jaxpr.dataflow import index_makers, variables
from jaxoff._jaxpr.primitives import is_compute
from jaxoff._jaxpr.scopes import is_transposed
from jaxoff._jaxpr.split_maps import look_inside

# Part of the forward pass's compute from which on a run is worth a choice of its own.
_LEAST_SHARE = 0.05
# Least part of the bytes of a layer's values to be passed on: parts of a batch pass on a sum at most.
_LEAST_PASSED = 1e-3
# Part of the bytes of a layer's values from which on the residuals of its loops have placements of their own:
# attention over parts of the queries keeps none where each part is under `jax.checkpoint`.
_OF_LOOPS = 1 / 8


@dataclasses.dataclass(frozen=True)
class LayerRun:
    """A run of equations, as alike layers of one length.

    Attributes:
      start: index of the first equation.
      length: equations of a layer.
      count: the number of layers.
    """

    start: int
    length: int
    count: int

    @property
    def end(self) -> int:
        """The index behind the last equation."""
        return self.start + self.length * self.count

    def layer(self, number: int) -> range:
        """The indices of a layer's equations."""
        first = self.start + self.length * number
        return range(first, first + self.length)


def find_runs(eqns: Sequence[JaxprEqn], paired: Mapping[Var, int] | None = None) -> list[LayerRun]:
    """The runs of alike layers in a forward pass, the runs with most compute first; none overlap.

    Two equations are alike if primitive and shapes are. A run repeats the shortest series of equations. Of
    the ways to divide a run into layers, the way with the fewest bytes from a layer to the next is taken.

    Args:
      eqns: of a differentiated program, calls inlined.
      paired: the first results of loops with a backward loop, with the bytes of their residuals. A run is
        left whose layers compute mostly in such loops and keep much for their iterations: stacks of layers.
    """
    paired = paired or {}
    excluded = [is_transposed(eqn) or compat.has_side_effects(eqn) for eqn in eqns]
    weights = [0.0 if no else _weigh(eqn) for eqn, no in zip(eqns, excluded, strict=True)]
    in_loops = [
        w if eqn.outvars and eqn.outvars[0] in paired else 0.0 for eqn, w in zip(eqns, weights, strict=True)
    ]
    before, before_in_loops = (np.concatenate(([0.0], np.cumsum(w))) for w in (weights, in_loops))
    least = max(1.0, _LEAST_SHARE * before[-1])

    def cover(run: LayerRun) -> float:
        return before[run.end] - before[run.start]

    def is_of_loops(run: LayerRun) -> bool:
        """Whether the layers of a run are stacks of layers in loops."""
        if 2 * (before_in_loops[run.end] - before_in_loops[run.start]) <= cover(run):
            return False
        made = [v for i in run.layer(0) for v in eqns[i].outvars]
        residuals = sum(paired.get(v, 0) for v in made)
        return residuals > _OF_LOOPS * compat.nbytes_of(made)

    makers = index_makers(eqns)
    taken = np.zeros(len(eqns), dtype=bool)
    found = []
    stretches = [(a, b) for a, b in _list_stretches(excluded) if before[b] - before[a] >= least]
    candidates = [
        (run, slack)
        for start, end in stretches
        for run, slack in _list_periods(eqns[start:end], start)
        if cover(run) >= least and not is_of_loops(run)
    ]
    for run, slack in sorted(candidates, key=lambda c: (-cover(c[0]), c[0].length)):
        if not taken[run.start : run.end].any():
            shifted = (dataclasses.replace(run, start=run.start + i) for i in range(slack + 1))
            best = min(shifted, key=lambda r: _passed_nbytes(eqns, makers, r))
            made = compat.nbytes_of(v for i in best.layer(0) for v in eqns[i].outvars)
            is_chain = _passed_nbytes(eqns, makers, best) >= _LEAST_PASSED * made
            if is_chain and cover(best) >= least and not taken[best.start : best.end].any():
                found.append(best)
                taken[best.start : best.end] = True
    return found


def _key(eqn: JaxprEqn) -> Any:
    atoms = (*eqn.invars, *eqn.outvars)
    return eqn.primitive.name, len(eqn.invars), tuple(str(v.aval) for v in atoms)


def _weigh(eqn: JaxprEqn) -> float:
    """The operations of an equation of compute and its written bytes, as the equation's weight."""
    return product_flops(look_inside(eqn)) + compat.nbytes_of(eqn.outvars) if is_compute(eqn) else 0.0


def _list_stretches(excluded: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """The longest ranges of indices without an exclusion."""
    start = 0
    for is_excluded, group in itertools.groupby(excluded):
        end = start + len(list(group))
        if not is_excluded:
            yield start, end
        start = end


def _list_periods(eqns: Sequence[JaxprEqn], offset: int) -> Iterator[tuple[LayerRun, int]]:
    """The longest runs of each length of a layer, with the number of equations left over at the end.

    Args:
      eqns: the equations.
      offset: the index of the first, for the runs' indices.
    """
    numbers: dict[Any, int] = {}
    keys = np.array([numbers.setdefault(_key(eqn), len(numbers)) for eqn in eqns])
    for length in range(1, len(keys) // 2 + 1):
        same = np.flatnonzero(keys[length:] != keys[:-length])
        bounds = np.concatenate(([-1], same, [len(keys) - length]))
        matches = np.diff(bounds) - 1
        for i in np.flatnonzero(matches >= length):
            count, slack = divmod(int(matches[i]) + length, length)
            yield LayerRun(offset + int(bounds[i]) + 1, length, count), slack


def _passed_nbytes(eqns: Sequence[JaxprEqn], makers: dict[Any, int], run: LayerRun) -> int:
    """Bytes of the values passed from a run's first layer to its second layer."""
    first = run.layer(0)
    read = {v for i in run.layer(1) for v in variables(eqns[i])}
    return compat.nbytes_of(v for v in read if makers.get(v, -1) in first)
