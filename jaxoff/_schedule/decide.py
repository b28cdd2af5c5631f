"""Decides the order of a straight-line program: its large kernels in a chain, its copies beside the chain.

A kernel which has to wait for a reload lets a later kernel go first. A kernel runs at once if it frees as
much memory as it takes. A reload starts as late as possible, and still in time.

The kernels before a collective go first, as far as the memory suffices: the peak of the program in its own
order. Collectives stand outside of the chain: only the readers of their results wait for their ends.

A barrier cannot delay a reload out of a host stack: XLA fuses the reload with the slice before it and drops
the barrier between. A dependency through the stack itself works: an element of the value to wait for is
written into the stack's spare row, and the reload reads the stack after the write.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from jaxoff._device.kernel_time import kernel_ms
from jaxoff._device.profile import Device
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import Var
from jaxoff._jaxpr.kernels import KernelGraph, new_nbytes
from jaxoff._jaxpr.primitives import is_collective, is_compute
from jaxoff._schedule.chain import Chain, is_chained
from jaxoff._schedule.collectives import Collectives, can_wait
from jaxoff._schedule.copy_times import CopyTimes, ReloadPlan
from jaxoff._schedule.copy_waits import CopyWaits
from jaxoff._schedule.liveness import HeldMemory, find_fusion_pairs
from jaxoff._schedule.problem import OrderProblem
from jaxoff._schedule.schedule import Added, ReadBit, Run, Schedule, Substitutes
from jaxoff._schedule.summed_products import SummedProducts, find_summed_products

# Bytes: smaller values are not worth a position in the chain.
LARGE_NBYTES = 1 << 20
# Each draft plans its reloads from the times of the draft before, until the plan repeats. In all programs of
# the benchmarks, the plan repeats after two or three drafts (bench/LOG.md, "2026-11-25: one trace").
MOST_DRAFTS = 4
# Reloads under way ahead of their turns, where kernels keep pace with the link. Chosen: with 4, an ensemble
# of networks took 8.19 GB for 7.45 (bench/LOG.md, "2026-12-01, later").
_MOST_AHEAD = 2
# Kernels: how far down the program order `decide` looks for a kernel to run while another waits for a reload.
_LOOKAHEAD = 8


def decide(problem: OrderProblem, device: Device, large_nbytes: int = LARGE_NBYTES) -> Schedule:
    """Decides the order of the kernels and copies of a program.

    Args:
      problem: the program and its constraints.
      device: rates, to estimate when kernels and copies end.
      large_nbytes: the least bytes of a value whose kernel has a position in the chain.

    Returns:
      The schedule of the last draft.
    """
    graph = KernelGraph(problem.eqns, problem.outs | problem.moved_aside)
    summed = find_summed_products(problem, graph)
    reloads, room = ReloadPlan(), 0
    most_ahead = _MOST_AHEAD if problem.options.keeps_pace and problem.waits_for_sends else None
    pairs: dict[int, int] = {}
    if any(is_collective(problem.eqns[i]) for i in graph.kernels):
        plain = Draft(problem, graph, summed, device, large_nbytes, reloads, pairs)
        plain.run()
        room = plain.held.peak_nbytes
    # The first draft takes all copies for done, to see when each is needed.
    for _ in range(MOST_DRAFTS):
        draft = Draft(problem, graph, summed, device, large_nbytes, reloads, pairs, room)
        schedule, before = draft.run(), (reloads, pairs)
        reloads = draft.times.plan_reloads(problem.reuses_buffer_of, most_ahead)
        pairs = pairs or find_fusion_pairs(schedule.kernels, problem, graph, large_nbytes)
        if (reloads, pairs) == before:
            break
    return schedule


def estimate_copies(problem: OrderProblem, device: Device, large_nbytes: int = LARGE_NBYTES) -> CopyTimes:
    """Estimates the times of the copies of a loop's body, in an order which takes all copies for done."""
    graph = KernelGraph(problem.eqns, problem.outs)
    summed = find_summed_products(problem, graph)
    draft = Draft(problem, graph, summed, device, large_nbytes, ReloadPlan(), {})
    draft.run()
    return draft.times


class Draft:
    """A pass over the kernels of a program which places each kernel once.

    Attributes:
      times: the times of the copies in this draft.
      held: the device memory held by the results of the kernels placed so far.
    """

    def __init__(
        self,
        problem: OrderProblem,
        graph: KernelGraph,
        summed: SummedProducts,
        device: Device,
        large_nbytes: int,
        reloads: ReloadPlan,
        pairs: Mapping[int, int],
        room: int = 0,
    ):
        self._problem, self._eqns, self._graph, self._device = problem, problem.eqns, graph, device
        self._large_nbytes, self._pairs = large_nbytes, pairs
        self._reloads, self._room = reloads, room
        self._collectives = Collectives(problem, graph, large_nbytes, device)
        self.times = CopyTimes(problem.eqns, graph, device)
        self.held = HeldMemory(problem.eqns, problem.outs)
        self._waits = CopyWaits(problem.eqns, self.times, device, keeps_pace=problem.options.keeps_pace)
        self._summed = summed
        self._chain = Chain(problem, graph, large_nbytes, pairs, summed, self._waits)
        self._placed: set[int] = set()
        self._time = 0.0  # ms
        self._available: dict[Var, float] = {}  # result of a reload or collective -> its end, ms
        self._bits: dict[int, Added] = {}  # collective -> a bit of its result
        self._sent_only: dict[int, bool] = {}  # kernel -> whether only copies to the host read its results

    def run(self) -> Schedule:
        """Places all kernels."""
        self._place_first_reloads()
        self._store_arguments()
        waiting = [i for i in self._graph.kernels if self._problem.in_order[i] and self._takes_turns(i)]
        while waiting:
            candidates = self._find_leading(waiting) + waiting[:_LOOKAHEAD]
            self._place(self._take_first_ready(candidates))
            waiting = [i for i in waiting if i not in self._placed]
        for i in self._graph.kernels:
            self._place(i)
        late = frozenset(self.times.find_late_reloads(self._problem.reuses_buffer_of))
        return Schedule(tuple(self._chain.actions), self._chain.renamed, late)

    def _take_first_ready(self, candidates: list[int]) -> int:
        """The first kernel that waits for no copy; where all wait, the one that waits least."""
        ready: dict[int, float] = {}
        for i in candidates:
            ready[i] = self._graph.find_ready_ms(i, self._placed, self._available)
            if ready[i] <= self._time:
                return i
        first = min(ready, key=ready.__getitem__)
        self._time = ready[first]
        return first

    def _takes_turns(self, i: int) -> bool:
        """Whether a kernel waits for its turn; the others run where their results are read, or at the end.

        A compute kernel does, and a sum over a recomputed compute kernel's result: the gradient of a scale
        behind a product would recompute the product at the end of the program, and hold its operands. Of
        products that are added up the last one does, and the others run just before it.
        """
        if is_compute(self._eqns[i]):
            return self._summed.last.get(i, i) == i
        if self._eqns[i].primitive.name != "reduce_sum":
            return False
        makers = (self._graph.maker[v] for v in self._graph.reads[i] if v in self._graph.maker)
        return any(is_compute(self._eqns[j]) and not self._problem.in_order[j] for j in makers)

    def _find_leading(self, waiting: list[int]) -> list[int]:
        """Finds the kernels before collectives with room in memory beside the other candidates."""
        leading = [i for i in self._collectives.leading if i not in self._placed] if self._room else []
        others = (new_nbytes(self._eqns[i]) for i in waiting[:_LOOKAHEAD] if i not in leading)
        room = self._room - self.held.nbytes - max(others, default=0)
        return self._collectives.limit_to_room(leading[:_LOOKAHEAD], room)

    def _place_first_reloads(self) -> None:
        """Estimates when reloads end, and places the reloads which start with the program."""
        time, ends = 0.0, {}
        for i in self._reloads.order:
            time += self.times.estimate_reload_ms(i)
            ends[i] = time
        for i in dict.fromkeys((*self._reloads.order, *self._graph.kernels)):
            if compat.transfer_in(self._eqns[i]) == "H2D":
                self._available[self._eqns[i].outvars[0]] = ends.get(i, 0.0)
                if self._can_reload(i) and not self._reloads.starts.get(i):
                    self._run_kernel(i)

    def _store_arguments(self) -> None:
        """Writes arguments into their stacks, before their buffers are reused."""
        for i in self._graph.kernels:
            eqn = self._eqns[i]
            is_write = eqn.primitive.name == "dynamic_update_slice" and not compat.is_host(
                eqn.outvars[0].aval
            )
            if is_write and self._graph.maker.keys().isdisjoint(self._graph.reads[i]):
                self._run_kernel(i, chained=False)

    def _place(self, i: int) -> None:
        """Places kernel `i` after all kernels before it, then the kernels which take no new memory."""
        maker, todo = self._graph.maker, [i]
        while todo:
            j = todo[-1]
            last = self._summed.last.get(j)
            if last is not None and last not in todo and j not in self._placed:
                todo.append(last)
                continue
            others = self._summed.others.get(j, ())
            needs = [v for k in (*others, j) for v in self._chain.required_by(k)]
            missing = {m for v in needs if (m := maker.get(v)) is not None and m not in self._placed}
            missing = missing or {k for k in others if k not in self._placed}
            if missing and j not in self._placed:
                todo += sorted(missing, reverse=True)
                continue
            todo.pop()
            if j not in self._placed:
                self._add(j)
                todo += reversed(self._find_freed(j))
                todo += self._find_freed_by_collectives()
                todo += [self._pairs[j]] if j in self._pairs else []

    def _add(self, i: int) -> None:
        eqn = self._eqns[i]
        if is_collective(eqn):
            self._start_collective(i)
            return
        if not is_chained(eqn, self._large_nbytes):
            self._run_kernel(i)
            return
        # A value for which a reload waits lives until the reload starts: results of the program live anyway.
        if is_compute(eqn) or self._chain.last_large in self._problem.outs:
            self._start_due_reloads()
        self._run_kernel(i, self._chain.tie_to_last(i, self._time))
        began = self._time
        self._time += kernel_ms(self._graph, i, self._device)
        if self._problem.waits_for_sends and is_compute(eqn):
            self._waits.hide_behind(eqn, began, self._time)
        self.times.add(i, self._time)

    def _start_collective(self, i: int) -> None:
        """Starts collective `i` behind the previous collective; only readers of the result wait for it."""
        eqn = self._eqns[i]
        self._run_kernel(i)
        bit = Added(eqn.outvars[0])
        self._chain.actions.append(ReadBit(i, bit))
        results = self._chain.add_barrier(eqn.outvars[0], bit, i)
        self._chain.substitutes[eqn.outvars[0]], self._bits[i] = results
        end = self._collectives.start(i, self._time)
        self._time = self._time if self._room else end
        self._available |= dict.fromkeys(eqn.outvars, end)
        self.times.add(i, end, is_chained=False)

    def _start_due_reloads(self) -> None:
        for j, start in self._reloads.starts.items():
            if j not in self._placed and start <= self._chain.length and self._can_reload(j):
                self._run_kernel(j, self._chain.tie_reload(j))

    def _find_freed_by_collectives(self) -> list[int]:
        """The kernels to place next because a collective has ended."""
        ended = self._collectives.pop_ended(self._time)
        for v in (v for i in ended for v in self._graph.reads[i] if not self._chain.unread[v]):
            self.held.free(v)
        return [j for i in ended for j in reversed(self._find_freed(i))]

    def _find_freed(self, i: int) -> list[int]:
        """The kernels to place next because kernel `i` is placed; places kernels of small results itself."""
        readers = {j: None for v in self._eqns[i].outvars for j in self._graph.readers.get(v, ())}
        freed = self._find_reductions(i)
        for j in readers:
            if j not in self._placed and (self._takes_no_memory(j) or self._is_ready_to_send(j)):
                freed.append(j)
            elif j not in self._placed and self._makes_small_of_large(j):
                self._run_kernel(j)
                self._chain.small_results += self._eqns[j].outvars
            elif j not in self._placed and self._only_leaves(j):
                self._run_kernel(j, chained=False)
        return freed

    def _find_reductions(self, i: int) -> list[int]:
        """The sums that can run now and free a value that kernel `i` has read: they read it last."""
        ended = [v for v in self._graph.reads[i] if self._chain.unread[v] == 1 and v in self._graph.maker]
        readers = {j: None for v in ended for j in self._graph.readers[v] if j not in self._placed}
        return [
            j for j in readers if self._eqns[j].primitive.name == "reduce_sum" and self._takes_no_memory(j)
        ]

    def _can_reload(self, i: int) -> bool:
        """Whether the operand of reload `i` is on the host, and the buffer for the result is free."""
        argument = self._problem.reuses_buffer_of.get(self._eqns[i].outvars[0])
        readers = () if argument is None else self._graph.readers.get(argument, ())
        is_sent = all(
            v not in self._graph.maker or v in self._chain.substitutes for v in self._graph.reads[i]
        )
        return is_sent and self._placed.issuperset(readers)

    def _takes_no_memory(self, i: int) -> bool:
        """Whether move kernel `i` can run now, in the memory of operands without other readers left."""
        eqn, reads = self._eqns[i], self._graph.reads[i]
        if compat.transfer_in(eqn) == "D2H":
            return all(self._graph.maker.get(v, -1) in self._placed for v in reads)
        if is_compute(eqn) or not is_chained(eqn, self._large_nbytes) or not self._are_available(reads):
            return False
        ending = [v for v in reads if self._chain.unread[v] == 1]
        freed = sum(compat.nbytes(v.aval) for v in ending if v in self._graph.maker)
        if self._problem.donates:
            replaced = [v.aval for v in eqn.outvars if v in self._problem.outs]
            freed += sum(
                compat.nbytes(v.aval) for v in ending if v not in self._graph.maker and v.aval in replaced
            )
        return new_nbytes(eqn) <= freed

    def _is_ready_to_send(self, i: int) -> bool:
        """Whether a move kernel can run now, and makes only what is sent to the host."""
        return self._is_sent_only(i) and self._are_available(self._graph.reads[i])

    def _is_sent_only(self, i: int) -> bool:
        """Whether only copies to the host read the results, and move kernels that make what these copy."""
        if i not in self._sent_only:
            eqn, readers = self._eqns[i], [self._graph.readers.get(v, ()) for v in self._eqns[i].outvars]
            self._sent_only[i] = (
                not (is_compute(eqn) or compat.transfer_in(eqn))
                and all(readers)
                and self._problem.outs.isdisjoint(eqn.outvars)
                and all(
                    compat.transfer_in(self._eqns[j]) == "D2H" or self._is_sent_only(j)
                    for j in itertools.chain(*readers)
                )
            )
        return self._sent_only[i]

    def _only_leaves(self, i: int) -> bool:
        """Whether a move kernel makes a result of the program, larger than its operands, and nothing else.

        A loop writes the result into its stack in the same kernel, if nothing waits for the kernel.
        """
        eqn, made, maker = self._eqns[i], set(self._eqns[i].outvars), self._graph.maker
        if is_compute(eqn) or compat.transfer_in(eqn) or not made <= self._problem.outs:
            return False
        if any(v in self._graph.readers for v in made):
            return False
        return all(maker.get(v, -1) in self._placed or v not in maker for v in self._graph.reads[i])

    def _makes_small_of_large(self, i: int) -> bool:
        """Whether kernel `i` is a move kernel, can run now, and makes a small value from a large value.

        The next compute kernel waits for the small value, so that the large value does not live longer. XLA
        may fuse kernel `i` with move kernels before the compute kernel.
        """
        eqn, reads = self._eqns[i], self._graph.reads[i]
        if is_compute(eqn) or compat.transfer_in(eqn) or is_chained(eqn, self._large_nbytes):
            return False
        if all(compat.is_host(v.aval) for v in eqn.outvars):  # a write into a host stack: a send under way
            return False
        return self._are_available(reads) and any(compat.nbytes(v.aval) >= self._large_nbytes for v in reads)

    def _are_available(self, values: list[Var]) -> bool:
        """Whether values are made, or reloaded, by now."""
        maker = self._graph.maker
        made = all(maker[v] in self._placed for v in values if v in maker)
        return made and all(self._available.get(v, 0.0) <= self._time for v in values)

    def _run_kernel(self, i: int, behind: Substitutes | None = None, *, chained: bool | None = None) -> None:
        """Places kernel `i`, which reads `behind` in place of its operands."""
        eqn, behind, chain = self._eqns[i], behind or {}, self._chain
        self._placed.add(i)
        if compat.transfer_in(eqn) == "H2D":
            chain.delay_reload(i)
        elif compat.transfer_in(eqn) == "D2H":
            self.times.add_send(i)
        chain.actions.append(self._make_run(i, behind))
        self.held.make(i)
        chain.append(i, behind, chained=is_chained(eqn, self._large_nbytes) if chained is None else chained)
        if self._problem.waits_for_sends:
            self._waits.start(eqn, self._time)
        for v in self._graph.reads[i]:
            chain.unread[v] -= 1
            if not chain.unread[v] and not is_collective(eqn):
                self.held.free(v)
            self._waits.mark_read(v)
            if v in self._available and not is_collective(self._eqns[self._graph.maker[v]]):
                self.times.first_reads.setdefault(self._graph.maker[v], chain.length)

    def _make_run(self, i: int, behind: Substitutes) -> Run:
        equations = (*self._graph.fused[i], i)
        reads = {v for j in equations for v in self._eqns[j].invars if isinstance(v, Var)}
        operands: Substitutes = {}
        for replaced in (self._chain.substitutes, self._chain.renamed, behind):
            operands |= {v: replaced[v] for v in reads if v in replaced}
        if not is_collective(self._eqns[i]):
            return Run(equations, operands)
        bits = tuple(self._bits[j] for j in self._collectives.find_awaited(i))
        made_inside = {v for j in equations for v in self._eqns[j].outvars}
        waiting = [v for v in self._eqns[i].invars if bits and can_wait(v, [bit.of for bit in bits])]
        elements: Substitutes = {
            v: Added(v) for v in waiting if isinstance(v, Var) and v not in operands and v not in made_inside
        }
        self._chain.elements |= elements
        return Run(equations, operands, bits, elements)
