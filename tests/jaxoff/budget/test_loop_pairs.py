"""Loops over layers and the loops of their backward passes, in programs where the two are hard to tell."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxoff
from jaxoff._budget.loop_pairs import find_loop_pairs
from jaxoff._jaxpr.inline import inline_program
from jaxoff._jaxpr.scopes import is_transposed

LAYERS, WIDTH, ROWS = 3, 32, 64


def layer_with_state(x, layer):
    w, mean = layer
    h = x @ w
    mean = 0.9 * mean + 0.1 * jax.lax.stop_gradient(h.mean(0))
    return x + jnp.tanh(h - mean), mean


def apply(w, means, x):
    return jax.lax.scan(layer_with_state, x, (w, means))


def loss_of_both(w, means, x, y):
    """Both calls are differentiated; the second takes the state of the first."""
    x, means = apply(w, means, x)
    y, means = apply(w, means, y)
    return ((x - y) ** 2).mean(), means


def loss_of_the_second(w, means, x, y):
    """The first call makes state only."""
    _, means = apply(w, means, x)
    y, means = apply(w, means, y)
    return (y**2).mean(), means


@pytest.fixture
def args():
    w, x, y = (jax.random.normal(key, shape) for key, shape in zip(
        jax.random.split(jax.random.key(0), 3),
        ((LAYERS, WIDTH, WIDTH), (ROWS, WIDTH), (ROWS, WIDTH)),
        strict=True,
    ))  # fmt: skip
    return w / 8, jnp.zeros((LAYERS, WIDTH)), x, y


@pytest.mark.parametrize(("loss", "pairs"), [(loss_of_both, 2), (loss_of_the_second, 1)])
def test_state_goes_on_from_call_to_call(loss, pairs, args):
    step = jax.value_and_grad(loss, has_aux=True)
    program = inline_program(jax.make_jaxpr(step)(*args).jaxpr)
    found = find_loop_pairs(program)
    assert len(found) == pairs
    assert all(is_transposed(pair.backward) and not is_transposed(pair.forward) for pair in found)

    planned = jaxoff.jit(step, device_bytes="1GB")
    for a, b in zip(*map(jax.tree.leaves, (planned(*args), jax.jit(step)(*args))), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


class Table:
    """A table, for a callback that is a method."""

    def __init__(self, values):
        self.values = values

    def __repr__(self):
        return "Table()"

    def look(self, i):
        return self.values[i]


def look(table, i):
    return table[i]


FUNCTIONS = {
    "partial functions": lambda table: functools.partial(look, table),
    "methods": lambda table: Table(table).look,
}


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_callbacks_are_told_apart_by_what_they_hold(kind):
    """Their text is the same: the arrays that they hold are long."""
    tables = np.zeros((2, 4096), np.float32)
    tables[:, 100:300] = np.random.default_rng(0).normal(size=(2, 200))
    functions = [FUNCTIONS[kind](table) for table in tables]

    def layer(x, w):
        i = jnp.clip((jax.lax.stop_gradient(x[:, :1]) * 100).astype(jnp.int32) + 200, 0, 4095)
        like = jax.ShapeDtypeStruct(i.shape, jnp.float32)
        a, b = (jax.pure_callback(f, like, i, vmap_method="sequential") for f in functions)
        return x + jnp.tanh(x @ w * (1 + a)) * (1 + b), None

    grad = jax.grad(lambda w, x: (jax.lax.scan(layer, x, w)[0] ** 2).mean())
    w = jax.random.normal(jax.random.key(0), (LAYERS, WIDTH, WIDTH)) / 8
    x = jax.random.normal(jax.random.key(1), (ROWS, WIDTH))
    step = jaxoff.jit(grad, device_bytes="1GB")
    np.testing.assert_allclose(step(w, x), jax.jit(grad)(w, x), rtol=1e-5, atol=1e-6)
    assert step.plan.values
