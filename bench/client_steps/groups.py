"""A decoder in groups of layers: a scan over the layers of a group inside of a scan over groups."""

from __future__ import annotations

import functools
from typing import Any

import jax

from bench.client_steps.decoder import decoder_loss, initialize_decoder, make_scan_block, stack
from bench.client_steps.step import ClientStep, Sizes, build_step


def build_groups(sizes: Sizes, policy: Any, *, attention: Any = "cudnn") -> ClientStep:
    """A decoder in groups of layers; the policy is of the layers in the inner loop.

    Args:
      sizes: the sizes; `groups` divides `layers`.
      policy: for `jax.checkpoint`; names as in `decoder`.
      attention: the implementation for `jax.nn.dot_product_attention`.
    """
    block = make_scan_block(sizes, policy, attention)

    def run_group(x, layers):
        return jax.lax.scan(block, x, layers)[0], None

    def run(x, groups):
        return jax.lax.scan(run_group, x, groups)[0]

    def pack(layers):
        return jax.tree.map(lambda leaf: leaf.reshape(sizes.groups, -1, *leaf.shape[1:]), stack(layers))

    return build_step(
        functools.partial(decoder_loss, run),
        functools.partial(initialize_decoder, sizes, pack),
        sizes.tokens,
        sizes,
    )
