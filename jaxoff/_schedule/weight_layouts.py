"""Lays out the weights of loops over layers by rows, where the compiler divides them by columns.

A gather joins values along their first axis in memory. To gather columns XLA transposes weights, and moves
the transposition out of loops: the stacks of all layers are in memory a second time, and their gradients.
A constraint on the layout of a layer's weights leaves the transposition in the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import NamedSharding, Sharding

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jaxoff._jaxpr.inline import trace_call
from jaxoff._jaxpr.meshes import list_dividing
from jaxoff._schedule.batch_axes import Axes, BatchAxes

# Smaller weights, like a norm's scale, are left to the compiler.
_LEAST_NBYTES = 2**20


def lay_out_weights(
    closed: ClosedJaxpr, batch: Axes, shards: int, shardings: Sequence[Sharding | None]
) -> ClosedJaxpr:
    """A program in which each iteration of a loop takes weights, and makes their gradients, laid out by rows.

    Args:
      closed: a program which is not differentiated any more.
      batch: of each argument, the axis of the batch, or None.
      shards: the number of parts of the batch.
      shardings: of the arguments. Unless they divide a stack by columns, the program itself is returned.
    """
    if not any(map(_divides_columns, shardings)):
        return closed
    axes = BatchAxes(shards)
    stacks = (v.aval for v, axis in zip(closed.jaxpr.invars, batch, strict=True) if axis is None)
    shapes = {
        shape[k:] for aval in stacks for shape in [compat.shape_of(aval)] for k in range(1, len(shape) - 1)
    }

    def write_around(eqn: JaxprEqn, given: Axes) -> JaxprEqn:
        if (layout := compat.scan_in(eqn)) is None:
            return eqn

        def constrain(body: Jaxpr) -> Jaxpr:
            known = axes.follow(body, given)
            return _constrain(body, lambda v: v not in known and _is_weights(v, shapes), layout, eqn)

        return compat.map_programs(eqn, constrain)

    return axes.rewrite(closed, batch, write_around=write_around)


def _constrain(
    body: Jaxpr, is_weights: Callable[[Var], bool], layout: compat.ScanLayout, like: JaxprEqn
) -> Jaxpr:
    """The body of a loop with constraints on its weights and on the gradients of weights.

    Args:
      body: the body.
      is_weights: whether a row of a stack is weights, or their gradient.
      layout: of the loop's operands.
      like: the loop.
    """
    before: list[JaxprEqn] = []
    after: list[JaxprEqn] = []
    taken: dict[Any, Var] = {}
    outvars, first = list(body.outvars), layout.num_consts + layout.num_carry
    for v in body.invars[first:]:
        if is_weights(v):
            eqns, (taken[v],) = trace_call(_store_by_rows, [v], like=like)
            before += eqns
    for k in range(layout.num_carry, len(outvars)):
        v = outvars[k]
        if isinstance(v, Var) and v not in body.invars and is_weights(v):
            eqns, (outvars[k],) = trace_call(_store_by_rows, [v], like=like)
            after += eqns
    if not before and not after:
        return body
    eqns = [
        eqn.replace(invars=[taken.get(v, v) if isinstance(v, Var) else v for v in eqn.invars])
        for eqn in body.eqns
    ]
    return body.replace(eqns=[*before, *eqns, *after], outvars=outvars)


def _store_by_rows(weights: jax.Array) -> jax.Array:
    return with_layout_constraint(weights, Layout(tuple(range(weights.ndim))))


def _is_weights(v: Var, shapes: Container[tuple[int, ...]]) -> bool:
    """Whether a value is a large matrix with one of the shapes of weights."""
    shape, dtype = compat.shape_of(v.aval), getattr(v.aval, "dtype", jnp.bool_)
    is_large = jnp.issubdtype(dtype, jnp.floating) and compat.nbytes(v.aval) >= _LEAST_NBYTES
    return is_large and shape in shapes


def _divides_columns(sharding: Sharding | None) -> bool:
    """Whether a sharding divides a stack of matrices along another axis than the first of the matrices."""
    return isinstance(sharding, NamedSharding) and any(list_dividing(sharding)[2:])
