"""Direct preference optimization: a decoder against a frozen copy, over pairs of chosen and rejected answers.

Chosen and rejected sequences go through the layers one after the other, so that a step has two scans over the
same weights, and two more over the frozen weights.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from bench.client_steps.decoder import decoder_logits, initialize_decoder, make_scan_block, stack
from bench.client_steps.step import ClientStep, Sizes, build_step

BETA = 0.1


def build_dpo(sizes: Sizes, policy: Any, *, attention: Any = "cudnn") -> ClientStep:
    """A decoder and its reference in bfloat16. The first half of a sequence is the prompt.

    Args:
      sizes: the sizes; `batch` pairs.
      policy: for `jax.checkpoint`; names as in `decoder`.
      attention: the implementation for `jax.nn.dot_product_attention`.
    """
    block = make_scan_block(sizes, policy, attention)
    initialize = functools.partial(initialize_decoder, sizes, stack)

    def initialize_frozen(key):
        return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), initialize(key))

    def score(params, tokens):
        """The log probability of each answer."""
        run = lambda x, layers: jax.lax.scan(block, x, layers)[0]  # noqa: E731
        logs = jax.nn.log_softmax(decoder_logits(run, params, tokens[:, :-1]))
        of_labels = jnp.take_along_axis(logs, tokens[:, 1:, None], axis=-1)[..., 0]
        return jnp.where(jnp.arange(sizes.length) >= sizes.length // 2, of_labels, 0.0).sum(-1)

    def loss_of(params, batch):
        frozen = jax.lax.stop_gradient(batch["frozen"])
        chosen, rejected = (
            score(params, batch[kind]) - score(frozen, batch[kind]) for kind in ("chosen", "rejected")
        )
        return -jax.nn.log_sigmoid(BETA * (chosen - rejected)).mean()

    batch = {"chosen": sizes.tokens, "rejected": sizes.tokens}
    return build_step(loss_of, initialize, batch, sizes, initialize_frozen)
