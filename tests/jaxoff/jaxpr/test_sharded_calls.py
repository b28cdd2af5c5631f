"""A step that `jax.jit` calls with shardings is placed like one without, and keeps its shardings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoff
from jaxoff._jaxpr.jit_functions import add_shardings
from jaxoff._jaxpr.sharded_calls import constrain_calls

LAYERS, ROWS, WIDTH = 4, 64, 32


def step(weights, x):
    def layer(x, w):
        return x + jnp.tanh(jnp.sin(x @ w) @ w.T), None

    loss, grads = jax.value_and_grad(lambda w: lax.scan(layer, x, w)[0].var())(weights)
    return weights - 0.1 * grads, loss


def make_mesh(*kinds):
    kinds = kinds or (AxisType.Auto,)
    return jax.make_mesh((2,), ("data",), kinds, devices=jax.devices()[:2])


def make_arguments(mesh):
    shardings = NamedSharding(mesh, P(None, "data")), NamedSharding(mesh, P("data"))
    weights = jax.random.normal(jax.random.key(0), (LAYERS, WIDTH, WIDTH)) / 8
    x = jax.random.normal(jax.random.key(1), (ROWS, WIDTH))
    return tuple(map(jax.device_put, (weights, x), shardings)), shardings


@pytest.mark.some_cases(2)
@pytest.mark.parametrize("given", ["in", "out", "both", "part of out"])
def test_a_plan_is_that_of_the_step_without_shardings(given):
    args, shardings = make_arguments(make_mesh())
    replicated = NamedSharding(shardings[0].mesh, P())
    keywords = {
        "in": {"in_shardings": shardings},
        "out": {"out_shardings": (shardings[0], replicated)},
        "both": {"in_shardings": shardings, "out_shardings": (shardings[0], replicated)},
        "part of out": {"out_shardings": (replicated, None)},
    }[given]
    sharded = jax.jit(step, donate_argnums=0, **keywords)
    settings = {"device_bytes": 1e9, "compiled": False, "device": "h200"}
    plan = jaxoff.plan(sharded, *args, **settings)
    want = jaxoff.plan(jax.jit(step, donate_argnums=0), *args, **settings)
    assert [v.value for v in plan.values] == [v.value for v in want.values]
    # Constraints are no kernels, but a value in two places is two values.
    assert plan.step_ms == pytest.approx(want.step_ms, rel=0.05)

    expected = jax.jit(step, **keywords)(*args)
    within = jaxoff.jit(jax.jit(step, **keywords), device_bytes=1e9)
    for got, value in zip(within(*args), expected, strict=True):
        np.testing.assert_allclose(got, value, rtol=1e-5, atol=1e-6)
        assert got.sharding.is_equivalent_to(value.sharding, value.ndim)
    assert within.plan.programs


def test_calls_that_constraints_cannot_say_stay():
    (weights, x), shardings = make_arguments(make_mesh())
    assert str(constrain_calls(jax.make_jaxpr(step)(weights, x))) == str(jax.make_jaxpr(step)(weights, x))

    plain = jax.make_jaxpr(jax.jit(step))(weights, x)
    assert constrain_calls(plain) is plain
    host = shardings[0].with_memory_kind("pinned_host"), None
    moves = jax.make_jaxpr(jax.jit(step, out_shardings=host))(weights, x)
    assert str(constrain_calls(moves)) == str(moves)
    explicit = make_mesh(AxisType.Explicit)
    with jax.set_mesh(explicit):
        (weights, x), shardings = make_arguments(explicit)
        program = jax.make_jaxpr(jax.jit(lambda w, x: (w * 2, x), in_shardings=shardings))(weights, x)
        assert str(constrain_calls(program)) == str(program)


def test_structs_take_the_shardings_of_jit():
    _, (of_weights, _) = make_arguments(make_mesh())
    structs = [jax.ShapeDtypeStruct(s, "float32") for s in ((LAYERS, WIDTH, WIDTH), (ROWS, WIDTH))]
    fun = jax.jit(lambda state, x: state, in_shardings=({"w": of_weights}, None))
    (state, x) = add_shardings(fun, ({"w": structs[0]}, structs[1]))
    assert state["w"].sharding == of_weights
    assert x.sharding is None
    one = jax.jit(lambda state, x: state, in_shardings=of_weights)
    assert {s.sharding for s in add_shardings(one, tuple(structs))} == {of_weights}
    args = ({"w": structs[0]}, 3)
    assert add_shardings(jax.jit(lambda state, x: state), args) is args
    assert add_shardings(lambda state, x: state, args) is args
