"""A speech recognizer: an encoder over frames of a spectrogram, a decoder with cross attention, a tied head.

Each side is a scan over stacked layers under a `jax.checkpoint`; biases and LayerNorm, as Whisper has them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name

from bench.client_steps.decoder import stack
from bench.client_steps.step import ClientStep, Sizes, build_step
from bench.client_steps.vit import initialize_linear, initialize_norm, linear, normalize

BANDS = 128


def build_encoder_decoder(sizes: Sizes, policy: Any, *, attention: Any = "cudnn") -> ClientStep:
    """An encoder and a decoder of `layers` layers each.

    Args:
      sizes: the sizes; `source_length` frames of 128 bands in front of `length` tokens.
      policy: for `jax.checkpoint`; names are "enc.in", "enc.attn", "dec.in", "dec.attn" and "dec.cross".
      attention: the implementation for `jax.nn.dot_product_attention`.
    """
    s, inner = sizes, sizes.heads * sizes.head_size

    def attend(x, memory, w, **mask):
        def project(array, name):
            return linear(array, w[name]).reshape(*array.shape[:2], s.heads, s.head_size)

        q, k, v = project(x, "q"), project(memory, "k"), project(memory, "v")
        out = jax.nn.dot_product_attention(q, k, v, implementation=attention, **mask)
        return out.reshape(*x.shape[:2], inner)

    def feed_forward(x, w):
        return linear(jax.nn.gelu(linear(normalize(x, w["norm"]), w["up"])), w["down"])

    def encode(x, w):
        x = checkpoint_name(x, "enc.in")
        h = normalize(x, w["attn"]["norm"])
        x = x + linear(checkpoint_name(attend(h, h, w["attn"]), "enc.attn"), w["attn"]["o"])
        return x + feed_forward(x, w["mlp"]), None

    def decode(x, w, memory):
        x = checkpoint_name(x, "dec.in")
        h = normalize(x, w["attn"]["norm"])
        a = checkpoint_name(attend(h, h, w["attn"], is_causal=True), "dec.attn")
        x = x + linear(a, w["attn"]["o"])
        a = checkpoint_name(attend(normalize(x, w["cross"]["norm"]), memory, w["cross"]), "dec.cross")
        x = x + linear(a, w["cross"]["o"])
        return x + feed_forward(x, w["mlp"]), None

    def initialize_block(key, *attentions):
        def initialize_attention(key):
            keys = dict(zip("qkv", jax.random.split(key, 3), strict=True))
            into = {name: initialize_linear(k, s.width, inner) for name, k in keys.items()}
            return into | {"o": initialize_linear(key, inner, s.width), "norm": initialize_norm(s.width)}

        first, second, *rest = jax.random.split(key, 2 + len(attentions))
        up, down = initialize_linear(first, s.width, s.hidden), initialize_linear(second, s.hidden, s.width)
        layer = {"mlp": {"norm": initialize_norm(s.width), "up": up, "down": down}}
        return layer | {n: initialize_attention(k) for n, k in zip(attentions, rest, strict=True)}

    def initialize(key):
        keys = jax.random.split(key, 2 * s.layers + 2)
        encoder, decoder = keys[2 : 2 + s.layers], keys[2 + s.layers :]
        return {
            "stem": initialize_linear(keys[0], BANDS, s.width),
            "embed": jax.random.normal(keys[1], (s.vocabulary, s.width)) * 0.02,
            "position": jnp.zeros((s.length, s.width)),
            "encoder": stack([initialize_block(k, "attn") for k in encoder]),
            "encoder_norm": initialize_norm(s.width),
            "decoder": stack([initialize_block(k, "attn", "cross") for k in decoder]),
            "decoder_norm": initialize_norm(s.width),
        }

    def loss_of(params, batch):
        x = jax.nn.gelu(linear(batch["frames"], params["stem"])) + make_waves(s.source_length, s.width)
        x, _ = jax.lax.scan(jax.checkpoint(encode, policy=policy, prevent_cse=False), x, params["encoder"])
        memory = normalize(x, params["encoder_norm"])

        block = jax.checkpoint(decode, policy=policy, prevent_cse=False)
        embed = params["embed"].astype(jnp.bfloat16)
        x = embed[batch["tokens"][:, :-1]] + params["position"].astype(jnp.bfloat16)
        x, _ = jax.lax.scan(lambda x, w: block(x, w, memory), x, params["decoder"])
        logits = jnp.einsum("bld,vd->blv", normalize(x, params["decoder_norm"]), embed)
        return optax.softmax_cross_entropy_with_integer_labels(
            logits.astype(jnp.float32), batch["tokens"][:, 1:]
        ).mean()

    frames = jax.ShapeDtypeStruct((s.batch, s.source_length, BANDS), jnp.bfloat16)
    return build_step(loss_of, initialize, {"frames": frames, "tokens": s.tokens}, s)


def make_waves(length: int, width: int) -> jax.Array:
    """Sinusoidal positions of shape (length, width), bfloat16."""
    angles = jnp.arange(length)[:, None] * jnp.exp(jnp.linspace(0.0, -9.2, width // 2))
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1).astype(jnp.bfloat16)
