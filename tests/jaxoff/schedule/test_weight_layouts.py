"""Weights of loops that the compiler divides by columns: laid out by rows, where a layer takes them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoff
from jaxoff._jaxpr import compat
from jaxoff._schedule.weight_layouts import lay_out_weights

LAYERS, WIDTH, HIDDEN = 3, 256, 1024
COLUMNS = P(None, None, "data")


@pytest.fixture
def mesh():
    return jax.make_mesh((4,), ("data",), (AxisType.Auto,), devices=jax.devices()[:4])


def layer(x, w):
    return x + jnp.tanh(x @ w["up"]) @ w["down"] * w["scale"], None


def loss(w, x):
    return jnp.square(lax.scan(jax.checkpoint(layer), x, w)[0]).mean()


def step(w, x):
    value, gradients = jax.value_and_grad(loss)(w, x)
    return jax.tree.map(lambda a, b: a - 0.1 * b, w, gradients), value


def make_arguments(mesh, spec):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    w = {
        name: jax.random.normal(key, (LAYERS, *shape)) / 16
        for key, (name, shape) in zip(keys[1:], shapes.items(), strict=True)
    }
    w = {name: jax.device_put(value, NamedSharding(mesh, spec)) for name, value in w.items()}
    w["scale"] = jax.device_put(jnp.ones((LAYERS, WIDTH)), NamedSharding(mesh, P()))
    x = jax.random.normal(keys[0], (8, 128, WIDTH))
    return w, jax.device_put(x, NamedSharding(mesh, P("data")))


def lay_out(fun, args):
    """The program of a function, and with weights laid out."""
    leaves = jax.tree.leaves(args)
    closed = jax.make_jaxpr(fun)(*args)
    batch = (*(None for _ in leaves[:-1]), 0)
    return closed, lay_out_weights(closed, batch, 4, [leaf.sharding for leaf in leaves])


def test_each_layer_takes_weights_and_makes_gradients_by_rows(mesh):
    """Both weights in either loop, and both gradients; no activation, and no scale of a norm."""
    args = make_arguments(mesh, COLUMNS)
    _, laid = lay_out(step, args)
    forward, backward = (eqn for eqn in laid.jaxpr.eqns if compat.scan_in(eqn) is not None)
    shapes = [(WIDTH, HIDDEN), (HIDDEN, WIDTH)]
    for eqn, expected in ((forward, shapes), (backward, 2 * shapes)):
        (body,) = compat.sub_jaxprs(eqn)
        found = [eqn for eqn in body.eqns if eqn.primitive.name == "layout_constraint"]
        assert sorted(eqn.outvars[0].aval.shape for eqn in found) == sorted(expected)
        assert {eqn.params["layout"].major_to_minor for eqn in found} == {(0, 1)}
    run = jax.jit(compat.jaxpr_as_fun(laid))
    for got, want in zip(run(*jax.tree.leaves(args)), jax.tree.leaves(jax.jit(step)(*args)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_weights_divided_by_rows_stay_as_they_are(mesh):
    closed, laid = lay_out(step, make_arguments(mesh, P(None, "data")))
    assert laid is closed


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("passes", ["row", "carry"])
def test_weights_that_a_loop_passes_through_stay_its_results(passes, mesh):
    """A loop may stack the weights that it takes, or a value that is its carry, too."""

    def fun(w, x):
        def body(x, w):
            return x + jnp.tanh(x @ w["up"]) @ w["down"], w["up"] if passes == "row" else w["up"] * 2

        return lax.scan(body, x, w)

    args = make_arguments(mesh, COLUMNS)
    _, laid = lay_out(fun, args)
    assert "layout_constraint" in str(laid)
    for got, want in zip(
        jax.jit(compat.jaxpr_as_fun(laid))(*jax.tree.leaves(args)),
        jax.tree.leaves(jax.jit(fun)(*args)),
        strict=True,
    ):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_a_step_within_a_budget_has_the_results_of_jit(mesh):
    args = make_arguments(mesh, COLUMNS)
    options = {"out_shardings": (jax.tree.map(lambda leaf: leaf.sharding, args[0]), None)}
    jitted = jaxoff.jit(step, device_bytes="1GB", **options)
    assert "LayoutConstraint" in jitted.lower(*args).as_text()
    for got, want in zip(
        jax.tree.leaves(jitted(*args)), jax.tree.leaves(jax.jit(step, **options)(*args)), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)
    assert "constraint" not in str(jitted.plan)
