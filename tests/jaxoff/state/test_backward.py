"""Updates in the loop of the backward pass: where they may be, their numbers, their places."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxoff
from jaxoff._budget.state import State
from jaxoff._jaxpr import compat
from jaxoff._state.backward import find_early
from jaxoff._state.stream import stream_updates

LAYERS, WIDTH = 8, 256
ADAMW = optax.adamw(1e-2)
MOMENTS_NBYTES = 2 * 2 * LAYERS * WIDTH * WIDTH * 4


def make_step(optimizer=ADAMW, *, returns=lambda grads, params: ()):
    def step(state, x):
        def loss(params):
            layer = jax.checkpoint(lambda h, w: (h + jnp.tanh(h @ w["in"]) @ w["out"], None))
            return lax.scan(layer, x, params)[0].var()

        params, optimizer_state = state
        value, grads = jax.value_and_grad(loss)(params)
        changes, optimizer_state = optimizer.update(grads, optimizer_state, params)
        return (optax.apply_updates(params, changes), optimizer_state), value, returns(grads, params)

    return step


def make_state(optimizer=ADAMW):
    keys = jax.random.split(jax.random.key(0))
    params = {
        name: jax.random.normal(key, (LAYERS, WIDTH, WIDTH)) / WIDTH
        for name, key in zip("io", keys, strict=True)
    }
    params = {"in": params["i"], "out": params["o"]}
    return params, optimizer.init(params)


X = jnp.linspace(-1, 1, 64 * WIDTH).reshape(64, WIDTH)


def find(step, optimizer=ADAMW):
    """The step's state, and its updates in loops."""
    closed = jax.make_jaxpr(step)(jax.eval_shape(lambda: make_state(optimizer)), X)
    state = State.find(closed, [True] * (len(closed.jaxpr.invars) - 1) + [False])
    return state, find_early(state.closed.jaxpr, state.updates)


def clipped():
    return optax.chain(optax.clip_by_global_norm(1.0), ADAMW)


def test_the_updates_of_stacked_weights_follow_their_gradients():
    state, (early,) = find(make_step())
    assert len(early.updates) == len(state.updates) == 2
    program = stream_updates(state.closed, state.updates, early=[early]).jaxpr
    loops = [eqn for eqn in program.eqns if compat.scan_in(eqn) is not None]
    assert len(loops) == 2  # forward and backward: no loop over blocks
    assert sum(compat.is_host(v.aval) for v in loops[1].outvars) == 4
    assert not any(
        compat.scan_in(eqn) or eqn.primitive.name == "while" for eqn in program.eqns if eqn not in loops
    )


@pytest.mark.parametrize(
    ("optimizer", "returns"),
    [
        (clipped, lambda grads, params: ()),  # scaled by the norm of all gradients
        (lambda: ADAMW, lambda grads, params: optax.tree.norm(grads)),  # which is logged
        (lambda: ADAMW, lambda grads, params: grads),
        (lambda: ADAMW, lambda grads, params: jax.tree.map(lambda p, g: (p * g).sum(), params, grads)),
        (lambda: ADAMW, lambda grads, params: optax.tree.norm(params)),  # of those that are replaced
    ],
)
def test_what_needs_all_gradients_comes_before_the_updates(optimizer, returns):
    assert find(make_step(optimizer(), returns=returns), optimizer())[1] == []


def test_a_step_within_a_budget_has_the_numbers_of_the_step_on_the_device():
    plain = jax.jit(make_step(), donate_argnums=0)
    memory = plain.lower(make_state(), X).compile().memory_analysis()
    nbytes = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    within = jaxoff.jit(make_step(), donate_argnums=0, device_bytes=nbytes - 0.6 * MOMENTS_NBYTES)
    state, other = make_state(), make_state()
    for _ in range(3):
        state, value, _ = within(state, X)
        other, expected, _ = plain(other, X)
        np.testing.assert_allclose(value, expected, rtol=1e-6)
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-4, atol=1e-6)
    assert not within.findings
    assert within.plan.peak_bytes <= nbytes - 0.6 * MOMENTS_NBYTES
    hosted = [leaf for leaf in jax.tree.leaves(state) if leaf.sharding.memory_kind == "pinned_host"]
    assert sum(leaf.nbytes for leaf in hosted) == within.plan.host_bytes >= MOMENTS_NBYTES / 2
    assert {value.source for value in within.plan.values if value.placement == "offload"} == {
        "state, updated in the backward pass"
    }
