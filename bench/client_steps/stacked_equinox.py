"""A decoder in Equinox: blocks made by `eqx.filter_vmap`, partitioned and combined around `jax.lax.scan`.

The step takes the arrays of the model and closes over the rest, as `eqx.filter_jit` does.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx  # pyright: ignore[reportMissingImports]
import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name

from bench.client_steps.step import ClientStep, Sizes


class Block(eqx.Module):
    """A layer."""

    q: eqx.nn.Linear
    k: eqx.nn.Linear
    v: eqx.nn.Linear
    o: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    norm1: eqx.nn.RMSNorm
    norm2: eqx.nn.RMSNorm
    sizes: Sizes = eqx.field(static=True)
    attention: Any = eqx.field(static=True)

    def __init__(self, sizes: Sizes, attention: Any, key: jax.Array):
        s, self.sizes, self.attention = sizes, sizes, attention
        keys = jax.random.split(key, 6)
        inner, kv = s.heads * s.head_size, s.kv_heads * s.head_size
        self.q = eqx.nn.Linear(s.width, inner, use_bias=False, key=keys[0])
        self.k = eqx.nn.Linear(s.width, kv, use_bias=False, key=keys[1])
        self.v = eqx.nn.Linear(s.width, kv, use_bias=False, key=keys[2])
        self.o = eqx.nn.Linear(inner, s.width, use_bias=False, key=keys[3])
        self.up = eqx.nn.Linear(s.width, s.hidden, key=keys[4])
        self.down = eqx.nn.Linear(s.hidden, s.width, key=keys[5])
        self.norm1, self.norm2 = eqx.nn.RMSNorm(s.width), eqx.nn.RMSNorm(s.width)

    def __call__(self, x):
        """A sequence of shape (length, width)."""
        s = self.sizes
        x = checkpoint_name(x, "block_in")
        h = jax.vmap(self.norm1)(x).astype(x.dtype)
        q = jax.vmap(self.q)(h).reshape(-1, s.heads, s.head_size)
        k, v = (jax.vmap(linear)(h).reshape(-1, s.kv_heads, s.head_size) for linear in (self.k, self.v))
        a = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=self.attention)
        x = x + jax.vmap(self.o)(checkpoint_name(a.reshape(x.shape[0], -1), "attn"))
        h = jax.vmap(self.norm2)(x).astype(x.dtype)
        return x + jax.vmap(self.down)(jax.nn.gelu(jax.vmap(self.up)(h)))


class Decoder(eqx.Module):
    """The decoder, its blocks stacked."""

    embed: jax.Array
    blocks: Block
    norm: eqx.nn.RMSNorm
    head: eqx.nn.Linear

    def __init__(self, sizes: Sizes, attention: Any, key: jax.Array):
        embed, blocks, head = jax.random.split(key, 3)
        self.embed = jax.random.normal(embed, (sizes.vocabulary, sizes.width)) * 0.02
        self.blocks = eqx.filter_vmap(lambda key: Block(sizes, attention, key))(
            jax.random.split(blocks, sizes.layers)
        )
        self.norm = eqx.nn.RMSNorm(sizes.width)
        self.head = eqx.nn.Linear(sizes.width, sizes.vocabulary, use_bias=False, key=head)

    def __call__(self, tokens, policy):
        """The logits of a batch of sequences; the policy is for `jax.checkpoint`."""
        half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16) if eqx.is_array(leaf) else leaf, self)
        arrays, rest = eqx.partition(half.blocks, eqx.is_array)

        def run_block(x, arrays):
            return jax.vmap(eqx.combine(arrays, rest))(x), None

        block = jax.checkpoint(run_block, policy=policy, prevent_cse=False)
        x, _ = jax.lax.scan(block, half.embed[tokens], arrays)
        x = jax.vmap(jax.vmap(half.norm))(x).astype(x.dtype)
        return jax.vmap(jax.vmap(half.head))(x).astype(jnp.float32)


def build_equinox(sizes: Sizes, policy: Any, *, attention: Any = "cudnn") -> ClientStep:
    """A decoder of Equinox modules.

    Args:
      sizes: the sizes.
      policy: for `jax.checkpoint`; names are "block_in" and "attn".
      attention: the implementation for `jax.nn.dot_product_attention`.
    """

    def make(key):
        return Decoder(sizes, attention, key)

    def is_struct(leaf):
        return isinstance(leaf, jax.ShapeDtypeStruct)

    _, rest = eqx.partition(eqx.filter_eval_shape(make, jax.random.key(0)), is_struct)

    def initialize(key):
        arrays = eqx.filter(make(key), eqx.is_array)
        return arrays, sizes.optimizer.init(arrays)

    def loss_of(model, tokens):
        logits = model(tokens[:, :-1], policy)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    def step(state, tokens):
        arrays, optimizer_state = state
        model = eqx.combine(arrays, rest)
        loss, grads = eqx.filter_value_and_grad(loss_of)(model, tokens)
        updates, optimizer_state = sizes.optimizer.update(grads, optimizer_state, arrays)
        model = eqx.apply_updates(model, updates)
        return (eqx.filter(model, eqx.is_array), optimizer_state), loss

    return ClientStep.of(step, initialize, sizes.tokens, sizes)
