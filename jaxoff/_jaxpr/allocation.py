"""Arrays with arbitrary contents, allocated without a write."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.own_primitives import allocate
from jaxoff._jaxpr.shares import apply_to_shares


def empty(aval: Any, rows: int | None, *, is_divided: bool) -> jax.Array:
    """Makes an array with arbitrary contents.

    Args:
      aval: the abstract array, or of a stack the abstract row.
      rows: number of rows of a stack; None for an array of type `aval`.
      is_divided: whether the compiler may divide the array over devices.
    """
    scalar = compat.empty_scalar(aval)
    lead = () if rows is None else (rows,)
    shape, spec = (*lead, *aval.shape), jax.P(*(None for _ in lead), *aval.sharding.spec)
    sharding = aval.sharding.update(spec=spec)
    fill = functools.partial(jax.lax.broadcast, sizes=shape, out_sharding=sharding)
    if not shape or compat.is_host(aval) or jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        return fill(scalar)
    if is_divided:  # each device allocates its share
        whole = jax.typeof(scalar).sharding.update(spec=jax.P(*[None] * len(shape)))
        return apply_to_shares(functools.partial(allocate, sharding=whole), [scalar], like=fill)
    return allocate(scalar, shape, sharding)
