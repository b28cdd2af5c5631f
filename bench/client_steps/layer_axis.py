"""A decoder whose weights are stacked on axis 1, as MaxText's `param_scan_axis=1` does for its shardings."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from bench.client_steps.decoder import decoder_loss, initialize_decoder, make_scan_block, stack
from bench.client_steps.step import ClientStep, Sizes, build_step

AXIS = 1


def build_layer_axis(sizes: Sizes, policy: Any, *, attention: Any = "cudnn") -> ClientStep:
    """A decoder with a scan over weights whose layers are on axis 1. Vectors have the layers there, too.

    Args:
      sizes: the sizes.
      policy: for `jax.checkpoint`; names as in `decoder`.
      attention: the implementation for `jax.nn.dot_product_attention`.
    """
    block = make_scan_block(sizes, policy, attention)

    def run(x, layers):
        return jax.lax.scan(block, x, jax.tree.map(lambda leaf: jnp.moveaxis(leaf, AXIS, 0), layers))[0]

    return build_step(
        functools.partial(decoder_loss, run),
        functools.partial(initialize_decoder, sizes, functools.partial(stack, axis=AXIS)),
        sizes.tokens,
        sizes,
    )
