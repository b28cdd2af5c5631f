"""Stacks whose rows a loop replaces in place: weights, and optimizer state in host memory.

The body of such a loop computes an iteration's new row from the old row, and marks the new row with
`write_over`. The written-out loop carries the stacks. An iteration writes the rows of the iteration before,
then reads its own. Of a stack in host memory it sends the rows of the iteration before, and reloads those of
the next: each copy has a whole iteration. The rows wait in buffers of their own, three of each stack.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxoff._device.kernel_time import kernel_ms
from jaxoff._device.profile import Device
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import Jaxpr, JaxprEqn, Var
from jaxoff._jaxpr.dataflow import count_reads, map_makers, variables
from jaxoff._jaxpr.inline import Renamed, resolve
from jaxoff._jaxpr.kernels import KernelGraph
from jaxoff._jaxpr.own_primitives import written_over_p


@dataclasses.dataclass(frozen=True)
class UpdatedStack:
    """A stack whose rows are replaced in place.

    Attributes:
      xs: its index among the xs of the scan.
      ys: its index among the ys.
      on_host: whether the stack is in host memory.
    """

    xs: int
    ys: int
    on_host: bool


def find_updated_stacks(body: Jaxpr, xs: Sequence[Var], num_carry: int) -> tuple[list[UpdatedStack], Jaxpr]:
    """Finds the stacks that a scan replaces in place.

    Args:
      body: of the scan, its calls inlined.
      xs: the body's arguments for rows.
      num_carry: the number of carried values.

    Returns:
      The stacks; and the body without their marks and copies: it takes and returns their rows on the device.
    """
    makers, reads = map_makers(body.eqns), count_reads(body.eqns, body.outvars)
    marks = [eqn for eqn in body.eqns if eqn.primitive is written_over_p]
    if not marks:
        return [], body
    reloads = {eqn.invars[0]: eqn for eqn in body.eqns if compat.transfer_in(eqn) == "H2D"}
    rows, places = {v: k for k, v in enumerate(xs)}, {v: k for k, v in enumerate(body.outvars[num_carry:])}
    found: list[UpdatedStack] = []
    renamed: Renamed = {}
    arguments: dict[Var, Var] = {}  # row in host memory -> row on the device
    removed: list[JaxprEqn] = []
    for mark in marks:
        (marked,) = mark.outvars
        new, old = variables(mark)
        on_host, send, reload = compat.is_host(new.aval), makers.get(new), reloads.get(old)
        removed.append(mark)
        renamed[marked] = new
        is_copied = send is not None and compat.transfer_in(send) == "D2H" and reload is not None
        if old not in rows or marked not in places or reads[marked] > 1 or not (is_copied or not on_host):
            continue
        found.append(UpdatedStack(rows[old], places[marked], on_host))
        if on_host:
            assert send is not None and reload is not None
            removed += [send, reload]
            renamed[marked], arguments[old] = send.invars[0], reload.outvars[0]
    gone = set(map(id, removed))
    eqns = [
        eqn.replace(invars=[resolve(renamed, v) for v in eqn.invars])
        for eqn in body.eqns
        if id(eqn) not in gone
    ]
    invars = [arguments.get(v, v) for v in body.invars]
    found.sort(key=lambda stack: -compat.nbytes(xs[stack.xs].aval))  # the last send has least beside it
    return found, body.replace(invars=invars, eqns=eqns, outvars=[resolve(renamed, v) for v in body.outvars])


class UpdatedRows(NamedTuple):
    """Rows on the device between two iterations, in the order of the stacks.

    Attributes:
      waiting: the new rows of the iteration before, to be written into the stacks.
      arrived: this iteration's rows of the stacks in host memory.
    """

    waiting: list[Any]
    arrived: list[Any]

    @staticmethod
    def of_first(updated: Sequence[UpdatedStack], xs: Sequence[Any], first: Any) -> UpdatedRows:
        """The rows for the first iteration. What it writes is what it reads."""
        stacks = [xs[stack.xs] for stack in updated]
        if not stacks:
            return UpdatedRows([], [])

        def read(_: list[Any]) -> list[Any]:
            return [_to_device(read_row(stack, first)) for stack in stacks]

        types = [jax.typeof(stack) for stack in stacks]
        zeros = [compat.vary_like(jnp.zeros(each.shape[1:], each.dtype), each) for each in types]
        waiting = _run_apart(read, zeros)
        rows = zip(updated, waiting, strict=True)
        return UpdatedRows(waiting, [row for stack, row in rows if stack.on_host])

    def write_on_device(self, updated: Sequence[UpdatedStack], stacks: Sequence[Any], at: Any) -> list[Any]:
        """Writes the waiting rows of the stacks on the device.

        Args:
          updated: the stacks.
          stacks: of all ys.
          at: the index of the iteration before. The first iteration writes the row that it reads.
        """
        stacks = list(stacks)
        for stack, row in zip(updated, self.waiting, strict=True):
            if not stack.on_host:
                stacks[stack.ys] = write_row(stacks[stack.ys], row, at)
        return stacks

    def list_sent(self, updated: Sequence[UpdatedStack]) -> list[Any]:
        """The waiting rows of the stacks in host memory."""
        return [row for stack, row in zip(updated, self.waiting, strict=True) if stack.on_host]

    def write_last(self, updated: Sequence[UpdatedStack], stacks: Sequence[Any], last: Any) -> list[Any]:
        """The stacks with the rows of the last iteration."""

        def write(stacks: list[Any]) -> list[Any]:
            for stack, row in zip(updated, self.waiting, strict=True):
                row = jax.device_put(row, jax.memory.Space.Host) if stack.on_host else row
                stacks[stack.ys] = write_row(stacks[stack.ys], row, last)
            return stacks

        return _run_apart(write, list(stacks)) if self.waiting else list(stacks)


def reload_rows(updated: Sequence[UpdatedStack], stacks: Sequence[Any], at: Any) -> list[Any]:
    """Reloads a row of each stack in host memory. What the last iteration reloads is not read."""
    return [_to_device(read_row(stacks[stack.ys], at)) for stack in updated if stack.on_host]


def send_rows(
    updated: Sequence[UpdatedStack],
    stacks: Sequence[Any],
    at: Any,
    sent: Sequence[Any],
    reloaded: Sequence[Any],
) -> tuple[list[Any], list[Any]]:
    """Sends a row of each stack in host memory once the other row is reloaded: XLA keeps the stack in place.

    Returns:
      The stacks, and the reloaded rows.
    """
    stacks, rows = list(stacks), []
    on_host = [stack.ys for stack in updated if stack.on_host]
    for k, row, arriving in zip(on_host, sent, reloaded, strict=True):
        row, arriving = lax.optimization_barrier((row, arriving))
        stacks[k] = write_row(stacks[k], jax.device_put(row, jax.memory.Space.Host), at)
        rows.append(arriving)
    return stacks, rows


def exchange_beside(program: Jaxpr, rows: Sequence[Any], device: Device) -> Jaxpr:
    """An ordered iteration with the copies of rows beside its kernels.

    Each reload ends at the first place between kernels where the link is done with it, and the send to its
    stack and the next reload begin there. Otherwise XLA would do all reloads first, or all sends last. At a
    nearer place, ahead of the link's end, the kernels would wait.

    Args:
      program: the iteration.
      rows: the types of the rows. Reloads come one after another, and sends run beside them.
      device: rates.

    Returns:
      The program with the reloaded rows, and the rows to be sent, as further arguments and results.
    """
    graph = KernelGraph(program.eqns, frozenset(v for v in program.outvars if isinstance(v, Var)))
    kernels, end = set(graph.kernels), 0.0
    places: list[
        tuple[float, int, Var]
    ] = []  # behind kernels: a time, the index of a barrier, a value behind it
    for i, eqn in enumerate(program.eqns):
        if eqn.primitive.name == "optimization_barrier" and end:
            places += [(end, i, v) for v in eqn.outvars[:1] if not compat.is_host(v.aval)]
        elif i in kernels and compat.transfer_in(eqn) is None:
            end += kernel_ms(graph, i, device)
    times = itertools.accumulate(device.both_ms(compat.nbytes(row)) for row in rows)
    at = [next((place for place in places if place[0] >= time), places[-1]) for time in times if places]
    reloaded, sent = [Var(row) for row in rows], [Var(row) for row in rows]
    renamed: Renamed = {}
    eqns: list[JaxprEqn] = []
    for i, eqn in enumerate(program.eqns):
        eqns.append(eqn.replace(invars=[resolve(renamed, v) for v in eqn.invars]))
        for k, (_, place, value) in enumerate(at):
            for row in (reloaded[k], sent[k]) if place == i else ():
                outs, barrier = compat.make_barrier([row, resolve(renamed, value)], like=eqn)
                eqns.append(barrier)
                renamed |= dict(zip((row, value), outs, strict=True))
    outs = [resolve(renamed, v) for v in (*program.outvars, *reloaded, *sent)]
    return program.replace(invars=[*program.invars, *reloaded, *sent], eqns=eqns, outvars=outs)


def _run_apart(function: Callable[[list[Any]], list[Any]], values: list[Any]) -> list[Any]:
    """Runs a function of values once, in a loop: copies outside of loops are those of residuals."""
    state = jnp.int32(0), values
    return lax.while_loop(
        lambda state: state[0] < 1, lambda state: (state[0] + 1, function(state[1])), state
    )[1]


def _to_device(row: jax.Array) -> jax.Array:
    return jax.device_put(row, jax.memory.Space.Device) if compat.is_host(jax.typeof(row)) else row


def read_row(stack: jax.Array, index: Any) -> jax.Array:
    """A row of a stack."""
    return lax.dynamic_index_in_dim(stack, index, 0, keepdims=False, allow_negative_indices=False)


def write_row(stack: jax.Array, value: jax.Array, index: Any) -> jax.Array:
    """The stack with another row."""
    return lax.dynamic_update_index_in_dim(stack, value, index, 0, allow_negative_indices=False)
