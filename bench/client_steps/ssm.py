"""A language model of state space layers: a gated linear recurrence over time in each layer."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from bench.client_steps.decoder import decoder_loss, normalize, stack
from bench.client_steps.step import ClientStep, Sizes, build_step

CHUNK = 16


def build_ssm(sizes: Sizes, policy: Any, *, recurrence: str = "associative") -> ClientStep:
    """State space layers in a scan, each with a recurrence h[t] = a[t] h[t-1] + b[t] over `hidden` channels.

    Args:
      sizes: the sizes.
      policy: for `jax.checkpoint`; names are "ssm.block_in", "ssm.in" and "ssm.states".
      recurrence: "associative", one `jax.lax.associative_scan` over time; or "chunks", a `jax.lax.scan` over
        chunks of 16 steps.
    """
    s = sizes
    recur = {"associative": recur_by_tree, "chunks": recur_by_chunks}[recurrence]

    def initialize_layer(key):
        shapes = {"in": (s.width, 2 * s.hidden), "decay": (s.width, s.hidden), "out": (s.hidden, s.width)}
        keys = jax.random.split(key, 3)
        weights = {
            name: jax.random.normal(k, shape) * shape[0] ** -0.5
            for k, (name, shape) in zip(keys, shapes.items(), strict=True)
        }
        return weights | {"norm": jnp.ones(s.width), "bias": jnp.linspace(-4.0, 4.0, s.hidden)}

    def initialize(key):
        keys = jax.random.split(key, s.layers + 2)
        return {
            "embed": jax.random.normal(keys[0], (s.vocabulary, s.width)) * 0.02,
            "layers": stack([initialize_layer(k) for k in keys[2:]]),
            "norm": jnp.ones(s.width),
            "head": jax.random.normal(keys[1], (s.width, s.vocabulary)) * s.width**-0.5,
        }

    def layer(x, weights):
        w = {n: v.astype(jnp.bfloat16) for n, v in weights.items()}
        x = checkpoint_name(x, "ssm.block_in")
        h = normalize(x, w["norm"])
        gate, inputs = jnp.split(checkpoint_name(h @ w["in"], "ssm.in"), 2, axis=-1)
        decay = jax.nn.sigmoid((h @ w["decay"]).astype(jnp.float32) + weights["bias"])
        states = recur(decay, (1 - decay) * inputs.astype(jnp.float32))
        states = checkpoint_name(states.astype(jnp.bfloat16), "ssm.states")
        return x + (jax.nn.silu(gate) * states) @ w["out"], None

    block = jax.checkpoint(layer, policy=policy, prevent_cse=False)
    run = lambda x, layers: jax.lax.scan(block, x, layers)[0]  # noqa: E731
    return build_step(functools.partial(decoder_loss, run), initialize, s.tokens, s)


def recur_by_tree(decay: jax.Array, inputs: jax.Array) -> jax.Array:
    """The states of a recurrence over axis 1 of float32 arrays of shape (batch, length, channels)."""

    def combine(first, second):
        return first[0] * second[0], second[0] * first[1] + second[1]

    return jax.lax.associative_scan(combine, (decay, inputs), axis=1)[1]


def recur_by_chunks(decay: jax.Array, inputs: jax.Array) -> jax.Array:
    """As `recur_by_tree`: inside of a chunk by a tree, from chunk to chunk by a scan."""
    batch, length, channels = inputs.shape

    def run_chunk(state, chunk):
        decay, inputs = chunk
        inputs = inputs.at[:, 0].add(decay[:, 0] * state)
        states = recur_by_tree(decay, inputs)
        return states[:, -1], states

    chunks = [v.reshape(batch, -1, CHUNK, channels).swapaxes(0, 1) for v in (decay, inputs)]
    _, states = jax.lax.scan(run_chunk, jnp.zeros_like(inputs[:, 0]), tuple(chunks))
    return states.swapaxes(0, 1).reshape(batch, length, channels)
