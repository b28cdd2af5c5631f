"""Updates in backward passes of many programs: the numbers of the step on the device, in jaxoff's order."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxoff
from jaxoff._budget.state import State
from jaxoff._device.profile import H200
from jaxoff._jaxpr import compat
from jaxoff._schedule.rewrite import rewrite
from jaxoff._state import updates
from jaxoff._state.backward import find_early
from jaxoff._state.stream import stream_updates

LAYERS, WIDTH = 5, 32
ADAMW = optax.adamw(1e-2)
BF16 = jnp.bfloat16


@pytest.fixture(autouse=True)
def _small_arrays_may_rest(monkeypatch):
    monkeypatch.setattr(updates, "LEAST_NBYTES", 1 << 10)


def stack(seed, length=LAYERS):
    return jax.random.normal(jax.random.key(seed), (length, WIDTH, WIDTH)) / WIDTH**0.5


def make_weights(length=LAYERS):
    return {"a": stack(0, length), "b": stack(1, length)}


X = jax.random.normal(jax.random.key(2), (8, WIDTH))


def layer(h, w):
    return h + jnp.tanh(h @ w["a"]) @ w["b"], None


def base(params, x, **keywords):
    return lax.scan(jax.checkpoint(layer), x, params, **keywords)[0].var()


def train(loss, optimizer=ADAMW):
    def step(state, x):
        params, optimizer_state = state
        value, grads = jax.value_and_grad(loss)(params, x)
        changes, optimizer_state = optimizer.update(grads, optimizer_state, params)
        return (optax.apply_updates(params, changes), optimizer_state), value

    return step


def of_weights(loss, optimizer=ADAMW, length=LAYERS):
    params = make_weights(length)
    return train(loss, optimizer), (params, optimizer.init(params))


def in_two_scans(params, x):
    return base(params["decoder"], lax.scan(jax.checkpoint(layer), x, params["encoder"])[0])


def make_two_scans():
    params = {"encoder": make_weights(), "decoder": make_weights()}
    return train(in_two_scans), (params, ADAMW.init(params))


def make_masters():
    def step(state, x):
        weights, masters, optimizer_state = state
        value, grads = jax.value_and_grad(base)(weights, x.astype(BF16))
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        changes, optimizer_state = ADAMW.update(grads, optimizer_state, masters)
        masters = optax.apply_updates(masters, changes)
        return (jax.tree.map(lambda m: m.astype(BF16), masters), masters, optimizer_state), value

    masters = make_weights()
    return step, (jax.tree.map(lambda m: m.astype(BF16), masters), masters, ADAMW.init(masters))


def make_averages():
    def step(state, x):
        inner, averages = state
        inner, value = train(base)(inner, x)
        return (inner, jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, averages, inner[0])), value

    params = make_weights()
    return step, ((params, ADAMW.init(params)), params)


def offloaded(params, x):
    def body(h, w):
        return h + jaxoff.name(jnp.tanh(h @ w["a"]), "h") @ w["b"], None

    policy = jaxoff.policy(offload=["h"], min_bytes=0)
    return lax.scan(jax.checkpoint(body, policy=policy), x, params)[0].var()


def by_index(params, x):
    """One stack is a constant of the loop, whose gradient is a carried sum."""

    def body(h, row):
        i, w = row
        return layer(h, {"a": params["a"][i], "b": w})

    return lax.scan(jax.checkpoint(body), x, (jnp.arange(LAYERS), params["b"]))[0].var()


# The step and its state, and how many of its updates are in backward passes.
CASES = {
    "lion": (lambda: of_weights(base, optax.lion(1e-2)), 2),
    "schedule": (lambda: of_weights(base, optax.adam(optax.cosine_decay_schedule(1e-2, 10))), 2),
    "mask": (lambda: of_weights(base, optax.adamw(1e-2, mask={"a": True, "b": False})), 2),
    "forward loop in reverse": (lambda: of_weights(lambda p, x: base(p, x, reverse=True)), 2),
    "one layer": (lambda: of_weights(base, length=1), 2),
    "two scans": (make_two_scans, 4),
    "a stack in two scans": (lambda: of_weights(lambda p, x: base(p, lax.scan(layer, x, p)[0])), 0),
    "penalty": (lambda: of_weights(lambda p, x: base(p, x) * (1 + jnp.square(p["a"]).sum())), 1),
    "masters": (make_masters, 2),
    "averages": (make_averages, 2),
    "offloads": (lambda: of_weights(offloaded), 2),
    "by index": (lambda: of_weights(by_index), 1),
}


@pytest.mark.some_cases(5)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_numbers_are_those_of_the_step(case):
    make, count = case
    step, state = make()
    leaves = jax.tree.leaves((state, X))
    own = State.find(jax.make_jaxpr(step)(state, X), [True] * (len(leaves) - 1) + [False])
    early = find_early(own.closed.jaxpr, own.updates)
    assert sum(len(each.updates) for each in early) == count
    program = stream_updates(own.closed, own.updates, early=early)
    written = rewrite(program, H200, large_nbytes=1 << 8)
    assert (written.loops > 0) == (count > 0)
    on_host = [compat.is_host(v.aval) for v in program.jaxpr.invars]
    assert sum(on_host) >= 2
    run, plain = jax.jit(compat.jaxpr_as_fun(written.jaxpr)), jax.jit(step)
    for _ in range(2):
        placed = [
            jax.device_put(v, jax.memory.Space.Host) if rests else v
            for v, rests in zip(leaves, on_host, strict=True)
        ]
        got, (state, value) = run(*placed), plain(state, X)
        leaves = [*got[: len(leaves) - 1], X]
        expected = [*jax.tree.leaves(state), value]
        for ours, theirs in zip(got, expected, strict=True):
            np.testing.assert_allclose(
                np.asarray(ours, np.float32), np.asarray(theirs, np.float32), rtol=1e-3, atol=1e-4
            )
