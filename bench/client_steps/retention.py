"""A language model of linear attention in Flax's NNX: decaying states from chunk to chunk, shifted tokens.

The layers are a list of modules under `nnx.remat`, and each has a `jax.lax.scan` over chunks inside.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from bench.client_steps.nnx import build_nnx_step
from bench.client_steps.step import ClientStep, Sizes

CHUNK = 128


def make_linear(rows: int, columns: int, rngs: nnx.Rngs) -> nnx.Linear:
    """A linear layer in bfloat16 without a bias."""
    return nnx.Linear(rows, columns, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)


def shift(x: jax.Array, share: nnx.Param) -> jax.Array:
    """Each token mixed with the token before it; x: (batch, length, width)."""
    before = jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]
    return x + (before - x) * share[...].astype(x.dtype)


class TimeMix(nnx.Module):
    """Linear attention with a decay for each head, and a gate."""

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs):
        s, self.heads = sizes, sizes.heads
        inner = s.heads * s.head_size
        self.share = nnx.Param(jnp.full(s.width, 0.5))
        self.decay = nnx.Param(jnp.linspace(2.0, 6.0, s.heads))
        self.inputs = make_linear(s.width, 4 * inner, rngs)
        self.norm = nnx.RMSNorm(s.head_size, dtype=jnp.bfloat16, rngs=rngs)
        self.out = make_linear(inner, s.width, rngs)

    def __call__(self, x):
        inputs = checkpoint_name(self.inputs(shift(x, self.share)), "mix.inputs")
        q, k, v, gate = jnp.split(inputs.reshape(*x.shape[:2], 4 * self.heads, -1), 4, axis=2)
        y = attend_by_chunks(q, k * k.shape[-1] ** -0.5, v, jax.nn.log_sigmoid(self.decay[...]))
        y = checkpoint_name(y, "mix.out")
        return self.out((self.norm(y) * nnx.silu(gate)).reshape(*x.shape[:2], -1))


class ChannelMix(nnx.Module):
    """An MLP with a squared ReLU."""

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs):
        self.share = nnx.Param(jnp.full(sizes.width, 0.5))
        self.up = make_linear(sizes.width, sizes.hidden, rngs)
        self.down = make_linear(sizes.hidden, sizes.width, rngs)

    def __call__(self, x):
        up = checkpoint_name(self.up(shift(x, self.share)), "mlp.up")
        return self.down(nnx.relu(up) ** 2)


class Block(nnx.Module):
    """A layer."""

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs):
        self.norm1 = nnx.LayerNorm(sizes.width, dtype=jnp.bfloat16, rngs=rngs)
        self.norm2 = nnx.LayerNorm(sizes.width, dtype=jnp.bfloat16, rngs=rngs)
        self.time_mix, self.channel_mix = TimeMix(sizes, rngs), ChannelMix(sizes, rngs)

    def __call__(self, x):
        x = checkpoint_name(x, "block_in")
        x = x + self.time_mix(self.norm1(x))
        return x + self.channel_mix(self.norm2(x))


class LanguageModel(nnx.Module):
    """The language model."""

    def __init__(self, sizes: Sizes, policy: Any, rngs: nnx.Rngs):
        s, self.policy = sizes, policy
        self.embed = nnx.Embed(s.vocabulary, s.width, dtype=jnp.bfloat16, rngs=rngs)
        self.blocks = nnx.List([Block(s, rngs) for _ in range(s.layers)])
        self.norm = nnx.LayerNorm(s.width, dtype=jnp.bfloat16, rngs=rngs)
        self.head = make_linear(s.width, s.vocabulary, rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        block = nnx.remat(Block.__call__, policy=self.policy)
        for each in self.blocks:
            x = block(each, x)
        return self.head(self.norm(x)).astype(jnp.float32)


def build_retention(sizes: Sizes, policy: Any) -> ClientStep:
    """Linear attention in chunks of 128 tokens, or of a sequence, in a list of NNX modules.

    Args:
      sizes: the sizes.
      policy: for `nnx.remat`; names are "block_in", "mix.inputs", "mix.out" and "mlp.up".
    """
    return build_nnx_step(lambda rngs: LanguageModel(sizes, policy, rngs), sizes)


def attend_by_chunks(q: jax.Array, k: jax.Array, v: jax.Array, decay: jax.Array) -> jax.Array:
    """Causal attention without a softmax, weighted by exp(decay * distance).

    Args:
      q, k, v: arrays of shape (batch, length, heads, head size).
      decay: logarithms, of shape (heads,).
    """
    batch, length, heads, size = q.shape
    chunk = min(CHUNK, length)
    places = jnp.arange(chunk)
    distances = places[:, None] - places
    inside = jnp.where(distances >= 0, jnp.exp(decay[:, None, None] * distances), 0.0).astype(q.dtype)
    since = jnp.exp(decay * (places[:, None] + 1))[..., None].astype(q.dtype)  # (chunk, heads, 1)
    until = jnp.exp(decay * (chunk - 1 - places[:, None]))[..., None].astype(q.dtype)
    over = jnp.exp(decay * chunk)[:, None, None]

    def run_chunk(state, qkv):
        q, k, v = qkv
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * inside
        y = jnp.einsum("bhqk,bkhe->bqhe", scores, v)
        y = y + jnp.einsum("bqhd,bhde->bqhe", q * since, state.astype(q.dtype))
        new = jnp.einsum("bkhd,bkhe->bhde", k * until, v, preferred_element_type=jnp.float32)
        return over * state + new, y

    chunks = [array.reshape(batch, -1, chunk, heads, size).swapaxes(0, 1) for array in (q, k, v)]
    _, y = jax.lax.scan(run_chunk, jnp.zeros((batch, heads, size, size)), tuple(chunks))
    return y.swapaxes(0, 1).reshape(batch, length, heads, size)
