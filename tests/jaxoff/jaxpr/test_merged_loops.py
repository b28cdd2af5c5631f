"""Backward loops over the residuals of one forward loop, merged into one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxoff
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.merged_loops import merge_backward_loops
from jaxoff._jaxpr.scopes import is_transposed
from jaxoff._runtime.program_memory import program_nbytes

LAYERS, ROWS, WIDTH = 6, 256, 32


def layer(x, w):
    return x + jnp.tanh(jax.nn.gelu(x @ w["up"])) @ w["down"], None


def losses(w, x):
    y, _ = jax.lax.scan(layer, x, w)
    return jnp.mean(y**2), jnp.mean(jnp.abs(y))


def two_pullbacks(w, x):
    """Gradients of two losses, each scaled by what the two have in common."""
    values, pull = jax.vjp(lambda w: losses(w, x), w)
    (first,), (second,) = pull((1.0, 0.0)), pull((0.0, 1.0))
    return values, jax.tree.map(lambda a, b: a + jnp.vdot(a, b) * b, first, second)


def one_after_the_other(w, x):
    """The second pullback begins with a result of the first."""
    values, pull = jax.vjp(lambda w: losses(w, x), w)
    (first,) = pull((1.0, 0.0))
    (second,) = pull((0.0, jnp.mean(first["up"])))
    return values, jax.tree.map(jnp.add, first, second)


def two_forward_passes(w, x):
    gradients = [jax.grad(lambda w, i=i: losses(w, x)[i])(w) for i in range(2)]
    return jax.tree.map(jnp.add, *gradients)


def make_arguments():
    keys = jax.random.split(jax.random.key(0), 3)
    w = {
        "up": jax.random.normal(keys[0], (LAYERS, WIDTH, 4 * WIDTH)) / WIDTH**0.5,
        "down": jax.random.normal(keys[1], (LAYERS, 4 * WIDTH, WIDTH)) / WIDTH**0.5,
    }
    return w, jax.random.normal(keys[2], (ROWS, WIDTH))


def count_backward_loops(closed):
    return sum(compat.scan_in(eqn) is not None and is_transposed(eqn) for eqn in closed.jaxpr.eqns)


def test_two_pullbacks_are_one_loop_with_the_same_results():
    args = make_arguments()
    closed = jax.make_jaxpr(two_pullbacks)(*args)
    merged = merge_backward_loops(closed)
    assert (count_backward_loops(closed), count_backward_loops(merged)) == (2, 1)
    got, want = (jax.jit(compat.jaxpr_as_fun(p))(*jax.tree.leaves(args)) for p in (merged, closed))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)


@pytest.mark.parametrize("step", [one_after_the_other, two_forward_passes])
def test_loops_that_need_each_other_or_read_other_residuals_stay(step):
    closed = jax.make_jaxpr(step)(*make_arguments())
    assert count_backward_loops(closed) == 2
    assert merge_backward_loops(closed) is closed


def test_a_step_with_two_pullbacks_fits_near_what_a_checkpoint_of_each_layer_takes():
    args = make_arguments()
    compiled = jax.jit(two_pullbacks).lower(*args).compile()
    step = jaxoff.jit(two_pullbacks, device_bytes=0.4 * program_nbytes(compiled), host_bytes=1)
    got, want = step(*args), compiled(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), got, want)
    assert {value.placement for value in step.plan.values} >= {"save", "recompute"}
