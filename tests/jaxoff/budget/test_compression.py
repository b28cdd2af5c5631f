"""Kept values in float8: their error, the programs with them, and plans that use them."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import jaxoff
from jaxoff._budget.joint_graph import Placements
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.float8 import compress, compressed_nbytes, restore
from tests.clients.test_clients import ROUNDED
from tests.jaxoff.budget.layered import list_joint_graphs, write_placed

LAYERS, ROWS, WIDTH, HIDDEN = 4, 16, 128, 256


@given(st.integers(0, 1 << 16), st.integers(-20, 20), st.sampled_from(["float32", "bfloat16", "float16"]))
@settings(max_examples=20, deadline=None)
def test_the_error_is_a_sixteenth_of_each_number_or_tiny_beside_the_largest(seed, exponent, dtype):
    if dtype == "float16":  # within its normal numbers
        exponent = max(-4, min(exponent, 10))
    draw = np.random.default_rng(seed).normal(size=(3, 256)) * 2.0**exponent
    x = jnp.asarray(draw, dtype)
    numbers, scales = compress(x)
    assert numbers.shape == x.shape
    assert scales.shape == (3, 2)
    assert numbers.nbytes + scales.nbytes == compressed_nbytes(jax.typeof(x))
    got, want = (np.asarray(v, "float64") for v in (restore(numbers, scales, x.dtype), x))
    largest = np.abs(want).reshape(3, 2, 128).max(-1).repeat(128, -1)
    assert np.all(np.abs(got - want) <= np.maximum(np.abs(want) / 16 * 1.05, largest * 2.0**-18))


@pytest.mark.parametrize(("width", "block"), [(32, 32), (192, 64), (1856, 64), (96, 32), (256, 128)])
def test_blocks_divide_the_last_axis(width, block):
    x = jax.random.normal(jax.random.key(0), (3, width))
    numbers, scales = compress(x)
    assert scales.shape == (3, width // block)
    assert numbers.nbytes + scales.nbytes == compressed_nbytes(jax.typeof(x))
    np.testing.assert_allclose(restore(numbers, scales, x.dtype), x, rtol=0.07, atol=1e-4)


def test_zeros_stay_zeros_and_what_is_not_finite_shows():
    x = jnp.zeros((2, 256)).at[0, 3].set(jnp.inf).at[1, 200].set(jnp.nan)
    got = np.asarray(restore(*compress(x), x.dtype))
    assert np.isnan(got[0, 3])
    assert np.isnan(got[1, 200])
    np.testing.assert_array_equal(got[0, 128:], 0)
    np.testing.assert_array_equal(got[1, :128], 0)


def layer(x, w):
    h = jaxoff.name(x @ w["up"], "mlp.up")
    return x + jax.nn.gelu(h) @ w["down"], None


def step(w, x):
    value, grads = jax.value_and_grad(lambda w: lax.scan(layer, x, w)[0].astype("float32").var())(w)
    return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads), value


def make_arguments():
    keys = jax.random.split(jax.random.key(0), 3)
    up = jax.random.normal(keys[0], (LAYERS, WIDTH, HIDDEN), "bfloat16") / WIDTH**0.5
    down = jax.random.normal(keys[1], (LAYERS, HIDDEN, WIDTH), "bfloat16") / HIDDEN**0.5
    return {"up": up, "down": down}, jax.random.normal(keys[2], (ROWS, WIDTH), "bfloat16")


@pytest.mark.parametrize("offloaded", [False, True])
@pytest.mark.some_cases(1)
def test_the_backward_pass_reads_the_rounded_value(offloaded):
    args = make_arguments()
    closed = jax.make_jaxpr(step)(*args)
    (pair,) = list_joint_graphs(closed)
    (up,) = [i for i, v in enumerate(pair.values) if v.aval.shape == (ROWS, HIDDEN) and v in pair.names]
    moved, carry = ((up,), (0,)) if offloaded else ((), (0, up))
    placed = write_placed(closed, lambda _: Placements(carry, moved, frozenset([up])))
    stacks = re.findall(rf"f8_e4m3fn(<host>)?\[{LAYERS},{ROWS},{HIDDEN}\]", str(placed))
    assert stacks
    assert any(stacks) is offloaded

    def apply(h, down):
        return jax.nn.gelu(h) @ down

    @jax.custom_vjp
    def feed(x, up, down):
        return apply(x @ up, down)

    def feed_backward(residuals, g):
        x, up, down = residuals
        h = x @ up
        grad_h, grad_down = jax.vjp(apply, restore(*compress(h), h.dtype), down)[1](g)
        return grad_h @ up.T, x.T @ grad_h, grad_down

    feed.defvjp(lambda x, up, down: (feed(x, up, down), (x, up, down)), feed_backward)

    def rounded(x, w):
        return x + feed(x, w["up"], w["down"]), None

    def expected_step(w, x):
        value, grads = jax.value_and_grad(lambda w: lax.scan(rounded, x, w)[0].astype("float32").var())(w)
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads), value

    run = jax.jit(compat.jaxpr_as_fun(placed), compiler_options=ROUNDED)
    *weights, value = run(*jax.tree.leaves(args))
    expected, exact = jax.jit(expected_step, compiler_options=ROUNDED)(*args)
    assert value == exact  # the forward pass is the same
    for ours, theirs in zip(weights, jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(*(np.asarray(v, "float32") for v in (ours, theirs)), rtol=1e-2, atol=1e-4)
    plain, _ = jax.jit(step, compiler_options=ROUNDED)(*args)
    assert any(
        np.any(np.asarray(a) != np.asarray(b)) for a, b in zip(weights, jax.tree.leaves(plain), strict=True)
    )


def struct(*shape):
    return jax.ShapeDtypeStruct(shape, "bfloat16")


LARGE = {"up": struct(32, 4096, 16384), "down": struct(32, 16384, 4096)}, struct(16384, 4096)


def test_a_plan_compresses_what_it_may_where_that_is_faster():
    def plan(**options):
        jitted = jaxoff.jit(step, donate_argnums=0)
        return jaxoff.plan(jitted, *LARGE, device_bytes="45GB", host_bytes=1e6, compiled=False, **options)

    plain, allowed = plan(), plan(compress=["mlp.*"])
    assert not any("float8" in v.shape for v in plain.values)
    (row,) = [v for v in allowed.values if "float8" in v.shape]
    assert row.value == "mlp.up"
    assert row.nbytes == row.count * 16384 * 16384 * (1 + 4 / 128)
    assert allowed.step_ms < plain.step_ms
    assert "float8_e4m3fn[16384, 16384]" in str(allowed)


def test_a_step_with_compressed_values_trains():
    args = make_arguments()
    within = jaxoff.jit(step, device_bytes=1e9, compress=["mlp.up"])
    weights, value = within(*args)
    assert within(weights, args[1])[1] < value


@pytest.mark.parametrize(
    ("compress", "message"),
    [
        (["mlp.upp"], r"'mlp.upp' matches none of them \(.*mlp\.up.*Did you mean"),
        ("mlp.up", "compress is a list of names or patterns"),
        ([3], "compress is a list of names or patterns"),
    ],
)
def test_what_cannot_be_compressed_is_an_error(compress, message):
    with pytest.raises(ValueError, match=message):
        jaxoff.jit(step, device_bytes=1e9, compress=compress).lower(*make_arguments())


def test_it_goes_with_a_budget():
    with pytest.raises(ValueError, match="compress goes with device_bytes"):
        jaxoff.jit(step, compress=["mlp.up"])
