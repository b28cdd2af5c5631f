"""A vision transformer: LayerNorm, attention with biases, GELU, a classifier on the mean of the patches."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name

from bench.client_steps.decoder import stack
from bench.client_steps.step import ClientStep, Sizes, build_step

PATCH = 14 * 14 * 3


def build_vit(sizes: Sizes, policy: Any, *, attention: Any = "cudnn") -> ClientStep:
    """A vision transformer over patches of 14 x 14 pixels, with a scan over its layers.

    Args:
      sizes: the sizes; `length` patches a picture, `vocabulary` classes.
      policy: for `jax.checkpoint`; names are "vit.block_in", "vit.qkv", "vit.attn" and "vit.mlp".
      attention: the implementation for `jax.nn.dot_product_attention`.
    """
    s, inner = sizes, sizes.heads * sizes.head_size

    def initialize_layer(key):
        keys = jax.random.split(key, 4)
        return {
            "norm1": initialize_norm(s.width),
            "qkv": initialize_linear(keys[0], s.width, 3 * inner),
            "o": initialize_linear(keys[1], inner, s.width),
            "norm2": initialize_norm(s.width),
            "up": initialize_linear(keys[2], s.width, s.hidden),
            "down": initialize_linear(keys[3], s.hidden, s.width),
        }

    def initialize(key):
        keys = jax.random.split(key, s.layers + 3)
        return {
            "patch": initialize_linear(keys[0], PATCH, s.width),
            "position": jax.random.normal(keys[1], (s.length, s.width)) * 0.02,
            "layers": stack([initialize_layer(k) for k in keys[3:]]),
            "norm": initialize_norm(s.width),
            "head": initialize_linear(keys[2], s.width, s.vocabulary),
        }

    def layer(x, weights):
        x = checkpoint_name(x, "vit.block_in")
        qkv = checkpoint_name(linear(normalize(x, weights["norm1"]), weights["qkv"]), "vit.qkv")
        q, k, v = jnp.split(qkv.reshape(*x.shape[:2], 3 * s.heads, s.head_size), 3, axis=2)
        a = jax.nn.dot_product_attention(q, k, v, implementation=attention)
        a = checkpoint_name(a.reshape(*x.shape[:2], inner), "vit.attn")
        x = x + linear(a, weights["o"])
        up = checkpoint_name(linear(normalize(x, weights["norm2"]), weights["up"]), "vit.mlp")
        return x + linear(jax.nn.gelu(up), weights["down"]), None

    block = jax.checkpoint(layer, policy=policy, prevent_cse=False)

    def loss_of(params, batch):
        x = linear(batch["patches"], params["patch"]) + params["position"].astype(jnp.bfloat16)
        x, _ = jax.lax.scan(block, x, params["layers"])
        pooled = normalize(x, params["norm"]).mean(1)
        logits = linear(pooled, params["head"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    batch = {
        "patches": jax.ShapeDtypeStruct((s.batch, s.length, PATCH), jnp.bfloat16),
        "labels": jax.ShapeDtypeStruct((s.batch,), jnp.int32),
    }
    return build_step(loss_of, initialize, batch, sizes)


def initialize_linear(key: jax.Array, rows: int, columns: int) -> Any:
    """The parameters of a linear layer."""
    return {"w": jax.random.normal(key, (rows, columns)) * rows**-0.5, "b": jnp.zeros(columns)}


def initialize_norm(width: int) -> Any:
    """The parameters of a LayerNorm."""
    return {"scale": jnp.ones(width), "bias": jnp.zeros(width)}


def linear(x: jax.Array, weights: Any) -> jax.Array:
    """A linear layer in bfloat16."""
    return x @ weights["w"].astype(jnp.bfloat16) + weights["b"].astype(jnp.bfloat16)


def normalize(x: jax.Array, weights: Any) -> jax.Array:
    """LayerNorm in float32, its result in bfloat16."""
    wide = x.astype(jnp.float32)
    wide = wide - wide.mean(-1, keepdims=True)
    wide = wide * jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-6)
    return (wide * weights["scale"] + weights["bias"]).astype(jnp.bfloat16)
