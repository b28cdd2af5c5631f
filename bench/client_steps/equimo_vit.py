"""The vision transformer of the package equimo under `jax.vmap`, each block under `eqx.filter_checkpoint`.

The blocks are wrapped inside of the loss: an Equinox module holds its policy, which the state's must not.
"""

from __future__ import annotations

from typing import Any

import equimo.vision.models as em  # pyright: ignore[reportMissingImports]
import equinox as eqx  # pyright: ignore[reportMissingImports]
import jax
import jax.numpy as jnp
import optax
from equimo.core.layers import with_attention_implementation  # pyright: ignore[reportMissingImports]
from jax.ad_checkpoint import checkpoint_name

from bench.client_steps.step import ClientStep, Sizes, build_step

PATCH = 14


class CheckpointedBlock(eqx.Module):
    """A block of the package that recomputes what the policy does not keep."""

    block: eqx.Module
    policy: Any = eqx.field(static=True)

    def __call__(self, x, **keywords):
        def run(block, x):
            return block(checkpoint_name(x, "block_in"), **keywords)

        return eqx.filter_checkpoint(run, policy=self.policy)(self.block, x)


def build_equimo(sizes: Sizes, policy: Any, *, attention: Any = "cudnn") -> ClientStep:
    """The package's `VisionTransformer`, with stochastic depth, in bfloat16.

    Args:
      sizes: the sizes; `length` patches of 14 x 14 pixels a picture, a square; `vocabulary` classes.
      policy: for `eqx.filter_checkpoint`; the only name is "block_in".
      attention: the package's attention, "xla" or "cudnn".
    """
    s, side = sizes, PATCH * round(sizes.length**0.5)

    def make(key):
        model = em.VisionTransformer(  # pyright: ignore[reportAttributeAccessIssue]
            img_size=side,
            in_channels=3,
            dim=s.width,
            patch_size=PATCH,
            num_heads=[s.heads],
            depths=[s.layers],
            mlp_ratio=s.hidden / s.width,
            drop_path_rate=0.1,
            num_classes=s.vocabulary,
            key=key,
        )
        return with_attention_implementation(model, attention)

    structs = eqx.filter_eval_shape(make, jax.random.key(0))
    _, rest = eqx.partition(structs, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))

    def loss_of(arrays, batch):
        half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), arrays)
        model = eqx.combine(half, rest)
        blocks = tuple(CheckpointedBlock(block, policy) for block in model.blocks[0].blocks)
        model = eqx.tree_at(lambda model: model.blocks[0].blocks, model, blocks)
        keys = jax.random.split(jax.random.key(0), s.batch)
        logits = jax.vmap(lambda x, key: model(x, key=key, inference=False))(batch["pictures"], keys)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), batch["labels"])
        return losses.mean()

    batch = {
        "pictures": jax.ShapeDtypeStruct((s.batch, 3, side, side), jnp.bfloat16),
        "labels": jax.ShapeDtypeStruct((s.batch,), jnp.int32),
    }
    return build_step(loss_of, lambda key: eqx.filter(make(key), eqx.is_array), batch, s)
