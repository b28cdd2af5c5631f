"""Asks the compiler how it divides the values of layer loops over devices.

The compiler chooses shardings by propagation through the whole program. A loop in another form may get
others, with more communication. So the program as given is compiled with marks in its loops, up to the
partition of the program, and the loops written out pin what the marks recorded.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import ClosedJaxpr, JaxprEqn, Var
from jaxoff._jaxpr.inline import trace_call
from jaxoff._jaxpr.shares import record_sharding
from jaxoff._schedule.loop_shardings import LoopShardings
from jaxoff._schedule.loops import Loop
from jaxoff._schedule.rewrite import replace_layer_loops

# Lowers a program as `jax.jit` does; the result compiles the program.
type Lower = Callable[[ClosedJaxpr], Callable[[], Any]]


class Recorded(Exception):  # noqa: N818  (no error: it ends a compilation that has served its purpose)
    """All marks have recorded a sharding."""


class Marks:
    """Marks in the layer loops of a program.

    Attributes:
      loops: number of a loop -> the shardings recorded so far.
      count: the number of marks that have not recorded a sharding.
    """

    def __init__(self):
        self.loops: dict[int, LoopShardings] = {}
        self.count = 0

    def mark(self, loop: Loop, number: int) -> JaxprEqn:
        """The scan of a loop, with marks on its carried values and sends; unchanged in `shard_map`."""
        if compat.is_manual(loop.eqn):
            return loop.eqn
        shardings = self.loops[number] = LoopShardings()
        body, sends, first = loop.body, loop.find_sends(), loop.layout.num_carry
        eqns: list[JaxprEqn] = list(body.eqns)
        outs: list[Any] = list(body.outvars)
        for k, v in enumerate(outs[:first]):
            if _is_array(v):
                outs[k] = Var(v.aval)
                eqns += self._mark(v, outs[k], shardings.carry, k, loop)
        for k, send in sends.items():
            value: Any = send.invars[0]
            sent = Var(value.aval)
            place = next(i for i, eqn in enumerate(eqns) if eqn is send)
            marks = self._mark(value, sent, shardings.ys, k, loop)
            eqns[place : place + 1] = [*marks, send.replace(invars=[sent])]
        closed = loop.eqn.params["jaxpr"]
        closed = closed.replace(jaxpr=body.replace(eqns=eqns, outvars=outs))
        return loop.eqn.replace(params=loop.eqn.params | {"jaxpr": closed})

    def _mark(self, v: Var, result: Var, recorded: dict, k: int, loop: Loop) -> list[JaxprEqn]:
        """The equations from a variable to its marked value."""
        self.count += 1

        def record(sharding: NamedSharding) -> None:
            self.count -= k not in recorded
            recorded[k] = sharding
            if not self.count:
                raise Recorded

        eqns, _ = trace_call(functools.partial(record_sharding, record=record), [v], loop.eqn)
        return [*eqns[:-1], eqns[-1].replace(outvars=[result])]


def _is_array(v: Any) -> bool:
    """Whether the compiler may divide a value on the device."""
    if not isinstance(v, Var) or not compat.shape_of(v.aval) or compat.is_host(v.aval):
        return False
    return not jnp.issubdtype(compat.struct_of(v.aval).dtype, jax.dtypes.extended)


def find_loop_shardings(closed: ClosedJaxpr, lower_program: Lower) -> Mapping[int, LoopShardings]:
    """Finds how the compiler divides the values of a program's layer loops.

    Args:
      closed: the program.
      lower_program: lowers a program for its devices.

    Returns:
      Number of a loop -> its shardings; empty if the compiler refuses the program.
    """
    marks = Marks()
    marked = replace_layer_loops(closed, marks.mark)
    if not marks.count:
        return {}
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # by `Recorded`, or XLA refuses the program
        lower_program(marked)()
    return marks.loops
