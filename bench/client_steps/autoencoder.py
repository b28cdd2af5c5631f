"""A masked autoencoder in Equinox: modules of one picture under `jax.vmap`, XLA's attention over odd lengths.

A quarter of the patches, drawn for each picture, passes the encoder; a narrower decoder fills in the others.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx  # pyright: ignore[reportMissingImports]
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from bench.client_steps.step import ClientStep, Sizes, build_step

PATCH = 16 * 16 * 3


class Block(eqx.Module):
    """A layer."""

    norm1: eqx.nn.LayerNorm
    qkv: eqx.nn.Linear
    o: eqx.nn.Linear
    norm2: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    heads: int = eqx.field(static=True)

    def __init__(self, width: int, hidden: int, heads: int, key: jax.Array):
        keys = jax.random.split(key, 4)
        self.norm1, self.norm2 = eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)
        self.qkv = eqx.nn.Linear(width, 3 * width, key=keys[0])
        self.o = eqx.nn.Linear(width, width, key=keys[1])
        self.up = eqx.nn.Linear(width, hidden, key=keys[2])
        self.down = eqx.nn.Linear(hidden, width, key=keys[3])
        self.heads = heads

    def __call__(self, x):
        """A sequence of shape (length, width)."""
        x = checkpoint_name(x, "mae.in")
        qkv = jax.vmap(self.qkv)(jax.vmap(self.norm1)(x)).reshape(x.shape[0], 3 * self.heads, -1)
        a = jax.nn.dot_product_attention(*jnp.split(qkv, 3, axis=1), implementation="xla")
        x = x + jax.vmap(self.o)(checkpoint_name(a.reshape(x.shape), "mae.attn"))
        up = jax.nn.gelu(jax.vmap(self.up)(jax.vmap(self.norm2)(x)))
        return x + jax.vmap(self.down)(up)


class Autoencoder(eqx.Module):
    """The encoder and the decoder, each a list of blocks."""

    embed: eqx.nn.Linear
    position: jax.Array
    encoder: list[Block]
    bridge: eqx.nn.Linear
    mask: jax.Array
    decoder_position: jax.Array
    decoder: list[Block]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, sizes: Sizes, key: jax.Array):
        s, narrow = sizes, sizes.head_size // 2
        heads = 2 * s.width // (3 * narrow)
        width = heads * narrow
        keys = jax.random.split(key, 6)
        self.embed = eqx.nn.Linear(PATCH, s.width, key=keys[0])
        self.position = 0.02 * jax.random.normal(keys[1], (s.length, s.width))
        encoder, decoder = (jax.random.split(k, s.layers) for k in keys[2:4])
        self.encoder = [Block(s.width, s.hidden, s.heads, k) for k in encoder]
        self.bridge = eqx.nn.Linear(s.width, width, key=keys[4])
        self.mask, self.decoder_position = jnp.zeros(width), jnp.zeros((s.length, width))
        self.decoder = [Block(width, 4 * width, heads, k) for k in decoder[: max(1, s.layers // 3)]]
        self.norm = eqx.nn.LayerNorm(width)
        self.head = eqx.nn.Linear(width, PATCH, key=keys[5])

    def __call__(self, patches, key, policy):
        """The patches of a picture, and whether each was masked; the policy is for `jax.checkpoint`."""
        length = patches.shape[0]
        order = jnp.argsort(jax.random.uniform(key, (length,)))
        places, seen = jnp.argsort(order), length // 4

        def run_block(block, x):
            return block(x)

        run_block = eqx.filter_checkpoint(run_block, policy=policy)
        x = (jax.vmap(self.embed)(patches) + self.position)[order[:seen]]
        for block in self.encoder:
            x = run_block(block, x)
        masked = jnp.tile(self.mask, (length - seen, 1))
        x = jnp.concatenate([jax.vmap(self.bridge)(x), masked])[places] + self.decoder_position
        for block in self.decoder:
            x = run_block(block, x)
        return jax.vmap(self.head)(jax.vmap(self.norm)(x)), places >= seen


def build_autoencoder(sizes: Sizes, policy: Any) -> ClientStep:
    """A masked autoencoder over patches of 16 x 16 pixels.

    Args:
      sizes: the sizes; `length` patches a picture. The decoder has a third of the layers.
      policy: for `jax.checkpoint`; names are "mae.in" and "mae.attn".
    """

    def make(key):
        return Autoencoder(sizes, key)

    structs = eqx.filter_eval_shape(make, jax.random.key(0))
    _, rest = eqx.partition(structs, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))

    def initialize_params(key):
        return eqx.filter(make(key), eqx.is_array)

    def loss_of(arrays, patches):
        half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), arrays)
        model, keys = eqx.combine(half, rest), jax.random.split(jax.random.key(0), sizes.batch)
        found, masked = jax.vmap(model, (0, 0, None))(patches, keys, policy)
        error = jnp.square(found.astype(jnp.float32) - patches).mean(-1)
        return (error * masked).sum() / masked.sum()

    batch = jax.ShapeDtypeStruct((sizes.batch, sizes.length, PATCH), jnp.bfloat16)
    return build_step(loss_of, initialize_params, batch, sizes)
