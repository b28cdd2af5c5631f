"""Calls with constants: their equations, with each constant once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxoff
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.constants import lift_constants
from jaxoff._jaxpr.saved_twin import build_saved_twin

MASK = np.tril(np.ones((8, 8), np.float32))
X = jax.random.normal(jax.random.key(0), (8, 8))
inner = jax.jit(lambda x: jnp.cos(x * MASK))
outer = jax.jit(lambda x: jnp.tanh(inner(jnp.sin(x * MASK)) @ MASK))


def loss(x):
    return (outer(x) + outer(x * 2)).sum()


def test_the_equations_of_calls_with_constants_stand_in_the_program():
    closed = jax.make_jaxpr(jax.value_and_grad(loss))(X)
    lifted = lift_constants(closed)
    assert len(lifted.consts) == 1
    assert not any(
        called.consts for eqn in lifted.jaxpr.eqns if (called := compat.called_program(eqn)) is not None
    )
    for got, expected in zip(compat.jaxpr_as_fun(lifted)(X), jax.value_and_grad(loss)(X), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6)


STEPS = {
    "checkpoint": lambda: jax.grad(lambda x: jax.checkpoint(outer)(x).sum()),
    "scan": lambda: (
        lambda x: jax.lax.scan(lambda x, _: (STEPS["checkpoint"]()(x), None), x, None, length=2)[0]
    ),
    "cond": lambda: lambda x: jax.lax.cond(x[0, 0] < 9, STEPS["checkpoint"](), jnp.sin, x),
}


@pytest.mark.parametrize("where", STEPS)
def test_constants_are_lifted_out_of_calls_at_all_levels(where):
    fun = STEPS[where]()
    lifted = lift_constants(jax.make_jaxpr(fun)(X))

    def check(jaxpr):
        for eqn in jaxpr.eqns:
            called = compat.called_program(eqn)
            assert called is None or not (called.consts and eqn.invars)
            for program in compat.sub_jaxprs(eqn):
                check(program)

    check(lifted.jaxpr)
    np.testing.assert_allclose(compat.jaxpr_as_fun(lifted)(X)[0], jax.jit(fun)(X), rtol=1e-5, atol=1e-6)


def test_the_saved_twin_of_a_program_with_constants_has_them():
    layer = jax.checkpoint(
        jax.jit(lambda x: jnp.tanh(jaxoff.name(jnp.sin(x * MASK), "h") @ MASK)),
        policy=jaxoff.policy(offload=["h"]),
    )
    fun = jax.grad(lambda x: layer(layer(x)).sum())
    for lift in (lambda closed: closed, lift_constants):
        twin = build_saved_twin(lift(jax.make_jaxpr(fun)(X)))
        assert twin is not None and "<host>" not in str(twin)
        np.testing.assert_allclose(compat.jaxpr_as_fun(twin)(X)[0], fun(X), rtol=1e-5, atol=1e-6)


def test_a_program_without_such_calls_is_the_same_object():
    closed = jax.make_jaxpr(jax.grad(lambda x: jax.jit(jnp.sin)(x).sum()))(X)
    assert lift_constants(closed) is closed


@pytest.mark.parametrize("loop", ["scan", "list"])
def test_layers_of_a_jitted_model_with_a_mask_are_placed(loop):
    @jax.jit
    def model(ws, x):
        layer = lambda x, w: (x + jnp.tanh((x @ w) @ MASK), None)  # noqa: E731
        if loop == "scan":
            return jax.lax.scan(layer, x, ws)[0].sum()
        for i in range(6):
            x, _ = layer(x, ws[i])
        return x.sum()

    ws, x = jax.ShapeDtypeStruct((6, 8, 8), "float32"), jax.ShapeDtypeStruct((4096, 8), "float32")
    plan = functools.partial(jaxoff.plan, jax.value_and_grad(model), ws, x, device="h100", compiled=False)
    assert "recompute" in str(plan(device_bytes=1.75e6))
    assert "recompute" not in str(plan(device_bytes=1e9))
