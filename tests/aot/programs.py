"""Small stacks of layers whose residuals move, and ways in which the moves go wrong."""

import importlib.resources
import re

import jax
import jax.numpy as jnp
from jax import lax

import jaxoff

LAYERS, ROWS, D = 6, 1024, 512
STACK_NBYTES = LAYERS * ROWS * D * 2  # one residual a layer, bf16
CONCURRENT = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}
# Products of cuBLAS alone, as they come: to compile XLA's own, by Triton, takes most of the time.
QUICK = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": 0}
TRITON = {"xla_gpu_enable_triton_gemm": True}  # as XLA does by itself
BOTH = jaxoff.policy(offload=["x_in", "act"])
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def arguments(rows=ROWS):
    w = jax.ShapeDtypeStruct((LAYERS, D, D), jnp.bfloat16)
    return w, jax.ShapeDtypeStruct((rows, D), jnp.bfloat16)


def layer(x, w):
    x = jaxoff.name(x, "x_in")
    act = jaxoff.name(jnp.square(jax.nn.relu(x @ w)), "act")
    return x + act @ w.T, None


def layer_with_a_norm(x, w):
    """Its backward pass needs the input to compute the rest again, and at the end for the norm."""
    x = jaxoff.name(x, "x_in")
    wide = x.astype(jnp.float32)
    normed = (wide * lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)).astype(x.dtype)
    return x + jnp.square(jax.nn.relu(normed @ w["up"])) @ w["down"], None


def layer_with_two_names(x, w):
    """What comes out of a layer is what goes into the next: one value, two names."""
    x = jaxoff.name(x, "x_in")
    out = jaxoff.name(x + jnp.tanh(x @ w) * jnp.sin(x), "out")
    return out, jnp.sin(out).astype(jnp.float32).mean()


def scanned(policy, body=layer):
    block = jax.checkpoint(body, policy=policy, prevent_cse=False)

    def loss(w, x):
        x, extra = lax.scan(block, x, w)
        return x.astype(jnp.float32).sum() + (0.0 if extra is None else extra.sum())

    return loss


def unrolled(policy, prevent_cse=True):
    block = jax.checkpoint(layer, policy=policy, prevent_cse=prevent_cse)

    def loss(w, x):
        for i in range(LAYERS):
            x, _ = block(x, w[i])
        return x.astype(jnp.float32).sum()

    return loss


def step(loss):
    return jax.value_and_grad(loss, argnums=(0, 1))


def fetched_by(index):
    """A loop that sends each layer's input to the host, and one that fetches the one that `index` says."""

    def program(w, x):
        def send(x, w):
            return layer(x, w)[0], jax.device_put(x, HOST)

        y, sent = lax.scan(send, x, w)

        def fetch(i, y):
            taken = lax.dynamic_index_in_dim(sent, index(i), 0, keepdims=False)
            return y + jnp.tanh(jax.device_put(taken, DEVICE) @ w[0])

        return lax.fori_loop(0, LAYERS, fetch, y)

    return program


def fetched_by_xs(w, x):
    """The second loop reads the index from what it scans over."""

    def send(x, w):
        return layer(x, w)[0], jax.device_put(x, HOST)

    y, sent = lax.scan(send, x, w)

    def fetch(y, iw):
        taken = jax.device_put(lax.dynamic_index_in_dim(sent, iw[0], 0, keepdims=False), DEVICE)
        return y + jnp.tanh(taken @ iw[1]), None

    return lax.scan(fetch, y, (jnp.arange(LAYERS), w), reverse=True)[0]


def h200_with(nbytes, folder):
    """An H200 with so much memory, of which XLA takes 80% as its limit."""
    text = (importlib.resources.files("jaxoff._device") / "data" / "h200.txtpb").read_text()
    text, count = re.subn(r"device_memory_size: \d+", f"device_memory_size: {int(nbytes / 0.8)}", text)
    assert count == 1
    path = folder / "small.txtpb"
    path.write_text(text)
    return jaxoff.target(path)
