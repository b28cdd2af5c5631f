"""Budgets of steps whose layers print, or have other effects."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

import jaxoff
from jaxoff._runtime.program_memory import program_nbytes

LAYERS, ROWS, WIDTH = 6, 512, 64
BUDGET = 9e6


def arguments():
    up = jax.random.normal(jax.random.key(0), (LAYERS, WIDTH, 4 * WIDTH)) / 8
    down = jax.random.normal(jax.random.key(1), (LAYERS, 4 * WIDTH, WIDTH)) / 16
    return {"up": up, "down": down}, jax.random.normal(jax.random.key(2), (ROWS, WIDTH))


def step_of(loss):
    def step(w, x):
        gradients = jax.grad(loss)(w, x)
        return jax.tree.map(lambda a, g: a - 0.1 * g, w, gradients)

    return step


@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint], ids=["plain", "checkpoint"])
def test_layers_in_a_loop_that_print_are_placed_and_print_once(wrap):
    seen = []

    def layer(x, w):
        h = x @ w["up"]
        jax.debug.callback(lambda a: seen.append(float(a)), h[0, 0])
        return x + jax.nn.gelu(h) @ w["down"], None

    step = step_of(lambda w, x: jnp.mean(lax.scan(wrap(layer), x, w)[0] ** 2))
    runs = []
    for jitted in (jax.jit(step), jaxoff.jit(step, device_bytes=BUDGET)):
        result = jax.block_until_ready(jitted(*arguments()))
        jax.effects_barrier()
        runs.append((result, sorted(seen)))
        seen.clear()
    (wanted, printed), (got, now) = runs
    np.testing.assert_allclose(now, printed, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, wanted)
    assert program_nbytes(jitted.lower(*arguments()).compile()) <= BUDGET


def test_ordered_effects_keep_values_on_the_device_and_the_error_says_so():
    seen = []

    def loss(w, x):
        for up, down in zip(w["up"], w["down"], strict=True):
            h = x @ up
            io_callback(lambda a: seen.append(float(a)), None, lax.stop_gradient(h[0, 0]), ordered=True)
            x = x + jax.nn.gelu(h) @ down
        return jnp.mean(x**2)

    step = step_of(loss)
    fitted = jaxoff.jit(step, device_bytes=10e6)
    got = jax.block_until_ready(fitted(*arguments()))
    assert len(seen) == LAYERS
    assert not fitted.plan.host_bytes
    wanted = jax.jit(step)(*arguments())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, wanted)
    with pytest.raises(jaxoff.BudgetError, match="ordered effects"):
        jaxoff.jit(step, device_bytes=4e6).lower(*arguments())


def test_an_error_of_jax_in_the_search_leaves_the_step_as_written():
    def layer(x, w):
        held = jax.new_ref(x @ w)
        held[...] = held[...] * 2
        return x + jnp.tanh(held[...])

    def loss(w, x):
        for one in w:
            x = jax.checkpoint(layer)(x, one)
        return jnp.mean(x**2)

    args = [jnp.ones((WIDTH, WIDTH)) / WIDTH] * 3, jnp.ones((8, WIDTH))
    with pytest.warns(UserWarning, match="runs as it is written"):
        got = jaxoff.jit(jax.grad(loss), device_bytes="1GB")(*args)
    jax.tree.map(np.testing.assert_array_equal, got, jax.jit(jax.grad(loss))(*args))
