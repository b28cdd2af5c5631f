"""The grouped MLP as one differentiable operation, over either implementation.

Shapes: R rows (one a routed token), H model width, I expert width, E experts.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels._backend import Backend, Weights
from pallas_kernels._compat import vary, varying_axes
from pallas_kernels._reference import Reference

_Optional = jax.Array | None


def _make_backend(name: str) -> Backend:
    if name == "reference":
        return Reference()
    # Imported on first use: importing JAX's Mosaic GPU sets environment variables.
    from pallas_kernels._mosaic.launch import Mosaic

    return Mosaic()


class StaticOptions(NamedTuple):
    """The static options of a call, in a hashable tuple for `jax.custom_vjp`."""

    implementation: str
    grad_dtype: Any


def pin_and_name(x: jax.Array, name: str) -> jax.Array:
    """Names a value for checkpoint policies and pins its rounding.

    XLA may keep a narrow value wider inside a fusion. Rounding to the value's format right before the name
    makes the saved, the offloaded and the recomputed value equal, bit for bit.
    """
    info = jnp.finfo(x.dtype)
    return checkpoint_name(lax.reduce_precision(x, info.nexp, info.nmant), name)


def grouped_mlp(
    static: StaticOptions,
    x: jax.Array,
    w1: jax.Array,
    w2: jax.Array,
    group_sizes: jax.Array,
    probs: _Optional,
    b1: _Optional,
    b2: _Optional,
    accumulators: tuple[jax.Array, jax.Array] | None,
) -> jax.Array:
    """Computes `pallas_kernels.grouped_mlp` for checked arguments."""
    if x.shape[0] == 0:
        return jnp.zeros_like(x)
    arguments = (x, w1, w2, group_sizes.astype(jnp.int32), probs, b1, b2, accumulators)
    # Inside shard_map the rows differ between devices while the weights are often shared. Marking all
    # arguments as varying, outside of the custom rule, lets JAX sum the weight gradients over the devices.
    axes = frozenset().union(*map(varying_axes, jax.tree.leaves(arguments)))
    for accumulator in accumulators or ():
        if missing := axes - varying_axes(accumulator):
            raise ValueError(
                "grouped_mlp: grad_accumulators must differ between devices along every mesh axis that the "
                f"rows differ over, got accumulators that are the same over {sorted(missing)}. JAX would add "
                "them once a device: shard them over these axes too, and add them up after the last call"
            )
    return _grouped_mlp(static, *jax.tree.map(functools.partial(vary, axes=axes), arguments))


def _cast_weights(x, w1, w2, b1, b2) -> Weights:
    def widen(b):
        return None if b is None else b.astype(jnp.float32)

    return Weights(w1.astype(x.dtype), w2.astype(x.dtype), widen(b1), widen(b2))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped_mlp(static, x, w1, w2, group_sizes, probs, b1, b2, accumulators):
    return _forward(static, x, w1, w2, group_sizes, probs, b1, b2, accumulators)[0]


def _forward(static, x, w1, w2, group_sizes, probs, b1, b2, accumulators):
    """Returns y and the residuals.

    The undifferentiated call uses this function, too, so that the names appear in both programs.
    """
    backend, weights = _make_backend(static.implementation), _cast_weights(x, w1, w2, b1, b2)
    mark = functools.partial(vary, axes=varying_axes(x))
    x = pin_and_name(x, "moe.dispatched")
    a = pin_and_name(mark(backend.fc1(x, weights, group_sizes)), "moe.act")
    y = mark(backend.fc2(a, weights, probs, group_sizes))
    return y, (x, a, w1, w2, group_sizes, probs, b1, b2, accumulators)


def _backward(static, residuals, dy):
    x, a, w1, w2, group_sizes, probs, b1, b2, accumulators = residuals
    weights = _cast_weights(x, w1, w2, b1, b2)
    backend = _make_backend(static.implementation)
    grads = backend.backward(
        x, a, weights, probs, group_sizes, dy, accumulators, grad_dtype=static.grad_dtype
    )
    mark = functools.partial(vary, axes=varying_axes(x))

    def cast_like(grad, value):
        return None if value is None else mark(grad.astype(value.dtype))

    rest = None, cast_like(grads.probs, probs), cast_like(grads.b1, b1), cast_like(grads.b2, b2)
    if accumulators is not None:
        sums = cast_like(grads.w1, accumulators[0]), cast_like(grads.w2, accumulators[1])
        return mark(grads.x), None, None, *rest, sums
    return mark(grads.x), cast_like(grads.w1, w1), cast_like(grads.w2, w2), *rest, None


_grouped_mlp.defvjp(_forward, _backward)
