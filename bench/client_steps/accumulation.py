"""Gradient accumulation: a scan over microbatches, `jax.value_and_grad` inside, the layers in a scan."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from bench.client_steps.decoder import decoder_loss, initialize_decoder, make_scan_block, stack
from bench.client_steps.step import ClientStep, Sizes, build_step_of_gradients


def build_accumulation(sizes: Sizes, policy: Any, *, attention: Any = "cudnn") -> ClientStep:
    """A decoder's step that adds up the gradients of microbatches.

    Args:
      sizes: the sizes; `microbatches` divides `batch`.
      policy: for `jax.checkpoint`; names as in `decoder`.
      attention: the implementation for `jax.nn.dot_product_attention`.
    """
    block = make_scan_block(sizes, policy, attention)
    loss_of = functools.partial(decoder_loss, lambda x, layers: jax.lax.scan(block, x, layers)[0])

    def value_and_grad(params, tokens):
        def add_microbatch(sums, tokens):
            return jax.tree.map(jnp.add, sums, jax.value_and_grad(loss_of)(params, tokens)), None

        zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        microbatches = tokens.reshape(sizes.microbatches, -1, tokens.shape[1])
        sums, _ = jax.lax.scan(add_microbatch, zeros, microbatches)
        return jax.tree.map(lambda total: total / sizes.microbatches, sums)

    initialize_params = functools.partial(initialize_decoder, sizes, stack)
    return build_step_of_gradients(value_and_grad, initialize_params, sizes.tokens, sizes)
