"""The device memory held by an order, and the move kernels which XLA can fuse with an earlier kernel."""

from __future__ import annotations

from collections.abc import Sequence

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import JaxprEqn, Var
from jaxoff._jaxpr.kernels import KernelGraph, new_nbytes
from jaxoff._jaxpr.primitives import is_collective, is_compute
from jaxoff._schedule.problem import OrderProblem


def count_held_nbytes(
    order: Sequence[int], eqns: Sequence[JaxprEqn], graph: KernelGraph, outs: frozenset[Var]
) -> list[int]:
    """Counts, for each kernel of an order, the device bytes of the values alive while the kernel runs."""
    position = {i: n for n, i in enumerate(order)}
    change = [0] * (len(order) + 1)
    for i, first in position.items():
        for v in eqns[i].outvars:
            if compat.is_host(v.aval) or not new_nbytes(eqns[i]):
                continue
            last = max((position[j] for j in graph.readers.get(v, ())), default=first)
            change[first] += compat.nbytes(v.aval)
            change[len(order) if v in outs else last + 1] -= compat.nbytes(v.aval)
    held, total = [], 0
    for difference in change[:-1]:
        total += difference
        held.append(total)
    return held


class HeldMemory:
    """The device memory held by an order so far.

    Results do not count: a loop writes its results into their stacks.

    Attributes:
      nbytes: bytes held now.
      peak_nbytes: the most bytes held so far.
    """

    def __init__(self, eqns: Sequence[JaxprEqn], outs: frozenset[Var]):
        self._eqns, self._outs = eqns, outs
        self._alive: dict[Var, int] = {}
        self.nbytes = self.peak_nbytes = 0

    def make(self, i: int) -> None:
        """Adds the results of kernel `i`."""
        for v in self._eqns[i].outvars:
            if not compat.is_host(v.aval) and new_nbytes(self._eqns[i]) and v not in self._outs:
                self._alive[v] = compat.nbytes(v.aval)
                self.nbytes += self._alive[v]
        self.peak_nbytes = max(self.peak_nbytes, self.nbytes)

    def free(self, v: Var) -> None:
        """Drops a value without further readers."""
        self.nbytes -= self._alive.pop(v, 0)


def find_fusion_pairs(
    order: Sequence[int], problem: OrderProblem, graph: KernelGraph, large_nbytes: int
) -> dict[int, int]:
    """Pairs move kernels to place next to each other, so that XLA fuses each pair horizontally.

    Both kernels of a pair read the same array and make results of the same shape; for example, two gathers by
    the same indices. The second result is then held from the first kernel on. A pair is kept
    only if this does not raise the peak of the order's memory.

    Returns:
      First kernel -> second kernel.
    """
    eqns = problem.eqns
    held = count_held_nbytes(order, eqns, graph, problem.outs)
    position = {i: n for n, i in enumerate(order)}
    peak_nbytes = max(held, default=0)
    overwriting = {i for made in problem.overwrites_after_send for i in graph.find_makers(made)}

    def is_candidate(i: int) -> bool:
        eqn = eqns[i]
        if is_compute(eqn) or compat.transfer_in(eqn) or i in overwriting:
            return False
        if not problem.outs.isdisjoint(eqn.outvars):
            return False
        return len(eqn.outvars) == 1 and new_nbytes(eqn) >= large_nbytes

    def is_received(v: Var) -> bool:
        maker = eqns[graph.maker[v]] if v in graph.maker else None
        return maker is not None and (compat.transfer_in(maker) == "H2D" or is_collective(maker))

    pairs: dict[int, int] = {}
    for second in filter(is_candidate, order):
        reads = graph.reads[second]
        if any(map(is_received, reads)):
            continue
        made = max((position[graph.maker[v]] for v in reads if v in graph.maker), default=-1)
        shared = (j for v in reads if compat.shape_of(v.aval) for j in graph.readers[v])
        earlier = [
            j for j in shared if made < position[j] < position[second] and is_candidate(j) and j not in pairs
        ]
        (out,) = eqns[second].outvars
        earlier = [j for j in earlier if eqns[j].outvars[0].aval.shape == out.aval.shape]  # pyright: ignore
        first = max(earlier, key=lambda j: position[j], default=None)
        if first is None or first in pairs.values():
            continue
        between = range(position[first], position[second])
        if all(held[n] + compat.nbytes(out.aval) <= peak_nbytes for n in between):
            pairs[first] = second
            for n in between:
                held[n] += compat.nbytes(out.aval)
    return pairs
