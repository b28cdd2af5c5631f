"""Sections of a forward pass outside of layers in a row: its stem, or a model whose layers all differ.

A section is to the plan a layer that does not repeat. Sections end where few bytes pass from one to the next,
and are so small that a recomputed section takes little room beside the kept values.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence, Set

from jaxoff._budget.repeats import Run
from jaxoff._device.flops import product_flops
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import JaxprEqn, Var
from jaxoff._jaxpr.dataflow import variables
from jaxoff._jaxpr.scopes import is_transposed

# Values from this size on are placed. Smaller values stay on the device.
LEAST_NBYTES = 1 << 16
# Part of the values read by the backward pass from which on a stretch is worth choices of its own.
_LEAST_SHARE = 0.05
# A stretch behind layers with fewer products and the like is a head.
_LEAST_PRODUCTS = 3
# A section has at least this part of those values, and no less than the largest layer.
_SECTION_SHARE = 1 / 32
# A section ends where at most this part of its bytes passes to the next, the best place up to this many times
# the bytes ahead of the place, and in any case from this many times the least bytes on.
_PASSED_SHARE = 1 / 6
_LOOKAHEAD = 1.25
_LARGEST = 8


def list_stretches(eqns: Sequence[JaxprEqn], runs: Sequence[Run]) -> list[Run]:
    """The stretches of a forward pass outside of runs, without loops, other control flow and effects.

    A stretch ahead of a backward pass ends with its last product: behind it is the loss. Few products behind
    layers, or ahead of a backward pass, are a head, whose values are all there when the backward pass begins,
    kept or made again. Where most of the compute is in loops, so are the layers.

    Args:
      eqns: of a differentiated program, calls inlined.
      runs: of `find_runs`.
    """
    taken = {i for run in runs for i in range(run.start, run.end)}
    is_left = [
        i in taken or is_transposed(eqn) or bool(eqn.effects) or compat.control_flow(eqn) is not None
        for i, eqn in enumerate(eqns)
    ]
    flops = [0.0 if is_transposed(eqn) else product_flops(eqn) for eqn in eqns]
    in_loops = sum(
        flops[i] for i, eqn in enumerate(eqns) if i not in taken and compat.scan_in(eqn) is not None
    )
    if 2 * in_loops > sum(flops):
        return []
    behind_layers = {run.end for run in runs}
    found, start = [], 0
    for left, group in itertools.groupby(is_left):
        end = start + len(list(group))
        if not left:
            products = [i for i in range(start, end) if flops[i]]
            is_last = end < len(eqns) and is_transposed(eqns[end])
            is_head = (is_last or start in behind_layers) and len(products) < _LEAST_PRODUCTS
            last = max(products, default=start) + 1 if is_last else end
            if not is_head:
                found.append(Run(start, last - start, 1))
        start = end
    return found


def cut_stretches(
    stretches: Sequence[Run], runs: Sequence[Run], eqns: Sequence[JaxprEqn], needed: Set[Var]
) -> list[Run]:
    """The sections of stretches.

    Args:
      stretches: of `list_stretches`.
      runs: the layers in a row.
      eqns: the equations, those of the backward pass with values of the forward pass as operands.
      needed: the values read by the backward pass.
    """
    nbytes = [compat.nbytes_of(v for v in eqn.outvars if v in needed) for eqn in eqns]
    total = sum(n for eqn, n in zip(eqns, nbytes, strict=True) if not is_transposed(eqn))
    in_layers = (sum(nbytes[i] for i in run.layer(run.count // 2)) for run in runs)
    least = max(_SECTION_SHARE * total, *in_layers, 1)
    forward = [i for i, eqn in enumerate(eqns) if not is_transposed(eqn)]
    last_reads = {v: i for i in forward for v in variables(eqns[i])}
    found: list[Run] = []
    for stretch in stretches:
        if sum(nbytes[stretch.start : stretch.end]) < max(_LEAST_SHARE * total, LEAST_NBYTES):
            continue
        found += _cut(stretch, least, nbytes, eqns, last_reads)
    return found


def _cut(
    stretch: Run,
    least: float,
    nbytes: Sequence[int],
    eqns: Sequence[JaxprEqn],
    last_reads: Mapping[Var, int],
) -> Iterator[Run]:
    """Sections of a stretch that end where few bytes pass to the next.

    Args:
      stretch: the stretch.
      least: bytes of a section's values, at least.
      nbytes: bytes of the values of each equation.
      eqns: the equations.
      last_reads: value -> index of its last reader in the forward pass.
    """
    start, held, ends = stretch.start, 0, list[tuple[bool, int, int, int]]()
    for i in range(stretch.start, stretch.end):
        held += nbytes[i]
        if held >= least:
            made = (v for eqn in eqns[start : i + 1] for v in eqn.outvars)
            passed = compat.nbytes_of(v for v in made if last_reads.get(v, i) > i)
            ends.append((passed > _PASSED_SHARE * held, passed, i, held))
        if not ends:
            continue
        is_dear, _, end, nbytes_there = min(ends)
        is_full = held >= max(2 * least, _LOOKAHEAD * nbytes_there) and not is_dear
        if is_full or held >= _LARGEST * least or i + 1 == stretch.end:
            yield Run(start, end + 1 - start, 1)
            start, held, ends = end + 1, held - nbytes_there, []
    if start < stretch.end:
        yield Run(start, stretch.end - start, 1)
