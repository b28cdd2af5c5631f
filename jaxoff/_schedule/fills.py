"""Arrays filled with a constant after the loops of a program: the zeros for the gradient of an embedding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import jax.numpy as jnp

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import Jaxpr, JaxprEqn, Literal, Var
from jaxoff._jaxpr.dataflow import variables


def delay_fills(eqns: Iterable[JaxprEqn], value: Var | None, large_nbytes: int) -> Iterator[JaxprEqn]:
    """Delays large arrays filled with a constant until a value is ready. XLA could fill them at any time."""
    for eqn in eqns:
        is_constant = eqn.primitive.name == "broadcast_in_dim" and isinstance(eqn.invars[0], Literal)
        if value is not None and is_constant and compat.nbytes_of(eqn.outvars) >= large_nbytes:
            (constant, _), barrier = compat.make_barrier([eqn.invars[0], value], like=eqn)
            yield barrier
            yield eqn.replace(invars=[constant])
        else:
            yield eqn


def find_last_loop_result(jaxpr: Jaxpr) -> Var | None:
    """Finds the smallest float array on the device among the read results which the last loop changes."""
    read = {v for v in jaxpr.outvars if isinstance(v, Var)}
    for eqn in reversed(jaxpr.eqns):
        if (changed := _find_changed_results(eqn)) is not None:
            found = [v for v in changed if v in read and not compat.is_host(v.aval)]
            floats = [v for v in found if jnp.issubdtype(compat.struct_of(v.aval).dtype, jnp.inexact)]
            return min(floats, key=lambda v: compat.nbytes(v.aval), default=None)
        read.update(variables(eqn))
    return None


def _find_changed_results(eqn: JaxprEqn) -> list[Var] | None:
    """Finds the results changed by the body of a `while` loop. Returns None for another equation."""
    if eqn.primitive.name != "while":
        return None
    body = eqn.params["body_jaxpr"].jaxpr
    given = body.invars[eqn.params["body_nconsts"] :]
    results = zip(eqn.outvars, given, body.outvars, strict=True)
    return [v for v, before, after in results if before is not after]
