"""Pre-norm decoders with grouped queries, SwiGLU, an untied head and plain cross entropy, in plain JAX.

Weights are float32, compute is bfloat16, logits are one float32 array. Names are "block_in" (input of a
layer) and "attn" (output of attention).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name

from bench.client_steps.step import ClientStep, Sizes, build_step


def build_decoder(sizes: Sizes, policy: Any, *, loop: str = "scan", attention: Any = "cudnn") -> ClientStep:
    """A decoder with its layers in a loop.

    Args:
      sizes: the sizes.
      policy: for `jax.checkpoint`.
      loop: "scan" over stacked weights, or "python" over a list of layers.
      attention: the implementation for `jax.nn.dot_product_attention`.
    """
    layer = functools.partial(apply_layer, sizes, attention)
    block = jax.checkpoint(layer, policy=policy, prevent_cse=loop != "scan")

    def run(x, layers):
        if loop == "scan":
            return jax.lax.scan(block, x, layers)[0]
        for weights in layers:
            x, _ = block(x, weights)
        return x

    return build_step(
        functools.partial(decoder_loss, run),
        functools.partial(initialize_decoder, sizes, stack if loop == "scan" else list),
        sizes.tokens,
        sizes,
    )


def initialize_decoder(sizes: Sizes, pack: Callable[[list[Any]], Any], key: jax.Array) -> Any:
    """The parameters of a decoder; `pack` makes those of its loop from a list of those of the layers."""
    keys = jax.random.split(key, sizes.layers + 2)
    return {
        "embed": jax.random.normal(keys[0], (sizes.vocabulary, sizes.width)) * 0.02,
        "layers": pack([initialize_layer(sizes, k) for k in keys[2:]]),
        "norm": jnp.ones(sizes.width),
        "head": jax.random.normal(keys[1], (sizes.width, sizes.vocabulary)) * sizes.width**-0.5,
    }


def decoder_loss(run: Callable[..., Any], params: Any, tokens: jax.Array) -> jax.Array:
    """The mean cross entropy of a decoder; `run` takes the embedded tokens through the layers."""
    logits = decoder_logits(run, params, tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def decoder_logits(run: Callable[..., Any], params: Any, tokens: jax.Array) -> jax.Array:
    """The float32 logits of a decoder; `run` takes the embedded tokens through the layers."""
    x = run(params["embed"].astype(jnp.bfloat16)[tokens], params["layers"])
    return (normalize(x, params["norm"]) @ params["head"].astype(jnp.bfloat16)).astype(jnp.float32)


def stack(layers: list[Any], axis: int = 0) -> Any:
    """The parameters of layers, stacked."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves, axis), *layers)


def initialize_layer(sizes: Sizes, key: jax.Array) -> Any:
    """The parameters of a layer."""
    shapes = list_shapes(sizes)
    keys = dict(zip(shapes, jax.random.split(key, len(shapes)), strict=True))
    weights = {n: jax.random.normal(keys[n], shape) * shape[0] ** -0.5 for n, shape in shapes.items()}
    return weights | {"norm1": jnp.ones(sizes.width), "norm2": jnp.ones(sizes.width)}


def list_shapes(sizes: Sizes) -> dict[str, tuple[int, int]]:
    """The shapes of a layer's matrices, by name."""
    s = sizes
    return {
        "q": (s.width, s.heads * s.head_size),
        "k": (s.width, s.kv_heads * s.head_size),
        "v": (s.width, s.kv_heads * s.head_size),
        "o": (s.heads * s.head_size, s.width),
        "gate": (s.width, s.hidden),
        "up": (s.width, s.hidden),
        "down": (s.hidden, s.width),
    }


def apply_layer(sizes: Sizes, attention: Any, x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
    """A layer, as the body of a scan."""
    w = {n: v.astype(jnp.bfloat16) for n, v in weights.items()}
    return apply_mlp(apply_attention(sizes, attention, checkpoint_name(x, "block_in"), w), w), None


def apply_attention(sizes: Sizes, attention: Any, x: jax.Array, w: Any) -> jax.Array:
    """The attention of a layer, with its residual; `w` has the layer's weights in bfloat16."""
    s, h = sizes, normalize(x, w["norm1"])
    q = (h @ w["q"]).reshape(*x.shape[:2], s.heads, s.head_size)
    k, v = ((h @ w[n]).reshape(*x.shape[:2], s.kv_heads, s.head_size) for n in "kv")
    a = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=attention)
    return x + checkpoint_name(a.reshape(*x.shape[:2], -1), "attn") @ w["o"]


def apply_mlp(x: jax.Array, w: Any) -> jax.Array:
    """The MLP of a layer, with its residual."""
    h = normalize(x, w["norm2"])
    return x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]


def make_scan_block(sizes: Sizes, policy: Any, attention: Any) -> Any:
    """A layer under a checkpoint with a policy, as the body of a scan."""
    layer = functools.partial(apply_layer, sizes, attention)
    return jax.checkpoint(layer, policy=policy, prevent_cse=False)


def normalize(x: jax.Array, scale: jax.Array) -> jax.Array:
    """RMSNorm in float32, its result in bfloat16."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * scale).astype(jnp.bfloat16)
