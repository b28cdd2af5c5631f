"""Rules that match no name in the layers of `scan` and `layers`, without `jaxoff.jit`."""

import warnings

import jax
import jax.numpy as jnp
import pytest

import jaxoff
from tests.jaxoff.policy.matrix import inputs

X, WEIGHTS = inputs(4, 8), inputs(3, 8, 8)


def layer(x, w):
    x = jaxoff.name(jnp.tanh(x @ w), "mlp.act")
    return jaxoff.name(jnp.sin(x), "mlp.out")


@jax.custom_vjp
def opaque(x, w):
    return jnp.tanh(x @ w)


def opaque_forward(x, w):
    y = jaxoff.name(jnp.tanh(x @ w), "kernel.out")
    return y, (x, w, y)


def opaque_backward(residuals, g):
    x, w, y = residuals
    g = g * (1 - y * y)
    return g @ w.T, x.T @ g


opaque.defvjp(opaque_forward, opaque_backward)


def in_a_scan(function, policy, **more):
    def loss(ws, x):
        return jaxoff.scan(lambda x, w: (function(x, w), None), x, ws, policy=policy, **more)[0].sum()

    return loss


def in_a_row(function, policy, **more):
    def loss(ws, x):
        return jaxoff.layers(lambda w, x: function(x, w), x, list(ws), policy=policy, **more).sum()

    return loss


STACKS = pytest.mark.parametrize("stack", [in_a_scan, in_a_row])


def warned_by(step, *args):
    """The warnings of a call, at a line of this file."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step(*args)
    assert {w.filename for w in caught} <= {__file__}
    return [str(w.message) for w in caught]


@STACKS
@pytest.mark.parametrize("keep_first", [False, "auto"])
def test_a_misspelt_rule_is_said_with_the_near_miss(stack, keep_first):
    for offload, save in ((["mlp.actt"], []), (["mlp.actt"], ["mlp.out"])):
        policy = jaxoff.policy(offload=offload, save=save)
        (message,) = warned_by(jax.jit(jax.grad(stack(layer, policy, keep_first=keep_first))), WEIGHTS, X)
        assert message.startswith(
            "rule-matched-nothing: offload='mlp.actt' matches no name in these layers. "
            "Did you mean 'mlp.act'? The names there are mlp.act, mlp.out."
        )


@STACKS
def test_a_policy_of_first_layers_is_checked_too(stack):
    first = jaxoff.FirstLayers(1, jaxoff.policy(offload=["mlp.act"]), rest=jaxoff.policy(offload=["attn"]))
    (message,) = warned_by(jax.jit(jax.grad(stack(layer, first))), WEIGHTS, X)
    assert "offload='attn' matches no name in these layers. The names there are mlp.act" in message


@STACKS
def test_a_policy_shared_with_other_layers_is_no_slip(stack):
    policy = jaxoff.policy(offload=["mlp.act", "moe.out"], save=["head"])  # and mlp.out is not listed
    assert warned_by(jax.jit(jax.grad(stack(layer, policy))), WEIGHTS, X) == []


def test_layers_of_several_functions_match_together():
    policy = jaxoff.policy(offload=["first", "second"])
    functions = [lambda x: jaxoff.name(jnp.sin(x), "first"), lambda x: jaxoff.name(jnp.cos(x), "second")]
    assert warned_by(jax.grad(lambda x: jaxoff.layers(functions, x, policy=policy).sum()), X) == []


@STACKS
def test_names_in_the_rules_of_a_custom_vjp_match(stack):
    policy = jaxoff.policy(offload=["kernel.out"])
    assert warned_by(jax.jit(jax.grad(stack(opaque, policy))), WEIGHTS, X) == []
    (message,) = warned_by(
        jax.jit(jax.grad(stack(opaque, jaxoff.policy(offload=["kernel.uot"])))), WEIGHTS, X
    )
    assert "Did you mean 'kernel.out'?" in message


@STACKS
def test_jit_and_explain_say_it_alone(stack):
    loss = stack(layer, jaxoff.policy(offload=["mlp.actt"]))
    message, *_ = warned_by(jaxoff.jit(jax.grad(loss)), WEIGHTS, X)
    assert "matches no name in the program" in message
    assert warned_by(jaxoff.explain, loss, WEIGHTS, X) == []


def test_layers_without_a_gradient_have_no_residuals():
    def count(x, w):
        return jaxoff.name(x + w, "count")

    policy = jaxoff.policy(offload=["cuont"])
    counts, more = jnp.arange(4), jnp.ones((3, 4), int)
    loss = in_a_scan(count, policy)
    assert warned_by(jax.jit(loss), more, counts) == []
