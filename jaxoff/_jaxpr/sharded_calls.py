"""Calls of `jax.jit` with shardings, as calls without, between constraints of their operands and results.

A call without shardings is no more than its equations, which may take its place.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import ClosedJaxpr, Jaxpr, JaxprEqn
from jaxoff._jaxpr.inline import trace_call, write_otherwise
from jaxoff._jaxpr.primitives import holds, is_shard_map

_KEYS = ("in_shardings", "out_shardings")


def constrain_calls(closed: ClosedJaxpr) -> ClosedJaxpr:
    """A program without calls with shardings, but for Explicit axes, other memories and layouts."""
    return compat.map_open(closed, _constrain_level) if holds(closed.jaxpr, _is_sharded) else closed


def _constrain_level(program: Jaxpr) -> Jaxpr:
    return write_otherwise(program, _constrain_call)


def _constrain_call(eqn: JaxprEqn) -> JaxprEqn | tuple[list[JaxprEqn], list[Any]]:
    if is_shard_map(eqn):
        return eqn
    eqn = compat.map_programs(eqn, _constrain_level)
    if not _is_sharded(eqn):
        return eqn
    given, results = (eqn.params[key] for key in _KEYS)
    free = {key: (_make_unspecified(),) * len(eqn.params[key]) for key in _KEYS}
    before, operands = _constrain(eqn.invars, given, eqn)
    outs = [compat.Var(v.aval) for v in eqn.outvars]
    call = eqn.replace(invars=operands, outvars=outs, params=eqn.params | free)
    after, outs = _constrain(outs, results, eqn)
    return [*before, call, *after], outs


def _constrain(
    values: Sequence[Any], shardings: Sequence[Any], like: JaxprEqn
) -> tuple[list[JaxprEqn], list[Any]]:
    eqns, constrained = [], list(values)
    for i, sharding in enumerate(shardings):
        if isinstance(sharding, NamedSharding):
            constrain = functools.partial(jax.lax.with_sharding_constraint, shardings=sharding)
            made, (constrained[i],) = trace_call(constrain, [values[i]], like)
            eqns += made
    return eqns, constrained


def _is_sharded(eqn: JaxprEqn) -> bool:
    """Whether an equation is a call with shardings which constraints can say."""
    if not all(key in eqn.params for key in _KEYS):
        return False
    named = [s for key in _KEYS for s in eqn.params[key] if type(s) is not type(_make_unspecified())]
    layouts = (*eqn.params.get("in_layouts", ()), *eqn.params.get("out_layouts", ()))
    return bool(named) and not any(layouts) and all(map(_is_said_by_constraint, named))


def _is_said_by_constraint(sharding: Any) -> bool:
    if not isinstance(sharding, NamedSharding) or sharding.memory_kind not in (None, "device"):
        return False
    return all(kind is AxisType.Auto for kind in sharding.mesh.axis_types)


@functools.cache
def _make_unspecified() -> Any:
    """What stands for no sharding among the parameters of a call."""
    (eqn,) = jax.make_jaxpr(jax.jit(lambda x: x + 1))(0.0).jaxpr.eqns
    return eqn.params["in_shardings"][0]
