"""Counts the host memory of a program before compilation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jaxoff._jaxpr.dataflow import drop_dead
from jaxoff._jaxpr.primitives import num_shards


def peak_host_nbytes(closed: ClosedJaxpr) -> int:
    """Counts the most bytes in host memory at once, arguments and results included.

    The equations run in program order; equations without readers are left out. XLA gives the stacks of each
    loop buffers of their own for the whole program, and reuses all other buffers. XLA may fold copies outside
    of loops, and then takes less. A sharded array counts with the bytes of all shards.
    """
    live = drop_dead(closed.jaxpr)
    return _find_peak(live)


def _find_peak(jaxpr: Jaxpr) -> int:
    places = _map_places(jaxpr)

    def select(*groups: Iterable[Any]) -> set[Var]:
        return {places.get(v, v) for v in _select_host(*groups)}

    loops = [_list_new_results(eqn) for eqn in jaxpr.eqns if compat.is_loop(eqn)]
    always = select(jaxpr.constvars, jaxpr.invars, *loops)
    live = always | select(jaxpr.outvars)
    peak = size = compat.nbytes_of(live)
    for eqn in reversed(jaxpr.eqns):
        made, read = live.intersection(eqn.outvars) - always, select(eqn.invars) - live
        live -= made
        live |= read
        size += compat.nbytes_of(read) - compat.nbytes_of(made)
        peak = max(peak, size + _count_inside(eqn))
    return peak


def _map_places(jaxpr: Jaxpr) -> dict[Var, Var]:
    """For each result of a `jax.lax.while_loop`, the operand in whose place it is.

    State on the host, a donated argument, passes through a few loops: the place of all their results is its.
    """
    places: dict[Var, Var] = {}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "while":
            initial = eqn.invars[len(eqn.invars) - len(eqn.outvars) :]
            for out, v in zip(eqn.outvars, initial, strict=True):
                if isinstance(v, Var) and compat.is_host(v.aval):
                    places[out] = places.get(v, v)
    return places


def _count_inside(eqn: JaxprEqn) -> int:
    """Counts the bytes in use only while an equation runs, its operands excluded."""
    extra = []
    for body in compat.sub_jaxprs(eqn):
        # The results of an iteration are rows of the loop's results. The results of a call count here.
        outside = _select_host(body.constvars, body.invars, body.outvars if compat.is_loop(eqn) else ())
        extra.append(_find_peak(body) - compat.nbytes_of(outside))
    return max(extra, default=0) * num_shards(eqn)


def _list_new_results(loop: JaxprEqn) -> list[Any]:
    """The results of a loop but for those of a `jax.lax.while_loop`, which are in the places of operands."""
    return [] if loop.primitive.name == "while" else list(loop.outvars)


def _select_host(*groups: Iterable[Any]) -> set[Var]:
    return {v for group in groups for v in group if isinstance(v, Var) and compat.is_host(v.aval)}
