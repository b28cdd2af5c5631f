"""A diffusion transformer: adaLN-Zero from time and class, a squared error, averaged weights in the state.

The parameters are dicts, the layers a Python loop. The state is a dict with the step's number, from which the
noise and the times are drawn.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name

from bench.client_steps.encoder_decoder import make_waves
from bench.client_steps.step import ClientStep, Sizes
from bench.client_steps.vit import initialize_linear, linear

CHANNELS = 16
FREQUENCIES = 256
DECAY = 0.9999


def build_dit(sizes: Sizes, policy: Any, *, attention: Any = "cudnn") -> ClientStep:
    """A diffusion transformer over patches of latents, trained to predict a rectified flow's velocity.

    Args:
      sizes: the sizes; `length` patches of 16 numbers, `vocabulary` classes.
      policy: for `jax.checkpoint`; names are "dit.in", "dit.qkv", "dit.attn" and "dit.up".
      attention: the implementation for `jax.nn.dot_product_attention`.
    """
    s, inner = sizes, sizes.heads * sizes.head_size

    def initialize_layer(key):
        keys = jax.random.split(key, 4)
        return {
            "modulation": jax.tree.map(jnp.zeros_like, initialize_linear(key, s.width, 6 * s.width)),
            "qkv": initialize_linear(keys[0], s.width, 3 * inner),
            "o": initialize_linear(keys[1], inner, s.width),
            "up": initialize_linear(keys[2], s.width, s.hidden),
            "down": initialize_linear(keys[3], s.hidden, s.width),
        }

    def initialize(key):
        keys = jax.random.split(key, s.layers + 5)
        params = {
            "patch": initialize_linear(keys[0], CHANNELS, s.width),
            "time1": initialize_linear(keys[1], FREQUENCIES, s.width),
            "time2": initialize_linear(keys[2], s.width, s.width),
            "classes": jax.random.normal(keys[3], (s.vocabulary, s.width)) * 0.02,
            "layers": [initialize_layer(k) for k in keys[5:]],
            "out": initialize_linear(keys[4], s.width, CHANNELS),
        }
        average = jax.tree.map(jnp.copy, params)
        return {"params": params, "ema": average, "opt": s.optimizer.init(params), "step": jnp.zeros((), int)}

    def layer(w, x, condition):
        x = checkpoint_name(x, "dit.in")
        parts = jnp.split(linear(jax.nn.silu(condition), w["modulation"])[:, None], 6, axis=-1)
        shift1, scale1, gate1, shift2, scale2, gate2 = parts
        h = standardize(x) * (1 + scale1) + shift1
        qkv = checkpoint_name(linear(h, w["qkv"]), "dit.qkv")
        q, k, v = jnp.split(qkv.reshape(*x.shape[:2], 3 * s.heads, s.head_size), 3, axis=2)
        a = jax.nn.dot_product_attention(q, k, v, implementation=attention)
        x = x + gate1 * linear(checkpoint_name(a.reshape(*x.shape[:2], inner), "dit.attn"), w["o"])
        h = standardize(x) * (1 + scale2) + shift2
        up = checkpoint_name(linear(h, w["up"]), "dit.up")
        return x + gate2 * linear(jax.nn.gelu(up, approximate=True), w["down"])

    block = jax.checkpoint(layer, policy=policy)

    def predict(params, noisy, time, classes):
        angles = time[:, None] * 1000.0 * jnp.exp(jnp.linspace(0.0, -9.2, FREQUENCIES // 2))
        waves = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], -1).astype(jnp.bfloat16)
        condition = linear(jax.nn.silu(linear(waves, params["time1"])), params["time2"])
        condition = condition + params["classes"].astype(jnp.bfloat16)[classes]
        x = linear(noisy, params["patch"]) + make_waves(s.length, s.width)
        for weights in params["layers"]:
            x = block(weights, x, condition)
        return linear(standardize(x), params["out"])

    def loss_of(params, batch, key):
        clean = batch["latents"]
        of_noise, of_time = jax.random.split(key)
        noise = jax.random.normal(of_noise, clean.shape, clean.dtype)
        time = jax.nn.sigmoid(jax.random.normal(of_time, (s.batch,)))
        part = time[:, None, None].astype(clean.dtype)
        velocity = predict(params, (1 - part) * clean + part * noise, time, batch["classes"])
        return jnp.mean((velocity - (noise - clean)).astype(jnp.float32) ** 2)

    def step(state, batch):
        key = jax.random.fold_in(jax.random.key(0), state["step"])
        loss, grads = jax.value_and_grad(loss_of)(state["params"], batch, key)
        updates, moments = s.optimizer.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        average = optax.incremental_update(params, state["ema"], 1 - DECAY)
        return {"params": params, "ema": average, "opt": moments, "step": state["step"] + 1}, loss

    batch = {
        "latents": jax.ShapeDtypeStruct((s.batch, s.length, CHANNELS), jnp.bfloat16),
        "classes": jax.ShapeDtypeStruct((s.batch,), jnp.int32),
    }
    return ClientStep.of(step, initialize, batch, s)


def standardize(x: jax.Array) -> jax.Array:
    """LayerNorm without weights, in float32, its result in bfloat16."""
    return jax.nn.standardize(x.astype(jnp.float32), epsilon=1e-6).astype(jnp.bfloat16)
