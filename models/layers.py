"""Layers without experts: norm, rotary embedding, attention, MLP.

Shapes: B batch, S sequence, D model width, N query heads, K key-value heads, H head width, F hidden width of
an MLP.

Rounding: each 16-bit value here has its rounding pinned, by `jaxoff.name` or by `pin`, and all arithmetic
between two 16-bit values is float32. So a saved, offloaded or recomputed value has the same bits; the same
holds for gradients, since the gradient of a pin is a pin.
"""

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

import jaxoff
from models.config import Config

Implementation = Literal["cudnn", "xla"]


def pin(x: jax.Array) -> jax.Array:
    """Rounds a value to its own format, so XLA cannot keep a wider value inside a fusion."""
    info = jnp.finfo(x.dtype)
    return lax.reduce_precision(x, info.nexp, info.nmant)


def fence(x: jax.Array) -> jax.Array:
    """Keeps XLA from looking across a value.

    XLA orders the additions of a reduction by the other operations of the fusion, and gathers the constants
    of a chain of products. The fusions of the forward pass and of a recomputation differ, and so would the
    bits.
    """
    return lax.optimization_barrier(x)


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], stddev: float, config: Config) -> nnx.Param:
    return nnx.Param(stddev * jax.random.normal(rngs.params(), shape, config.param_dtype))


def _matmul_rounded(x, w, dtype):
    return jnp.dot(x, w.astype(x.dtype), preferred_element_type=dtype)


# A forward rule here repeats the plain function instead of calling the function with the rule: a checkpoint
# policy would see neither names nor dots inside the call.
_matmul = jax.custom_vjp(_matmul_rounded, nondiff_argnums=(2,))


def _matmul_forward(x, w, dtype):
    return _matmul_rounded(x, w, dtype), (x, w)


def _matmul_backward(dtype, residuals, dy):
    x, w = residuals
    dy = pin(dy.astype(x.dtype))
    dx = lax.dot_general(
        dy, w.astype(x.dtype), (((dy.ndim - 1,), (1,)), ((), ())), preferred_element_type=x.dtype
    )
    rows = tuple(range(x.ndim - 1))
    dw = lax.dot_general(x, dy, ((rows, rows), ((), ())), preferred_element_type=jnp.float32)
    return pin(dx), dw.astype(w.dtype)


_matmul.defvjp(_matmul_forward, _matmul_backward)


def matmul(x: jax.Array, w: jax.Array, dtype: jax.typing.DTypeLike | None = None) -> jax.Array:
    """Multiplies activations by a weight kept in its own, wider type.

    The weight is cast to x's dtype where used, the sums are in float32, and the weight's gradient leaves its
    sum in float32. The gradient is written by hand: JAX's own would round the weight's gradient to x's dtype,
    or multiply in float32.

    Args:
      x: (..., D) of the compute dtype.
      w: (D, F) of the parameter dtype.
      dtype: dtype of the result; x's by default.

    Returns:
      (..., F), its rounding pinned.
    """
    return pin(_matmul(x, w, jnp.dtype(dtype or x.dtype)))


@jax.custom_vjp
def fan_out(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Hands a value to three consumers and adds their gradients in float32, rounding the sum once."""
    return x, x, x


def _fan_out_backward(residuals, grads):
    del residuals
    first, second, third = (pin(grad).astype(jnp.float32) for grad in grads)
    return (pin((first + second + third).astype(grads[0].dtype)),)


fan_out.defvjp(lambda x: ((x, x, x), None), _fan_out_backward)


def _squared_relu(z, name):
    return jaxoff.name(jnp.square(jnp.maximum(z.astype(jnp.float32), 0.0)).astype(z.dtype), name)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def squared_relu(z: jax.Array, name: str) -> jax.Array:
    """Applies relu(z)^2 and names the result.

    The gradient needs the result alone, and not z: relu(z) is its square root.
    """
    return _squared_relu(z, name)


def _squared_relu_forward(z, name):
    a = _squared_relu(z, name)
    return a, a


def _squared_relu_backward(name, a, da):
    del name
    return (pin((2.0 * jnp.sqrt(a.astype(jnp.float32)) * da.astype(jnp.float32)).astype(a.dtype)),)


squared_relu.defvjp(_squared_relu_forward, _squared_relu_backward)


def _swiglu(z, name):
    gate, up = jnp.split(z.astype(jnp.float32), 2, axis=-1)
    return jaxoff.name((gate * jax.nn.sigmoid(gate) * up).astype(z.dtype), name)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def swiglu(z: jax.Array, name: str) -> jax.Array:
    """Applies `silu(g) * u` to z = (g, u), (..., 2 F) to (..., F), and names the result.

    The gradient starts from z alone, as that of `rms_norm` from x.

    References:
      Shazeer, GLU Variants Improve Transformer, 2020.
    """
    return _swiglu(z, name)


def _swiglu_backward(name, z, da):
    del name
    gate, up = jnp.split(z.astype(jnp.float32), 2, axis=-1)
    da, share = da.astype(jnp.float32), jax.nn.sigmoid(gate)
    dgate = da * up * share * (1.0 + gate * (1.0 - share))
    return (pin(jnp.concatenate([dgate, da * gate * share], axis=-1).astype(z.dtype)),)


swiglu.defvjp(lambda z, name: (_swiglu(z, name), z), _swiglu_backward)


def _normalize(x, eps):
    x = x.astype(jnp.float32)
    scale = lax.rsqrt(fence(jnp.mean(jnp.square(x), axis=-1, keepdims=True)) + eps)
    return x * scale, scale


def _rms_norm(x, scale, eps, dtype):
    scale = scale.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + scale.shape)
    return pin((_normalize(x, eps)[0] * scale).astype(dtype))


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def rms_norm(x: jax.Array, scale: jax.Array, eps: float, dtype: str) -> jax.Array:
    """Computes `scale * x / sqrt(mean(x^2) + eps)` in float32 over the last axis, rounded to `dtype`.

    The gradient always starts from x alone. XLA contracts products and sums differently in each fusion, so a
    gradient from autograd's intermediate values would differ from the recomputed gradient in the last bits.
    """
    return _rms_norm(x, scale, eps, dtype)


def _rms_norm_backward(eps, dtype, residuals, dy):
    x, scale = residuals
    normed, inverse_rms = _normalize(x, eps)
    dy = pin(dy).astype(jnp.float32)
    dscale = fence(jnp.sum(dy * normed, axis=tuple(range(x.ndim - 1))))
    dy = dy * scale.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + scale.shape)
    dx = inverse_rms * (dy - normed * fence(jnp.mean(dy * normed, axis=-1, keepdims=True)))
    return dx.astype(x.dtype), dscale.astype(scale.dtype)


rms_norm.defvjp(
    lambda x, scale, eps, dtype: (_rms_norm(x, scale, eps, dtype), (x, scale)), _rms_norm_backward
)


def sum_of_exp(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes `exp(x - max)`, its sum, fenced, and the max, over the last axis.

    Args:
      x: (..., E) float32.

    Returns:
      (..., E), (..., 1) and (..., 1), float32. The max has no gradient.
    """
    largest = lax.stop_gradient(jnp.max(x, axis=-1, keepdims=True))
    exponentials = jnp.exp(x - largest)
    return exponentials, fence(jnp.sum(exponentials, axis=-1, keepdims=True)), largest


def logsumexp(x: jax.Array) -> jax.Array:
    """Computes `log(sum(exp(x)))` over the last axis: (..., E) to (...), float32."""
    _, total, largest = sum_of_exp(x)
    return jnp.squeeze(jnp.log(total) + largest, axis=-1)


class RMSNorm(nnx.Module):
    """Divides by the root mean square over the last axis, and scales.

    References:
      Zhang and Sennrich, Root Mean Square Layer Normalization, 2019.
    """

    def __init__(self, config: Config):
        self.scale = nnx.Param(jnp.ones((config.d_model,), config.param_dtype))
        self.eps, self.dtype = config.rms_eps, config.dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps (..., D) of any float dtype to the compute dtype, in float32 between."""
        return rms_norm(x, self.scale[...], self.eps, self.dtype)


def rope(x_BSNH: jax.Array, theta: float, context: str | None = None) -> jax.Array:
    """Turns feature pairs (i, i + H/2) by position times theta^(-2i/H), in float32.

    Args:
      x_BSNH: the queries or the keys; of a device's part of the sequences with `context`.
      theta: the base of the frequencies.
      context: mesh axis that divides the sequences.

    References:
      Su et al., RoFormer, 2021.
    """
    half = x_BSNH.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    position = jnp.arange(x_BSNH.shape[1], dtype=jnp.float32)
    if context is not None:
        position += lax.axis_index(context) * x_BSNH.shape[1]
    angle = position[:, None] * frequency[None, :]
    cos, sin = jnp.cos(angle)[None, :, None, :], jnp.sin(angle)[None, :, None, :]
    x = x_BSNH.astype(jnp.float32)
    x1, x2 = x[..., :half], x[..., half:]
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).astype(x_BSNH.dtype)


def traced_platform() -> str:
    """Names the platform traced for: the device of the abstract mesh, as in `jaxoff.target`, or JAX's own."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        return jax.default_backend()
    return "gpu" if device.platform == "cuda" else device.platform


def attention_implementation(config: Config, platform: str | None = None) -> Implementation:
    """Chooses the attention of a model: "cudnn" or "xla".

    Args:
      config: numbers of the model; a `config.attention` other than "auto" is returned.
      platform: "gpu" or another platform; by default the platform traced for.

    Returns:
      "cudnn" on a GPU for 16-bit activations and head widths up to 128 divisible by 8, "xla" otherwise.
    """
    if config.attention != "auto":
        return "cudnn" if config.attention == "cudnn" else "xla"
    on_gpu = (platform or traced_platform()) == "gpu"
    return (
        "cudnn"
        if on_gpu and config.dtype == "bfloat16" and config.head_dim <= 128 and not config.head_dim % 8
        else "xla"
    )


def causal_attention(
    q_BSNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, implementation: Implementation
) -> jax.Array:
    """Attends to each position's own and earlier positions; `N / K` query heads share a key-value head.

    Returns (B, S, N, H) in q's dtype.
    """
    if implementation == "xla":
        return _attention_in_float32(q_BSNH, k_BSKH, v_BSKH)
    return jax.nn.dot_product_attention(q_BSNH, k_BSKH, v_BSKH, is_causal=True, implementation=implementation)


def _attention_in_float32(q_BSNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array) -> jax.Array:
    """Computes attention without a kernel. G query heads share a key-value head.

    All values inside are float32, since no 16-bit value inside could be pinned, and the sum of the softmax is
    fenced. With `jax.nn.dot_product_attention` the last bits would depend on the producers of q, k and v.
    """
    B, S, N, H = q_BSNH.shape
    k, v = k_BSKH.astype(jnp.float32), v_BSKH.astype(jnp.float32)
    q_BSKGH = (q_BSNH.astype(jnp.float32) * H**-0.5).reshape(B, S, k.shape[2], -1, H)
    scores_BKGST = jnp.einsum("bskgh,btkh->bkgst", q_BSKGH, k)
    causal = lax.broadcasted_iota(jnp.int32, (S, S), 0) >= lax.broadcasted_iota(jnp.int32, (S, S), 1)
    exponentials, total, _ = sum_of_exp(jnp.where(causal, scores_BKGST, jnp.finfo(jnp.float32).min))
    out_BSKGH = jnp.einsum("bkgst,btkh->bskgh", exponentials / total, v)
    return out_BSKGH.reshape(B, S, N, H).astype(q_BSNH.dtype)


class Attention(nnx.Module):
    """Causal grouped-query attention with rotary embedding.

    q, k and v are named after the rotary embedding: the attention's gradient needs the rotated values, and
    the embedding's own gradient needs no values.

    Where a mesh axis divides the sequences, devices exchange their parts for whole sequences of a part of the
    heads, and back behind the attention. The names are those of the exchanged values.

    Args:
      config: numbers of the model.
      rngs: source of the parameters.
      context: mesh axis that divides each sequence; None for whole sequences.

    References:
      Jacobs et al., DeepSpeed Ulysses, 2023.
    """

    def __init__(self, config: Config, *, rngs: nnx.Rngs, context: str | None = None):
        self.config, self.context = config, context
        heads, width = config.num_heads + 2 * config.num_kv_heads, config.head_dim
        self.qkv = normal(rngs, (config.d_model, heads * width), config.d_model**-0.5, config)
        inner = config.num_heads * width
        self.out = normal(rngs, (inner, config.d_model), inner**-0.5 / (2 * config.num_layers) ** 0.5, config)

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        """Maps the normed input (B, S, D) to (B, S, D)."""
        c = self.config
        x_BSD = jaxoff.name(x_BSD, "attn.qkv_in")
        batch, length = x_BSD.shape[:2]
        qkv = matmul(x_BSD, self.qkv[...]).reshape(batch, length, -1, c.head_dim)
        q, k, v = jnp.split(qkv, (c.num_heads, c.num_heads + c.num_kv_heads), axis=2)
        q, k = rope(q, c.rope_theta, self.context), rope(k, c.rope_theta, self.context)
        q, k, v = jaxoff.name((self._to_heads(q), self._to_heads(k), self._to_heads(v)), "attn.qkv")
        out = jaxoff.name(causal_attention(q, k, v, attention_implementation(c)), "attn.core")
        if self.context is not None:
            out = lax.all_to_all(out, self.context, split_axis=1, concat_axis=2, tiled=True)
        out = jaxoff.name(out.reshape(batch, length, -1), "attn.proj_in")
        return matmul(out, self.out[...])

    def _to_heads(self, x_BSNH: jax.Array) -> jax.Array:
        """The whole sequences of a part of the heads, of parts of the sequences with all heads."""
        if self.context is None:
            return x_BSNH
        return lax.all_to_all(x_BSNH, self.context, split_axis=2, concat_axis=1, tiled=True)


class MLP(nnx.Module):
    """Two matrices with an activation between, whose output bears `act_name`; the caller names the input.

    Args:
      config: numbers of the model.
      d_hidden: hidden width F.
      act_name: name of the activation's output.
      activation: "squared_relu" or "swiglu", whose first matrix has 2 F columns, gate and up.
      chunk: tokens of a sequence at a time, 0 for all.
      rngs: source of the parameters.
    """

    def __init__(
        self,
        config: Config,
        d_hidden: int,
        act_name: str,
        *,
        activation: str = "squared_relu",
        chunk: int = 0,
        rngs: nnx.Rngs,
    ):
        self.act_name, self.activation, self.chunk = act_name, activation, chunk
        columns = 2 * d_hidden if activation == "swiglu" else d_hidden
        self.w1 = normal(rngs, (config.d_model, columns), config.d_model**-0.5, config)
        self.w2 = normal(
            rngs, (d_hidden, config.d_model), d_hidden**-0.5 / (2 * config.num_layers) ** 0.5, config
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps (..., S, D) to (..., S, D)."""
        act = swiglu if self.activation == "swiglu" else squared_relu

        def apply(x, w1, w2):
            return matmul(act(matmul(x, w1), self.act_name), w2)

        axis = x.ndim - 2
        length = x.shape[axis]
        if 0 < self.chunk < length:
            least = -(-length // self.chunk)
            tiles = next(n for n in range(least, length + 1) if length % n == 0)
            apply = jaxoff.tiled(apply, tiles=tiles, axis=axis)
        return apply(x, self.w1[...], self.w2[...])
