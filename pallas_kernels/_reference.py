"""The grouped MLP in XLA operations: a scan over tiles of rows, with a hand-written gradient.

Shapes: R rows (one a routed token), H model width, I expert width, E experts, T rows of a tile, F columns of
FC1 (I, or 2 I for a gated activation).

XLA lowers `lax.ragged_dot` to a masked dense product over all experts, which needs E times the memory. Here
each iteration of the scan multiplies one tile by the weights of one expert, a slice of the (E, ...) stack.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._activation import Activation
from pallas_kernels._backend import Grads, Hidden
from pallas_kernels._compat import vary, varying_axes
from pallas_kernels._tiles import Tiles, choose_height, cut_tiles


def _dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """Contracts one axis of each of two matrices in float32, without transposing either in memory."""
    # HIGHEST keeps a GPU from rounding float32 operands to TF32. Products of 16-bit operands are exact.
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def _slice(x: jax.Array, tile: Tiles, height: int) -> jax.Array:
    """Reads a tile's rows. Rows of other tiles or of no group read as zero, even where they hold NaN."""
    rows = lax.dynamic_slice_in_dim(x, tile.start, height)
    mask = tile.mask(height)
    return jnp.where(mask if x.ndim == 2 else mask[:, 0], rows, jnp.zeros_like(rows))


def _store(buffer: jax.Array, rows: jax.Array, tile: Tiles) -> jax.Array:
    """Writes a tile's rows and keeps the other rows of the slice."""
    height = rows.shape[0]
    mask = tile.mask(height)
    old = lax.dynamic_slice_in_dim(buffer, tile.start, height)
    new = jnp.where(mask if rows.ndim == 2 else mask[:, 0], rows.astype(buffer.dtype), old)
    return lax.dynamic_update_slice_in_dim(buffer, new, tile.start, 0)


def _read_expert(stack: jax.Array, tile: Tiles) -> jax.Array:
    return lax.dynamic_index_in_dim(stack, tile.expert, keepdims=False)


def _accumulate(stack: jax.Array, value: jax.Array, tile: Tiles) -> jax.Array:
    return lax.dynamic_update_index_in_dim(stack, _read_expert(stack, tile) + value, tile.expert, 0)


def _zeros(shape: tuple[int, ...], dtype: Any, like: jax.Array) -> jax.Array:
    # A scan's initial carry must vary over the mesh axes of its result.
    return vary(jnp.zeros(shape, dtype), varying_axes(like))


def _scan_tiles(step: Callable[[Any, Tiles], Any], init: Any, tiles: Tiles) -> Any:
    return lax.scan(lambda carry, tile: (step(carry, tile), None), init, tiles)[0]


def _round(x: jax.Array, dtype: Any) -> jax.Array:
    """Rounds float32 values to a narrower format, in float32. XLA does not remove this rounding."""
    info = jnp.finfo(dtype)
    return lax.reduce_precision(x, info.nexp, info.nmant)


def _gate(activation: Activation, z: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns `f(g) u` and its derivatives by g and by u, for z = (g, u) of (T, 2 I)."""
    g, u = jnp.split(z, 2, axis=1)
    assert activation.gate is not None
    value, slope = activation.gate(g)
    return value * u, slope * u, value


class Reference:
    """The implementation of `pallas_kernels._backend.Backend` in XLA operations."""

    def fc1(self, x, w, group_sizes, activation, index=None, *, save):
        x = _take_rows(x, index)
        tiles, height = _cut_rows(x, w, group_sizes)
        gated = activation.gate is not None

        def step(buffers, tile):
            z = _dot(_slice(x, tile, height), _read_expert(w.w1, tile), (1, 0))
            if w.b1 is not None:
                z += _read_expert(w.b1, tile)[None]
            if not gated:
                return [_store(buffers[0], jnp.square(jnp.maximum(z, 0.0)), tile)]
            z = _round(z, x.dtype)
            values = [_gate(activation, z)[0], z][: len(buffers)]
            return [_store(buffer, v, tile) for buffer, v in zip(buffers, values, strict=True)]

        widths = [w.w2.shape[1], w.w1.shape[2]][: 1 + (gated and save)]
        init = [_zeros((x.shape[0], width), x.dtype, x) for width in widths]
        a, *z = _scan_tiles(step, init, tiles)
        return Hidden((z[0] if gated else a) if save else None, a)

    def fc2(self, a, w, probs, group_sizes):
        tiles, height = _cut_rows(a, w, group_sizes)

        def step(y, tile):
            out = _dot(_slice(a, tile, height), _read_expert(w.w2, tile), (1, 0))
            if w.b2 is not None:
                out += _read_expert(w.b2, tile)[None]
            if probs is not None:
                out *= _slice(probs, tile, height).astype(jnp.float32)[:, None]
            return _store(y, out, tile)

        return _scan_tiles(step, _zeros((a.shape[0], w.w2.shape[2]), a.dtype, a), tiles)

    def backward(
        self, x, saved, w, probs, group_sizes, dy, accumulators, activation, index=None, *, grad_dtype
    ):
        x, dy = _take_rows(x, index), _take_rows(dy, index)
        tiles, height = _cut_rows(x, w, group_sizes)

        def step(carry, tile):
            dx, dw1, dw2, dp, db1, db2 = carry
            e1, e2 = _read_expert(w.w1, tile), _read_expert(w.w2, tile)
            x_t, dy_t = _slice(x, tile, height), _slice(dy, tile, height)
            saved_t = _slice(saved, tile, height).astype(jnp.float32)
            if activation.gate is None:
                a_t = saved_t
            else:
                a_t, *slopes = _gate(activation, saved_t)
                a_t = _round(a_t, x.dtype)  # as in the forward pass
            da = _dot(dy_t, e2, (1, 1))
            pa, pdy = a_t, dy_t.astype(jnp.float32)
            if probs is not None:
                p_t = _slice(probs, tile, height).astype(jnp.float32)[:, None]
                dp_t = jnp.sum(da * a_t, axis=1)
                if w.b2 is not None:
                    dp_t += jnp.sum(pdy * _read_expert(w.b2, tile)[None], axis=1)
                dp = _store(dp, dp_t, tile)
                da, pa, pdy = p_t * da, p_t * pa, p_t * pdy
            if activation.gate is None:
                # relu(z) = sqrt(a). The inner select keeps the second derivative finite where a = 0.
                on = a_t > 0.0
                dz = 2.0 * da * jnp.where(on, jnp.sqrt(jnp.where(on, a_t, 1.0)), 0.0)
            else:
                dz = jnp.concatenate([da * slope for slope in slopes], axis=1)
            # Rounded here, since XLA may otherwise keep dz in float32 on its way into db1.
            dz = _round(dz, x.dtype).astype(x.dtype)
            if w.b1 is not None:
                db1 = _accumulate(db1, jnp.sum(dz.astype(jnp.float32), axis=0), tile)
            if w.b2 is not None:
                db2 = _accumulate(db2, jnp.sum(pdy, axis=0), tile)
            dw2 = _accumulate(dw2, _dot(pa.astype(x.dtype), dy_t, (0, 0)), tile)
            dw1 = _accumulate(dw1, _dot(x_t, dz, (0, 0)), tile)
            dx = _store(dx, _dot(dz, e1, (1, 1)), tile)
            return dx, dw1, dw2, dp, db1, db2

        def zeros(value, dtype=jnp.float32):
            return None if value is None else _zeros(value.shape, dtype, dy)

        # The scan adds the tiles to their experts' slices one by one, in a fixed order.
        dw = accumulators or (zeros(w.w1), zeros(w.w2))
        init = (zeros(x, x.dtype), *dw, zeros(probs), zeros(w.b1), zeros(w.b2))
        dx, dw1, dw2, dp, db1, db2 = _scan_tiles(step, init, tiles)
        return Grads(dx, dw1.astype(grad_dtype), dw2.astype(grad_dtype), db1, db2, dp)

    def sum_rows(self, rows, index):
        copies = rows.at[index].get(mode="promise_in_bounds")
        return _round(jnp.sum(copies.astype(jnp.float32), axis=1), rows.dtype).astype(rows.dtype)


def _take_rows(x: jax.Array, index: jax.Array | None) -> jax.Array:
    return x if index is None else x.at[index].get(mode="promise_in_bounds")


def _cut_rows(x, w, group_sizes) -> tuple[Tiles, int]:
    height = choose_height(x.shape[0], w.w1.shape[0])
    return cut_tiles(group_sizes, x.shape[0], height), height
