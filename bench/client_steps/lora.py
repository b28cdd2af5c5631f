"""Fine-tuning by LoRA: a frozen decoder in bfloat16, and adapters of rank 16 on each of its matrices.

The state has the adapters and their moments alone. The frozen weights are an argument that the step neither
donates nor differentiates.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name

from bench.client_steps.decoder import decoder_logits, list_shapes, normalize
from bench.client_steps.step import ClientStep, Sizes, build_step

RANK = 16
SCALE = 2.0


def build_lora(sizes: Sizes, policy: Any, *, attention: Any = "cudnn") -> ClientStep:
    """A decoder with rotary positions and adapters, its layers in a scan.

    Args:
      sizes: the sizes.
      policy: for `jax.checkpoint`; names are "block_in", "attn", "gate" and "up".
      attention: the implementation for `jax.nn.dot_product_attention`.
    """
    s, shapes = sizes, list_shapes(sizes)

    def initialize_frozen(key):
        keys = jax.random.split(key, len(shapes) + 2)

        def draw(key, *shape):
            return jax.random.normal(key, shape, jnp.bfloat16) * shape[-2] ** -0.5

        matrices = zip(keys[2:], shapes.items(), strict=True)
        layers = {name: draw(k, s.layers, *shape) for k, (name, shape) in matrices}
        ones = jnp.ones((s.layers, s.width), jnp.bfloat16)
        return {
            "embed": draw(keys[0], s.vocabulary, s.width),
            "layers": layers | {"norm1": ones, "norm2": ones},
            "norm": jnp.ones(s.width, jnp.bfloat16),
            "head": draw(keys[1], s.width, s.vocabulary),
        }

    def initialize(key):
        def initialize_adapter(key, rows, columns):
            down = jax.random.normal(key, (s.layers, rows, RANK)) * rows**-0.5
            return {"down": down, "up": jnp.zeros((s.layers, RANK, columns))}

        keys = jax.random.split(key, len(shapes))
        matrices = zip(keys, shapes.items(), strict=True)
        return {name: initialize_adapter(k, *shape) for k, (name, shape) in matrices}

    def layer(x, weights):
        w, adapters = weights

        def project(name, h):
            low = h @ adapters[name]["down"].astype(h.dtype)
            return h @ w[name] + SCALE * (low @ adapters[name]["up"].astype(h.dtype))

        def project_heads(name, h):
            return project(name, h).reshape(*h.shape[:2], -1, s.head_size)

        x = checkpoint_name(x, "block_in")
        h = normalize(x, w["norm1"])
        q, k = rotate(project_heads("q", h)), rotate(project_heads("k", h))
        a = jax.nn.dot_product_attention(
            q, k, project_heads("v", h), is_causal=True, implementation=attention
        )
        x = x + project("o", checkpoint_name(a.reshape(*x.shape[:2], -1), "attn"))
        h = normalize(x, w["norm2"])
        gate, up = checkpoint_name(project("gate", h), "gate"), checkpoint_name(project("up", h), "up")
        return x + project("down", jax.nn.silu(gate) * up), None

    block = jax.checkpoint(layer, policy=policy, prevent_cse=False)

    def loss_of(adapters, batch):
        run = lambda x, layers: jax.lax.scan(block, x, (layers, adapters))[0]  # noqa: E731
        logits = decoder_logits(run, batch["frozen"], batch["tokens"][:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:]).mean()

    return build_step(loss_of, initialize, {"tokens": s.tokens}, s, initialize_frozen)


def rotate(x: jax.Array) -> jax.Array:
    """Rotary positions on an array of shape (batch, length, heads, head size)."""
    frequencies = 5e5 ** -jnp.linspace(0.0, 1.0, x.shape[-1] // 2, endpoint=False)
    angles = jnp.arange(x.shape[1])[:, None, None] * frequencies
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)
