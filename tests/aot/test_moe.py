"""The MoE layer's kernels, which gather rows by inline code, compile for a Hopper GPU that is not there."""

import jax
import jax.numpy as jnp
import pytest

import jaxoff
from pallas_kernels import moe

pytestmark = [pytest.mark.aot, pytest.mark.slow]

TOKENS, K, WIDTH, HIDDEN, EXPERTS = 4096, 4, 1024, 256, 4


def loss(x, w1, w2, probs, experts):
    return jnp.sum(jnp.sin(moe(x, probs, experts, w1, w2, activation="swiglu").astype(jnp.float32)))


@pytest.mark.long  # eight kernels, each compiled for 6 s
def test_no_gathered_rows_are_in_memory():
    narrow = [(TOKENS, WIDTH), (EXPERTS, WIDTH, 2 * HIDDEN), (EXPERTS, HIDDEN, WIDTH)]
    given = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in narrow]
    given += [jax.ShapeDtypeStruct((TOKENS, K), dtype) for dtype in (jnp.float32, jnp.int32)]
    compiled = jaxoff.target("h200").compile(jax.jit(jax.grad(loss, (0, 1, 2, 3))), *given)
    assert (compiled.as_text() or "").count('custom_call_target="mosaic_gpu') == 8
    # In units of (R, H), with H = 4 I: z of a half, a and the sum of a quarter, y of one, and small values.
    # Gathered rows of x and of the output's gradient would be two more in the backward pass.
    row_nbytes = 2 * TOKENS * K * WIDTH
    assert compiled.memory_analysis().temp_size_in_bytes < 2.1 * row_nbytes
