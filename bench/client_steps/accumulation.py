"""Gradient accumulation: a scan over microbatches, `jax.value_and_grad` inside, the layers in a scan."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from bench.client_steps.decoder import apply_layer, decoder_loss, initialize_decoder, stack
from bench.client_steps.step import OPTIMIZER, ClientStep, Sizes


def build_accumulation(sizes: Sizes, policy: Any, *, attention: Any = "cudnn") -> ClientStep:
    """A decoder's step that adds up the gradients of microbatches.

    Args:
      sizes: the sizes; `microbatches` divides `batch`.
      policy: for `jax.checkpoint`; names as in `decoder`.
      attention: the implementation for `jax.nn.dot_product_attention`.
    """
    layer = functools.partial(apply_layer, sizes, attention)
    block = jax.checkpoint(layer, policy=policy, prevent_cse=False)
    loss_of = functools.partial(decoder_loss, lambda x, layers: jax.lax.scan(block, x, layers)[0])

    def initialize(key):
        params = initialize_decoder(sizes, stack, key)
        return params, OPTIMIZER.init(params)

    def step(state, tokens):
        params, optimizer_state = state

        def add_microbatch(sums, tokens):
            return jax.tree.map(jnp.add, sums, jax.value_and_grad(loss_of)(params, tokens)), None

        zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        microbatches = tokens.reshape(sizes.microbatches, -1, tokens.shape[1])
        sums, _ = jax.lax.scan(add_microbatch, zeros, microbatches)
        loss, grads = jax.tree.map(lambda total: total / sizes.microbatches, sums)
        updates, optimizer_state = OPTIMIZER.update(grads, optimizer_state, params)
        return (optax.apply_updates(params, updates), optimizer_state), loss

    return ClientStep.of(step, initialize, sizes.tokens, sizes)
