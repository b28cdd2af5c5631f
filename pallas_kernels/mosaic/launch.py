"""The grouped MLP's forward and backward pass as launches of the Hopper kernels."""

import jax
import jax.numpy as jnp

from pallas_kernels.backend import Grads
from pallas_kernels.mosaic import row_products, tuning
from pallas_kernels.mosaic.schedule import ROW_ALIGNMENT, Schedule, group_of_rows, schedule
from pallas_kernels.mosaic.weights import WG_M, grad_weight


class Mosaic:
    """The implementation of `pallas_kernels.backend.Backend` on the fused kernels."""

    def fc1(self, x, w, group_sizes):
        rows = x.shape[0]
        x = _align(x)
        plan = schedule(group_sizes, x.shape[0])
        config = tuning.configs(w.w1.shape, x.shape[0]).fc1
        return row_products.fc1(x, w.w1, w.b1, plan, config)[:rows]

    def fc2(self, a, w, probs, group_sizes):
        rows = a.shape[0]
        a, probs = _align(a), _align(probs)
        plan = schedule(group_sizes, a.shape[0])
        config = tuning.configs(w.w1.shape, a.shape[0]).fc2
        return row_products.fc2(a, w.w2, w.b2, probs, plan, config)[:rows]

    def backward(self, x, a, w, probs, group_sizes, dy, grad_dtype, accumulators):
        rows = x.shape[0]
        x, a, dy, probs = _align(x), _align(a), _align(dy), _align(probs)
        plan = schedule(group_sizes, x.shape[0])
        config = tuning.configs(w.w1.shape, x.shape[0])
        scale_a = probs is not None and not config.scale_dy
        dz, pa, dp = row_products.grad_act(dy, w.w2, a, probs, plan, config.grad_act, scale_a=scale_a)
        pdy = dy
        if probs is not None and not scale_a:
            pdy = (dy.astype(jnp.float32) * probs.astype(jnp.float32)[:, None]).astype(dy.dtype)
        acc1, acc2 = (None, None) if accumulators is None else accumulators
        dw2 = grad_weight(pa, pdy, plan, grad_dtype, config.grad_w2, acc2)
        dx = row_products.grad_x(dz, w.w1, plan, config.grad_x)
        dw1 = grad_weight(x, dz, plan, grad_dtype, config.grad_w1, acc1)
        db1 = None if w.b1 is None else _sum_rows(None, dz, plan)
        db2 = None
        if w.b2 is not None:
            db2 = _sum_rows(probs, dy, plan)
            if probs is not None:
                dp = dp + _dot_bias(dy, w.b2, plan)
        return Grads(dx[:rows], dw1, dw2, db1, db2, None if dp is None else dp[:rows])


def _align(x: jax.Array | None) -> jax.Array | None:
    """Pads the rows to a multiple of what the copy engine takes; most calls need none."""
    if x is None or x.shape[0] % ROW_ALIGNMENT == 0:
        return x
    return jnp.pad(x, [(0, -x.shape[0] % ROW_ALIGNMENT)] + [(0, 0)] * (x.ndim - 1))


def _sum_rows(scale: jax.Array | None, x: jax.Array, plan: Schedule) -> jax.Array:
    """Adds up, for each expert, its rows times a scale: (R, N) to (E, N) float32, in a fixed order.

    A product of the kernel that makes the weights' gradients. It takes 16-bit operands: the scale enters as
    three of them that add up to its 24 bits.
    """
    if scale is None:
        parts = [jnp.ones((x.shape[0],), x.dtype)]
        unit = jnp.float32(1.0)
    else:
        row = jnp.arange(x.shape[0])
        rest = jnp.where(row < plan.group_stop[-1], scale.astype(jnp.float32), 0.0)
        # A power of two near the largest, so that float16 does not run out of exponents.
        unit = jnp.exp2(jnp.floor(jnp.log2(jnp.maximum(jnp.max(jnp.abs(rest)), jnp.finfo(jnp.float32).tiny))))
        rest, parts = rest / unit, []
        for _ in range(3):
            parts.append(rest.astype(x.dtype))
            rest = rest - parts[-1].astype(jnp.float32)
    left = jnp.stack(parts + [jnp.zeros_like(parts[0])] * (WG_M - len(parts)), axis=1)
    sums = grad_weight(left, x, plan, jnp.float32, tuning.Config(192, slots=3))
    return jnp.sum(sums[:, : len(parts)], axis=1) * unit


def _dot_bias(dy: jax.Array, b2: jax.Array, plan: Schedule) -> jax.Array:
    """What b2 adds to the gradient of the probs: (R,) float32, zero past the last group."""
    group = group_of_rows(plan, dy.shape[0])
    dot = jnp.sum(dy.astype(jnp.float32) * b2.at[group].get(mode="clip"), axis=1)
    return jnp.where(group < b2.shape[0], dot, 0.0)
