"""Kept values in half of their bytes: float8 numbers with a scale for each block."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import JaxprEqn, Var

# Neighbours along the last axis with a scale in common: at most, and at least.
_MOST, LEAST_BLOCK = 128, 32
_CHOICES = frozenset({"approx_top_k", "argmax", "argmin", "ceil", "floor", "round", "sort", "top_k"})
DTYPE = jnp.float8_e4m3fn
_LARGEST = float(jnp.finfo(DTYPE).max)


def can_compress(aval: Any) -> bool:
    """Whether a value has floating-point numbers of two bytes or more, in whole blocks."""
    shape, dtype = compat.shape_of(aval), compat.struct_of(aval).dtype
    is_wide = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize >= 2
    return is_wide and bool(shape) and block_of(shape) >= LEAST_BLOCK and compat.nbytes(aval) > 0


def chooses(eqn: JaxprEqn) -> bool:
    """Whether an equation makes a choice, such as the experts of a token, that rounded values may change."""
    if any(chooses(inner) for jaxpr in compat.sub_jaxprs(eqn) for inner in jaxpr.eqns):
        return True
    if eqn.primitive.name != "convert_element_type":
        return eqn.primitive.name in _CHOICES
    given, made = (
        jnp.issubdtype(compat.struct_of(v.aval).dtype, jnp.inexact) for v in (eqn.invars[0], eqn.outvars[0])
    )
    return given and not made


def block_of(shape: Sequence[int]) -> int:
    """The length of the blocks of a value: 128, or the largest power of two that divides the last axis."""
    return math.gcd(shape[-1], _MOST)


def compressed_nbytes(aval: Any) -> int:
    """Bytes of a compressed value: a byte a number, and a float32 scale a block."""
    numbers = compat.nbytes(aval) // compat.struct_of(aval).dtype.itemsize
    return numbers + 4 * numbers // block_of(compat.shape_of(aval))


def compress(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rounds a value to float8 (e4m3fn), each block by its largest magnitude.

    Numbers that are not finite stay so: a block with an infinity restores as zeros and NaN.

    Args:
      x: (..., n) floating-point numbers; blocks have `block_of(x.shape)` of them, b.

    Returns:
      The numbers, of the shape of x, and the scales, (..., n / b) float32.

    References:
      Micikevicius et al., FP8 Formats for Deep Learning, 2022. DeepSeek-AI, DeepSeek-V3 Technical Report,
      2024 (blocks of 128).
    """
    blocks = x.reshape(*x.shape[:-1], -1, block_of(x.shape)).astype(jnp.float32)
    largest = jnp.max(jnp.abs(blocks), axis=-1)
    scales = jnp.where(largest == 0, 1.0, largest / _LARGEST)
    return (blocks / scales[..., None]).astype(DTYPE).reshape(x.shape), scales


def restore(numbers: jax.Array, scales: jax.Array, dtype: Any) -> jax.Array:
    """The value behind `compress`, of a dtype; the error is at most a sixteenth of each normal number."""
    blocks = numbers.reshape(*scales.shape, -1).astype(jnp.float32) * scales[..., None]
    return blocks.reshape(numbers.shape).astype(dtype)


def pack(values: Sequence[Any], compressed: Sequence[bool]) -> list[Any]:
    """Values as arrays to keep: two for a compressed value."""
    pairs = zip(values, compressed, strict=True)
    return [array for x, is_compressed in pairs for array in (compress(x) if is_compressed else (x,))]


def unpack(arrays: Sequence[Any], values: Sequence[Var], compressed: Sequence[bool]) -> list[Any]:
    """The values behind `pack`, of the variables' types."""
    left = iter(arrays)
    return [
        restore(next(left), next(left), compat.struct_of(v.aval).dtype) if is_compressed else next(left)
        for v, is_compressed in zip(values, compressed, strict=True)
    ]
