"""Collectives between devices: what is computed for them goes first, so that the rest stands beside them."""

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
    """Whether an operand of a collective can be made to wait for bits.

    The operand has to vary over the mesh axes over which the bits vary: it would vary over them afterwards.
    """
    if not isinstance(operand, Var) or not compat.nbytes(operand.aval):
        return False
    varying = {axis for bit in bits for axis in compat.varying_axes(bit.aval)}
    return varying <= {*compat.varying_axes(operand.aval)}


def wait_for_bits(
    eqn: JaxprEqn, operands: list[Any], bits: Sequence[Var]
) -> tuple[list[JaxprEqn], list[Any], Renamed]:
    """Operands of a collective that are available once bits of the results of earlier collectives are known.

    All devices have to run collectives in the same order, and the edges of a CUDA graph ignore barriers.

    Returns:
      Equations, the operands, and operand -> the element of it that was written back.
    """
    values = [v for v in operands if can_wait(v, bits)]
    if not bits or not values:
        return [], operands, {}
    eqns, results = trace_call(delay_values, [values, list(bits)], like=eqn)
    written: Renamed = dict(zip(values, results, strict=False))
    elements: Renamed = dict(zip(values, results[len(values) :], strict=True))
    return eqns, [resolve(written, v) for v in operands], elements


def cast_first(eqns: Sequence[JaxprEqn], results: Iterable[Any], renamed: Renamed) -> list[JaxprEqn]:
    """The same equations, where what is gathered and only read as a narrower type is sent as that.

    XLA does so, too, unless a barrier stands between the two.

    Args:
      eqns: in program order.
      results: what is read after them.
      renamed: what stands for a variable of theirs, filled with casts that are made before.
    """
    read_whole = {v for v in results if isinstance(v, Var)}
    casts: dict[Var, list[JaxprEqn]] = {}
    for eqn in eqns:
        for v in eqn.invars:
            if isinstance(v, Var) and eqn.primitive.name == "convert_element_type":
                casts.setdefault(v, []).append(eqn)
            elif isinstance(v, Var):
                read_whole.add(v)
    found, gone = [], set()
    for eqn in eqns:
        if id(eqn) in gone:
            continue
        eqn = eqn.replace(invars=[resolve(renamed, v) for v in eqn.invars])
        reads = casts.get(eqn.outvars[0], []) if eqn.primitive.name in GATHERS else []
        dtypes = {cast.params["new_dtype"] for cast in reads}
        if len(dtypes) == 1 and eqn.outvars[0] not in read_whole:
            dtype, aval = dtypes.pop(), eqn.outvars[0].aval
            if dtype.itemsize < compat.struct_of(aval).dtype.itemsize:
                before, operands = trace_call(lambda x, d=dtype: x.astype(d), eqn.invars, like=eqn)
                found += before
                eqn = eqn.replace(invars=operands, outvars=[Var(aval.update(dtype=dtype))])
                renamed.update((cast.outvars[0], eqn.outvars[0]) for cast in reads)
                gone |= {id(cast) for cast in reads}
        found.append(eqn)
    return found


def chain_collectives(eqns: Iterable[JaxprEqn]) -> list[JaxprEqn]:
    """The same equations, of which each collective waits for the last one over the same axis."""
    found: list[JaxprEqn] = []
    last: dict[str, Any] = {}  # by axis, a bit of what it brought
    for eqn in eqns:
        if not is_collective(eqn):
            found.append(eqn)
            continue
        axes = find_collective_axes(eqn)
        more, operands, _ = wait_for_bits(
            eqn, list(eqn.invars), [*dict.fromkeys(last[a] for a in axes if a in last)]
        )
        known, (bit,) = trace_call(read_bit, [eqn.outvars[0]], like=eqn)
        found += [*more, eqn.replace(invars=operands), *known]
        last |= dict.fromkeys(axes, bit)
    return found


class Collectives:
    """The collectives of a program, and the state of those in an order.

    Attributes:
      leading: the heavy kernels that lead to a large collective, and small collectives, in the order in which
        they go before all other kernels.
    """

    def __init__(self, program: OrderProblem, graph: KernelGraph, large_nbytes: int, device: Device):
        self._eqns, self._graph, self._device = program.eqns, graph, device
        self._before: dict[int, set[int]] = {}  # by kernel, those that it depends on
        self._ends: dict[int, float] = {}  # by collective under way, when it is over
        self._last_end = 0.0
        self._last: dict[str, int] = {}  # by axis, the collective that started last
        self.leading: list[int] = []
        if any(is_collective(self._eqns[i]) for i in graph.kernels):
            self._trace_back()
            self.leading = list(self._led_to(program.in_order, large_nbytes))

    def _trace_back(self) -> None:
        for i in self._graph.kernels:
            makers = [self._graph.maker[v] for v in self._graph.reads[i] if v in self._graph.maker]
            self._before[i] = set(makers).union(*(self._before[j] for j in makers))

    def _led_to(self, in_order: tuple[bool, ...], large_nbytes: int) -> dict[int, None]:
        """Collective by collective: what it needs, the small ones that need no more than that, and itself.

        One that is computed again comes only if it needs nothing more.
        """
        collectives = [i for i in self._before if is_collective(self._eqns[i])]
        large = [i for i in collectives if self.nbytes(i) >= large_nbytes]
        found: dict[int, None] = {}
        lead_on = {j for i in large for j in self._before[i]}  # those to another collective come first
        for i in sorted(large, key=lambda i: (i not in lead_on, len(self._before[i].intersection(large)))):
            needs = self._heavy_before(i)
            if in_order[i]:
                found |= dict.fromkeys(needs)
            elif not found.keys() >= set(needs):
                continue
            small = (j for j in collectives if j not in large)
            found |= dict.fromkeys(j for j in small if found.keys() >= set(self._heavy_before(j)))
            found[i] = None
        return found

    def _heavy_before(self, i: int) -> list[int]:
        return sorted(j for j in self._before[i] if is_compute(self._eqns[j]))

    def nbytes(self, i: int) -> int:
        """Bytes that a collective brings."""
        return compat.nbytes_of(self._eqns[i].outvars)

    def for_which_is_room(self, graph: list[int], nbytes: int) -> list[int]:
        """The kernels before the first collective that brings more."""
        too_large = (
            n for n, i in enumerate(graph) if is_collective(self._eqns[i]) and self.nbytes(i) > nbytes
        )
        return graph[: next(too_large, len(graph))]

    def start(self, i: int, time: float) -> float:
        """Starts a collective at a time; says when it is over. They follow each other."""
        self._last |= dict.fromkeys(find_collective_axes(self._eqns[i]), i)
        ms = collective_ms(self.nbytes(i), self._device)
        self._ends[i] = self._last_end = max(time, self._last_end) + ms
        return self._last_end

    def over(self, time: float) -> list[int]:
        """The collectives that are over by a time, each once."""
        over = [i for i, end in self._ends.items() if end <= time]
        for i in over:
            del self._ends[i]
        return over

    def to_wait_for(self, i: int) -> list[int]:
        """The collectives that started last over a collective's axes, without those that it depends on."""
        last = {self._last[axis] for axis in find_collective_axes(self._eqns[i]) if axis in self._last}
        return sorted(last - self._before[i])
