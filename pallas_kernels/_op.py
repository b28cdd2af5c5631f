"""The grouped MLP and the MoE layer as differentiable operations, over either implementation.

Shapes: T tokens, k experts a token, R rows (one a routed token), H model width, I expert width, E experts.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels._activation import ACTIVATIONS
from pallas_kernels._backend import Backend, Weights
from pallas_kernels._compat import vary, varying_axes
from pallas_kernels._reference import Reference
from pallas_kernels._routing import Routes, route

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
    activation: str


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
    return _grouped_mlp(static, *_vary_alike("grouped_mlp", arguments))


def moe(
    static: StaticOptions,
    x: jax.Array,
    probs: jax.Array,
    experts: jax.Array,
    w1: jax.Array,
    w2: jax.Array,
    b1: _Optional,
    b2: _Optional,
    accumulators: tuple[jax.Array, jax.Array] | None,
) -> jax.Array:
    """Computes `pallas_kernels.moe` for checked arguments."""
    if experts.size == 0:
        return jnp.zeros_like(x)
    arguments = (x, probs, experts.astype(jnp.int32), w1, w2, b1, b2, accumulators)
    return _moe(static, *_vary_alike("moe", arguments))


def _vary_alike(op: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Marks all arguments, of which the last are accumulators, as varying over the mesh axes of any.

    Inside shard_map the rows differ between devices while the weights are often shared. The marks, outside of
    the custom rule, let JAX sum the weight gradients over the devices.
    """
    axes = frozenset().union(*map(varying_axes, jax.tree.leaves(arguments)))
    for accumulator in arguments[-1] or ():
        if missing := axes - varying_axes(accumulator):
            raise ValueError(
                f"{op}: grad_accumulators must differ between devices along every mesh axis that the "
                f"rows differ over, got accumulators that are the same over {sorted(missing)}. JAX would add "
                "them once a device: shard them over these axes too, and add them up after the last call"
            )
    return jax.tree.map(functools.partial(vary, axes=axes), arguments)


def _cast_weights(x, w1, w2, b1, b2) -> Weights:
    def widen(b):
        return None if b is None else b.astype(jnp.float32)

    return Weights(w1.astype(x.dtype), w2.astype(x.dtype), widen(b1), widen(b2))


def _multiply(static, x, weights, group_sizes, probs, index=None, *, save):
    """Runs both products on rows x or x[index]: (R, H), and the named residual, maybe None without `save`."""
    backend = _make_backend(static.implementation)
    activation = ACTIVATIONS[static.activation]
    mark = functools.partial(vary, axes=varying_axes(x))
    # The squared ReLU's residual is its output.
    hidden = backend.fc1(x, weights, group_sizes, activation, index, save=save or activation.gate is None)
    saved = None if hidden.saved is None else pin_and_name(mark(hidden.saved), "moe.act")
    a = saved if activation.gate is None else mark(hidden.a)
    assert a is not None
    return mark(backend.fc2(a, weights, probs, group_sizes)), saved


def _cast_grads(grads, arguments, mark):
    """Returns the gradients of w1, w2, b1, b2 and of the accumulators, in the arguments' dtypes."""
    w1, w2, b1, b2, accumulators = arguments

    def cast_like(grad, value):
        return None if value is None else mark(grad.astype(value.dtype))

    biases = cast_like(grads.b1, b1), cast_like(grads.b2, b2)
    if accumulators is not None:
        sums = cast_like(grads.w1, accumulators[0]), cast_like(grads.w2, accumulators[1])
        return None, None, *biases, sums
    return cast_like(grads.w1, w1), cast_like(grads.w2, w2), *biases, None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped_mlp(static, x, w1, w2, group_sizes, probs, b1, b2, accumulators):
    # The names appear in the undifferentiated program, too.
    x = pin_and_name(x, "moe.dispatched")
    return _multiply(static, x, _cast_weights(x, w1, w2, b1, b2), group_sizes, probs, save=False)[0]


def _grouped_mlp_forward(static, x, w1, w2, group_sizes, probs, b1, b2, accumulators):
    x = pin_and_name(x, "moe.dispatched")
    y, saved = _multiply(static, x, _cast_weights(x, w1, w2, b1, b2), group_sizes, probs, save=True)
    return y, (x, saved, w1, w2, group_sizes, probs, b1, b2, accumulators)


def _grouped_mlp_backward(static, residuals, dy):
    x, saved, w1, w2, group_sizes, probs, b1, b2, accumulators = residuals
    weights = _cast_weights(x, w1, w2, b1, b2)
    grads = _make_backend(static.implementation).backward(
        x,
        saved,
        weights,
        probs,
        group_sizes,
        dy,
        accumulators,
        ACTIVATIONS[static.activation],
        grad_dtype=static.grad_dtype,
    )
    mark = functools.partial(vary, axes=varying_axes(x))
    dw1, dw2, *rest = _cast_grads(grads, (w1, w2, b1, b2, accumulators), mark)
    dprobs = None if grads.probs is None else mark(grads.probs.astype(probs.dtype))
    return mark(grads.x), dw1, dw2, None, dprobs, *rest


_grouped_mlp.defvjp(_grouped_mlp_forward, _grouped_mlp_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _moe(static, x, probs, experts, w1, w2, b1, b2, accumulators):
    x = pin_and_name(x, "moe.in")
    routes = route(experts, w1.shape[0])
    return _apply_experts(static, x, probs, routes, _cast_weights(x, w1, w2, b1, b2), save=False)[0]


def _apply_experts(static, x, probs, routes: Routes, weights: Weights, *, save):
    """Multiplies the gathered rows and adds each token's: (T, H), and the residual of `_multiply`."""
    sizes, probs = routes.group_sizes, routes.sort(probs)
    y, saved = _multiply(static, x, weights, sizes, probs, routes.tokens, save=save)
    out = _make_backend(static.implementation).sum_rows(y, routes.places)
    return vary(out, axes=varying_axes(x)), saved


def _moe_forward(static, x, probs, experts, w1, w2, b1, b2, accumulators):
    x = pin_and_name(x, "moe.in")
    routes = route(experts, w1.shape[0])
    out, saved = _apply_experts(static, x, probs, routes, _cast_weights(x, w1, w2, b1, b2), save=True)
    return out, (x, saved, probs, routes, w1, w2, b1, b2, accumulators)


def _moe_backward(static, residuals, dout):
    x, saved, probs, routes, w1, w2, b1, b2, accumulators = residuals
    backend = _make_backend(static.implementation)
    mark = functools.partial(vary, axes=varying_axes(x))
    # The rows are gathered again: kept, they would take k times the memory of x.
    grads = backend.backward(
        x,
        saved,
        _cast_weights(x, w1, w2, b1, b2),
        routes.sort(probs),
        routes.group_sizes,
        dout,
        accumulators,
        ACTIVATIONS[static.activation],
        routes.tokens,
        grad_dtype=static.grad_dtype,
    )
    dx = mark(backend.sum_rows(mark(grads.x), routes.places))
    dprobs = mark(routes.unsort(grads.probs).astype(probs.dtype))
    return dx, dprobs, None, *_cast_grads(grads, (w1, w2, b1, b2, accumulators), mark)


_moe.defvjp(_moe_forward, _moe_backward)
