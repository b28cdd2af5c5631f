"""Scans over groups of layers merged with the scans over the layers: the same values in a single loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxoff
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.nested_loops import merge_nested_loops

WIDTH = 8


def layer(scale, x, w):
    x = jnp.tanh(x @ w) * scale + x
    return x, x.sum()


def nested(weights, x, scale, *, reverse=False):
    """Three levels of loops over weights of shape (2, 3, 2, WIDTH, WIDTH)."""

    def group(x, w):
        return lax.scan(lambda x, w: layer(scale, x, w), x, w, reverse=reverse)

    def section(x, w):
        return lax.scan(group, x, w, reverse=reverse)

    return lax.scan(section, x, weights, reverse=reverse)


def arguments():
    keys = jax.random.split(jax.random.key(0))
    weights = jax.random.normal(keys[0], (2, 3, 2, WIDTH, WIDTH)) * 0.3
    return weights, jax.random.normal(keys[1], (4, WIDTH)), jnp.float32(0.5)


def list_lengths(closed):
    return [eqn.params["length"] for eqn in closed.jaxpr.eqns if eqn.primitive.name == "scan"]


@pytest.mark.parametrize("reverse", [False, True])
def test_all_levels_become_one_loop(reverse):
    args = arguments()
    closed = jax.make_jaxpr(lambda *args: nested(*args, reverse=reverse))(*args)
    merged = merge_nested_loops(closed)
    assert list_lengths(merged) == [12]
    got, want = (compat.jaxpr_as_fun(p)(*args) for p in (merged, closed))
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_both_passes_of_a_differentiated_nest_share_their_stacks():
    args = arguments()

    def loss(*args):
        x, sums = nested(*args)
        return x.sum() + sums.sum()

    closed = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(*args)
    merged = merge_nested_loops(closed)
    assert list_lengths(merged) == [12, 12]
    forward, backward = (eqn for eqn in merged.jaxpr.eqns if eqn.primitive.name == "scan")
    assert set(forward.outvars) & set(backward.invars)
    for got, want in zip(*(compat.jaxpr_as_fun(p)(*args) for p in (merged, closed)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


def between(x, w):
    return lax.scan(lambda x, w: layer(1.0, x, w), x + 1, w)[0], None


def row_as_constant(x, w):
    return lax.scan(lambda x, _: (jnp.tanh(x @ w[0]), None), x, None, length=2)[0], None


def other_carry(x, w):
    y, _ = lax.scan(lambda y, w: layer(1.0, y, w), jnp.ones_like(x), w)
    return y, None


@pytest.mark.parametrize("group", [between, row_as_constant, other_carry])
def test_other_nests_stay(group):
    weights, x, _ = arguments()
    closed = jax.make_jaxpr(lambda w, x: lax.scan(group, x, w[0])[0])(weights, x)
    merged = merge_nested_loops(closed)
    assert list_lengths(merged) == [3]
    for got, want in zip(*(compat.jaxpr_as_fun(p)(weights, x) for p in (merged, closed)), strict=True):
        np.testing.assert_array_equal(got, want)


def test_only_loops_with_copies_are_merged_where_asked_so():
    closed = jax.make_jaxpr(nested)(*arguments())
    assert merge_nested_loops(closed, with_copies=True) is closed

    def loss(weights, x):
        def block(x, w):
            return jnp.tanh(jaxoff.name(x, "x_in") @ w), None

        layers = jax.checkpoint(block, policy=jaxoff.policy(offload=["x_in"]), prevent_cse=False)
        return lax.scan(lambda x, w: lax.scan(layers, x, w), x, weights[0])[0].sum()

    weights, x, _ = arguments()
    offloading = jax.make_jaxpr(jax.grad(loss))(weights, x)
    merged = merge_nested_loops(offloading, with_copies=True)
    assert list_lengths(merged) == [6, 6]
    for got, want in zip(*(compat.jaxpr_as_fun(p)(weights, x) for p in (merged, offloading)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("shape", [(1, 4), (4, 1)])
@pytest.mark.parametrize("reverse", [False, True])
def test_of_nested_loops_one_with_a_single_iteration_is_written_out(shape, reverse):
    _, x, scale = arguments()
    weights = jax.random.normal(jax.random.key(1), (*shape, WIDTH, WIDTH)) * 0.3
    body = jax.checkpoint(
        lambda x, w: layer(scale, jaxoff.name(x, "x"), w), policy=jaxoff.policy(offload=["x"])
    )

    def loss(weights, x):
        def group(x, w):
            x, sums = lax.scan(body, x, w, reverse=reverse)
            return jnp.sin(x), sums

        x, sums = lax.scan(group, x, weights, reverse=reverse)
        return x.sum() + (sums**2).sum()

    closed = jax.make_jaxpr(jax.value_and_grad(loss))(weights, x)
    merged = merge_nested_loops(closed, with_copies=True)
    assert list_lengths(merged) == [4, 4]
    assert not any(
        compat.scan_in(inner) for eqn in merged.jaxpr.eqns for p in compat.sub_jaxprs(eqn) for inner in p.eqns
    )
    got, want = (compat.jaxpr_as_fun(p)(weights, x) for p in (merged, closed))
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_a_single_iteration_without_a_loop_around_or_inside_stays():
    def loss(weights, x):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), x), x, weights)

    closed = jax.make_jaxpr(loss)(jnp.ones((1, WIDTH, WIDTH)), jnp.ones((4, WIDTH)))
    assert merge_nested_loops(closed) is closed
