"""A decoder in a Python loop under `jax.jit` inside of the step, each block under a `jax.jit` of its own.

gemma's `@nn.jit`ed attention and libraries of functions decorated with `@jax.jit` make such programs.
"""

from __future__ import annotations

import functools
from typing import Any

import jax

from bench.client_steps.decoder import apply_layer, decoder_loss, initialize_decoder
from bench.client_steps.step import ClientStep, Sizes, build_step


def build_inner_jit(sizes: Sizes, policy: Any, *, attention: Any = "cudnn") -> ClientStep:
    """A decoder with jitted blocks in a jitted loop.

    Args:
      sizes: the sizes.
      policy: for `jax.checkpoint`; names as in `decoder`.
      attention: the implementation for `jax.nn.dot_product_attention`.
    """
    block = jax.checkpoint(jax.jit(functools.partial(apply_layer, sizes, attention)), policy=policy)

    @jax.jit
    def run(x, layers):
        for weights in layers:
            x, _ = block(x, weights)
        return x

    return build_step(
        functools.partial(decoder_loss, run),
        functools.partial(initialize_decoder, sizes, list),
        sizes.tokens,
        sizes,
    )
