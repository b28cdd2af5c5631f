"""A U-Net that removes noise from pictures: convolutions, group norms, attention at the lowest resolution.

Plain Python: no two of its blocks have equal shapes. Each block is under a `jax.checkpoint`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from bench.client_steps.step import ClientStep, Sizes, build_step
from bench.client_steps.vit import initialize_linear, initialize_norm, linear

CHANNELS = 3
GROUPS = 32
FREQUENCIES = 256


def build_unet(sizes: Sizes, policy: Any, *, attention: Any = "cudnn") -> ClientStep:
    """A U-Net of `layers` resolutions, the next of half the side; level i has (i + 1) `width` channels.

    Args:
      sizes: the sizes; `length` pixels a side.
      policy: for `jax.checkpoint`; names are "unet.in", "unet.conv" and "unet.attn".
      attention: the implementation for `jax.nn.dot_product_attention`.
    """
    s = sizes
    channels = [s.width * (level + 1) for level in range(s.layers)]

    def initialize_block(key, inputs, outputs):
        keys = jax.random.split(key, 4)
        return {
            "norm1": initialize_norm(inputs),
            "conv1": initialize_convolution(keys[0], 3, inputs, outputs),
            "time": initialize_linear(keys[1], 4 * s.width, outputs),
            "norm2": initialize_norm(outputs),
            "conv2": initialize_convolution(keys[2], 3, outputs, outputs),
            "skip": initialize_convolution(keys[3], 1, inputs, outputs),
        }

    def initialize(key):
        down, up, *keys = jax.random.split(key, 8)
        inputs, low = [s.width, *channels], channels[-1]
        return {
            "time": initialize_linear(keys[0], FREQUENCIES, 4 * s.width),
            "in": initialize_convolution(keys[1], 3, CHANNELS, s.width),
            "down": [
                initialize_block(k, *inputs[i : i + 2])
                for i, k in enumerate(jax.random.split(down, s.layers))
            ],
            "attention": {
                "norm": initialize_norm(low),
                "qkv": initialize_linear(keys[2], low, 3 * low),
                "out": initialize_linear(keys[3], low, low),
            },
            "middle": initialize_block(keys[4], low, low),
            "up": [
                initialize_block(k, channels[min(i + 1, s.layers - 1)] + channels[i], channels[i])
                for i, k in enumerate(jax.random.split(up, s.layers))
            ],
            "norm": initialize_norm(s.width),
            "out": initialize_convolution(keys[5], 3, s.width, CHANNELS),
        }

    @functools.partial(jax.checkpoint, policy=policy)
    def run_block(w, x, time):
        x = checkpoint_name(x, "unet.in")
        h = convolve(jax.nn.silu(normalize_groups(x, w["norm1"])), w["conv1"])
        h = checkpoint_name(h, "unet.conv") + linear(jax.nn.silu(time), w["time"])[:, None, None]
        h = convolve(jax.nn.silu(normalize_groups(h, w["norm2"])), w["conv2"])
        return convolve(x, w["skip"]) + h

    @functools.partial(jax.checkpoint, policy=policy)
    def attend(w, x):
        x = checkpoint_name(x, "unet.in")
        qkv = linear(normalize_groups(x, w["norm"]), w["qkv"])
        q, k, v = jnp.split(qkv.reshape(x.shape[0], -1, 3 * s.heads, x.shape[-1] // s.heads), 3, axis=2)
        a = checkpoint_name(jax.nn.dot_product_attention(q, k, v, implementation=attention), "unet.attn")
        return x + linear(a.reshape(x.shape), w["out"])

    def predict(params, pictures, time):
        angles = time[:, None] * 1000.0 * jnp.exp(jnp.linspace(0.0, -9.2, FREQUENCIES // 2))
        waves = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], -1).astype(jnp.bfloat16)
        time = linear(waves, params["time"])
        x, skips = convolve(pictures, params["in"]), []
        for level, weights in enumerate(params["down"]):
            x = run_block(weights, x, time)
            skips.append(x)
            if level < s.layers - 1:
                x = halve(x)
        x = run_block(params["middle"], attend(params["attention"], x), time)
        for level, weights in reversed(list(enumerate(params["up"]))):
            x = run_block(weights, jnp.concatenate([x, skips[level]], -1), time)
            if level:
                x = double(x)
        return convolve(jax.nn.silu(normalize_groups(x, params["norm"])), params["out"])

    def loss_of(params, batch):
        clean, noise = batch["pictures"], batch["noise"]
        time = jax.nn.sigmoid(batch["times"])
        angle = (jnp.pi / 2 * time)[:, None, None, None].astype(clean.dtype)
        noisy = jnp.cos(angle) * clean + jnp.sin(angle) * noise
        return jnp.mean((predict(params, noisy, time) - noise).astype(jnp.float32) ** 2)

    picture = jax.ShapeDtypeStruct((s.batch, s.length, s.length, CHANNELS), jnp.bfloat16)
    times = jax.ShapeDtypeStruct((s.batch,), jnp.float32)
    return build_step(loss_of, initialize, {"pictures": picture, "noise": picture, "times": times}, s)


def initialize_convolution(key: jax.Array, side: int, inputs: int, outputs: int) -> Any:
    """The parameters of a convolution with windows of `side` x `side` pixels."""
    w = jax.random.normal(key, (side, side, inputs, outputs)) * (side * side * inputs) ** -0.5
    return {"w": w, "b": jnp.zeros(outputs)}


def convolve(x: jax.Array, weights: Any) -> jax.Array:
    """A convolution in bfloat16 that keeps the size of pictures of shape (batch, rows, columns, channels)."""
    y = jax.lax.conv_general_dilated(
        x, weights["w"].astype(jnp.bfloat16), (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return y + weights["b"].astype(jnp.bfloat16)


def normalize_groups(x: jax.Array, weights: Any) -> jax.Array:
    """Group norm in float32, its result in bfloat16."""
    wide = x.astype(jnp.float32).reshape(*x.shape[:-1], GROUPS, -1)
    wide = jax.nn.standardize(wide, axis=(1, 2, 4), epsilon=1e-6).reshape(x.shape)
    return (wide * weights["scale"] + weights["bias"]).astype(jnp.bfloat16)


def halve(x: jax.Array) -> jax.Array:
    """Pictures of half the side, by means of 2 x 2 pixels."""
    batch, rows, columns, channels = x.shape
    return x.reshape(batch, rows // 2, 2, columns // 2, 2, channels).mean((2, 4))


def double(x: jax.Array) -> jax.Array:
    """Pictures of double the side, by repetition."""
    return x.repeat(2, axis=1).repeat(2, axis=2)
