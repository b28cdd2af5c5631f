"""Writes the updates of stacked weights into the loop of their backward pass.

A layer's update needs its own gradient alone, unless something of all gradients comes between: a norm by
which they are clipped, or which is logged. Then the gradients of all layers never exist together, and the
copies of the state have the whole backward pass to run beside (`jaxoff._schedule.updated_rows`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import Jaxpr, JaxprEqn, Var
from jaxoff._jaxpr.dataflow import index_readers, map_makers, mark_dependents, variables
from jaxoff._jaxpr.inline import resolve, trace_scan
from jaxoff._jaxpr.own_primitives import write_over
from jaxoff._state.updates import Update


@dataclasses.dataclass(frozen=True)
class EarlyUpdates:
    """The updates to follow the gradients of a loop's iteration.

    Attributes:
      loop: the equation of the loop, a scan.
      updates: of stacks with a row for each iteration.
      before: the equations behind the loop for operands of the updates, without an operand of the loop.
    """

    loop: JaxprEqn
    updates: tuple[Update, ...]
    before: tuple[JaxprEqn, ...]


def find_early(program: Jaxpr, updates: Sequence[Update]) -> list[EarlyUpdates]:
    """Finds the updates of gradients stacked by a loop, without another operand of the loop.

    Args:
      program: a program for one device, with its calls inlined.
      updates: from `find_updates` of this program.
    """
    level = _Level(program)
    found = []
    for i, eqn in enumerate(program.eqns):
        layout = compat.scan_in(eqn)
        if layout is None or eqn.params["jaxpr"].consts or compat.has_side_effects(eqn.params["jaxpr"].jaxpr):
            continue
        if early := [u for u in updates if u.shape[0] == layout.length and level.is_early(u, i)]:
            found.append(EarlyUpdates(eqn, tuple(early), tuple(level.list_before(early, i))))
    return found


class _Level:
    def __init__(self, program: Jaxpr):
        self._eqns = program.eqns
        self._outs = {v for v in program.outvars if isinstance(v, Var)}
        self._readers, self._makers = index_readers(program.eqns), map_makers(program.eqns)
        self._index = {id(eqn): i for i, eqn in enumerate(program.eqns)}
        self._made_of: dict[int, set[Var]] = {}  # loop -> what is computed from its results

    def is_early(self, update: Update, loop: int) -> bool:
        """Whether the loop of an index makes gradients of an update, and no other operand of the update.

        Its gradients have no other reader, and nothing behind the loop reads the replaced arguments.
        """
        if update.sharding is not None or update.late:
            return False
        eqn, inside = self._eqns[loop], {self._index[id(eqn)] for eqn in update.eqns}
        stacks = {v for v in _list_stacks(eqn) if v in update.read}
        others = [v for v in (*update.read, *update.scalars) if v not in stacks]
        replaced = [v for v, _ in update.replaced]
        return (
            bool(stacks)
            and self._outs.isdisjoint(stacks)
            and all(inside.issuperset(self._readers.get(v, ())) for v in stacks)
            and all(i <= loop or i in inside for v in replaced for i in self._readers.get(v, ()))
            and not any(self._depends(v, loop) for v in (*others, *replaced))
        )

    def _depends(self, v: Var, loop: int) -> bool:
        """Whether a value is a result of a loop, or computed from one."""
        if loop not in self._made_of:
            results, behind = set(self._eqns[loop].outvars), self._eqns[loop + 1 :]
            found = zip(behind, mark_dependents(behind, results), strict=True)
            self._made_of[loop] = results.union(w for eqn, does in found if does for w in eqn.outvars)
        return v in self._made_of[loop]

    def list_before(self, updates: Iterable[Update], loop: int) -> list[JaxprEqn]:
        """The equations behind a loop that make the updates' operands but for its own results."""
        todo = [v for u in updates for v in (*u.read, *u.scalars)]
        found: set[int] = set()
        while todo:
            eqn = self._makers.get(todo.pop())
            if eqn is not None and (i := self._index[id(eqn)]) > loop and i not in found:
                found.add(i)
                todo += variables(eqn)
        return [self._eqns[i] for i in sorted(found)]


def write_early(early: EarlyUpdates, renamed: dict[Var, Any]) -> tuple[list[JaxprEqn], dict[Var, Any]]:
    """The loop with the updates in its body, their states in host memory.

    Args:
      early: the updates.
      renamed: variable -> its replacement: the argument in host memory for a state.

    Returns:
      The equations; and the program's variables among the loop's and the updates' results -> their results.
    """
    loop, layout = early.loop, compat.scan_in(early.loop)
    assert layout is not None
    first, row = layout.num_consts, layout.num_consts + layout.num_carry
    consts, carry, rows = loop.invars[:first], loop.invars[first:row], list(loop.invars[row:])
    body, stacks = compat.jaxpr_as_fun(loop.params["jaxpr"]), _list_stacks(loop)
    gradients = {v for u in early.updates for v in u.read if v in stacks}
    kept = [k for k, v in enumerate(stacks) if v not in gradients]
    scalars = list(dict.fromkeys(v for u in early.updates for v in u.scalars))
    own_rows = len(rows)
    for update in early.updates:
        arrays = (*(v for v, _ in (*update.states, *update.replaced)), *update.read)
        rows += [v for v in arrays if v not in stacks and v not in rows]

    def run(*values: Any) -> list[Any]:
        consts, known_scalars = values[:first], values[first : first + len(scalars)]
        carry, of_rows = values[first + len(scalars) : -len(rows)], values[-len(rows) :]
        made = body(*consts, *carry, *of_rows[:own_rows])
        carry, made_rows = made[: len(carry)], made[len(carry) :]
        known = dict(zip(scalars, known_scalars, strict=True)) | dict(zip(stacks, made_rows, strict=True))
        known |= {v: x for v, x in zip(rows, of_rows, strict=True) if isinstance(v, Var)}
        updated = [x for update in early.updates for x in _update_row(update, known)]
        return [*carry, *(made_rows[k] for k in kept), *updated]

    def rename(values: Iterable[Any]) -> list[Any]:
        return [resolve(renamed, v) for v in values]

    operands = rename([*consts, *scalars]), rename(carry), rename(rows)
    eqns, results = trace_scan(run, operands, loop, length=layout.length)
    places = [*loop.outvars[: layout.num_carry], *(stacks[k] for k in kept)]
    places += [v for update in early.updates for v in update.list_results()]
    return eqns, dict(zip(places, results, strict=True))


def _update_row(update: Update, known: Mapping[Any, Any]) -> list[Any]:
    """The rows of an update's results, as of `Update.list_results`; of arguments for their places."""
    values = dict(known)
    for state, _ in update.states:
        values[state] = jax.device_put(known[state], jax.memory.Space.Device)
    results = update.compute(values, update.shape[1:])
    for i, (state, _) in enumerate(update.states):
        results[i] = write_over(known[state], jax.device_put(results[i], jax.memory.Space.Host))
    for i, (v, _) in enumerate(update.replaced, len(update.states)):
        results[i] = write_over(known[v], results[i])
    return results


def _list_stacks(loop: JaxprEqn) -> list[Any]:
    """The stacks of a scan's results."""
    layout = compat.scan_in(loop)
    assert layout is not None
    return loop.outvars[layout.num_carry :]
