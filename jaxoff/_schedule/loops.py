"""Scans written out as while loops, so that what enters and leaves their bodies has a place in the order.

`jax.lax.scan` slices its operands before an iteration and writes its results into their stacks after it.
Written out:

- gradients go into their stacks as soon as they are made, and leave their memory;
- a stack of residuals on the host gets a spare row, through which a reload can wait for its time (see
  `jaxoff._schedule.order`);
- a reload that could not be in time starts in the iteration before, into the memory of the one before. The
  device copies that one elsewhere if the iteration would read it too long. For the first iteration of the
  backward loop, the last iteration of the forward loop leaves that residual on the device;
- what is made so late in an iteration that its copy would not end with the iteration is sent in the next one.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxoff._device.profile import Device
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import ClosedJaxpr, Jaxpr, JaxprEqn, ScanLayout, Var
from jaxoff._jaxpr.dataflow import count_reads, index_makers, mark_dependents
from jaxoff._jaxpr.inline import Renamed, inline_calls, resolve, trace_call
from jaxoff._jaxpr.kernels import back_to_the_kernel
from jaxoff._jaxpr.primitives import is_compute
from jaxoff._jaxpr.stack_slices import Pieces
from jaxoff._schedule.collectives import cast_before_gathers
from jaxoff._schedule.decide import decide, estimate_copies
from jaxoff._schedule.dependency_kernels import copy_aside
from jaxoff._schedule.emit import emit
from jaxoff._schedule.problem import OrderProblem, SpareRow

# No row that an iteration reads or writes has the next iteration's count for its index. XLA would compute
# both as one value, in the memory of the count, behind all that still reads that.
_FIRST_COUNT = 3


@dataclasses.dataclass(frozen=True)
class Loop:
    """A scan that moves residuals.

    Attributes:
      eqn: the scan.
      layout: how its operands and results divide.
      body: its body, calls inlined.
    """

    eqn: JaxprEqn
    layout: ScanLayout
    body: Jaxpr

    @staticmethod
    def of(eqn: JaxprEqn) -> Loop | None:
        """The scan in an equation, or None where it cannot be written out."""
        layout = compat.scan_in(eqn)
        if layout is None or layout.unroll not in (1, False) or eqn.params["jaxpr"].consts:
            return None
        body = eqn.params["jaxpr"].jaxpr
        renamed: Renamed = {}
        eqns = list(inline_calls(body.eqns, renamed))
        if compat.has_side_effects(body):
            return None
        eqns = cast_before_gathers(eqns, [resolve(renamed, v) for v in body.outvars], renamed)
        return Loop(eqn, layout, body.replace(eqns=eqns, outvars=[resolve(renamed, v) for v in body.outvars]))

    @property
    def step(self) -> int:
        return -1 if self.eqn.params["reverse"] else 1

    @property
    def first(self) -> int:
        """The index of the first iteration."""
        return self.layout.length - 1 if self.step < 0 else 0

    def split(self, operands: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Constants, carry and xs."""
        first, last = self.layout.num_consts, self.layout.num_consts + self.layout.num_carry
        return operands[:first], operands[first:last], operands[last:]

    def index_copies(self, kind: str) -> dict[Any, JaxprEqn]:
        """The copies in the body, by operand if they come from the host, by result if they go there."""
        found: list[Any] = [eqn for eqn in self.body.eqns if compat.transfer_in(eqn) == kind]
        return {(eqn.invars[0] if kind == "H2D" else eqn.outvars[0]): eqn for eqn in found}

    def find_reloads(self) -> dict[int, JaxprEqn]:
        """By number of the xs, the copy from the host that alone reads it."""
        copies, (_, _, xs) = self.index_copies("H2D"), self.split(self.body.invars)
        reads = count_reads(self.body.eqns, self.body.outvars)
        return {k: copies[x] for k, x in enumerate(xs) if x in copies and reads[x] == 1}

    def find_sends(self) -> dict[int, JaxprEqn]:
        """By number of the ys, the copy to the host whose result it is and nothing else."""
        copies, reads = self.index_copies("D2H"), count_reads(self.body.eqns, self.body.outvars)
        return {k: copies[y] for k, y in self._ys() if y in copies and reads[y] == 1}

    def _ys(self) -> Iterator[tuple[int, Var]]:
        """The ys that are not constants, by number."""
        for k, y in enumerate(self.body.outvars[self.layout.num_carry :]):
            if isinstance(y, Var):
                yield k, y

    def find_kept(self) -> set[int]:
        """The ys that a kernel makes, and that the body reads as well."""
        eqns, found = self.body.eqns, set()
        maker = index_makers(eqns)
        reads = count_reads(eqns, self.body.outvars)
        for k, y in self._ys():
            way = [] if compat.is_host(y.aval) else list(back_to_the_kernel(y, maker, eqns))
            if way and is_compute(eqns[way[-1][1]]) and any(reads[v] > 1 for v, _ in way):
                found.add(k)
        return found

    def to_problem(self) -> OrderProblem:
        """The body, to be put in order."""
        _, carry, _ = self.split(self.body.invars)
        results = frozenset(v for v in self.body.outvars if isinstance(v, Var))
        in_order = mark_dependents(self.body.eqns, set(carry))
        return OrderProblem(tuple(self.body.eqns), results, tuple(in_order), waits_for_sends=False)


@dataclasses.dataclass(frozen=True)
class HostStack:
    """A stack on the host that one loop writes and another reads backwards.

    Attributes:
      writer, reader: indices of the equations of the two loops.
      ys, xs: the index of the stack among the ys of the writer and among the xs of the reader.
      prefetched: iteration i of the reader reloads the row of iteration i+1.
      send_deferred: iteration i of the writer sends the value of iteration i-1, because the send would not
        finish in its own iteration. Implies `prefetched`: the last value stays on the device and starts the
        reader.
      overwrites: with `send_deferred`, a new value is written into the buffer of the value before it, which
        was sent by then. Otherwise the device copies the new value there after the send.
      row_offset: rows before the first layer's row: 1 where the spare row stands first, 0 where it stands
        last.
    """

    writer: int
    ys: int
    reader: int
    xs: int
    prefetched: bool
    send_deferred: bool
    overwrites: bool
    row_offset: int


def find_host_stacks(
    loops: Mapping[int, Loop], eqns: list[JaxprEqn], outvars: Iterable[Any], device: Device, large_nbytes: int
) -> Iterator[HostStack]:
    """The stacks that pass from loop to loop and that nothing else reads."""
    uses = count_reads(eqns, outvars)
    written = {
        loop.eqn.outvars[loop.layout.num_carry + k]: (i, k)
        for i, loop in loops.items()
        for k in loop.find_sends()
    }
    late_sends = {
        i: estimate_copies(loop.to_problem(), device, large_nbytes).find_late_sends()
        for i, loop in loops.items()
        if any(writer == i for writer, _ in written.values())
    }
    for i, loop in loops.items():
        reloads = loop.find_reloads()
        late = (
            estimate_copies(loop.to_problem(), device, large_nbytes).find_reloads_to_prefetch()
            if reloads
            else []
        )
        for k, v in enumerate(loop.split(loop.eqn.invars)[2]):
            if k not in reloads or v not in written or uses[v] != 1:
                continue
            writer, ys = written[v]
            if loops[writer].step == loop.step or loops[writer].layout.length != loop.layout.length:
                continue
            sent = loops[writer].find_sends()[ys].outvars[0]
            send_deferred, overwrites = sent in late_sends[writer], late_sends[writer].get(sent, False)
            prefetched = send_deferred or reloads[k].outvars[0] in late
            # A prefetching reader reads one row past the last; otherwise the row before the first is written.
            in_front = (loop.step < 0) == prefetched
            yield HostStack(writer, ys, i, k, prefetched, send_deferred, overwrites, int(in_front))


def row_nbytes(loop: Loop, xs: int) -> int:
    """Bytes of one row of a stack that a loop reads, on all devices."""
    mesh = loop.eqn.ctx.cur_abstract_mesh
    row = loop.split(loop.body.invars)[2][xs].aval
    return compat.nbytes(row) * (1 if mesh.empty else mesh.size)


def write_out(
    loop: Loop,
    operands: list[Any],
    pieces: Pieces,
    given: Mapping[int, Any],
    sends: Mapping[int, HostStack],
    takes: Mapping[int, HostStack],
    firsts: Mapping[int, Any],
    device: Device,
    large_nbytes: int,
    *,
    is_whole: bool,
) -> tuple[list[JaxprEqn], list[Any], dict[int, Any]]:
    """A scan as a while loop with an ordered body.

    Args:
      loop: the scan.
      operands: of the scan; stacks that it takes from another loop have a spare row.
      pieces: the rows that it reads and writes of stacks that it has pieces of; the operands are whole.
      given: by number of the ys, stacks that another loop has written rows of.
      sends: by number of the ys, stacks that another loop takes.
      takes: by number of the xs, stacks that it takes from another loop.
      firsts: by number of the xs, the values of the first iteration for what is copied back ahead.
      device: speeds, to estimate when copies arrive.
      large_nbytes: as for `jaxoff._schedule.order.ordered`.
      is_whole: whether the compiler leaves its values on one device.

    Returns:
      Equations, the results of the scan, and by number of the ys the last iteration's value on the device,
      for stacks that are copied back ahead.
    """
    iteration = _Iteration(loop, pieces, sends, takes)

    def run(consts, carry, xs, begun, arrived):
        stacks = [
            begun[k] if k in begun else compat.empty(v.aval, rows, is_whole=is_whole)
            for k, (v, rows) in enumerate(iteration.ys())
        ]
        lasts = [compat.empty(v.aval, None, is_whole=is_whole) for v in iteration.lasts]
        state = _State(
            jnp.int32(iteration.first_count), carry, stacks, lasts, [xs[k] for k in takes], arrived
        )
        body = iteration.ordered(consts, xs, state, device, large_nbytes)

        def step(state):
            leaves, structure = jax.tree.flatten(state)
            return jax.tree.unflatten(structure, compat.jaxpr_as_fun(body)(*consts, *xs, *leaves))

        end = iteration.first_count + loop.layout.length
        return lax.while_loop(lambda state: state.count < end, step, state)

    consts, carry, xs = loop.split(operands)
    args = consts, carry, xs, dict(given), [firsts[k] for k in iteration.prefetched]
    eqns, results = trace_call(run, args, like=loop.eqn)
    end = len(carry) + len(iteration.ys())
    return eqns, results[1 : 1 + end], dict(zip(iteration.leaves, results[1 + end :], strict=False))


class _State(NamedTuple):
    """What an iteration hands to the next one.

    Attributes:
      count: the number of iterations that are over, and `_Turn.first_count`.
      carry: of the scan.
      stacks: of the ys.
      lasts: the latest values of what the loop leaves on the device at its end.
      taken: stacks from another loop.
      arrived: what was copied back from them ahead.
    """

    count: Any
    carry: list[Any]
    stacks: list[Any]
    lasts: list[Any]
    taken: list[Any]
    arrived: list[Any]


class _Iteration:
    """One iteration of a loop that is written out.

    Attributes:
      prefetched: the xs that are reloaded one iteration ahead, in the order of `_State.arrived`.
      leaves: the ys whose last value stays on the device, in the order of `_State.lasts`.
      lasts: their values in the body of the scan.
      first_count: the count of the first iteration.
    """

    def __init__(
        self, loop: Loop, pieces: Pieces, sends: Mapping[int, HostStack], takes: Mapping[int, HostStack]
    ):
        self._loop, self._pieces, self._sends, self._takes = loop, pieces, sends, takes
        self.first_count = _FIRST_COUNT + pieces.most
        self.prefetched = [k for k, stack in takes.items() if stack.prefetched]
        self.leaves = [k for k, stack in sends.items() if stack.prefetched]
        self._kept = loop.find_kept()
        self.lasts: list[Any] = [loop.find_sends()[k].invars[0] for k in self.leaves]

    def ys(self) -> list[tuple[Any, int]]:
        """What each stack holds, and its rows."""
        values, written = self._loop.body.outvars[self._loop.layout.num_carry :], self._pieces.written
        length = self._loop.layout.length
        rows = dict.fromkeys(self._sends, length + 1) | {k: w.rows for k, w in written.items()}
        return [(v, rows.get(k, length)) for k, v in enumerate(values)]

    def ordered(
        self, consts: list[Any], xs: list[Any], state: _State, device: Device, large_nbytes: int
    ) -> ClosedJaxpr:
        """The program of an iteration, in order: constants, xs and a state, to the next state."""
        order = functools.partial(self._ordered, consts, xs, state, device, large_nbytes)
        body, late = order([])
        return order(late)[0] if late else body

    def _ordered(
        self,
        consts: list[Any],
        xs: list[Any],
        state: _State,
        device: Device,
        large_nbytes: int,
        moved_aside: list[int],
    ) -> tuple[ClosedJaxpr, list[int]]:
        """The program of an iteration that copies the xs `moved_aside`, and which others come back late.

        A copy is late if the iteration reads too long the value whose memory it takes.
        """
        loop, (given, structure) = self._loop, jax.tree.flatten(state)
        avals = jax.tree.map(jax.typeof, (consts, xs, state))
        closed = compat.trace_like(loop.eqn, functools.partial(self._run, moved_aside), avals)
        jaxpr, renamed = closed.jaxpr, {}
        eqns = list(inline_calls(jaxpr.eqns, renamed))
        outs = [resolve(renamed, v) for v in jaxpr.outvars]
        before = jax.tree.unflatten(structure, jaxpr.invars[-len(given) :])
        outs, copies = outs[: len(given)], outs[len(given) :]
        after = jax.tree.unflatten(structure, outs)
        problem = OrderProblem(
            tuple(eqns),
            frozenset(v for v in outs if isinstance(v, Var)),
            tuple(mark_dependents(eqns, set(before.carry))),
            waits_for_sends=False,
            iteration=before.count,
            spare_rows={
                v: SpareRow(
                    self._row_at(stack.row_offset - (0 if stack.prefetched else loop.step)), loop.step
                )
                for v, stack in zip(before.taken, self._takes.values(), strict=True)
            },
            reuses_buffer_of=dict(zip(after.arrived, before.arrived, strict=True)),
            moved_aside=frozenset(copies),
            overwrites_after_send={
                v: after.stacks[k]
                for k, v in zip(self.leaves, after.lasts, strict=True)
                if self._sends[k].overwrites
            },
        )
        schedule = decide(problem, device, large_nbytes)
        eqns, renamed = emit(schedule, problem)
        late = [k for k, v in zip(self.prefetched, after.arrived, strict=True) if v in schedule.late]
        jaxpr = jaxpr.replace(eqns=eqns, outvars=[resolve(renamed, v) for v in outs])
        return closed.replace(jaxpr=jaxpr), late

    def _row_at(self, offset: int) -> int:
        """A row, so many behind that of the iteration, but for what depends on the count of iterations."""
        return self._loop.first - self._loop.step * self.first_count + offset

    def _run(
        self, moved_aside: list[int], consts: list[Any], xs: list[Any], state: _State
    ) -> tuple[_State, list[Any]]:
        """The next state, and copies of what came back ahead."""
        loop, index = self._loop, self._row_at(0) + self._loop.step * state.count
        taken = dict(zip(self._takes, state.taken, strict=True))
        offsets, written = self._pieces.offsets, self._pieces.written
        inputs: dict[int, Any] = {
            k: _row(x, index + offsets.get(k, 0)) for k, x in enumerate(xs) if k not in taken
        }
        for k, stack in taken.items():
            if k not in self.prefetched:
                inputs[k] = _row(stack, index + self._takes[k].row_offset)
        inputs |= dict(zip(self.prefetched, state.arrived, strict=True))
        copies = {k: copy_aside(inputs[k], state.count) for k in moved_aside}
        inputs |= {k: lax.optimization_barrier(copy) for k, copy in copies.items()}
        deferred = [k for k in self.leaves if self._sends[k].send_deferred]
        body = _between_copies(loop, self.prefetched, deferred, self.lasts)
        out = compat.jaxpr_as_fun(body)(*consts, *state.carry, *(inputs[k] for k in range(len(xs))))
        carry, out = out[: loop.layout.num_carry], out[loop.layout.num_carry :]
        stacks, lasts = list(state.stacks), out[len(state.stacks) :]
        for j, k in enumerate(self.leaves):
            if k in deferred and not self._sends[k].overwrites:
                lasts[j] = copy_aside(lasts[j], state.count)
        for k, y in enumerate(out[: len(stacks)]):
            at = index + (self._sends[k].row_offset if k in self._sends else 0)
            at += written[k].offset if k in written else 0
            if k in self._kept:  # or XLA computes it twice, the second time in its place in the stack
                y = copy_aside(y, state.count)
            if k in deferred:  # the first iteration writes something, anything, into the spare row
                value = state.lasts[self.leaves.index(k)]
                y, at = jax.device_put(value, jax.memory.Space.Host), at - loop.step
            stacks[k] = _with_row(stacks[k], y, at)
        following = (_row(taken[k], index + loop.step + self._takes[k].row_offset) for k in self.prefetched)
        arrived = [jax.device_put(row, jax.memory.Space.Device) for row in following]
        return _State(state.count + 1, carry, stacks, lasts, state.taken, arrived), list(copies.values())


def _between_copies(loop: Loop, prefetched: list[int], deferred: list[int], lasts: list[Any]) -> ClosedJaxpr:
    """The body, given some xs on the device, which leaves some ys there, and also returns some values."""
    body, reloads, sends = loop.body, loop.find_reloads(), loop.find_sends()
    consts, carry, xs = loop.split(body.invars)
    outs = list(body.outvars)
    gone = [reloads[k] for k in prefetched]
    for k in prefetched:
        xs[k] = reloads[k].outvars[0]
    for k in deferred:
        gone.append(sends[k])
        outs[loop.layout.num_carry + k] = sends[k].invars[0]
    eqns = [eqn for eqn in body.eqns if not any(eqn is other for other in gone)]
    jaxpr = body.replace(invars=[*consts, *carry, *xs], eqns=eqns, outvars=[*outs, *lasts])
    return loop.eqn.params["jaxpr"].replace(jaxpr=jaxpr)


def _row(stack, index):
    return lax.dynamic_index_in_dim(stack, index, 0, keepdims=False, allow_negative_indices=False)


def _with_row(stack, value, index):
    return lax.dynamic_update_index_in_dim(stack, value, index, 0, allow_negative_indices=False)
