"""Token-wise functions on a part of their tokens at a time."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxoff

B, T, D, H, V = 2, 24, 8, 16, 40


def swiglu(x, w):
    h = jax.nn.rms_norm(x) if hasattr(jax.nn, "rms_norm") else x * lax.rsqrt((x * x).mean(-1, keepdims=True))
    return x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]


def cross_entropy(batch, w):
    x, labels = batch
    logits = (x @ w["head"]).astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


def make(dtype="float32"):
    keys = iter(jax.random.split(jax.random.key(0), 6))
    shapes = {"gate": (D, H), "up": (D, H), "down": (H, D), "head": (D, V)}
    w = {name: jax.random.normal(next(keys), shape, dtype) / 4 for name, shape in shapes.items()}
    return jax.random.normal(next(keys), (B, T, D), dtype), jax.random.randint(next(keys), (B, T), 0, V), w


def loss(apply, x, labels, w):
    mlp, head = apply(swiglu), apply(cross_entropy)
    return head((mlp(mlp(x, w), w), labels), w).mean()


@pytest.mark.parametrize(("tiles", "dtype"), [(3, "bfloat16"), (1, "float32"), (8, "float32")])
@pytest.mark.some_cases(1)
def test_values_and_gradients_are_those_of_all_tokens(tiles, dtype):
    x, labels, w = make(dtype)
    tile = functools.partial(jaxoff.tiled, tiles=tiles, axis=1)
    got, want = (
        jax.jit(jax.value_and_grad(functools.partial(loss, apply), (0, 2)))(x, labels, w)
        for apply in (tile, lambda fun: fun)
    )
    tolerance = 1e-5 if dtype == "float32" else 3e-2
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_allclose(
            *(np.asarray(v, "float32") for v in (ours, theirs)), rtol=tolerance, atol=tolerance
        )


def test_weights_that_a_function_closes_over_have_a_gradient():
    x, _, w = make()

    def run(apply, w):
        return apply(lambda x: jnp.tanh(x @ w["up"]) @ w["down"])(x).sum()

    got = jax.grad(functools.partial(run, functools.partial(jaxoff.tiled, tiles=4, axis=1)))(w)
    want = jax.grad(functools.partial(run, lambda fun: fun))(w)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)


def test_no_value_of_all_tokens_is_wider_than_the_input():
    x, labels, w = make()
    step = jax.grad(functools.partial(loss, functools.partial(jaxoff.tiled, tiles=8, axis=1)), (0, 2))
    text = str(jax.make_jaxpr(step)(x, labels, w))
    assert f"[{B},{T},{D}]" in text
    assert f"[{B},{T // 8},{H}]" in text
    assert f"[{B},{T},{H}]" not in text
    assert f"[{B},{T},{V}]" not in text


def test_sums_of_low_precision_weights_are_float32():
    x, w = jnp.ones((4096, 1), "bfloat16"), jnp.ones((1, 1), "bfloat16")
    run = jaxoff.tiled(lambda x, w: x @ w, tiles=4096)
    assert jax.grad(lambda w: run(x, w).astype("float32").sum())(w) == 4096  # bfloat16 would stop at 256


def test_it_works_in_layers_in_a_scan_under_a_budget():
    x, _, w = make()
    stack = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), w)

    def run(apply, w):
        return lax.scan(lambda x, w: (apply(swiglu)(x, w), None), x, w)[0].var()

    tile = functools.partial(jaxoff.tiled, tiles=4, axis=1)
    got = jaxoff.jit(jax.grad(functools.partial(run, tile)), device_bytes=1e9)(stack)
    want = jax.grad(functools.partial(run, lambda fun: fun))(stack)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), got, want)


@pytest.mark.parametrize(
    ("fun", "what"),
    [
        (lambda x: x - x.mean(axis=1, keepdims=True), r"sub at .*test_tiled\.py:\d+"),
        (lambda x: x + jnp.cumsum(x, axis=1), "cumsum"),
        (lambda x: x + x[:, ::-1], r"rev at .*test_tiled\.py:\d+"),
        (lambda x: jnp.einsum("btd,bsd->bts", x, x) @ x, "dot_general"),
    ],
)
def test_what_mixes_rows_is_refused_with_its_place(fun, what):
    x, _, _ = make()
    with pytest.raises(ValueError, match=rf"{what}.* mixes rows"):
        jaxoff.tiled(fun, tiles=4, axis=1)(x)


def test_wrong_calls_are_told():
    x, _, _ = make()
    with pytest.raises(ValueError, match="which tiles=5 divides"):
        jaxoff.tiled(jnp.tanh, tiles=5, axis=1)(x)
    with pytest.raises(ValueError, match="which tiles=2 divides"):
        jaxoff.tiled(lambda x: x[0], tiles=2)((x, x[:1]))
    with pytest.raises(ValueError, match="takes arrays with such an axis"):
        jaxoff.tiled(jnp.tanh, tiles=5, axis=3)(x)
    with pytest.raises(ValueError, match="Outputs of a function under"):
        jaxoff.tiled(lambda x: x.sum(), tiles=4, axis=1)(x)
    with pytest.raises(TypeError, match="is a whole number"):
        jaxoff.tiled(jnp.tanh, tiles=2.0)
    with pytest.raises(ValueError, match="at least 1"):
        jaxoff.tiled(jnp.tanh, tiles=0)


def test_unchecked_functions_run():
    x, _, _ = make()
    loop = lambda x: lax.fori_loop(0, 2, lambda _, x: jnp.sin(x), x)  # noqa: E731
    with pytest.raises(ValueError, match="cannot be told"):
        jaxoff.tiled(loop, tiles=4, axis=1)(x)
    got = jaxoff.tiled(loop, tiles=4, axis=1, check=False)(x)
    np.testing.assert_allclose(got, jnp.sin(jnp.sin(x)), rtol=1e-6)


@pytest.mark.parametrize(
    "fun",
    [
        lambda x: x + jnp.arange(x.shape[0])[:, None],
        lambda x: x * jax.random.bernoulli(jax.random.key(0), 0.5, x.shape),
        lambda x: jnp.where(jnp.tri(*x.shape) > 0, x, 0),
        lambda x: (x, jnp.arange(x.shape[0])),
    ],
)
def test_rows_that_a_part_makes_itself_are_refused(fun):
    with pytest.raises(ValueError, match="reads rows that the function makes itself for a part"):
        jaxoff.tiled(fun, tiles=4)(jnp.ones((8, 4)))
    jaxoff.tiled(fun, tiles=1)(jnp.ones((8, 4)))


def test_rows_that_are_all_the_same_may_be_made_by_a_part():
    def fun(x):
        return x + jnp.ones(x.shape) * jnp.arange(x.shape[1]), jnp.zeros(x.shape[0])

    x = jnp.ones((8, 4))
    jax.tree.map(np.testing.assert_array_equal, jaxoff.tiled(fun, tiles=4)(x), fun(x))
