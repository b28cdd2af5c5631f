"""Offloads out of two levels of control flow are saved; others stay as they are."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxoff
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.refused_offloads import save_refused

W, X = jnp.ones((3, 8, 8)), jnp.ones((4, 8))


def layer(x, w):
    x = jaxoff.name(x, "outer")

    def inner(x, _):
        return x + jnp.sin(jaxoff.name(jnp.tanh(x @ w), "inner")), None

    return lax.scan(inner, x, None, length=2)[0] * jnp.cos(x), None


def trace(offload):
    body = jax.checkpoint(layer, policy=jaxoff.policy(offload=offload))
    return jax.make_jaxpr(jax.grad(lambda w, x: lax.scan(body, x, w)[0].sum()))(W, X)


def list_host_shapes(jaxpr):
    for eqn in jaxpr.eqns:
        yield from (v.aval.shape for v in eqn.outvars if compat.is_host(v.aval))
        for inner in compat.sub_jaxprs(eqn):
            yield from list_host_shapes(inner)


@pytest.mark.parametrize("offload", [["inner"], ["outer", "inner"]])
def test_values_of_an_inner_loop_are_saved_and_results_stay(offload):
    closed = trace(offload)
    found, refused = save_refused(closed)
    assert len(refused) == 1
    shapes = set(list_host_shapes(found.jaxpr))
    assert shapes == ({(3, 4, 8), (4, 8)} if "outer" in offload else set())
    for a, b in zip(compat.jaxpr_as_fun(closed)(W, X), compat.jaxpr_as_fun(found)(W, X), strict=True):
        assert jnp.array_equal(a, b)


def test_values_of_an_outer_loop_stay_on_the_host():
    closed = trace(["outer"])
    found, refused = save_refused(closed)
    assert not refused
    assert found is closed
