"""Offloads that XLA refuses are saved, and the others offloaded: compiled for a GPU."""

import jax
import jax.numpy as jnp
import pytest

import jaxoff
from jaxoff import FindingCode
from tests.aot.programs import QUICK

pytestmark = pytest.mark.aot

LAYERS, ROWS, WIDTH = 4, 4096, 512
X_NBYTES = 2 * ROWS * WIDTH


def layer_with_a_loop(x, w):
    x = jaxoff.name(x, "x_in")

    def inner(total, rows):
        act = jaxoff.name(jnp.tanh(rows @ w), "inner")
        return total + act.mean(0), jnp.sin(act)

    total, y = jax.lax.scan(inner, jnp.zeros(WIDTH, x.dtype), x.reshape(8, -1, WIDTH))
    return x + y.reshape(x.shape) * total, None


def layer_with_a_condition(x, w):
    x = jaxoff.name(x, "x_in")

    def active(x):
        return x + jaxoff.name(jnp.tanh(x @ w), "inner") @ w.T

    return jax.lax.cond(x[0, 0] > 0, active, lambda x: x, x), None


def layer_in_an_unrolled_loop(x, w):
    return x + jaxoff.name(jnp.tanh(jaxoff.name(x, "x_in") @ w), "inner") @ w.T, None


@pytest.mark.parametrize(
    ("layer", "unroll"),
    [(layer_with_a_loop, 1), (layer_with_a_condition, 1), (layer_in_an_unrolled_loop, 2)],
)
def test_what_xla_refuses_is_saved_and_the_rest_is_offloaded(layer, unroll):
    policy = jaxoff.policy(offload=["x_in", "inner"])
    body = jax.checkpoint(layer, policy=policy, prevent_cse=False)

    def loss(w, x):
        return jax.lax.scan(body, x, w, unroll=unroll)[0].astype(jnp.float32).var()

    args = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in [(LAYERS, WIDTH, WIDTH), (ROWS, WIDTH)]]
    target, step = jaxoff.target("h200"), jax.grad(loss)
    with pytest.raises(jax.errors.JaxRuntimeError):
        target.compile(jax.jit(step, compiler_options=QUICK), *args)
    ours = jaxoff.jit(step, compiler_options=QUICK, recipe="ordered")
    with pytest.warns(UserWarning, match=FindingCode.OFFLOAD_IN_NESTED_SCAN):
        facts = jaxoff.verify(target.compile(ours, *args), compiler_options=ours.options)
    assert all(copy.via == "dma" for copy in facts.copies)
    expected = [0] if unroll > 1 else [layers * X_NBYTES for layers in (LAYERS - 1, LAYERS)]
    assert facts.d2h_bytes in expected
