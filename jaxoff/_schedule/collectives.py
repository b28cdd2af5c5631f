"""Collectives between devices: the kernels before a collective go first, and the others run during it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from jaxoff._device.kernel_time import collective_ms
from jaxoff._device.profile import Device
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import JaxprEqn, Var
from jaxoff._jaxpr.inline import Renamed, resolve, trace_call
from jaxoff._jaxpr.kernels import KernelGraph
from jaxoff._jaxpr.primitives import GATHERS, find_collective_axes, is_collective, is_compute
from jaxoff._schedule.dependency_kernels import delay_values, read_bit
from jaxoff._schedule.problem import OrderProblem


def can_wait(operand: Any, bits: Sequence[Var]) -> bool:
    """Whether an operand of a collective can wait for bits.

    The operand must vary over all mesh axes over which the bits vary, because the wait makes the operand vary
    over these axes.
    """
    if not isinstance(operand, Var) or not compat.nbytes(operand.aval):
        return False
    return compat.varies_with(operand.aval, [bit.aval for bit in bits])


def wait_for_bits(
    eqn: JaxprEqn, operands: list[Any], bits: Sequence[Var]
) -> tuple[list[JaxprEqn], list[Any], Renamed]:
    """Makes the operands of a collective wait for bits of the results of earlier collectives.

    All devices must run the collectives in the same order, and the edges of a CUDA graph ignore barriers.

    Returns:
      The new equations; the operands to use; and operand -> its element from before the wait.
    """
    values = [v for v in operands if can_wait(v, bits)]
    if not bits or not values:
        return [], operands, {}
    eqns, results = trace_call(delay_values, [values, list(bits)], like=eqn)
    written: Renamed = dict(zip(values, results, strict=False))
    elements: Renamed = dict(zip(values, results[len(values) :], strict=True))
    return eqns, [resolve(written, v) for v in operands], elements


def cast_before_gathers(eqns: Sequence[JaxprEqn], results: Iterable[Any], renamed: Renamed) -> list[JaxprEqn]:
    """Casts the operand of a gather if all readers cast the result to the same narrower dtype.

    The devices then send fewer bytes. XLA does so, too, unless a barrier stands between gather and cast.

    Args:
      eqns: the equations, in program order.
      results: the variables which are read after the equations.
      renamed: variable -> its replacement; gets an entry for each cast which the gather makes superfluous.

    Returns:
      The new equations.
    """
    read_whole = {v for v in results if isinstance(v, Var)}
    casts: dict[Var, list[JaxprEqn]] = {}
    for eqn in eqns:
        for v in eqn.invars:
            if isinstance(v, Var) and eqn.primitive.name == "convert_element_type":
                casts.setdefault(v, []).append(eqn)
            elif isinstance(v, Var):
                read_whole.add(v)
    new_eqns, superfluous = [], set()
    for eqn in eqns:
        if id(eqn) in superfluous:
            continue
        eqn = eqn.replace(invars=[resolve(renamed, v) for v in eqn.invars])
        reads = casts.get(eqn.outvars[0], []) if eqn.primitive.name in GATHERS else []
        dtypes = {cast.params["new_dtype"] for cast in reads}
        if len(dtypes) == 1 and eqn.outvars[0] not in read_whole:
            dtype, aval = dtypes.pop(), eqn.outvars[0].aval
            if dtype.itemsize < compat.struct_of(aval).dtype.itemsize:
                before, operands = trace_call(lambda x, d=dtype: x.astype(d), eqn.invars, like=eqn)
                new_eqns += before
                eqn = eqn.replace(invars=operands, outvars=[Var(aval.update(dtype=dtype))])
                renamed.update((cast.outvars[0], eqn.outvars[0]) for cast in reads)
                superfluous |= {id(cast) for cast in reads}
        new_eqns.append(eqn)
    return new_eqns


def chain_collectives(eqns: Iterable[JaxprEqn]) -> list[JaxprEqn]:
    """Makes each collective wait for the previous collective over the same mesh axis."""
    new_eqns: list[JaxprEqn] = []
    last_bits: dict[str, Any] = {}  # mesh axis -> a bit of the last result over the axis
    for eqn in eqns:
        if not is_collective(eqn):
            new_eqns.append(eqn)
            continue
        axes = find_collective_axes(eqn)
        bits = [*dict.fromkeys(last_bits[axis] for axis in axes if axis in last_bits)]
        waits, operands, _ = wait_for_bits(eqn, list(eqn.invars), bits)
        reads, (bit,) = trace_call(read_bit, [eqn.outvars[0]], like=eqn)
        new_eqns += [*waits, eqn.replace(invars=operands), *reads]
        last_bits |= dict.fromkeys(axes, bit)
    return new_eqns


class Collectives:
    """The collectives of a program, and the collectives under way in an order.

    Attributes:
      leading: the kernels to place before all other kernels, in order: compute kernels which lead to a large
        collective, small collectives, and large collectives.
    """

    def __init__(self, problem: OrderProblem, graph: KernelGraph, large_nbytes: int, device: Device):
        self._eqns, self._graph, self._device = problem.eqns, graph, device
        self._before: dict[int, set[int]] = {}  # kernel -> all kernels from which its result is computed
        self._ends: dict[int, float] = {}  # collective under way -> its end, ms
        self._last_end = 0.0  # ms
        self._last: dict[str, int] = {}  # mesh axis -> the collective which started last
        self.leading: list[int] = []
        if any(is_collective(self._eqns[i]) for i in graph.kernels):
            self._index_ancestors()
            self.leading = list(self._find_leading(problem.in_order, large_nbytes))

    def _index_ancestors(self) -> None:
        for i in self._graph.kernels:
            makers = [self._graph.maker[v] for v in self._graph.reads[i] if v in self._graph.maker]
            self._before[i] = set(makers).union(*(self._before[j] for j in makers))

    def _find_leading(self, in_order: tuple[bool, ...], large_nbytes: int) -> dict[int, None]:
        """Finds the leading kernels, large collective by large collective.

        Each large collective brings the compute kernels before it, then the small collectives without further
        compute kernels before them, then itself. A recomputed collective leads only if no further compute
        kernel stands before it.
        """
        collectives = [i for i in self._before if is_collective(self._eqns[i])]
        large = [i for i in collectives if self.count_nbytes(i) >= large_nbytes]
        found: dict[int, None] = {}
        # A large collective before another large collective goes first.
        lead_on = {j for i in large for j in self._before[i]}
        for i in sorted(large, key=lambda i: (i not in lead_on, len(self._before[i].intersection(large)))):
            needs = self._find_compute_before(i)
            if in_order[i]:
                found |= dict.fromkeys(needs)
            elif not found.keys() >= set(needs):
                continue
            small = (j for j in collectives if j not in large)
            found |= dict.fromkeys(j for j in small if found.keys() >= set(self._find_compute_before(j)))
            found[i] = None
        return found

    def _find_compute_before(self, i: int) -> list[int]:
        return sorted(j for j in self._before[i] if is_compute(self._eqns[j]))

    def count_nbytes(self, i: int) -> int:
        """Counts the bytes of the results of collective `i`."""
        return compat.nbytes_of(self._eqns[i].outvars)

    def limit_to_room(self, kernels: list[int], nbytes: int) -> list[int]:
        """Returns the kernels before the first collective whose results have more bytes than `nbytes`."""
        too_large = (
            n for n, i in enumerate(kernels) if is_collective(self._eqns[i]) and self.count_nbytes(i) > nbytes
        )
        return kernels[: next(too_large, len(kernels))]

    def start(self, i: int, time: float) -> float:
        """Starts collective `i` at a time, behind the collectives under way; returns its end, in ms."""
        self._last |= dict.fromkeys(find_collective_axes(self._eqns[i]), i)
        ms = collective_ms(self.count_nbytes(i), self._device)
        self._ends[i] = self._last_end = max(time, self._last_end) + ms
        return self._last_end

    def pop_ended(self, time: float) -> list[int]:
        """Removes and returns the collectives under way which have ended by a time."""
        ended = [i for i, end in self._ends.items() if end <= time]
        for i in ended:
            del self._ends[i]
        return ended

    def find_awaited(self, i: int) -> list[int]:
        """Finds the last collectives over the axes of collective `i` from which `i` is not computed."""
        last = {self._last[axis] for axis in find_collective_axes(self._eqns[i]) if axis in self._last}
        return sorted(last - self._before[i])
