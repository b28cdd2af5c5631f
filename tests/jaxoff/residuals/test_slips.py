"""Slips in the arguments of public functions: an error of jaxoff's, not of Python's or JAX's insides."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

import jaxoff

W, X = jnp.ones((4, 8, 8)), jnp.ones((2, 8))


def layer(x, w):
    return jnp.tanh(jaxoff.name(x, "a") @ w), None


def loss(w, x, policy=None):
    return jaxoff.scan(layer, x, w, policy=policy)[0].sum()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: jaxoff.policy(["mlp.*"]), TypeError, "jaxoff.policy(offload=[...], save=[...])"),
        (lambda: jaxoff.policy(3), TypeError, "is a preset's name, one of te_v1, te_v2"),
        (
            lambda: jaxoff.policy("megatron"),
            TypeError,
            "takes modules, got none: missing a required argument",
        ),
        (
            lambda: jaxoff.policy("te_v2", a=1),
            TypeError,
            "'te_v2' takes no option, got a=1: got an unexpected",
        ),
        (lambda: jaxoff.policy(offload=3), TypeError, "offload is a list of names or globs"),
        (lambda: loss(W, X, "te_v2"), TypeError, "got 'te_v2'. A preset or a list of names is an argument"),
        (lambda: loss(W, X, ["a"]), TypeError, "policy is what jaxoff.policy(...) returns"),
        (lambda: loss(W, X, jaxoff.policy), TypeError, "policy is what jaxoff.policy(...) returns"),
        (lambda: jaxoff.layers([jnp.sin], X, policy="te_v2"), TypeError, "got 'te_v2'"),
        (lambda: jaxoff.layers([3], X, policy=None), TypeError, "layers takes functions, got 3 of type int"),
        (lambda: jaxoff.scan(layer, X, W, policy=None, block="2"), TypeError, "a whole number, got '2'"),
        (lambda: jaxoff.jit(loss, compiler_options="CONCURRENT"), TypeError, "got 'CONCURRENT'"),
        (lambda: jaxoff.measure(loss, W, X, repeats="3"), TypeError, "a whole number; got '3'"),
        (lambda: jaxoff.frontier(jax.grad(loss), W, X, points="6"), TypeError, "a whole number; got '6'"),
        (lambda: jaxoff.plan(loss, W, X, device_bytes=None), ValueError, "above 0, or text such as"),
        (lambda: jaxoff.plan(loss, W, X, device_bytes=[1]), ValueError, "got [1]"),
        (lambda: jaxoff.plan(loss, W, X, device_bytes=True), ValueError, "got True"),
        (lambda: jaxoff.Device.of(None), TypeError, "or the path of a profile; got None of type NoneType"),
        (lambda: jaxoff.explain(loss, W, X, has_aux=True), TypeError, "(output, auxiliary), a tuple of two"),
        (lambda: jaxoff.explain(lambda w: None, W), ValueError, "no gradient: it returns no array"),
        (lambda: jaxoff.explain(lambda w: w.argmax(), W), ValueError, "no gradient: it returns int32[]"),
    ],
)
def test_a_slip_is_named_with_what_was_got(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call()


def test_a_file_that_is_no_trace_is_named(tmp_path):
    (tmp_path / "x.xplane.pb").write_bytes(b"garbage" * 9)
    with pytest.raises(ValueError, match=r"a file that jax.profiler.trace wrote; .*x\.xplane\.pb"):
        jaxoff.read_trace(tmp_path / "x.xplane.pb")


def test_a_loop_without_a_gradient_is_an_error_with_its_line():
    block = jax.checkpoint(lambda w, x: layer(x, w)[0], policy=jaxoff.policy(offload=["a"]))

    def dynamic(w, x, n):
        return jax.lax.fori_loop(0, n, lambda i, x: block(w, x), x)

    for explain in (jaxoff.explain, jaxoff.residuals):
        with pytest.raises(ValueError, match=r"no gradient.*the loop at \S*test_slips.py:\d+ \(\S*dynamic\)"):
            explain(dynamic, W[0], X, jnp.int32(3))
    # Bounds that are Python numbers, and a loop that no gradient goes through, have no such problem.
    report = jaxoff.explain(lambda w, x: jax.lax.fori_loop(0, 3, lambda i, x: block(w, x), x), W[0], X)
    assert report.host_bytes == 3 * X.nbytes

    def counted(w, x):
        n = jax.lax.while_loop(lambda n: n < 3, lambda n: n + 1, 0)
        return block(w, x) * n

    assert jaxoff.explain(counted, W[0], X).host_bytes == X.nbytes


def by_mode(w, x, mode, *, scale=1):
    return (layer(x * 2, w)[0] if mode == "t" else x) * len(range(scale))


@pytest.mark.parametrize(
    "explain",
    [
        lambda: jaxoff.explain(by_mode, W[0], X, "t", static_argnums=2),
        lambda: jaxoff.explain(by_mode, W[0], X, mode="t", static_argnames="mode"),
        lambda: jaxoff.explain(by_mode, W[0], X, "t", scale=2, static_argnames=("mode", "scale")),
        lambda: jaxoff.explain(jax.jit(by_mode, static_argnames="mode"), W[0], X, mode="t"),
        lambda: jaxoff.explain(jax.jit(by_mode, static_argnums=2), W[0], X, "t"),
        lambda: jaxoff.explain(jaxoff.jit(by_mode, static_argnames="mode"), W[0], X, "t"),
        lambda: jaxoff.explain(functools.partial(by_mode, mode="t"), W[0], X),
    ],
)
def test_static_arguments_are_those_given_or_those_of_the_jit(explain):
    assert [r.name for r in explain().residuals if r.name] == ["a"]


def test_an_argument_that_is_no_array_says_what_to_do():
    with pytest.raises(TypeError, match=r"got 't' of type str at args\[2\].*Give static_argnums"):
        jaxoff.explain(by_mode, W[0], X, "t")
    with pytest.raises(TypeError, match=r"got 't' of type str at kwargs\['mode'\]"):
        jaxoff.residuals(by_mode, W[0], X, mode="t")


@pytest.mark.parametrize(
    "trace",
    [
        lambda fun: jaxoff.explain(fun, W[0], X, scale=2, flag=True),
        lambda fun: jaxoff.plan(jax.grad(fun), W[0], X, flag=True, device_bytes=1e9),
        lambda fun: jaxoff.jit(jax.grad(fun), static_argnames="scale")(W[0], X, scale=2, flag=True),
    ],
    ids=["explain", "plan", "jit"],
)
def test_an_error_about_a_traced_argument_names_the_users_function_and_argument(trace):
    def by_flag(w, x, *, scale=1, flag=False):
        return layer(x, w)[0].sum() if flag else x.sum()

    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        trace(by_flag)
    assert f"tracing the function by_flag at {__file__}" in str(caught.value)
    assert "the value of the argument flag." in str(caught.value)


def test_a_name_with_brackets_is_told_from_a_glob():
    block = jax.checkpoint(
        lambda w, x: jnp.tanh(jaxoff.name(x, "a[0]") @ w), policy=jaxoff.policy(offload=["a[0]"])
    )
    (finding,) = jaxoff.explain(block, W[0], X).findings
    assert "Did you mean" not in finding.message
    assert "'a[[]0]' is the name itself" in finding.message


def test_a_plan_without_layers_says_so():
    assert "A loss is planned as jax.value_and_grad(loss)." in str(jaxoff.plan(loss, W, X, device_bytes=1e9))
    assert "A loss" not in str(jaxoff.plan(jax.value_and_grad(loss), W, X, device_bytes=1e9))


def test_texts_are_for_people():
    assert repr(jaxoff.jit(loss)) == f"jaxoff.jit({loss!r})"
    assert repr(jaxoff.nnx_jit(loss)) == f"jaxoff.nnx_jit({loss!r})"
    assert "of 1.0e+30 B" in str(jaxoff.plan(loss, W, X, device_bytes=1e30))
