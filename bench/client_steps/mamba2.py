"""The language model of the package mamba2-jax, its blocks under `nnx.remat`, with `nnx.Optimizer`.

The package has no checkpoint of its own: a module that calls a block under one replaces each of its blocks.
The model computes its loss itself, with its inputs as labels, and all in float32.
"""

from __future__ import annotations

from typing import Any

from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from mamba2_jax import Mamba2Config, Mamba2ForCausalLM  # pyright: ignore[reportMissingImports]

from bench.client_steps.nnx import build_nnx_step_of_loss
from bench.client_steps.step import ClientStep, Sizes


class CheckpointedBlock(nnx.Module):
    """A block of the package that recomputes what the policy does not keep."""

    def __init__(self, block: nnx.Module, policy: Any):
        self.block, self.policy = block, policy

    def __call__(self, hidden_states, conv_state=None, ssm_state=None):
        def run(block, x):
            return block(checkpoint_name(x, "block_in"), conv_state, ssm_state)

        return nnx.remat(run, policy=self.policy)(self.block, hidden_states)


def build_mamba2(sizes: Sizes, policy: Any) -> ClientStep:
    """The package's `Mamba2ForCausalLM`, with chunks of at most 256 tokens.

    Args:
      sizes: the sizes; `hidden` is a multiple of `width` and of `head_size`, and a state has twice the
        features of a head.
      policy: for `nnx.remat`; the only name is "block_in".
    """
    s = sizes
    config = Mamba2Config(
        vocab_size=s.vocabulary,
        hidden_size=s.width,
        state_size=2 * s.head_size,
        head_dim=s.head_size,
        chunk_size=min(s.length // 4, 256),
        expand=s.hidden // s.width,
        num_hidden_layers=s.layers,
    )

    def make_model(rngs):
        model = Mamba2ForCausalLM(config, rngs=rngs)
        backbone: Any = model.backbone
        backbone.layers = nnx.List([CheckpointedBlock(block, policy) for block in backbone.layers])
        return model

    def loss_of(model, tokens):
        inputs = tokens[:, :-1]  # a multiple of the chunks, which are padded otherwise
        return model(inputs, labels=inputs)["loss"]

    return build_nnx_step_of_loss(make_model, loss_of, s)
