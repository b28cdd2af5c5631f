"""How much host memory a program holds at once, counted before it is compiled."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import ClosedJaxpr, Jaxpr, JaxprEqn, Var


def peak_host_nbytes(closed: ClosedJaxpr) -> int:
    """The most bytes that a program holds in host memory at once, its arguments and results among them.

    Its equations are taken in their order; what nothing reads is left out. XLA gives the stacks of each loop
    memory of their own from beginning to end, and uses the rest again. It may fold copies outside of loops
    and take less. Bytes are those of whole arrays, where they are sharded.
    """
    live, _ = compat.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
    return _peak(live)


def _peak(jaxpr: Jaxpr) -> int:
    always = _on_host(jaxpr.constvars, jaxpr.invars, *(eqn.outvars for eqn in jaxpr.eqns if _is_loop(eqn)))
    live = always | _on_host(jaxpr.outvars)
    peak = size = compat.nbytes_of(live)
    for eqn in reversed(jaxpr.eqns):
        made, read = live.intersection(eqn.outvars) - always, _on_host(eqn.invars) - live
        live -= made
        live |= read
        size += compat.nbytes_of(read) - compat.nbytes_of(made)
        peak = max(peak, size + _within(eqn))
    return peak


def _within(eqn: JaxprEqn) -> int:
    """What an equation holds only while it runs, beyond what it reads."""
    beyond = []
    for body in compat.sub_jaxprs(eqn):
        # An iteration's results are parts of the loop's; those of a call are its own until then.
        outside = _on_host(body.constvars, body.invars, body.outvars if _is_loop(eqn) else ())
        beyond.append(_peak(body) - compat.nbytes_of(outside))
    return max(beyond, default=0) * compat.num_shards(eqn)


def _is_loop(eqn: JaxprEqn) -> bool:
    return compat.scan_in(eqn) is not None or eqn.primitive.name == "while"


def _on_host(*groups: Iterable[Any]) -> set[Var]:
    return {v for group in groups for v in group if isinstance(v, Var) and compat.is_host(v.aval)}
