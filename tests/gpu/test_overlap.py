"""On a GPU: copies run beside kernels, also of what a turn reads from its first kernel to its last."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxoff

pytestmark = pytest.mark.gpu

LAYERS, ROWS, D, FF = 6, 16384, 4096, 8192
NBYTES = LAYERS * ROWS * D * 2


def layer(x, w):
    """Its backward pass needs the input to compute the rest again, and at the end for the norm."""
    x = jaxoff.name(x, "x_in")
    wide = x.astype(jnp.float32)
    normed = (wide * lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)).astype(x.dtype)
    return x + jnp.square(jax.nn.relu(normed @ w["up"])) @ w["down"], None


def test_a_residual_that_a_whole_turn_reads_comes_back_beside_kernels():
    def loss(w, x):
        policy = jaxoff.policy(offload=["x_in"])
        return jaxoff.scan(layer, x, w, policy=policy)[0].astype(jnp.float32).mean()

    up, down, x = jax.random.split(jax.random.key(0), 3)
    w = {
        "up": jax.random.normal(up, (LAYERS, D, FF), jnp.bfloat16) * D**-0.5,
        "down": jax.random.normal(down, (LAYERS, FF, D), jnp.bfloat16) * FF**-0.5,
    }
    step = jaxoff.jit(jax.value_and_grad(loss))
    taken = jaxoff.measure(step, w, jax.random.normal(x, (ROWS, D), jnp.bfloat16))
    (gpu,) = taken.gpus
    for copy in (gpu.d2h, gpu.h2d):
        assert copy.nbytes >= (LAYERS - 1) / LAYERS * NBYTES, str(taken)
        assert copy.exposed_ms < 0.1 * copy.busy_ms, str(taken)
