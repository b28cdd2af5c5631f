"""A decoder in Flax's NNX: blocks in a list, each under `nnx.remat`; or stacked by `nnx.vmap`, in `nnx.scan`.

The step splits and merges the model and its optimizer itself, as NNX's guide to performance advises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from bench.client_steps.step import ClientStep, Sizes


class Block(nnx.Module):
    """A layer."""

    def __init__(self, sizes: Sizes, attention: Any, rngs: nnx.Rngs):
        s, self.attention = sizes, attention

        def make_heads(heads):
            shape = heads, s.head_size
            return nnx.LinearGeneral(s.width, shape, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)

        def make_linear(rows, columns):
            return nnx.Linear(rows, columns, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)

        self.q, self.k, self.v = make_heads(s.heads), make_heads(s.kv_heads), make_heads(s.kv_heads)
        self.o = nnx.LinearGeneral(
            (s.heads, s.head_size), s.width, axis=(-2, -1), use_bias=False, dtype=jnp.bfloat16, rngs=rngs
        )
        self.norm1 = nnx.RMSNorm(s.width, dtype=jnp.bfloat16, rngs=rngs)
        self.norm2 = nnx.RMSNorm(s.width, dtype=jnp.bfloat16, rngs=rngs)
        self.gate, self.up = make_linear(s.width, s.hidden), make_linear(s.width, s.hidden)
        self.down = make_linear(s.hidden, s.width)

    def __call__(self, x):
        x = checkpoint_name(x, "block_in")
        h = self.norm1(x)
        a = jax.nn.dot_product_attention(
            self.q(h), self.k(h), self.v(h), is_causal=True, implementation=self.attention
        )
        x = x + self.o(checkpoint_name(a, "attn"))
        h = self.norm2(x)
        return x + self.down(nnx.silu(self.gate(h)) * self.up(h))


class Decoder(nnx.Module):
    """The decoder, its blocks in a list or stacked."""

    def __init__(self, sizes: Sizes, policy: Any, attention: Any, rngs: nnx.Rngs, *, stacked: bool):
        s, self.policy = sizes, policy
        self.embed = nnx.Embed(s.vocabulary, s.width, dtype=jnp.bfloat16, rngs=rngs)
        self.norm = nnx.RMSNorm(s.width, dtype=jnp.bfloat16, rngs=rngs)
        self.head = nnx.Linear(s.width, s.vocabulary, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)
        if stacked:

            @nnx.split_rngs(splits=s.layers)
            @nnx.vmap(in_axes=0, out_axes=0)
            def make_block(rngs):
                return Block(s, attention, rngs)

            self.blocks = make_block(rngs)
        else:
            self.blocks = nnx.List([Block(s, attention, rngs) for _ in range(s.layers)])

    def __call__(self, tokens):
        x = self.embed(tokens)
        if isinstance(self.blocks, nnx.List):
            block = nnx.remat(Block.__call__, policy=self.policy)
            for each in self.blocks:
                x = block(each, x)
        else:
            block = nnx.remat(Block.__call__, policy=self.policy, prevent_cse=False)

            @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            def run(x, each):
                return block(each, x)

            x = run(x, self.blocks)
        return self.head(self.norm(x)).astype(jnp.float32)


def build_nnx(sizes: Sizes, policy: Any, *, stacked: bool, attention: Any = "cudnn") -> ClientStep:
    """A decoder of NNX modules, with `nnx.Optimizer`.

    Args:
      sizes: the sizes.
      policy: for `nnx.remat`; names are "block_in" and "attn".
      stacked: whether `nnx.scan` runs stacked blocks; otherwise a Python loop runs a list of blocks.
      attention: the implementation for `jax.nn.dot_product_attention`.
    """
    return build_nnx_step(lambda rngs: Decoder(sizes, policy, attention, rngs, stacked=stacked), sizes)


def build_nnx_step(make_model: Callable[[nnx.Rngs], Any], sizes: Sizes) -> ClientStep:
    """The step of a language model, a module from tokens to logits, with `nnx.Optimizer`."""

    def loss_of(model, tokens):
        logits = model(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return build_nnx_step_of_loss(make_model, loss_of, sizes)


def build_nnx_step_of_loss(
    make_model: Callable[[nnx.Rngs], Any], loss_of: Callable[[Any, jax.Array], jax.Array], sizes: Sizes
) -> ClientStep:
    """The step of a function (module, tokens) -> loss, with `nnx.Optimizer`."""

    def make(key):
        model = make_model(nnx.Rngs(params=key))
        return model, nnx.Optimizer(model, sizes.optimizer, wrt=nnx.Param)

    graph = nnx.graphdef(nnx.eval_shape(lambda: make(jax.random.key(0))))

    def initialize(key):
        return nnx.state(make(key))

    def step(state, tokens):
        model, optimizer = nnx.merge(graph, state)
        loss, grads = nnx.value_and_grad(loss_of)(model, tokens)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), loss

    return ClientStep.of(step, initialize, sizes.tokens, sizes)
