"""Primitives of jaxoff's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jaxoff._jaxpr.compat import define_primitive


def allocate(scalar: jax.Array, shape: tuple[int, ...], sharding: Any) -> jax.Array:
    """Allocates an array on a GPU without a write. Other backends fill the array with the scalar.

    Args:
      scalar: operand of the allocation. The allocation waits for it.
      shape: shape of the array.
      sharding: sharding of the array. The compiler must not divide the array: each device would allocate all
        of it.
    """
    return _unwritten_p.bind(scalar, shape=shape, sharding=sharding)


def change_in_place(function: Callable[..., jax.Array], value: jax.Array, *operands: jax.Array) -> jax.Array:
    """The result of `function(value, *operands)`, of the type of `value`.

    Inside `jax.shard_map` a result differs between devices, for JAX, where any operand does. A dependency on
    an operand leaves the value as it is; without this primitive the equations that read the value, and the
    carry of a loop, would have another type.
    """
    return _changed_p.bind(value, *operands, function=function)


def write_over(old: jax.Array, new: jax.Array) -> jax.Array:
    """The value `new`, for the memory of `old`: in a loop over rows of a stack, the row's place there.

    Without a reader of this mark, the value is in memory of its own.
    """
    return written_over_p.bind(new, old)


def _fill(scalar, *, shape, sharding):
    return jax.lax.broadcast(scalar, shape, out_sharding=sharding)


def _allocate_on_gpu(ctx, scalar, *, shape, sharding):
    del shape, sharding  # the type of the result has both
    return jax.ffi.ffi_lowering("AllocateBuffer")(ctx, scalar)


# XLA's custom call AllocateBuffer allocates without a write. `jax.lax.empty` binds the call without an
# operand. An operand delays the allocation, so the buffer can share memory with values dead by then.
_unwritten_p = define_primitive(
    "unwritten",
    lambda scalar, *, shape, sharding: scalar.update(shape=shape, sharding=sharding),
    _fill,
    _allocate_on_gpu,
)
_changed_p = define_primitive(
    "changed_in_place",
    lambda value, *operands, function: value,
    lambda value, *operands, function: function(value, *operands),
)
written_over_p = define_primitive("written_over", lambda new, old: new, lambda new, old: new)
