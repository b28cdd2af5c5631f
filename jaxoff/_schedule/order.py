"""One order for the values of a program that moves residuals, so that their memory is used again.

Under CUDA graphs scheduled CONCURRENT, XLA lets two values share memory only where one is provably before
the other by dependency. Gradients of weights and recomputed values hang loosely in a backward pass, so that
nearly everything would live at once. Optimization barriers from one large value to the next give the
dependencies back; the copies between device and host stay outside of that chain and run beside it.

No barrier holds back a copy out of a stack on the host: XLA fuses the copy with the slice before it and drops
what is between. A dependency through the stack itself does. An element of the value to wait for is written
into a row of the stack that nothing reads any more, and the copy reads the stack after that.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping

from jaxoff._device.kernel_time import kernel_ms
from jaxoff._device.profile import Device
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import JaxprEqn, Var
from jaxoff._jaxpr.inline import Renamed, resolve, trace_call
from jaxoff._jaxpr.kernels import KernelGraph, converts_all_slices, new_nbytes
from jaxoff._jaxpr.primitives import is_collective, is_compute, is_narrowing
from jaxoff._schedule.collectives import Collectives, waiting
from jaxoff._schedule.copy_times import CopyTimes, Reloads
from jaxoff._schedule.copy_waits import CopyWaits
from jaxoff._schedule.dependency_kernels import delay_iteration, read_bit, write_element
from jaxoff._schedule.liveness import Held, find_fusion_pairs
from jaxoff._schedule.problem import OrderProblem

# Values of fewer bytes are not worth a place in the chain.
LARGE_NBYTES = 1 << 20
# The most orders of one program: each plans its copies from the times of the order before, until the plan for
# copies stays. Two or three orders reach it in all programs of the benchmarks (bench/LOG.md).
MOST_DRAFTS = 4
# How many equations ahead may be taken first while a copy is on its way.
_LOOKAHEAD = 8


def ordered(program: OrderProblem, device: Device, large_nbytes: int = LARGE_NBYTES) -> Ordered:
    """Puts the large values of a straight-line program into one chain.

    An equation that has to wait for a copy from the host lets a later one go first. What frees as much memory
    as it takes comes at once. A copy from the host starts as late as it can and still be in time.

    What leads to a collective between devices goes first, as far as it takes no more memory than the program
    in its own order does at its fullest. A collective is no part of the chain: only what reads it waits.

    Args:
      program: the program.
      device: speeds, to estimate when copies arrive.
      large_nbytes: from how many bytes on a value has a place in the chain.

    Returns:
      Equations that compute the same results, with barriers between them.
    """
    # First as if every copy were there, to see when each is needed; then with the copies in that order.
    graph, reloads = KernelGraph(program.eqns, program.outs | program.moved_aside), Reloads()
    pairs: dict[int, int] = {}
    room = 0
    if any(is_collective(program.eqns[i]) for i in graph.kernels):
        plain = Order(program, graph, device, large_nbytes, reloads, pairs)
        plain.run()
        room = plain.held.fullest
    for _ in range(MOST_DRAFTS):
        draft = Order(program, graph, device, large_nbytes, reloads, pairs, room)
        order, before = draft.run(), (reloads, pairs)
        reloads = draft.times.reloads(program.reuses_buffer_of)
        pairs = pairs or find_fusion_pairs(list(draft.placed), program, graph, large_nbytes)
        if (reloads, pairs) == before:
            break
    return order


def estimate_copies(program: OrderProblem, device: Device, large_nbytes: int = LARGE_NBYTES) -> CopyTimes:
    """The times of the copies of a loop's body in order, as if they took none."""
    order = Order(program, KernelGraph(program.eqns, program.outs), device, large_nbytes, Reloads(), {})
    order.run()
    return order.times


@dataclasses.dataclass(frozen=True)
class Ordered:
    """A straight-line program in order.

    Attributes:
      eqns: its equations, with barriers between them.
      renamed: by result that is another value now, which one.
      late: the copies from the host that would not end with the program, as their memory is taken too long.
    """

    eqns: list[JaxprEqn]
    renamed: Renamed
    late: frozenset[Var] = frozenset()


class Order:
    """The state of an ordering.

    Attributes:
      times: of the copies.
      held: the memory.
      placed: the kernels, in order.
    """

    def __init__(
        self,
        program: OrderProblem,
        graph: KernelGraph,
        device: Device,
        large_nbytes: int,
        reloads: Reloads,
        pairs: Mapping[int, int],
        room: int = 0,
    ):
        self.times = CopyTimes(program.eqns, graph, device)
        self._eqns, self._program, self._device, self._plan = program.eqns, program, device, reloads
        self._large_nbytes, self._pairs = large_nbytes, pairs
        self._graph, self._maker = graph, graph.maker
        self._collectives, self._room = Collectives(program, graph, large_nbytes, device), room
        self.held = Held(program.eqns, program.outs)
        self._reads, self._between, self._readers = graph.reads, graph.fused, graph.readers
        self._displaced = {
            i: v for made, v in program.overwrites_after_send.items() for i in graph.find_makers_of(made)
        }
        self._unread = {v: len(readers) for v, readers in self._readers.items()}
        self.placed: dict[int, None] = {}
        self._out: list[JaxprEqn] = []
        self._last: Var | None = None
        self._last_large: Var | None = None  # an element of a small link may be known before the link
        self._behind: Renamed = {}  # what stands for values that the last link reads
        self._before_last: Var | None = None  # and before the light links that can be one kernel with it
        self._length = 0
        self._level: dict[Var, int] = {}  # the last place in the chain that a value is known to follow
        self._arrives: dict[Var, float] = {}  # when copies from the host, and collectives, are there
        self._time = 0.0
        self._waits = CopyWaits(program.eqns, self.times, device)
        self._made_small: list[Var] = []  # little of something large, for the next heavy kernel to wait for
        self._bits: dict[int, Var] = {}  # by collective, a bit of what it brings
        self._shown: Renamed = {}  # by link that a collective sends, an element of it for others to wait for
        self._left: Renamed = {}  # by copy, what stands for it once it is waited for
        self._renamed: Renamed = {}  # by result, or by stack that was written to, what it has become

    def run(self) -> Ordered:
        self._start_reloads()
        self._store_arguments()
        waiting = [i for i in self._graph.kernels if self._program.in_order[i] and is_compute(self._eqns[i])]
        while waiting:
            ahead = self._leading(waiting) + waiting[:_LOOKAHEAD]
            ready = {i: self._graph.find_ready_ms(i, self.placed, self._arrives) for i in ahead}
            first = next((i for i in ahead if ready[i] <= self._time), min(ahead, key=lambda i: ready[i]))
            self._time = max(self._time, ready[first])
            self._place(first)
            waiting = [i for i in waiting if i not in self.placed]
        for i in self._graph.kernels:
            self._place(i)
        return Ordered(self._out, self._renamed, frozenset(self.times.late(self._program.reuses_buffer_of)))

    def _leading(self, waiting: list[int]) -> list[int]:
        """What goes first: it leads to collectives for which, and for others beside them, there is room."""
        leading = [i for i in self._collectives.leading if i not in self.placed] if self._room else []
        others = (new_nbytes(self._eqns[i]) for i in waiting[:_LOOKAHEAD] if i not in leading)
        room = self._room - self.held.nbytes - max(others, default=0)
        return self._collectives.for_which_is_room(leading[:_LOOKAHEAD], room)

    def _start_reloads(self) -> None:
        """Says when copies from the host arrive; puts first what is not to start later."""
        time, arrives = 0.0, {}
        for i in self._plan.order:
            time += self.times.reload_ms(i)
            arrives[i] = time
        order = dict.fromkeys((*self._plan.order, *self._graph.kernels))
        for i in order:
            if compat.transfer_in(self._eqns[i]) == "H2D":
                self._arrives[self._eqns[i].outvars[0]] = arrives.get(i, 0.0)
                if self._can_return(i) and not self._plan.starts.get(i):
                    self._emit(i, {})

    def _store_arguments(self) -> None:
        """Writes arguments into the stacks that keep them: later, their memory would be taken."""
        for i in self._graph.kernels:
            eqn = self._eqns[i]
            is_write = eqn.primitive.name == "dynamic_update_slice" and not compat.is_host(
                eqn.outvars[0].aval
            )
            if is_write and self._maker.keys().isdisjoint(self._reads[i]):
                self._emit(i, {}, is_link=False)

    def _place(self, i: int) -> None:
        """Places a kernel and what it needs, then all that frees at least as much memory as it takes."""
        todo = [i]
        while todo:
            j = todo[-1]
            needs = [*self._reads[j], *([self._displaced[j]] if j in self._displaced else ())]
            missing = {m for v in needs if (m := self._maker.get(v)) is not None and m not in self.placed}
            if missing and j not in self.placed:
                todo += sorted(missing, reverse=True)
                continue
            todo.pop()
            if j not in self.placed:
                self._add(j)
                todo += reversed(self._free_after(j))
                todo += self._free_after_collectives()
                todo += [self._pairs[j]] if j in self._pairs else []

    def _add(self, i: int) -> None:
        eqn = self._eqns[i]
        if is_collective(eqn):
            self._start_collective(i)
            return
        if not self._is_link(eqn):
            self._emit(i, {})
            return
        # What a copy waits for lives until that is there: a result lives anyway.
        if is_compute(eqn) or self._last_large in self._program.outs:
            self._start_due_reloads()
        self._emit(i, self._behind_the_last(i))
        began = self._time
        self._time += kernel_ms(self._graph, i, self._device)
        if self._program.waits_for_sends and is_compute(eqn):
            self._waits.hide(eqn, began, self._time)
        self.times.add(i, self._time)

    def _start_collective(self, i: int) -> None:
        """Starts a collective with other devices behind the one before; only what reads it waits for it."""
        eqn = self._eqns[i]
        self._emit(i, {})
        eqns, (bit,) = trace_call(read_bit, [eqn.outvars[0]], like=eqn)
        self._out += eqns
        self._left[eqn.outvars[0]], self._bits[i] = self._barrier(eqn.outvars[0], bit, i)
        end = self._collectives.start(i, self._time)
        self._time = self._time if self._room else end
        self._arrives |= dict.fromkeys(eqn.outvars, end)
        self.times.add(i, end, is_link=False)

    def _free_after_collectives(self) -> list[int]:
        """The kernels that collectives which are over by now make free."""
        over = self._collectives.over(self._time)
        for v in (v for i in over for v in self._reads[i] if not self._unread[v]):
            self.held.free(v)
        return [j for i in over for j in reversed(self._free_after(i))]

    def _start_due_reloads(self) -> None:
        for j, start in self._plan.starts.items():
            if j not in self.placed and start <= self._length and self._can_return(j):
                self._emit(j, {} if self._stack_of(j) else self._tied(self._reads[j], j, (self._last,)))

    def _free_after(self, i: int) -> list[int]:
        """The kernels that an added one makes free; what only leaves the program is added at once."""
        readers = {j: None for v in self._eqns[i].outvars for j in self._readers.get(v, ())}
        free = []
        for j in readers:
            if j not in self.placed and self._is_free(j):
                free.append(j)
            elif j not in self.placed and self._is_small(j):
                self._emit(j, {})
                self._made_small += self._eqns[j].outvars
            elif j not in self.placed and self._only_leaves(j):
                self._emit(j, {}, is_link=False)
        return free

    def _is_link(self, eqn: JaxprEqn) -> bool:
        """Whether an equation has a place in the chain."""
        if compat.transfer_in(eqn) or is_collective(eqn):
            return False
        made = [compat.nbytes(v.aval) for v in eqn.outvars if not compat.is_host(v.aval)]
        largest = max(made, default=0)
        return largest > 0 and (is_compute(eqn) or largest >= self._large_nbytes)

    def _can_return(self, i: int) -> bool:
        """Whether what a copy from the host reads is on the host, and the memory for it free."""
        follows = self._program.reuses_buffer_of.get(self._eqns[i].outvars[0])
        waits = () if follows is None else self._readers.get(follows, ())
        is_there = all(v not in self._maker or v in self._left for v in self._reads[i])
        return is_there and self.placed.keys() >= set(waits)

    def _is_free(self, i: int) -> bool:
        """Whether a light kernel could be computed now, in the memory of what only it still reads."""
        eqn, reads = self._eqns[i], self._reads[i]
        if compat.transfer_in(eqn) == "D2H":
            return all(self._maker.get(v, -1) in self.placed for v in reads)
        if is_compute(eqn) or not self._is_link(eqn) or not self._is_there(reads):
            return False
        freed = sum(compat.nbytes(v.aval) for v in reads if v in self._maker and self._unread[v] == 1)
        return new_nbytes(eqn) <= freed

    def _only_leaves(self, i: int) -> bool:
        """Whether a light kernel makes a result of the program, larger than what it reads, and nothing else.

        A loop writes it into its stack in the same kernel, if nothing waits for it.
        """
        eqn, made = self._eqns[i], set(self._eqns[i].outvars)
        if is_compute(eqn) or compat.transfer_in(eqn) or not made <= self._program.outs:
            return False
        if any(v in self._readers for v in made):
            return False
        return all(self._maker.get(v, -1) in self.placed or v not in self._maker for v in self._reads[i])

    def _is_small(self, i: int) -> bool:
        """Whether a light kernel that could be computed now makes little of something large.

        The next heavy kernel waits for it, since then it holds nothing back: a copy may need that memory.
        Light ones before that may be one kernel with it.
        """
        eqn, reads = self._eqns[i], self._reads[i]
        if is_compute(eqn) or compat.transfer_in(eqn) or self._is_link(eqn):
            return False
        if all(compat.is_host(v.aval) for v in eqn.outvars):  # a write into a stack there: a copy under way
            return False
        return self._is_there(reads) and any(compat.nbytes(v.aval) >= self._large_nbytes for v in reads)

    def _is_there(self, values: list[Var]) -> bool:
        """Whether values are made by now, or have arrived."""
        made = all(self._maker[v] in self.placed for v in values if v in self._maker)
        return made and all(self._arrives.get(v, 0.0) <= self._time for v in values)

    def _behind_the_last(self, i: int) -> Renamed:
        """Ties what a kernel reads to the last link of the chain; says what stands for it."""
        # A barrier over a stack on the host would be a copy of it.
        reads = [v for v in self._reads[i] if not compat.is_host(v.aval)]
        displaced = self._displaced.get(i)
        if not reads or (self._last is None and displaced is None):
            return {}
        if self._last is not None and self._is_beside_the_last(i):
            if not self._behind.keys().isdisjoint(reads):
                return self._behind
            both = self._reads[self._maker[self._last]]
            reads = [v for v in reads if v not in both] or reads
        loose = [v for v in reads if self._level.get(v, 0) < self._length]
        tied = [v for v in loose if v in self._maker and compat.nbytes(v.aval) >= self._large_nbytes]
        arrived = self._waits.due(self._time)
        if is_compute(self._eqns[i]):
            # What the kernel is computed from it waits for anyway.
            pending = [v for v in self._made_small if v not in self._left]
            before = self._graph.find_ancestors_of(i, min((self._maker[v] for v in pending), default=i))
            self._made_small = [v for v in pending if self._maker[v] not in before]
            arrived += self._made_small
        others = [v for v in reads if v is not self._program.iteration]
        if not tied and (len(loose) == len(reads) or displaced is not None):
            tied = sorted(others, key=lambda v: compat.nbytes(v.aval))[:1]
        last = self._before_last if self._continues_the_last(i) else self._last
        behind = self._tied(tied, i, (displaced, last))
        if arrived and others:
            # What the kernel reads of the last link; XLA forgets to wait for that through any other value.
            latest = max(others, key=lambda v: (self._level.get(resolve(behind, v), 0), v not in behind))
            for v in arrived:
                held = resolve(behind, resolve(self._left, latest))
                behind[latest], self._left[v] = self._barrier(held, resolve(self._left, v), i)
                self._waits.end(v)
        return self._iteration_behind_the_last(i) | behind

    def _continues_the_last(self, i: int) -> bool:
        """Whether a kernel and the last link, both light, can be one kernel: no barrier stands between them.

        What else the kernel reads follows the link before. Behind the last one, that would have to be stored.
        What others read as well is a second result of that kernel, if both have one shape.
        """
        last = self._last
        if self._is_beside_the_last(i):
            return True
        if (
            last is None
            or is_compute(self._eqns[i])
            or last not in self._reads[i]
            or last in self._program.outs
        ):
            return False
        if is_compute(self._eqns[self._maker[last]]):  # a kernel that rounds what it computes
            return is_narrowing(self._eqns[i]) and self._unread[last] == 1
        return self._unread[last] == 1 or last.aval == self._eqns[i].outvars[0].aval

    def _is_beside_the_last(self, i: int) -> bool:
        """Whether a kernel was put behind the last link to be one kernel with it; see
        `jaxoff._schedule.liveness.find_fusion_pairs`.
        """
        return self._last is not None and self._pairs.get(self._maker[self._last]) == i

    def _iteration_behind_the_last(self, i: int) -> Renamed:
        """For a kernel that reads large slices of arguments, all in another dtype: the iteration, known late.

        Such slices are copies, which would be made at any time. Others are read in place, if XLA sees how
        their place depends on the iteration.
        """
        if self._program.iteration not in self._reads[i] or self._last_large is None:
            return {}
        if not converts_all_slices((self._eqns[j] for j in self._between[i]), self._large_nbytes):
            return {}
        given = [self._program.iteration, resolve(self._shown, self._last_large)]
        eqns, (late,) = trace_call(delay_iteration, given, like=self._eqns[i])
        self._out += eqns
        return {self._program.iteration: late}

    def _tied(self, values: list[Var], i: int, waits: Iterable[Var | None]) -> Renamed:
        """What stands for values, for a kernel, once others are done."""
        tied: Renamed = {}
        for v in values:
            tied[v] = resolve(self._left, v)
            for wait in waits:
                if wait is not None:
                    tied[v], _ = self._barrier(tied[v], resolve(self._shown, wait), i)
        return tied

    def _barrier(self, v: Var, other: Var, i: int) -> list[Var]:
        """Two values behind both. XLA would take out of a larger barrier what nothing reads behind it."""
        outs, barrier = compat.make_barrier([v, other], like=self._eqns[i])
        self._out.append(barrier)
        self._level |= dict.fromkeys(outs, self._length)
        return outs

    def _stack_of(self, i: int) -> Var | None:
        """The stack with a spare row that a copy from the host reads."""
        return next((v for v in self._reads[i] if v in self._program.spare_rows), None)

    def _hold_back(self, i: int) -> None:
        """Lets a copy out of a stack with a spare row start behind the last place in the chain."""
        stack = self._stack_of(i)
        if stack is None or self._last_large is None:
            return
        spare = self._program.spare_rows[stack]
        operands = (
            resolve(self._renamed, stack),
            resolve(self._shown, self._last_large),
            self._program.iteration,
        )
        write = functools.partial(write_element, spare.first, spare.step)
        eqns, (self._renamed[stack],) = trace_call(write, operands, like=self._eqns[i])
        self._out += eqns

    def _emit(self, i: int, behind: Renamed, *, is_link: bool | None = None) -> None:
        self.placed[i] = None
        if compat.transfer_in(self._eqns[i]) == "H2D":
            self._hold_back(i)
        elif compat.transfer_in(self._eqns[i]) == "D2H":
            self.times.send(i)
        renamed = self._left | self._renamed | behind
        for j in self._between[i]:
            eqn = self._eqns[j]
            outs = [Var(v.aval) for v in eqn.outvars]
            self._out.append(eqn.replace(invars=[resolve(renamed, v) for v in eqn.invars], outvars=outs))
            renamed.update(zip(eqn.outvars, outs, strict=True))
        eqn = self._eqns[i]
        operands = [resolve(renamed, v) for v in eqn.invars]
        if is_collective(eqn):
            bits = [self._bits[j] for j in self._collectives.to_wait_for(i)]
            waits, operands, elements = waiting(eqn, operands, bits)
            self._out += waits
            self._shown |= elements
        self._out.append(eqn.replace(invars=operands))
        self.held.make(i)
        level = max((self._level.get(resolve(behind, v), 0) for v in self._reads[i]), default=0)
        if self._is_link(eqn) if is_link is None else is_link:
            self._length += 1
            level = self._length
            if not self._continues_the_last(i):
                self._before_last = self._last
            self._behind = behind
            self._last = max(eqn.outvars, key=lambda v: compat.nbytes(v.aval))
            if compat.nbytes(self._last.aval) >= self._large_nbytes:
                self._last_large = self._last
        self._level |= dict.fromkeys(eqn.outvars, level)
        if self._program.waits_for_sends:
            self._waits.start(eqn, self._time)
        for v in self._reads[i]:
            self._unread[v] -= 1
            if not self._unread[v] and not is_collective(eqn):
                self.held.free(v)
            self._waits.read(v)
            if v in self._arrives and not is_collective(self._eqns[self._maker[v]]):
                self.times.needed.setdefault(self._maker[v], self._length)
