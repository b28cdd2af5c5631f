"""A decoder of Haiku's modules with dropout: `hk.layer_stack` over a layer under `hk.remat`.

The state has the key of the dropout of the next step.
"""

from __future__ import annotations

from typing import Any

import haiku as hk  # pyright: ignore[reportMissingImports]
import jax
import jax.numpy as jnp
import jmp  # pyright: ignore[reportMissingImports]
import numpy as np
import optax
from jax.ad_checkpoint import checkpoint_name

from bench.client_steps.step import ClientStep, Sizes

DROPOUT = 0.1
PRECISION = jmp.get_policy("params=float32,compute=bfloat16,output=float32")


def build_haiku(sizes: Sizes, policy: Any) -> ClientStep:
    """A decoder with `hk.MultiHeadAttention`; jmp, Haiku's mixed precision, casts parameters to bfloat16.

    Args:
      sizes: the sizes.
      policy: for `hk.remat`; names are "block_in", "attn" and "up".
    """
    s = sizes
    weights = hk.initializers.VarianceScaling(2 / s.layers)

    def normalize(x):
        return hk.LayerNorm(axis=-1, create_scale=True, create_offset=True)(x)

    def drop(x):
        return hk.dropout(hk.next_rng_key(), DROPOUT, x)

    def layer(x):
        x = checkpoint_name(x, "block_in")
        h, mask = normalize(x), np.tril(np.ones((1, 1, s.length, s.length), bool))
        attention = hk.MultiHeadAttention(s.heads, s.head_size, w_init=weights, model_size=s.width)
        x = x + drop(checkpoint_name(attention(h, h, h, mask=mask), "attn"))
        up = checkpoint_name(hk.Linear(s.hidden, w_init=weights)(normalize(x)), "up")
        return x + drop(hk.Linear(s.width, w_init=weights)(jax.nn.gelu(up)))

    def compute_loss(tokens):
        x = hk.Embed(s.vocabulary, s.width)(tokens[:, :-1])
        x = hk.layer_stack(s.layers)(hk.remat(layer, policy=policy, prevent_cse=False))(x)
        logits = hk.Linear(s.vocabulary)(normalize(x)).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    model = hk.transform(compute_loss)

    def initialize(key):
        params = model.init(key, jnp.zeros((1, s.length + 1), jnp.int32))
        return params, s.optimizer.init(params), jax.random.PRNGKey(0)

    def loss_of(params, key, tokens):
        return model.apply(PRECISION.cast_to_compute(params), key, tokens)

    def step(state, tokens):
        params, optimizer_state, key = state
        key, key_of_step = jax.random.split(key)
        loss, grads = jax.value_and_grad(loss_of)(params, key_of_step, tokens)
        updates, optimizer_state = s.optimizer.update(grads, optimizer_state, params)
        return (optax.apply_updates(params, updates), optimizer_state, key), loss

    return ClientStep.of(step, initialize, s.tokens, s)
