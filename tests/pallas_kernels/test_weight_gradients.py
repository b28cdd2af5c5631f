"""The dtype of the weights' gradients, and the sums that a caller carries from call to call."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import grouped_mlp
from tests.pallas_kernels.hopper import on_h200
from tests.pallas_kernels.interpreter import interpreted
from tests.pallas_kernels.oracle import dense, float64, make, norm_error

SIZES, ROWS = [9, 0, 20, 3], 35
GROUPS = jnp.array(SIZES, jnp.int32)
# The kernels' rows, activation and its gradient are rounded to 16 bits before the product; its sums are not.
OF_16_BITS, OF_32_BITS = 5e-3, 1e-6


def arguments():
    given = make(SIZES, ROWS, jnp.bfloat16, width=64, hidden=64)
    return given._replace(b1=None, b2=None)


def compiled(implementation, function, *given):
    return interpreted(function, *given) if implementation == "mosaic" else jax.jit(function)


def gradients(implementation, **more):
    """Gradients of both weights, and of the accumulators, for the rest of the arguments."""

    def run(w, sums, x, probs, dy):
        def loss(w, sums):
            kept = dict(probs=probs, grad_accumulators=sums, implementation=implementation, **more)
            y = grouped_mlp(x, w[0], w[1], GROUPS, **kept)
            return jnp.sum(jnp.where(jnp.isnan(dy), 0, y.astype(jnp.float32) * dy.astype(jnp.float32)))

        return jax.grad(loss, (0, 1))(w, sums)

    return run


@pytest.mark.parametrize("implementation", ["reference", pytest.param("mosaic", marks=pytest.mark.long)])
def test_float32_weights_get_float32_gradients_that_16_bits_could_not_hold(implementation):
    """And 16-bit ones where that is asked for: rounded once, on their way out."""
    x, w1, w2, probs, _, _, dy = arguments()
    wide = w1.astype(jnp.float32), w2.astype(jnp.float32)
    given = wide, None, x, probs, dy
    got, _ = compiled(implementation, gradients(implementation), *given)(*given)
    narrow, _ = gradients("reference", grad_dtype=jnp.bfloat16)(*given)
    for dw, rounded, want in zip(got, narrow, dense(SIZES, arguments())[2:4], strict=True):
        assert dw.dtype == rounded.dtype == jnp.float32
        assert norm_error(dw, want) < OF_16_BITS
        assert np.mean(float64(dw) != float64(dw.astype(jnp.bfloat16))) > 0.5
        assert (float64(rounded) == float64(rounded.astype(jnp.bfloat16))).all()
        assert norm_error(rounded, float64(dw)) < OF_16_BITS


def outputs_of_grad_weight(jaxpr):
    """The dtypes that the kernels of the weights' gradients write."""
    for eqn in jaxpr.eqns:
        if eqn.params.get("name") == "grouped_mlp_grad_weight":
            yield from (v.aval.dtype for v in eqn.outvars)
            continue
        for value in jax.tree.leaves(tuple(eqn.params.values()), is_leaf=lambda v: hasattr(v, "eqns")):
            if hasattr(inner := getattr(value, "jaxpr", value), "eqns"):
                yield from outputs_of_grad_weight(inner)


@pytest.mark.parametrize("grad_dtype", [None, jnp.bfloat16])
def test_the_kernels_write_the_gradients_in_the_dtype_that_is_asked_for(grad_dtype):
    x, w1, w2, probs, _, _, dy = arguments()
    wide = w1.astype(jnp.float32), w2.astype(jnp.float32)
    with on_h200():
        traced = jax.make_jaxpr(gradients("mosaic", grad_dtype=grad_dtype))(wide, None, x, probs, dy)
    assert list(outputs_of_grad_weight(traced.jaxpr)) == [grad_dtype or jnp.float32] * 2
    assert [out.dtype for out in traced.out_avals] == [jnp.float32] * 2


@pytest.mark.parametrize("implementation", ["reference", pytest.param("mosaic", marks=pytest.mark.long)])
def test_sums_over_two_calls_are_the_gradients_of_the_accumulators(implementation):
    x, w1, w2, probs, _, _, dy = arguments()
    keys = jax.random.split(jax.random.key(0))
    start = jax.random.normal(keys[0], w1.shape), jax.random.normal(keys[1], w2.shape)
    given = (w1, w2), start, x, probs, dy
    step = compiled(implementation, gradients(implementation), *given)
    wide, _ = gradients("reference")((w1.astype(jnp.float32), w2.astype(jnp.float32)), None, x, probs, dy)
    zeros, once = step(*given)
    again, twice = step((w1, w2), once, x, probs, dy)
    for dw in (*zeros, *again):
        assert dw.dtype == jnp.bfloat16 and not float64(dw).any()
    for first, second, begun, dw in zip(once, twice, start, wide, strict=True):
        assert first.dtype == jnp.float32
        assert norm_error(float64(first), float64(begun) + float64(dw)) < OF_32_BITS
        assert norm_error(float64(second), float64(begun) + 2 * float64(dw)) < OF_32_BITS
        assert (float64(first)[1] == float64(begun)[1]).all(), "an expert without rows"


def test_the_output_does_not_depend_on_the_accumulators():
    x, w1, w2, probs, _, _, _ = arguments()
    sums = jnp.full(w1.shape, jnp.nan), jnp.full(w2.shape, jnp.inf)
    plain, beside = (
        grouped_mlp(x, w1, w2, GROUPS, probs=probs, grad_accumulators=given) for given in (None, sums)
    )
    assert np.asarray(plain).tobytes() == np.asarray(beside).tobytes()
    assert np.isfinite(float64(plain)).all()
