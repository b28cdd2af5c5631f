"""The bits of a number of each type in memory: XLA packs narrow numbers, several to a byte."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

_PACKED: dict[Any, int] = {
    **dict.fromkeys(map(jnp.dtype, (jnp.int2, jnp.uint2)), 2),
    **dict.fromkeys(map(jnp.dtype, (jnp.int4, jnp.uint4, jnp.float4_e2m1fn)), 4),
}


def bits_of(dtype: Any) -> int:
    """The bits of a number in memory, or of another element, such as a random key."""
    return _PACKED[dtype] if dtype in _PACKED else 8 * dtype.itemsize
