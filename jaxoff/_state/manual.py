"""State of a step in a `jax.shard_map`: found and updated in the program that each device runs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jaxoff._jaxpr.dataflow import count_reads
from jaxoff._jaxpr.inline import inline_program, resolve
from jaxoff._jaxpr.primitives import is_shard_map
from jaxoff._state.stream import stream_updates
from jaxoff._state.updates import Update, find_updates, pair_donated


@dataclasses.dataclass(frozen=True)
class ManualStep:
    """A program with a `jax.shard_map` around the updates of its arguments.

    Attributes:
      closed: the program, its calls inlined.
      eqn: the only `jax.shard_map` among its equations.
      inner: the program in this equation, its calls inlined.
    """

    closed: ClosedJaxpr
    eqn: JaxprEqn
    inner: Jaxpr

    @staticmethod
    def of(closed: ClosedJaxpr) -> ManualStep | None:
        """The step of a program; None without a `jax.shard_map`, and with several."""
        found = [eqn for eqn in closed.jaxpr.eqns if is_shard_map(eqn)]
        if len(found) != 1 or found[0].params["jaxpr"].constvars:
            return None
        return ManualStep(closed, found[0], inline_program(found[0].params["jaxpr"]))

    def find(self, donated: Sequence[bool]) -> list[Update]:
        """The updates of arguments that go straight into the equation, to results straight out of it.

        Args:
          donated: for each argument of the program, whether the program may reuse its memory.
        """
        program = self.closed.jaxpr
        reads = count_reads(program.eqns, program.outvars)
        results = {v for v in program.outvars if isinstance(v, Var) and reads[v] == 1}
        pairs = pair_donated(program, donated)
        free = {v for v, may in zip(program.invars, donated, strict=True) if may and reads[v] == 1}
        inside = [isinstance(v, Var) and v in free for v in self.eqn.invars]
        outs = dict(zip(self.inner.outvars, self.eqn.outvars, strict=True))

        def is_in_place(state: Var, out: Var) -> bool:
            return outs[out] in results and pairs.get(self.argument_of[state]) is outs[out]

        updates = find_updates(self.inner, inside)
        return [update for update in updates if all(is_in_place(*pair) for pair in update.states)]

    @functools.cached_property
    def argument_of(self) -> dict[Var, Any]:
        """Argument of `inner` -> the operand of the equation, an argument of the program for a state."""
        return dict(zip(self.inner.invars, self.eqn.invars, strict=True))

    def list_arguments(self, update: Update) -> set[Any]:
        """The arguments of the program that are an update's states."""
        return {self.argument_of[state] for state, _ in update.states}

    def stream(
        self, updates: Sequence[Update], stream: Callable[..., ClosedJaxpr] = stream_updates
    ) -> ClosedJaxpr:
        """The program with the states of updates in host memory, by `stream_updates` of the inner program."""
        inner = stream(ClosedJaxpr(self.inner, ()), updates).jaxpr
        moved: dict[Any, Var] = {
            outside: Var(outside.aval.update(memory_space=jax.memory.Space.Host))
            for own, places in ((inner.invars, self.eqn.invars), (inner.outvars, self.eqn.outvars))
            for v, outside in zip(own, places, strict=True)
            if compat.is_host(v.aval)
        }
        eqn = self.eqn.replace(
            params=self.eqn.params | {"jaxpr": inner},
            invars=[resolve(moved, v) for v in self.eqn.invars],
            outvars=[resolve(moved, v) for v in self.eqn.outvars],
        )
        program = self.closed.jaxpr
        return self.closed.replace(
            jaxpr=program.replace(
                eqns=[eqn if other is self.eqn else other for other in program.eqns],
                invars=[resolve(moved, v) for v in program.invars],
                outvars=[resolve(moved, v) for v in program.outvars],
            )
        )
