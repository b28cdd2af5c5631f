"""A decoder in Flax's linen: `nn.scan(nn.remat(Block))`, and Flax's `TrainState`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.ad_checkpoint import checkpoint_name

from bench.client_steps.step import ClientStep, Sizes


class Block(nn.Module):
    """A layer, as the body of `nn.scan`."""

    sizes: Sizes
    attention: Any

    @nn.compact
    def __call__(self, x, _):
        s = self.sizes
        x = checkpoint_name(x, "block_in")
        h = nn.RMSNorm(dtype=jnp.bfloat16)(x)

        def project(name, heads):
            return nn.DenseGeneral((heads, s.head_size), use_bias=False, dtype=jnp.bfloat16, name=name)(h)

        q, k, v = project("q", s.heads), project("k", s.kv_heads), project("v", s.kv_heads)
        a = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=self.attention)
        a = checkpoint_name(a, "attn")
        x = x + nn.DenseGeneral(s.width, (-2, -1), use_bias=False, dtype=jnp.bfloat16, name="o")(a)
        h = nn.RMSNorm(dtype=jnp.bfloat16)(x)
        h = nn.silu(nn.Dense(s.hidden, use_bias=False, dtype=jnp.bfloat16, name="gate")(h)) * nn.Dense(
            s.hidden, use_bias=False, dtype=jnp.bfloat16, name="up"
        )(h)
        return x + nn.Dense(s.width, use_bias=False, dtype=jnp.bfloat16, name="down")(h), None


class Decoder(nn.Module):
    """The decoder."""

    sizes: Sizes
    policy: Any
    attention: Any

    @nn.compact
    def __call__(self, tokens):
        s = self.sizes
        x = nn.Embed(s.vocabulary, s.width, dtype=jnp.bfloat16)(tokens)
        layers = nn.scan(
            nn.remat(Block, policy=self.policy, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=s.layers,
        )
        x, _ = layers(s, self.attention, name="layers")(x, None)
        x = nn.RMSNorm(dtype=jnp.bfloat16)(x)
        return nn.Dense(s.vocabulary, use_bias=False, dtype=jnp.bfloat16, name="head")(x).astype(jnp.float32)


def build_linen(sizes: Sizes, policy: Any, *, attention: Any = "cudnn") -> ClientStep:
    """A decoder of linen modules. The state has no `apply_fn`: it would hold the policy.

    Args:
      sizes: the sizes.
      policy: for `nn.remat`; names are "block_in" and "attn".
      attention: the implementation for `jax.nn.dot_product_attention`.
    """
    model = Decoder(sizes, policy, attention)

    def initialize(key):
        params = model.init(key, jnp.zeros((1, sizes.length), jnp.int32))["params"]
        return TrainState.create(apply_fn=None, params=params, tx=sizes.optimizer)

    def step(state, tokens):
        def loss_of(params):
            logits: Any = model.apply({"params": params}, tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        loss, grads = jax.value_and_grad(loss_of)(state.params)
        return state.apply_gradients(grads=grads), loss

    return ClientStep.of(step, initialize, sizes.tokens, sizes)
