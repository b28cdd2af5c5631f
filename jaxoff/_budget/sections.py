"""Sections of a forward pass outside of layers in a row: its stem, or a model whose layers all differ.

A section is to the plan a layer without repeats. Sections are cut for the least memory of a step which
keeps the values passed from section to section, and recomputes the rest a section at a time.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence, Set

import numpy as np

from jaxoff._budget.repeats import LayerRun
from jaxoff._device.flops import product_flops
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import JaxprEqn, Var
from jaxoff._jaxpr.dataflow import variables
from jaxoff._jaxpr.kernels import find_stored
from jaxoff._jaxpr.scopes import is_transposed

# Values from this size on are placed. Smaller values stay on the device.
LEAST_NBYTES = 1 << 16
# Part of the values read by the backward pass from which on a stretch is worth choices of its own: where a
# step recomputes the rest, about a tenth of these values are left.
_LEAST_SHARE = 0.01
# A stretch behind layers with fewer products and the like is a head.
_LEAST_PRODUCTS = 3
# Places to cut a stretch at, at most.
_PLACES = 200
# Part of a stretch's values to which the least peak is found.
_PEAK_SHARE = 1e-3


def list_stretches(eqns: Sequence[JaxprEqn], runs: Sequence[LayerRun]) -> list[LayerRun]:
    """The stretches of a forward pass outside of runs, without loops and effects.

    A stretch ahead of a backward pass ends with its last product: behind it is the loss. Few products behind
    layers, or ahead of a backward pass, are a head, whose values are all there when the backward pass begins,
    kept or made again. Where most of the compute is in loops, so are the layers, and few products are no
    section anywhere.

    Args:
      eqns: of a differentiated program, calls inlined.
      runs: of `find_runs`.
    """
    taken = {i for run in runs for i in range(run.start, run.end)}
    is_left = [
        i in taken or is_transposed(eqn) or compat.has_side_effects(eqn) or compat.is_loop(eqn)
        for i, eqn in enumerate(eqns)
    ]
    flops = [0.0 if is_transposed(eqn) else product_flops(eqn) for eqn in eqns]
    in_loops = sum(
        flops[i] for i, eqn in enumerate(eqns) if i not in taken and compat.scan_in(eqn) is not None
    )
    layers_are_in_loops = 2 * in_loops > sum(flops)
    behind_layers = {run.end for run in runs}
    ahead_of_layers = {run.start for run in runs}
    found, start = [], 0
    for left, group in itertools.groupby(is_left):
        end = start + len(list(group))
        if not left:
            products = [i for i in range(start, end) if flops[i]]
            is_last = end < len(eqns) and is_transposed(eqns[end])
            is_behind = start in behind_layers and end not in ahead_of_layers
            is_small = len(products) < _LEAST_PRODUCTS
            last = max(products, default=start) + 1 if is_last else end
            if not (is_small and (is_last or is_behind or layers_are_in_loops)):
                found.append(LayerRun(start, last - start, 1))
        start = end
    return found


def cut_stretches(
    stretches: Sequence[LayerRun], runs: Sequence[LayerRun], eqns: Sequence[JaxprEqn], needed: Set[Var]
) -> list[LayerRun]:
    """The sections of stretches.

    Args:
      stretches: of `list_stretches`.
      runs: the layers in a row.
      eqns: the equations, those of the backward pass with values of the forward pass as operands.
      needed: the values read by the backward pass.
    """
    needed = find_stored(needed, eqns)
    nbytes = np.array([compat.nbytes_of(v for v in eqn.outvars if v in needed) for eqn in eqns])
    total = sum(n for eqn, n in zip(eqns, nbytes, strict=True) if not is_transposed(eqn))
    in_layers = [sum(nbytes[i] for i in run.layer(run.count // 2)) for run in runs]
    loops = ((compat.scan_in(eqn), n) for eqn, n in zip(eqns, nbytes, strict=True))
    in_layers += [n / max(1, loop.length) for loop, n in loops if loop is not None]
    forward = [i for i, eqn in enumerate(eqns) if not is_transposed(eqn)]
    last_reads = {v: i for i in forward for v in variables(eqns[i])}
    floor, measured = max(in_layers, default=0), list[Stretch]()
    for stretch in stretches:
        if nbytes[stretch.start : stretch.end].sum() < max(_LEAST_SHARE * total, LEAST_NBYTES):
            continue
        reads = [
            (i, min(last_reads.get(v, i), stretch.end), compat.nbytes_of([v]))
            for i in range(stretch.start, stretch.end)
            for v in eqns[i].outvars
        ]
        measured.append(Stretch.of(stretch, reads, nbytes, floor))
    return list(cut_together(measured, floor))


def cut_stretch(
    stretch: LayerRun, reads: Sequence[tuple[int, int, int]], nbytes: np.ndarray, floor: float
) -> Iterator[LayerRun]:
    """The sections of a stretch with the least peak of its backward pass, where all is recomputed.

    The backward pass of a section holds what the sections ahead pass on and the values of its own.

    Args:
      stretch: the stretch.
      reads: of each value, the indices of its equation and of its last reader, and its bytes.
      nbytes: bytes of the values of each equation that are read by the backward pass.
      floor: bytes below which the peak is some other place's.
    """
    yield from cut_together([Stretch.of(stretch, reads, nbytes, floor)], floor)


@dataclasses.dataclass(frozen=True, eq=False)
class Stretch:
    """A stretch with what its sections take.

    Attributes:
      places: the indices of equations ahead of which it may be cut, with its start and its end.
      passed, inner: bytes passed on, and bytes of values, by the section from a place to a place.
    """

    places: np.ndarray
    passed: np.ndarray
    inner: np.ndarray

    @staticmethod
    def of(
        stretch: LayerRun, reads: Sequence[tuple[int, int, int]], nbytes: np.ndarray, floor: float
    ) -> Stretch:
        """Measures a stretch; arguments as for `cut_stretch`."""
        places = _list_places(stretch, reads, nbytes)
        inner = np.concatenate([[0], np.cumsum(nbytes)])[places]
        inner = np.maximum(inner[None, :] - inner[:, None], floor)
        # Of values made from place a on, ahead of place b, and read from place b on.
        change = np.zeros((len(places) + 1, len(places) + 1))
        for i, last, size in reads:
            made, read = np.searchsorted(places, [i, last], side="right")
            if made < read:
                change[0, made] += size
                change[made, made] -= size
                change[0, read] -= size
                change[made, read] += size
        passed = change.cumsum(0).cumsum(1)[:-1, :-1] + LEAST_NBYTES  # the fewer sections, the better
        return Stretch(places, passed, inner)


def cut_together(stretches: Sequence[Stretch], floor: float) -> Iterator[LayerRun]:
    """The sections of stretches, in program order, with the least peak of all: what they pass on adds up."""
    high = held = 0.0
    for stretch in stretches:
        high, held = max(high, held + stretch.inner[0, -1]), held + stretch.passed[0, -1]
    best = [[0, len(stretch.places) - 1] for stretch in stretches]
    low, step = floor, _PEAK_SHARE * high
    while high - low > step:
        middle = (low + high) / 2
        ends = _find_all_ends(stretches, middle)
        low, high, best = (middle, high, best) if ends is None else (low, middle, ends)
    for stretch, ends in zip(stretches, best, strict=True):
        for start, end in itertools.pairwise(stretch.places[ends]):
            yield LayerRun(int(start), int(end - start), 1)


def _find_all_ends(stretches: Sequence[Stretch], peak: float) -> list[list[int]] | None:
    """The places to cut each stretch where all pass on the fewest bytes within a peak, or None."""
    found, held = list[list[int]](), 0.0
    for stretch in stretches:
        if (cut := _find_ends(stretch, peak - held)) is None:
            return None
        ends, passed = cut
        found.append(ends)
        held += passed
    return found


def _list_places(stretch: LayerRun, reads: Sequence[tuple[int, int, int]], nbytes: np.ndarray) -> np.ndarray:
    """The indices of equations ahead of which a stretch may be cut.

    They are its start, its end, and in each of many parts with about as many bytes of values the place where
    the fewest bytes pass.
    """
    change = np.zeros(stretch.length + 1)
    for i, last, size in reads:
        change[i + 1 - stretch.start] += size if last > i else 0
        change[min(last + 1 - stretch.start, stretch.length)] -= size if last > i else 0
    live = change.cumsum()
    parts = (_PLACES - 2) * np.cumsum(nbytes[stretch.start : stretch.end - 1])
    parts = parts // max(1, nbytes[stretch.start : stretch.end].sum())
    lowest = {part: i for i, part in sorted(enumerate(parts, 1), key=lambda p: -live[p[0]])}
    return stretch.start + np.array([0, *sorted(lowest.values()), stretch.length])


def _find_ends(stretch: Stretch, peak: float) -> tuple[list[int], float] | None:
    """The places to cut a stretch where its sections pass on the fewest bytes within a peak, and these bytes.

    None where no places are within the peak.

    Args:
      stretch: the stretch.
      peak: the most bytes that a section's backward pass may hold.
    """
    passed, inner = stretch.passed, stretch.inner
    held, origin = np.full(len(passed), np.inf), np.zeros(len(passed), int)
    held[0] = 0
    for end in range(1, len(passed)):
        fits = held[:end] + inner[:end, end] <= peak
        there = np.where(fits, held[:end] + passed[:end, end], np.inf)
        origin[end] = there.argmin()
        held[end] = there[origin[end]]
    if np.isinf(held[-1]):
        return None
    ends = [len(passed) - 1]
    while ends[-1]:
        ends.append(int(origin[ends[-1]]))
    return ends[::-1], float(held[-1])
