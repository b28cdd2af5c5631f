"""`jaxoff.scan` and `jaxoff.layers`: a drop-in for `lax.scan`, with the residuals of the policy."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxoff
from jaxoff._layers.scan import scan_by_strategy
from tests.jaxoff.policy import placement
from tests.jaxoff.policy.matrix import assert_close, assert_equal, inputs
from tests.jaxoff.schedule.test_order import BOTH, HIDDEN, LAYERS, ROWS, WIDTH, arguments, layer, loss_of

X_IN = jaxoff.policy(offload=["x_in"])
STRATEGIES = ["auto", "captured", "ordered", "plain"]


def body(carry, x):
    h, count = carry
    w, b = x["w"], x["b"]
    out = jnp.tanh(jaxoff.name(h, "x_in") @ w + b)
    return (h + out, count + 1), {"mean": out.mean(), "count": count}


def model_inputs(steps=6):
    xs = {"w": inputs(steps, WIDTH, WIDTH) / 4, "b": inputs(steps, WIDTH)}
    return (inputs(ROWS, WIDTH), 0), xs


@pytest.mark.parametrize("block", [1, 3])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.some_cases(4)
def test_it_does_what_lax_scan_does(strategy, reverse, block):
    init, xs = model_inputs()

    def run(scan, xs):
        (h, count), ys = scan(xs)
        return jnp.sum(h) + jnp.sum(ys["mean"] ** 2), (h, count, ys)

    def ours(xs):
        more = dict(strategy=strategy, reverse=reverse, block=block, policy=X_IN)
        return run(lambda xs: scan_by_strategy(body, init, xs, **more), xs)

    def plain(xs):
        return run(lambda xs: lax.scan(body, init, xs, reverse=reverse), xs)

    got, want = (jaxoff.jit(jax.value_and_grad(f, has_aux=True))(xs) for f in (ours, plain))
    assert_close(got, want)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_without_xs_a_length_tells(strategy):
    def iteration(x, _):
        return jnp.sin(jaxoff.name(x, "x_in")), None

    x = inputs(4)
    got = scan_by_strategy(iteration, x, length=3, policy=BOTH, strategy=strategy)
    assert got[1] is None
    assert_close(got[0], jnp.sin(jnp.sin(jnp.sin(x))))


@pytest.mark.parametrize("block", [1, 5])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_residuals_are_those_that_the_policy_names(strategy, block):
    def loss(w, x):
        return jnp.sum(scan_by_strategy(layer, x, w, policy=BOTH, strategy=strategy, block=block)[0])

    want = LAYERS * ROWS * (WIDTH + HIDDEN) * 4
    assert placement.nbytes(placement.grad_host_arrays(loss, *arguments())) == want
    report = jaxoff.explain(loss, *arguments())
    assert report.host_bytes == want
    assert report.findings == ()
    assert set(report.by_name) == {"x_in", "act"}


def test_layers_take_one_function_or_one_each():
    (w, x), want = arguments(), loss_of(BOTH)(*arguments())
    each = [jax.tree.map(lambda leaf, i=i: leaf[i], w) for i in range(LAYERS)]

    def several(each, x):
        functions = [lambda x, w=w: layer(x, w)[0] for w in each]
        return jnp.sum(jaxoff.layers(functions, x, policy=BOTH))

    assert_close(several(each, x), want)
    assert_close(loss_of(BOTH, flat=True)(w, x), want)
    report = jaxoff.explain(several, each, x)
    assert report.host_bytes == LAYERS * ROWS * (WIDTH + HIDDEN) * 4


def test_layers_may_differ():
    widths = [8, 16, 4]
    each = [inputs(i, o) for i, o in itertools.pairwise([WIDTH, *widths])]

    def loss(each, x):
        return jnp.sum(jaxoff.layers(lambda w, x: jnp.tanh(jaxoff.name(x, "x_in") @ w), x, each, policy=X_IN))

    x = inputs(ROWS, WIDTH)
    got = jaxoff.jit(jax.grad(loss))(each, x)

    def plain(each, x):
        for w in each:
            x = jnp.tanh(x @ w)
        return jnp.sum(x)

    assert_close(got, jax.grad(plain)(each, x))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (dict(strategy="capture"), "strategy must be one of .* got 'capture'. Did you mean 'captured'"),
        (dict(block=4), "block must divide the number of steps, 6, got 4"),
        (dict(block=0), "block must divide the number of steps, 6, got 0"),
        (dict(length=5), "must agree on the number of steps"),
    ],
)
def test_bad_arguments_are_named(more, message):
    init, xs = model_inputs()
    with pytest.raises(ValueError, match=message):
        scan_by_strategy(body, init, xs, policy=BOTH, **more)


def test_steps_must_be_told():
    with pytest.raises(ValueError, match="one must give it"):
        jaxoff.scan(lambda x, _: (x, None), 1.0, policy=BOTH)


def test_params_go_with_one_function():
    with pytest.raises(ValueError, match="pass params"):
        jaxoff.layers(lambda w, x: x, 1.0, policy=BOTH)
    with pytest.raises(ValueError, match="take x alone"):
        jaxoff.layers([lambda x: x], 1.0, [None], policy=BOTH)


@pytest.mark.parametrize("strategy", ["auto", "captured", "ordered", "plain"])
def test_no_steps_give_what_lax_scan_gives(strategy):
    def body(x, w):
        return jnp.tanh(jaxoff.name(x, "x_in") @ w), x.sum()

    x, w = jnp.ones((4, 8)), jnp.ones((0, 8, 8))
    got = scan_by_strategy(body, x, w, policy=BOTH, strategy=strategy)
    assert_equal(jax.tree.leaves(got), jax.tree.leaves(lax.scan(body, x, w)))
