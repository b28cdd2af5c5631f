"""The memory that an order holds, and the light kernels that could be one kernel with an earlier one."""

from __future__ import annotations

from collections.abc import Sequence

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import JaxprEqn, Var
from jaxoff._jaxpr.kernels import KernelGraph, new_nbytes
from jaxoff._jaxpr.primitives import is_collective, is_compute
from jaxoff._schedule.problem import OrderProblem


def held_nbytes(
    order: Sequence[int], eqns: Sequence[JaxprEqn], graph: KernelGraph, outs: frozenset[Var]
) -> list[int]:
    """Device bytes of the values of a program that are alive while each kernel of an order is computed."""
    place = {i: n for n, i in enumerate(order)}
    change = [0] * (len(order) + 1)
    for i, first in place.items():
        for v in eqns[i].outvars:
            if compat.is_host(v.aval) or not new_nbytes(eqns[i]):
                continue
            last = max((place[j] for j in graph.readers.get(v, ())), default=first)
            change[first] += compat.nbytes(v.aval)
            change[len(order) if v in outs else last + 1] -= compat.nbytes(v.aval)
    held, total = [], 0
    for difference in change[:-1]:
        total += difference
        held.append(total)
    return held


class Held:
    """The memory that an order holds so far, without results: in a loop those are written in place.

    Attributes:
      nbytes: on the device.
      peak: the most so far.
    """

    def __init__(self, eqns: Sequence[JaxprEqn], outs: frozenset[Var]):
        self._eqns, self._outs = eqns, outs
        self._alive: dict[Var, int] = {}
        self.nbytes = self.peak = 0

    def make(self, i: int) -> None:
        """Adds the results of a kernel."""
        for v in self._eqns[i].outvars:
            if not compat.is_host(v.aval) and new_nbytes(self._eqns[i]) and v not in self._outs:
                self._alive[v] = compat.nbytes(v.aval)
                self.nbytes += self._alive[v]
        self.peak = max(self.peak, self.nbytes)

    def free(self, v: Var) -> None:
        """Takes away a value that nothing reads any more."""
        self.nbytes -= self._alive.pop(v, 0)


def find_fusion_pairs(
    order: Sequence[int], program: OrderProblem, graph: KernelGraph, large_nbytes: int
) -> dict[int, int]:
    """By light kernel, a later one that XLA can make one kernel with it, for which there is memory by then.

    Both read the same array and make results of one shape, such as rows and gradients that are gathered by
    the same indices. What is made earlier takes its memory longer: at no place more than the order holds at
    its fullest.
    """
    eqns = program.eqns
    held, place = held_nbytes(order, eqns, graph, program.outs), {i: n for n, i in enumerate(order)}
    fullest = max(held, default=0)
    displacing = {i for made in program.overwrites_after_send for i in graph.find_makers(made)}

    def is_candidate(i: int) -> bool:
        eqn = eqns[i]
        if is_compute(eqn) or compat.transfer_in(eqn) or i in displacing:
            return False
        if not program.outs.isdisjoint(eqn.outvars):
            return False
        return len(eqn.outvars) == 1 and new_nbytes(eqn) >= large_nbytes

    def comes_from_elsewhere(v: Var) -> bool:
        maker = eqns[graph.maker[v]] if v in graph.maker else None
        return maker is not None and (compat.transfer_in(maker) == "H2D" or is_collective(maker))

    pairs: dict[int, int] = {}
    for later in filter(is_candidate, order):
        reads = graph.reads[later]
        if any(map(comes_from_elsewhere, reads)):
            continue
        made = max((place[graph.maker[v]] for v in reads if v in graph.maker), default=-1)
        shared = (j for v in reads if compat.shape_of(v.aval) for j in graph.readers[v])
        earlier = [j for j in shared if made < place[j] < place[later] and is_candidate(j) and j not in pairs]
        (out,) = eqns[later].outvars
        earlier = [j for j in earlier if eqns[j].outvars[0].aval.shape == out.aval.shape]  # pyright: ignore
        first = max(earlier, key=lambda j: place[j], default=None)
        if first is None or first in pairs.values():
            continue
        between = range(place[first], place[later])
        if all(held[n] + compat.nbytes(out.aval) <= fullest for n in between):
            pairs[first] = later
            for n in between:
                held[n] += compat.nbytes(out.aval)
    return pairs
