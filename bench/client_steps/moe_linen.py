"""A mixture of experts in Flax's linen, as GShard has it: one-hot dispatch, a capacity, sown losses."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from bench.client_steps.step import ClientStep, Sizes, build_step

GROUP = 1024
CHOICES = 2
CAPACITY_FACTOR = 1.25
BALANCE, ROUTER_Z = 1e-2, 1e-3


class Experts(nn.Module):
    """Experts with SwiGLU; each takes a bounded number of tokens of a group, and drops others."""

    sizes: Sizes

    @nn.compact
    def __call__(self, x):
        s, (batch, length, width) = self.sizes, x.shape
        size = min(GROUP, length)
        x = x.reshape(-1, size, width)
        capacity = int(CAPACITY_FACTOR * CHOICES * size / s.experts)
        logits = nn.Dense(s.experts, use_bias=False, dtype=jnp.float32, name="router")(x)
        probabilities = jax.nn.softmax(logits)
        weights, chosen = jax.lax.top_k(probabilities, CHOICES)
        weights = weights / weights.sum(-1, keepdims=True)
        # (group, choice, token, expert): first choices have a place before second choices.
        one_hot = jax.nn.one_hot(chosen.swapaxes(1, 2), s.experts, dtype=jnp.int32)
        place = jnp.cumsum(one_hot.reshape(x.shape[0], -1, s.experts), 1).reshape(one_hot.shape) * one_hot - 1
        slots = jax.nn.one_hot(place, capacity, dtype=jnp.bfloat16)
        dispatch = slots.sum(1)
        combine = jnp.einsum("gkt,gktec->gtec", weights.swapaxes(1, 2).astype(jnp.bfloat16), slots)

        share = one_hot[:, 0].mean((0, 1), dtype=jnp.float32)
        balance = s.experts * (share * probabilities.mean((0, 1))).sum()
        router_z = (jax.nn.logsumexp(logits, -1) ** 2).mean()
        self.sow("losses", "of_router", BALANCE * balance + ROUTER_Z * router_z)

        def weight(name, rows, columns):
            initializer = nn.initializers.lecun_normal(batch_axis=(0,))
            return self.param(name, initializer, (s.experts, rows, columns)).astype(jnp.bfloat16)

        rows = checkpoint_name(jnp.einsum("gtec,gtd->egcd", dispatch, x), "moe.rows")
        gate = jnp.einsum("egcd,edh->egch", rows, weight("gate", width, s.hidden))
        up = jnp.einsum("egcd,edh->egch", rows, weight("up", width, s.hidden))
        act = checkpoint_name(nn.silu(gate) * up, "moe.act")
        out = jnp.einsum("egch,ehd->egcd", act, weight("down", s.hidden, width))
        return jnp.einsum("gtec,egcd->gtd", combine, out).reshape(batch, length, width)


class Block(nn.Module):
    """A layer, as the body of `nn.scan`."""

    sizes: Sizes
    attention: Any

    @nn.compact
    def __call__(self, x, _):
        s = self.sizes
        x = checkpoint_name(x, "block_in")
        h = nn.RMSNorm(dtype=jnp.bfloat16)(x)
        qkv = nn.DenseGeneral((3, s.heads, s.head_size), use_bias=False, dtype=jnp.bfloat16, name="qkv")(h)
        q, k, v = jnp.moveaxis(qkv, 2, 0)
        a = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=self.attention)
        a = checkpoint_name(a, "attn")
        x = x + nn.DenseGeneral(s.width, (-2, -1), use_bias=False, dtype=jnp.bfloat16, name="o")(a)
        return x + Experts(s, name="experts")(nn.RMSNorm(dtype=jnp.bfloat16)(x)), None


class Decoder(nn.Module):
    """The decoder, its head tied to the embedding."""

    sizes: Sizes
    policy: Any
    attention: Any

    @nn.compact
    def __call__(self, tokens):
        s = self.sizes
        embed = nn.Embed(s.vocabulary, s.width, dtype=jnp.bfloat16)
        layers = nn.scan(
            nn.remat(Block, policy=self.policy, prevent_cse=False),
            variable_axes={"params": 0, "losses": 0},
            split_rngs={"params": True},
            length=s.layers,
        )
        x, _ = layers(s, self.attention, name="layers")(embed(tokens), None)
        return embed.attend(nn.RMSNorm(dtype=jnp.bfloat16)(x)).astype(jnp.float32)


def build_moe_linen(sizes: Sizes, policy: Any, *, attention: Any = "cudnn") -> ClientStep:
    """A decoder whose MLPs have experts, two for a token.

    Args:
      sizes: the sizes; `experts` experts, and groups of 1024 tokens, or of a sequence, with a capacity.
      policy: for `nn.remat`; names are "block_in", "attn", "moe.rows" and "moe.act".
      attention: the implementation for `jax.nn.dot_product_attention`.
    """
    model = Decoder(sizes, policy, attention)

    def initialize(key):
        return model.init(key, jnp.zeros((1, sizes.length), jnp.int32))["params"]

    def loss_of(params, tokens):
        logits, sown = model.apply({"params": params}, tokens[:, :-1], mutable=["losses"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return losses.mean() + sum(leaf.mean() for leaf in jax.tree.leaves(sown))

    return build_step(loss_of, initialize, sizes.tokens, sizes)
