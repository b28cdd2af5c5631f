"""`jaxoff.policy(store=...)`: kept values in float8 under `jaxoff.jit`."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxoff
from jaxoff import FindingCode
from jaxoff._jaxpr.float8 import compress, compressed_nbytes, restore
from jaxoff._jaxpr.float8_residuals import store_in_float8

LAYERS, WIDTH, HIDDEN, ROWS = 3, 64, 128, 8
FLOAT8 = {"h": "float8_e4m3fn"}


def weights_and_x():
    keys = jax.random.split(jax.random.key(0), 3)
    up = jax.random.normal(keys[0], (LAYERS, WIDTH, HIDDEN)) / 8
    down = jax.random.normal(keys[1], (LAYERS, HIDDEN, WIDTH)) / 8
    return (up, down), jax.random.normal(keys[2], (ROWS, WIDTH))


def layer(x, w):
    h = jaxoff.name(x @ w[0], "h")
    return x + jnp.sin(h) @ w[1], None


def scanned(policy):
    body = jax.checkpoint(layer, policy=policy)
    return lambda w, x: jax.lax.scan(body, x, w)[0].sum()


def listed(policy):
    body = jax.checkpoint(layer, policy=policy)

    def loss(w, x):
        for i in range(LAYERS):
            x, _ = body(x, jax.tree.map(lambda a, i=i: a[i], w))
        return x.sum()

    return loss


def around_the_scan(policy):
    return jax.checkpoint(lambda w, x: jax.lax.scan(layer, x, w)[0].sum(), policy=policy)


def by_jaxoff_scan(policy):
    return lambda w, x: jaxoff.scan(layer, x, w, policy=policy)[0].sum()


def in_groups(policy):
    body = jax.checkpoint(layer, policy=policy)

    def loss(w, x):
        groups = jax.tree.map(lambda a: a[None], w)
        return jax.lax.scan(lambda x, group: jax.lax.scan(body, x, group), x, groups)[0].sum()

    return loss


STYLES = [scanned, listed, around_the_scan, by_jaxoff_scan, in_groups]


def by_hand(w, x) -> jax.Array:
    """The loss with a derivative that reads `h`, and what is made of it, in float8."""

    @jax.custom_vjp
    def product(h: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sin(h) @ w

    def forward(h, w):
        return product(h, w), (compress(h), w)

    def backward(kept, cotangent):
        (numbers, scales), w = kept
        h = restore(numbers, scales, jnp.float32)
        return (cotangent @ w.T) * jnp.cos(h), jnp.sin(h).T @ cotangent

    product.defvjp(forward, backward)
    for up, down in zip(*w, strict=True):
        x = x + product(x @ up, down)
    return x.sum()


def distance(tree, other):
    """The norm of the difference of two trees, over the norm of the second."""
    norm = lambda leaves: math.sqrt(sum(float((leaf**2).sum()) for leaf in leaves))  # noqa: E731
    difference = jax.tree.map(jnp.subtract, tree, other)
    return norm(jax.tree.leaves(difference)) / norm(jax.tree.leaves(other))


@pytest.mark.some_cases(6)
@pytest.mark.parametrize("memory", ["offload", "save"])
@pytest.mark.parametrize("style", STYLES)
def test_gradients_are_those_of_a_derivative_by_hand(style, memory):
    policy = jaxoff.policy(**{memory: ["h"]}, store=FLOAT8)
    step = jaxoff.jit(jax.value_and_grad(style(policy)))
    loss, gradients = step(*weights_and_x())
    exact, exact_gradients = jax.value_and_grad(style(None))(*weights_and_x())
    assert not step.findings
    np.testing.assert_allclose(loss, exact, rtol=1e-6)
    assert 1e-3 < distance(gradients, exact_gradients) < 0.05
    if style is not around_the_scan:  # which makes the inputs of layers again from the rounded values
        assert distance(gradients, jax.grad(by_hand)(*weights_and_x())) < 1e-5


def list_avals(jaxpr):
    for eqn in jaxpr.eqns:
        yield from (v.aval for v in eqn.outvars)
        for value in eqn.params.values():
            for item in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(item, (jax.extend.core.Jaxpr, jax.extend.core.ClosedJaxpr)):
                    yield from list_avals(getattr(item, "jaxpr", item))


@pytest.mark.parametrize("style", STYLES)
def test_offloaded_values_move_in_float8(style):
    policy = jaxoff.policy(offload=["h"], store=FLOAT8)
    closed = jax.make_jaxpr(jax.grad(style(policy)))(*weights_and_x())
    narrowed = store_in_float8(closed, "h".__eq__)
    avals = list(list_avals(narrowed.closed.jaxpr))
    on_host = [aval for aval in avals if getattr(aval, "memory_space", None) == jax.memory.Space.Host]
    wide = [aval for aval in on_host if aval.dtype == jnp.float32 and aval.shape[-1] == HIDDEN]
    assert on_host
    assert not wide
    instance = jax.core.ShapedArray((ROWS, HIDDEN), jnp.float32)
    assert sum(stored.nbytes for stored in narrowed.stored) == LAYERS * compressed_nbytes(instance)


def test_microbatches_store_in_float8():
    policy = jaxoff.policy(offload=["h"], store=FLOAT8)

    def step(policy):
        def gradients(w, x):
            def add(total, x):
                return jax.tree.map(jnp.add, total, jax.grad(scanned(policy))(w, x)), None

            return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, w), jnp.stack([x, 2 * x]))[0]

        return gradients

    w, x = weights_and_x()
    jitted = jaxoff.jit(step(policy))
    got = jitted(w, x)
    want = jax.tree.map(jnp.add, jax.grad(by_hand)(w, x), jax.grad(by_hand)(w, 2 * x))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, want)
    assert not jitted.findings


def test_a_stack_that_the_forward_pass_reads_stays_exact():
    """The rows of a stack are read by a second loop, without a backward pass in it, and returned."""
    policy = jaxoff.policy(save=["h"], store=FLOAT8)

    def layer(x, w):
        h = jaxoff.name(x @ w[0], "h")
        return x + jnp.sin(h) @ w[1], h

    def loss(w, x):
        x, stack = jax.lax.scan(jax.checkpoint(layer, policy=policy), x, w)
        total, _ = jax.lax.scan(lambda total, h: (total + h.sum(), None), 0.0, stack)
        return x.sum() + total, stack

    step, exact = (jit(jax.value_and_grad(loss, has_aux=True)) for jit in (jaxoff.jit, jax.jit))
    ((code, message),) = find_codes(step, *weights_and_x())
    assert code is FindingCode.STORE_NOT_DONE
    assert "something else than the backward pass" in message
    jax.tree.map(np.testing.assert_array_equal, step(*weights_and_x()), exact(*weights_and_x()))


def find_codes(step, *args):
    with pytest.warns(UserWarning, match="float8|store"):
        step(*args)
    return [(finding.code, finding.message) for finding in step.findings]


def test_a_recomputed_value_is_reported():
    policy = jaxoff.policy(save=["x"], store=FLOAT8)
    ((code, message),) = find_codes(jaxoff.jit(jax.grad(scanned(policy))), *weights_and_x())
    assert code is FindingCode.STORE_NOT_DONE
    assert "'h' is not stored in float8" in message


def test_a_value_without_whole_blocks_is_reported():
    policy = jaxoff.policy(save=["h"], store=FLOAT8)
    (up, down), x = weights_and_x()
    w = up[..., :100], down[:, :100]
    step = jaxoff.jit(jax.grad(scanned(policy)))
    ((code, message),) = find_codes(step, w, x)
    assert code is FindingCode.STORE_NOT_DONE
    assert "float32[8,100]" in message
    assert "a last axis divisible by 32" in message


def test_under_remat3_nothing_is_stored_and_a_finding_says_so():
    step = jaxoff.jit(jax.grad(scanned(jaxoff.policy(save=["h"], store=FLOAT8))))
    jax.config.update("jax_remat3", True)
    try:
        ((code, message),) = find_codes(step, *weights_and_x())
        exact = jax.grad(scanned(None))(*weights_and_x())
        assert distance(step(*weights_and_x()), exact) < 1e-5
    finally:
        jax.config.update("jax_remat3", False)
    assert code is FindingCode.STORE_NOT_DONE
    assert message.startswith("jax_remat3 is on")


def test_a_program_without_a_backward_pass_keeps_nothing_and_is_silent():
    step = jaxoff.jit(scanned(jaxoff.policy(save=["h"], store=FLOAT8)))
    step(*weights_and_x())
    assert not step.findings


def test_a_misspelt_name_is_reported():
    policy = jaxoff.policy(save=["h"], store={"hh": "float8_e4m3fn"})
    ((code, message),) = find_codes(jaxoff.jit(jax.grad(scanned(policy))), *weights_and_x())
    assert code is FindingCode.RULE_MATCHED_NOTHING
    assert message.startswith("store='hh' matches no name in the program. Did you mean 'h'?")


def test_inside_another_jit_nothing_is_stored_and_a_finding_says_so():
    inner = jaxoff.jit(jax.grad(scanned(jaxoff.policy(save=["h"], store=FLOAT8))))
    with pytest.warns(UserWarning, match="called-inside-transform"):
        jax.jit(inner)(*weights_and_x())
    ((code, message),) = [(finding.code, finding.message) for finding in inner.findings]
    assert code is FindingCode.CALLED_INSIDE_TRANSFORM
    assert "it stores no value in float8" in message
    assert "copies" not in message


def test_a_budget_keeps_the_policys_store():
    policy = jaxoff.policy(save=["h"], store=FLOAT8)
    step = jaxoff.jit(jax.grad(scanned(policy)), device_bytes=10**9)
    got = step(*weights_and_x())
    want = jax.grad(by_hand)(*weights_and_x())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, want)


@pytest.mark.parametrize("memory", ["offload", "save"])
def test_explain_counts_bytes_in_float8(memory):
    policy = jaxoff.policy(**{memory: ["h"]}, store=FLOAT8)
    report = jaxoff.explain(scanned(policy), *weights_and_x())
    (row,) = [row for row in report.residuals if row.name == "h"]
    assert (row.dtype, row.shape, row.placement) == ("float8_e4m3fn", (ROWS, HIDDEN), memory)
    assert row.nbytes == LAYERS * (ROWS * HIDDEN + 4 * ROWS) == report.by_name["h"][memory]
    if memory == "offload":
        assert [t.nbytes for t in report.traffic] == [row.nbytes // LAYERS] * 2


def test_explain_shows_a_recomputed_value_as_it_is():
    report = jaxoff.explain(scanned(jaxoff.policy(save=["x"], store=FLOAT8)), *weights_and_x())
    (row,) = [row for row in report.residuals if row.name == "h"]
    assert (row.dtype, row.placement) == ("float32", "recompute")


def test_measure_says_the_error_of_each_name():
    policy = jaxoff.policy(offload=["h"], store=FLOAT8)
    step = jaxoff.jit(jax.grad(scanned(policy)))
    w, x = weights_and_x()
    errors = jaxoff.measure(step, w, x, repeats=1, warmup=0).store_errors
    total = wide = 0.0
    for up, down in zip(*w, strict=True):
        h = x @ up
        total += float(((h - restore(*compress(h), jnp.float32)) ** 2).sum())
        wide += float((h**2).sum())
        x = x + jnp.sin(h) @ down
    assert errors == {"h": pytest.approx(math.sqrt(total / wide), rel=1e-3)}
    assert 0.01 < errors["h"] < 0.04


def test_measure_of_a_donating_step_goes_on_with_its_results():
    policy = jaxoff.policy(save=["h"], store=FLOAT8)

    def train(w, x):
        return jax.tree.map(lambda w, g: w - 0.1 * g, w, jax.grad(scanned(policy))(w, x))

    taken = jaxoff.measure(
        jaxoff.jit(train, donate_argnums=0),
        *weights_and_x(),
        repeats=1,
        warmup=0,
        next_args=lambda args, w: (w, args[1]),
    )
    assert list(taken.store_errors) == ["h"]
    assert taken.to_dict()["store_errors"] == dict(taken.store_errors)
    assert "stored in float8, error of the values: h 2." in str(taken)


def test_measure_of_a_step_without_store_has_no_errors():
    step = jaxoff.jit(jax.grad(scanned(jaxoff.policy(save=["h"]))))
    assert jaxoff.measure(step, *weights_and_x(), repeats=1, warmup=0).store_errors == {}


@pytest.mark.parametrize(
    ("store", "error", "text"),
    [
        ({"h": "float8_e5m2"}, ValueError, r"store=\{'h': ...\} takes 'float8_e4m3fn', the one format"),
        ({"h": "no_dtype"}, ValueError, "the one format; got 'no_dtype'"),
        (["h"], TypeError, "store maps names or globs to a dtype"),
        ({1: "float8_e4m3fn"}, TypeError, "store is a list of names or globs"),
    ],
)
def test_a_policy_refuses_what_it_cannot_store(store, error, text):
    with pytest.raises(error, match=text):
        jaxoff.policy(store=store)


def test_a_policy_refuses_to_store_what_it_recomputes():
    with pytest.raises(ValueError, match="A recomputed value is not stored; got 'h' in both lists"):
        jaxoff.policy(recompute=["h"], store=FLOAT8)


def test_a_policy_with_store_is_a_policy():
    policy = jaxoff.policy(offload=["h"], store={"h": jnp.float8_e4m3fn})
    assert policy == jaxoff.policy(offload=["h"], store=FLOAT8)
    assert hash(policy) == hash(jaxoff.policy(offload=["h"], store=FLOAT8))
    assert eval(repr(policy)) == policy
    assert policy.on_device().store == policy.store


def routed(policy):
    def layer(x, w):
        x = jaxoff.name(x, "x")
        scores = jaxoff.name(jax.nn.softmax(jnp.tanh(x) @ w[0]), "scores")
        _, chosen = jax.lax.top_k(scores, 4)
        gates = jnp.take_along_axis(scores, chosen, -1)
        mixed = (w[1][chosen] * gates[..., None]).sum(1)
        return x + jnp.sin(jaxoff.name(x * mixed, "mixed")), None

    body = jax.checkpoint(layer, policy=policy)
    return lambda w, x: jax.lax.scan(body, x, w)[0].sum()


def test_a_value_with_a_choice_made_again_stays_exact():
    """The choice by a rounded value is another for some rows, whose gradients would be of other weights."""
    everything = {"*": "float8_e4m3fn"}
    w, x = weights_and_x()
    exact = jax.grad(routed(None))((w[0], w[1]), x)
    step = jaxoff.jit(jax.grad(routed(jaxoff.policy(save=["x", "mixed"], store=everything))))
    ((code, message),) = find_codes(step, (w[0], w[1]), x)
    assert code is FindingCode.STORE_NOT_DONE
    assert message.startswith("'x' is not stored in float8")
    assert "a choice (top_k)" in message
    assert distance(step((w[0], w[1]), x), exact) < 0.05
    saves = jaxoff.policy(save=["x", "mixed", "scores"], store={"x": "float8_e4m3fn"})
    step = jaxoff.jit(jax.grad(routed(saves)))
    assert 1e-4 < distance(step((w[0], w[1]), x), exact) < 0.05
    assert not step.findings
