"""The experts' forward and backward pass as launches of the Hopper kernels.

Shapes: R rows (one a routed token), H model width, I expert width, E experts.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._backend import Grads, Hidden
from pallas_kernels._mosaic import gated, gather, row_products, tuning
from pallas_kernels._mosaic.row_tiling import ROW_ALIGNMENT, RowTiling, find_groups, tile_rows
from pallas_kernels._mosaic.weights import WG_M, grad_weight


class Mosaic:
    """The implementation of `pallas_kernels._backend.Backend` on the fused kernels."""

    def fc1(self, x, w, group_sizes, activation, index=None, *, save):
        rows = x.shape[0] if index is None else index.shape[0]
        x, index = (_pad(x), None) if index is None else (x, _pad(index))
        padded = x.shape[0] if index is None else index.shape[0]
        tiling = tile_rows(group_sizes, padded)
        config = tuning.choose_configs(w.w1.shape, padded, activation.parts).fc1
        if activation.gate is None:
            a = saved = row_products.fc1(x, w.w1, w.b1, tiling, config, index)[:rows]
        else:
            a, z = gated.fc1_gated(x, w.w1, w.b1, tiling, config, activation, index, save=save)
            a, saved = a[:rows], None if z is None else z[:rows]
        return Hidden(saved if save else None, a)

    def fc2(self, a, w, probs, group_sizes):
        rows, a = a.shape[0], _pad(a)
        probs = None if probs is None else _pad(probs)
        tiling = tile_rows(group_sizes, a.shape[0])
        parts = w.w1.shape[2] // w.w2.shape[1]
        config = tuning.choose_configs(w.w1.shape, a.shape[0], parts).fc2
        return row_products.fc2(a, w.w2, w.b2, probs, tiling, config)[:rows]

    def backward(
        self, x, saved, w, probs, group_sizes, dy, accumulators, activation, index=None, *, grad_dtype
    ):
        rows = saved.shape[0]
        biased = w.b2 is not None
        if index is None:
            x, dy = _pad(x), _pad(dy)
        else:
            index = _pad(index)
        saved = _pad(saved)
        probs = None if probs is None else _pad(probs)
        tiling = tile_rows(group_sizes, saved.shape[0])
        config = tuning.choose_configs(w.w1.shape, saved.shape[0], activation.parts)
        acc1, acc2 = accumulators or (None, None)
        pdy = dy
        if activation.gate is not None:
            dz, pa, dp = gated.grad_act_gated(
                dy, w.w2, saved, probs, tiling, config.grad_act, activation, index
            )
        else:
            scale_a = probs is not None and (index is not None or not tuning.scales_dy(w.w1.shape))
            dz, pa, dp = row_products.grad_act(
                dy, w.w2, saved, probs, tiling, config.grad_act, index, scale_a=scale_a
            )
            if probs is not None and not scale_a:
                pdy = (dy.astype(jnp.float32) * probs[:, None]).astype(dy.dtype)
        if biased and index is not None:  # for the sums over rows of dy
            dy = gather.gather_rows(dy, index)
        if dp is not None:
            if biased:
                dp += _dot_bias(dy, w.b2, tiling)
            dp = dp[:rows]
        grad_w2 = functools.partial(
            grad_weight, pa, pdy, tiling, grad_dtype, config.grad_w2, acc2, right_index=index
        )
        dw2 = None
        if index is not None:
            # The memory of `p a` is free before the rows of dx take theirs.
            dz, dw2 = lax.optimization_barrier((dz, grad_w2()))
        return Grads(
            x=row_products.grad_x(dz, w.w1, tiling, config.grad_x)[:rows],
            w1=grad_weight(x, dz, tiling, grad_dtype, config.grad_w1, acc1, left_index=index),
            w2=grad_w2() if dw2 is None else dw2,
            b1=None if w.b1 is None else _sum_rows(None, dz, tiling),
            b2=_sum_rows(probs, dy, tiling) if biased else None,
            probs=dp,
        )

    def sum_rows(self, rows, index):
        return gather.sum_rows(rows, index)


def _pad(x: jax.Array) -> jax.Array:
    """Pads the rows to a multiple of `ROW_ALIGNMENT`. Most calls need no padding."""
    missing = -x.shape[0] % ROW_ALIGNMENT
    return jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1)) if missing else x


def _sum_rows(scale: jax.Array | None, x: jax.Array, tiling: RowTiling) -> jax.Array:
    """Sums each expert's rows times a scale: (R, N) to (E, N) float32, in a fixed order.

    The weight-gradient kernel computes the sums as a product. The kernel takes 16-bit operands, so the
    float32 scale enters as three 16-bit summands, which hold its 24 bits of significand.
    """
    unit, parts = jnp.float32(1.0), [jnp.ones((x.shape[0],), x.dtype)]
    if scale is not None:
        group = find_groups(tiling, x.shape[0])
        rest = jnp.where(group < tiling.group_stop.shape[0], scale.astype(jnp.float32), 0.0)
        # Each expert's scales are divided by a power of two near the largest, to fit float16's exponents.
        of_expert = group[:, None] == jnp.arange(tiling.group_stop.shape[0])[None]
        largest = jnp.max(jnp.where(of_expert, jnp.abs(rest)[:, None], 0.0), axis=0)
        unit = jnp.exp2(jnp.floor(jnp.log2(jnp.maximum(largest, jnp.finfo(jnp.float32).tiny))))
        rest, parts = rest / unit.at[group].get(mode="clip"), []
        info = jnp.finfo(x.dtype)
        for _ in range(3):
            rounded = lax.reduce_precision(rest, info.nexp, info.nmant)
            parts.append(rounded.astype(x.dtype))
            rest = rest - rounded
        unit = unit[:, None]
    left = jnp.stack(parts + [jnp.zeros_like(parts[0])] * (WG_M - len(parts)), axis=1)
    sums = grad_weight(left, x, tiling, jnp.float32, tuning.Config(192, slots=3))
    return jnp.sum(sums[:, : len(parts)], axis=1) * unit


def _dot_bias(dy: jax.Array, b2: jax.Array, tiling: RowTiling) -> jax.Array:
    """Returns the share of b2 in the gradient of the probs: (R,) float32, zero past the last group."""
    group = find_groups(tiling, dy.shape[0])
    dot = jnp.sum(dy.astype(jnp.float32) * b2.at[group].get(mode="clip"), axis=1)
    return jnp.where(group < b2.shape[0], dot, 0.0)
