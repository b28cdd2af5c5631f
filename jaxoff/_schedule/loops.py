"""Scans written out as while loops, so that the scheduler orders the reads, writes and copies of rows, too.

`jax.lax.scan` slices its operands before an iteration, and writes its results into stacks after the
iteration. In a while loop:

- A gradient is written into its stack at once, and the buffer of the gradient becomes free.
- A host stack has a spare row, by which a reload can wait for its start (see `jaxoff._schedule.decide`).
- A reload which cannot be in time is prefetched: it starts one iteration early, and takes the buffer of the
  current iteration's row. If the iteration reads the current row too long, the device moves the row aside.
  For the first iteration of the backward loop, the forward loop leaves its last residual on the device.
- A send which cannot end with its iteration is deferred to the next iteration.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxoff._device.profile import Device
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.allocation import empty
from jaxoff._jaxpr.compat import ClosedJaxpr, Jaxpr, JaxprEqn, ScanLayout, Var
from jaxoff._jaxpr.dataflow import count_reads, index_makers, mark_dependents
from jaxoff._jaxpr.inline import Renamed, inline_calls, resolve, trace_call
from jaxoff._jaxpr.kernels import trace_to_kernel
from jaxoff._jaxpr.primitives import is_compute
from jaxoff._jaxpr.stack_slices import StackSlices
from jaxoff._schedule.collectives import cast_before_gathers
from jaxoff._schedule.decide import decide
from jaxoff._schedule.dependency_kernels import copy_aside
from jaxoff._schedule.emit import emit
from jaxoff._schedule.flat_rows import find_flat, flatten
from jaxoff._schedule.host_stack import HostStack
from jaxoff._schedule.loop_shardings import LoopShardings, pin
from jaxoff._schedule.problem import OrderOptions, OrderProblem, SpareRow
from jaxoff._schedule.updated_rows import (
    UpdatedRows,
    UpdatedStack,
    exchange_beside,
    find_updated_stacks,
    read_row,
    reload_rows,
    send_rows,
    write_row,
)

# The loop counter starts here, above all row offsets, so that the index of a row never equals the counter
# plus 1. XLA would merge the two equal values, and copy insertion would place the index after all readers of
# the counter (bench/LOG.md, "2026-11-21: what the traces of the MoE block and of the Python loop showed").
_FIRST_COUNT = 3


@dataclasses.dataclass(frozen=True)
class Loop:
    """A scan over layers.

    Attributes:
      eqn: equation of the scan.
      layout: numbers of constants and carried values among the scan's operands, and further parameters.
      body: jaxpr of the scan's body, its calls inlined. The rows of `updated` are on the device.
      updated: the stacks whose rows the loop replaces in place.
    """

    eqn: JaxprEqn
    layout: ScanLayout
    body: Jaxpr
    updated: Sequence[UpdatedStack] = ()

    @staticmethod
    def find(eqn: JaxprEqn) -> Loop | None:
        """Returns the scan of an equation, or None if no scan can be written out."""
        layout = compat.scan_in(eqn)
        if not (layout and layout.length) or layout.unroll not in (1, False) or eqn.params["jaxpr"].consts:
            return None
        body = eqn.params["jaxpr"].jaxpr
        renamed: Renamed = {}
        eqns = list(inline_calls(body.eqns, renamed))
        if compat.has_side_effects(body):
            return None
        eqns = cast_before_gathers(eqns, [resolve(renamed, v) for v in body.outvars], renamed)
        body = body.replace(eqns=eqns, outvars=[resolve(renamed, v) for v in body.outvars])
        rows = body.invars[layout.num_consts + layout.num_carry :]
        updated, body = find_updated_stacks(body, rows, layout.num_carry)
        return Loop(eqn, layout, body, updated)

    @property
    def step(self) -> int:
        """The difference of the indices of two iterations."""
        return -1 if self.eqn.params["reverse"] else 1

    @property
    def first(self) -> int:
        """The index of the first iteration."""
        return self.layout.length - 1 if self.step < 0 else 0

    def split(self, operands: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Splits operands of the scan, or of its body, into constants, carry and xs."""
        first, last = self.layout.num_consts, self.layout.num_consts + self.layout.num_carry
        return operands[:first], operands[first:last], operands[last:]

    def index_copies(self, kind: str) -> dict[Any, JaxprEqn]:
        """Maps operand -> reload (`kind` "H2D"), or result -> send ("D2H"), for the copies in the body."""
        found: list[Any] = [eqn for eqn in self.body.eqns if compat.transfer_in(eqn) == kind]
        return {(eqn.invars[0] if kind == "H2D" else eqn.outvars[0]): eqn for eqn in found}

    def find_reloads(self) -> dict[int, JaxprEqn]:
        """Maps the index of an xs -> reload, for each xs with the reload as its only reader."""
        copies, (_, _, xs) = self.index_copies("H2D"), self.split(self.body.invars)
        reads = count_reads(self.body.eqns, self.body.outvars)
        return {k: copies[x] for k, x in enumerate(xs) if x in copies and reads[x] == 1}

    def find_sends(self) -> dict[int, JaxprEqn]:
        """Maps the index of a ys -> send, for each ys which is the result of the send and is not read."""
        copies, reads = self.index_copies("D2H"), count_reads(self.body.eqns, self.body.outvars)
        return {k: copies[y] for k, y in self._list_ys() if y in copies and reads[y] == 1}

    def _list_ys(self) -> Iterator[tuple[int, Var]]:
        """Lists index and variable of each ys, without constants."""
        for k, y in enumerate(self.body.outvars[self.layout.num_carry :]):
            if isinstance(y, Var):
                yield k, y

    def find_ys_read_inside(self) -> set[int]:
        """Finds the indices of the ys which a compute kernel makes and the body also reads."""
        eqns, found = self.body.eqns, set()
        maker = index_makers(eqns)
        reads = count_reads(eqns, self.body.outvars)
        for k, y in self._list_ys():
            path = [] if compat.is_host(y.aval) else list(trace_to_kernel(y, maker, eqns))
            if path and is_compute(eqns[path[-1][1]]) and any(reads[v] > 1 for v, _ in path):
                found.add(k)
        return found

    def to_problem(self) -> OrderProblem:
        """Returns the body as a problem for the scheduler."""
        _, carry, _ = self.split(self.body.invars)
        results = frozenset(v for v in self.body.outvars if isinstance(v, Var))
        in_order = mark_dependents(self.body.eqns, set(carry))
        return OrderProblem(tuple(self.body.eqns), results, tuple(in_order), waits_for_sends=False)


def write_out(
    loop: Loop,
    operands: list[Any],
    pieces: StackSlices,
    initial_stacks: Mapping[int, Any],
    sent_stacks: Mapping[int, HostStack],
    reloaded_stacks: Mapping[int, HostStack],
    first_rows: Mapping[int, Any],
    device: Device,
    large_nbytes: int,
    shardings: LoopShardings | None,
    options: OrderOptions,
) -> tuple[list[JaxprEqn], list[Any], dict[int, Any]]:
    """Writes out a scan as a while loop with an ordered body.

    Args:
      loop: the scan.
      operands: the scan's operands. `reloaded_stacks` have a spare row, and stacks of `pieces` are whole.
      pieces: the rows which the scan reads and writes in longer stacks.
      initial_stacks: index of a ys -> stack in which another loop has written rows.
      sent_stacks: index of a ys -> host stack which another loop reads.
      reloaded_stacks: index of an xs -> host stack which another loop has written.
      first_rows: index of a prefetched xs -> the row of the first iteration, on the device.
      device: rates, to estimate when kernels and copies end.
      large_nbytes: as for `jaxoff._schedule.decide.decide`.
      shardings: how the compiler divides the loop's values over devices; None if it leaves them whole.
      options: how the body is ordered.

    Returns:
      The new equations; the results of the scan; and index of a ys -> the last iteration's value on the
      device, for stacks which the reader prefetches.
    """
    iteration = _Iteration(loop, pieces, sent_stacks, reloaded_stacks, shardings, options)
    is_divided = shardings is not None

    def run(consts, carry, xs, initial_stacks, first_rows):
        ys = iteration.list_ys()
        initial_stacks |= {stack.ys: xs[stack.xs] for stack in loop.updated}
        stacks = [
            initial_stacks[k] if k in initial_stacks else empty(v.aval, rows, is_divided=is_divided)
            for k, (v, rows) in enumerate(ys)
        ]
        rows = UpdatedRows.of_first(loop.updated, xs, loop.first)
        stacks, xs = flatten(stacks, iteration.flat_ys), flatten(xs, iteration.flat_xs)
        retained = [empty(v.aval, None, is_divided=is_divided) for v in iteration.retained_vars]
        host_stacks = [xs[k] for k in reloaded_stacks]
        count = jnp.int32(iteration.first_count)
        state = _State(count, carry, stacks, retained, host_stacks, first_rows, rows)
        body = iteration.order(consts, xs, state, device, large_nbytes)
        body = body.replace(jaxpr=exchange_beside(body.jaxpr, [*map(jax.typeof, rows.arrived)], device))

        def advance(state, copied):
            leaves, structure = jax.tree.flatten(state)
            outs = compat.jaxpr_as_fun(body)(*consts, *xs, *leaves, *copied)
            return jax.tree.unflatten(structure, outs[: len(leaves)]), outs[len(leaves) :]

        def step(state):
            if not loop.updated:
                return advance(state, [])[0]
            previous, following = iteration.rows_beside(state)
            stacks = state.updated.write_on_device(loop.updated, state.stacks, previous)
            arriving = reload_rows(loop.updated, stacks, following)
            copied = [*arriving, *state.updated.list_sent(loop.updated)]
            new, copied = advance(state._replace(stacks=stacks), copied)
            arriving, sent = copied[: len(arriving)], copied[len(arriving) :]
            stacks, rows = send_rows(loop.updated, new.stacks, previous, sent, arriving)
            return new._replace(stacks=stacks, updated=new.updated._replace(arrived=rows))

        end = iteration.first_count + loop.layout.length
        state = lax.while_loop(lambda state: state.count < end, step, state)
        last = loop.first + loop.step * (loop.layout.length - 1)
        state = state._replace(stacks=state.updated.write_last(loop.updated, state.stacks, last))
        for k in iteration.flat_ys:
            state.stacks[k] = state.stacks[k].reshape(ys[k][1], *ys[k][0].aval.shape)
        return state

    consts, carry, xs = loop.split(operands)
    args = consts, carry, xs, dict(initial_stacks), [first_rows[k] for k in iteration.prefetched]
    eqns, results = trace_call(run, args, like=loop.eqn)
    end = len(carry) + len(iteration.list_ys())
    return eqns, results[1 : 1 + end], dict(zip(iteration.retained, results[1 + end :], strict=False))


class _State(NamedTuple):
    """The state of the while loop between two iterations.

    Attributes:
      count: the loop counter: `_Iteration.first_count` plus the number of iterations done.
      carry: the carried values of the scan.
      stacks: the stacks of the ys.
      retained: the latest values of the ys whose last value stays on the device.
      host_stacks: the host stacks which another loop has written.
      prefetched: the rows reloaded for the next iteration.
      updated: the rows of the stacks that are replaced in place.
    """

    count: Any
    carry: list[Any]
    stacks: list[Any]
    retained: list[Any]
    host_stacks: list[Any]
    prefetched: list[Any]
    updated: UpdatedRows


class _Iteration:
    """One iteration of a written-out loop.

    Attributes:
      prefetched: indices of the prefetched xs, in the order of `_State.prefetched`.
      retained: indices of the ys whose last value stays on the device, in the order of `_State.retained`.
      retained_vars: variables of the retained values in the scan's body.
      first_count: loop counter of the first iteration.
      flat_xs, flat_ys: indices of the xs and ys whose stacks have flat rows.
    """

    def __init__(
        self,
        loop: Loop,
        pieces: StackSlices,
        sent_stacks: Mapping[int, HostStack],
        reloaded_stacks: Mapping[int, HostStack],
        shardings: LoopShardings | None,
        options: OrderOptions,
    ):
        self._loop, self._pieces, self._shardings = loop, pieces, shardings
        self._sent_stacks, self._reloaded_stacks = sent_stacks, reloaded_stacks
        self._options = options
        self.first_count = _FIRST_COUNT + pieces.largest_offset
        self.prefetched = [k for k, stack in reloaded_stacks.items() if stack.prefetched]
        self.retained = [k for k, stack in sent_stacks.items() if stack.prefetched]
        self._read_inside = loop.find_ys_read_inside()
        self._rows, values = loop.split(loop.body.invars)[2], loop.body.outvars[loop.layout.num_carry :]
        flat_xs, flat_ys = ({getattr(stack, way) for stack in loop.updated} for way in ("xs", "ys"))
        self.flat_xs = find_flat(self._rows, flat_xs.union(reloaded_stacks), is_divided=shardings is not None)
        self.flat_ys = find_flat(values, flat_ys.union(sent_stacks), is_divided=shardings is not None)
        self.retained_vars: list[Any] = [loop.find_sends()[k].invars[0] for k in self.retained]

    def list_ys(self) -> list[tuple[Any, int]]:
        """Lists the variable of each ys in the body, and the number of rows of its stack."""
        values, written = self._loop.body.outvars[self._loop.layout.num_carry :], self._pieces.written
        length = self._loop.layout.length
        rows = dict.fromkeys(self._sent_stacks, length + 1) | {k: w.rows for k, w in written.items()}
        return [(v, rows.get(k, length)) for k, v in enumerate(values)]

    def rows_beside(self, state: _State) -> tuple[Any, Any]:
        """The indices of the rows of the iterations before and behind the one that begins with a state."""
        index = self._offset_row(0) + self._loop.step * state.count
        return index - self._loop.step, index + self._loop.step

    def order(
        self, consts: list[Any], xs: list[Any], state: _State, device: Device, large_nbytes: int
    ) -> ClosedJaxpr:
        """Orders the program of an iteration, from constants, xs and a state to the next state."""
        order = functools.partial(self._order, consts, xs, state, device, large_nbytes)
        body, late = order([])
        return order(late)[0] if late else body

    def _order(
        self,
        consts: list[Any],
        xs: list[Any],
        state: _State,
        device: Device,
        large_nbytes: int,
        moved_aside: list[int],
    ) -> tuple[ClosedJaxpr, list[int]]:
        """Orders the program of an iteration which moves the rows of the xs `moved_aside` aside.

        Returns:
          The program; and the indices of prefetched xs whose reloads are late, because the iteration reads
          the row in their buffer too long.
        """
        loop, (leaves, structure) = self._loop, jax.tree.flatten(state)
        avals = jax.tree.map(jax.typeof, (consts, xs, state))
        closed = compat.trace_like(loop.eqn, functools.partial(self._advance, moved_aside), avals)
        jaxpr, renamed = closed.jaxpr, {}
        eqns = list(inline_calls(jaxpr.eqns, renamed))
        outs = [resolve(renamed, v) for v in jaxpr.outvars]
        before = jax.tree.unflatten(structure, jaxpr.invars[-len(leaves) :])
        outs, copies = outs[: len(leaves)], outs[len(leaves) :]
        after = jax.tree.unflatten(structure, outs)
        problem = OrderProblem(
            tuple(eqns),
            frozenset(v for v in outs if isinstance(v, Var)),
            tuple(mark_dependents(eqns, set(before.carry))),
            waits_for_sends=False,
            iteration=before.count,
            spare_rows={
                v: SpareRow(
                    self._offset_row(stack.row_offset - (0 if stack.prefetched else loop.step)), loop.step
                )
                for v, stack in zip(before.host_stacks, self._reloaded_stacks.values(), strict=True)
            },
            reuses_buffer_of=dict(zip(after.prefetched, before.prefetched, strict=True)),
            moved_aside=frozenset(copies),
            overwrites_after_send={
                v: after.stacks[k]
                for k, v in zip(self.retained, after.retained, strict=True)
                if self._sent_stacks[k].overwrites
            },
            is_divided=self._shardings is not None,
            shares_fused=self._shardings is not None,
            options=self._options,
        )
        schedule = decide(problem, device, large_nbytes)
        eqns, renamed = emit(schedule, problem)
        late = [k for k, v in zip(self.prefetched, after.prefetched, strict=True) if v in schedule.late]
        jaxpr = jaxpr.replace(eqns=eqns, outvars=[resolve(renamed, v) for v in outs])
        return closed.replace(jaxpr=jaxpr), late

    def _offset_row(self, offset: int) -> int:
        """Returns the index of the row `offset` rows after the iteration's row, without `step * count`."""
        return self._loop.first - self._loop.step * self.first_count + offset

    def _advance(
        self, moved_aside: list[int], consts: list[Any], xs: list[Any], state: _State
    ) -> tuple[_State, list[Any]]:
        """Runs an iteration: returns the next state, and the copies of the rows moved aside."""
        loop, index = self._loop, self._offset_row(0) + self._loop.step * state.count
        host_stacks = dict(zip(self._reloaded_stacks, state.host_stacks, strict=True))
        offsets, written = self._pieces.offsets, self._pieces.written
        arrived = (stack.xs for stack in loop.updated if stack.on_host)
        inputs: dict[int, Any] = dict(zip(arrived, state.updated.arrived, strict=True))
        inputs |= {u.xs: read_row(state.stacks[u.ys], index) for u in loop.updated if not u.on_host}
        inputs |= {
            k: read_row(x, index + offsets.get(k, 0))
            for k, x in enumerate(xs)
            if k not in host_stacks and k not in inputs
        }
        for k, stack in host_stacks.items():
            if k not in self.prefetched:
                with self._reloaded_stacks[k].mark_copies():
                    inputs[k] = read_row(stack, index + self._reloaded_stacks[k].row_offset)
        for k in self.flat_xs:
            inputs[k] = inputs[k].reshape(self._rows[k].aval.shape)
        pinned, rows = self._shardings or LoopShardings(), zip(self.prefetched, state.prefetched, strict=True)
        inputs |= {k: pin(row, pinned.xs, k) for k, row in rows}
        carry = [pin(value, pinned.carry, k) for k, value in enumerate(state.carry)]
        copies = {k: copy_aside(inputs[k], state.count) for k in moved_aside}
        inputs |= {k: lax.optimization_barrier(copy) for k, copy in copies.items()}
        deferred = [k for k in self.retained if self._sent_stacks[k].send_deferred]
        body = _remove_copies(loop, self.prefetched, deferred, self.retained_vars)
        out = compat.jaxpr_as_fun(body)(*consts, *carry, *(inputs[k] for k in range(len(xs))))
        carry, out = [*map(_hide_count, out[: loop.layout.num_carry])], out[loop.layout.num_carry :]
        stacks, retained = list(state.stacks), out[len(state.stacks) :]
        for j, k in enumerate(self.retained):
            if k in deferred and not self._sent_stacks[k].overwrites:
                retained[j] = copy_aside(retained[j], state.count)
        waiting = {stack.ys: out[stack.ys] for stack in loop.updated}
        for k, y in enumerate(out[: len(stacks)]):
            if k in waiting:
                continue
            sent = self._sent_stacks.get(k)
            at = index + (sent.row_offset if sent else 0)
            at += written[k].offset if k in written else 0
            if k in self._read_inside:  # XLA would run the kernel twice: for the stack and for the readers
                y = copy_aside(y, state.count)
            with sent.mark_copies() if sent else contextlib.nullcontext():
                if k in deferred:  # the first iteration writes arbitrary contents into the spare row
                    value = state.retained[self.retained.index(k)]
                    y, at = jax.device_put(value, jax.memory.Space.Host), at - loop.step
                stacks[k] = write_row(stacks[k], y.reshape(-1) if k in self.flat_ys else y, at)
        prefetched = []
        for k in self.prefetched:
            with (stack := self._reloaded_stacks[k]).mark_copies():
                row = read_row(host_stacks[k], index + loop.step + stack.row_offset)
                prefetched.append(jax.device_put(row, jax.memory.Space.Device))
        updated = UpdatedRows([*waiting.values()], state.updated.arrived)
        new_state = _State(state.count + 1, carry, stacks, retained, state.host_stacks, prefetched, updated)
        return new_state, list(copies.values())


def _remove_copies(
    loop: Loop, prefetched: list[int], deferred: list[int], retained_vars: list[Any]
) -> ClosedJaxpr:
    """Removes copies from the body, which then also returns the retained values.

    The body takes the xs `prefetched` on the device, and returns the ys `deferred` on the device.
    """
    body, reloads, sends = loop.body, loop.find_reloads(), loop.find_sends()
    consts, carry, xs = loop.split(body.invars)
    outs = list(body.outvars)
    removed = [reloads[k] for k in prefetched]
    for k in prefetched:
        xs[k] = reloads[k].outvars[0]
    for k in deferred:
        removed.append(sends[k])
        outs[loop.layout.num_carry + k] = sends[k].invars[0]
    eqns = [eqn for eqn in body.eqns if not any(eqn is other for other in removed)]
    jaxpr = body.replace(invars=[*consts, *carry, *xs], eqns=eqns, outvars=[*outs, *retained_vars])
    return loop.eqn.params["jaxpr"].replace(jaxpr=jaxpr)


def _hide_count(value: Any) -> Any:
    """A carried integer behind a barrier: XLA would make one counter of it and of the loop's own.

    The loop would lose its known number of iterations, and write host stacks by kernels instead of copies.
    """
    is_count = not value.ndim and jnp.issubdtype(value.dtype, jnp.integer)
    return lax.optimization_barrier(value) if is_count else value
