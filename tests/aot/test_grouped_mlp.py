"""What XLA's GPU compiler makes of the operations around the grouped MLP's kernels."""

import re

import jax
import jax.numpy as jnp
import pytest

import jaxoff
from pallas_kernels import grouped_mlp

pytestmark = pytest.mark.aot

ROWS, WIDTH, HIDDEN, EXPERTS = 512, 128, 192, 4


def loss(b2, x, w1, w2, probs, sizes):
    y = grouped_mlp(x, w1, w2, sizes, probs=probs, b2=b2, implementation="mosaic")
    return jnp.sum(jnp.sin(y.astype(jnp.float32)))


@pytest.mark.long  # six kernels, each compiled for 4 s; on a GPU the gradients are compared with float64
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_probs_keep_their_precision_in_the_gradient_of_b2(dtype):
    """They are split into three 16-bit parts; what a part leaves is not to be folded to zero."""
    shapes = dict(x=(ROWS, WIDTH), w1=(EXPERTS, WIDTH, HIDDEN), w2=(EXPERTS, HIDDEN, WIDTH))
    arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes.values()]
    b2, probs = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((EXPERTS, WIDTH), (ROWS,)))
    sizes = jax.ShapeDtypeStruct((EXPERTS,), jnp.int32)
    compiled = jaxoff.target("h200").compile(jax.jit(jax.grad(loss)), b2, *arrays, probs, sizes)
    text = compiled.as_text() or ""
    rests = re.findall(rf"= f32\[{ROWS}\]\S* subtract\((%\S+), (%\S+?)\)", text)
    assert len(rests) >= 2
    assert all(whole != part for whole, part in rests), "a rest of the probs is x - x"
