"""`jaxoff.jit(device_bytes=, tune=True)`: programs within the budget take real steps, the fastest stays."""

import json

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxoff
from jaxoff._schedule import tuning

OPTIMIZER = optax.adamw(1e-3)
LAYERS, WIDTH = 4, 128
AS_WRITTEN, WITH_STATE = 60e6, 8.2e6


pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture(autouse=True)
def _one_sample(monkeypatch):
    monkeypatch.setattr(tuning, "SAMPLES", 1)


def make_step(calls):
    """An AdamW step over layers in a loop, its state and a batch: (state, batch) -> (state, loss)."""

    def layer(x, w):
        return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None

    def loss_of(params, x):
        return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)

    def step(state, x):
        calls.append(1)
        params, rest = state
        loss, grads = jax.value_and_grad(loss_of)(params, x)
        updates, rest = OPTIMIZER.update(grads, rest, params)
        return (optax.apply_updates(params, updates), rest), loss

    init = jax.nn.initializers.normal(0.02)
    shapes = {"up": (LAYERS, WIDTH, 4 * WIDTH), "down": (LAYERS, 4 * WIDTH, WIDTH)}
    params = {name: init(jax.random.key(i), shape) for i, (name, shape) in enumerate(shapes.items())}
    return step, (params, OPTIMIZER.init(params)), jnp.ones((64, WIDTH))


def run(step, state, x, count):
    losses = []
    for _ in range(count):
        state, loss = step(state, x)
        losses.append(float(loss))
    return losses, state


def test_the_fastest_of_all_programs_within_the_budget_stays(took, cache):
    fun, state, x = make_step(calls := [])
    step = jaxoff.jit(fun, device_bytes=AS_WRITTEN, tune=True)
    took.fast.append("as written, ordered")
    losses, _ = run(step, state, x, 9)
    assert losses == pytest.approx(run(jax.jit(make_step([])[0]), state, x, 9)[0], rel=1e-4)
    assert len(calls) == 1
    assert {name.partition(",")[0] for name in took.names} == {"planned", "as written"}
    assert set(step.tuned) == set(took.names) and len(took.names) == 2 * len(set(took.names))
    assert step.plan.programs == 0  # the step as it is written
    assert step.plan.peak_bytes <= AS_WRITTEN
    (file,) = cache.iterdir()
    assert json.loads(file.read_text())["milliseconds"] == step.tuned
    took_so_far = len(took.names)
    again = jaxoff.jit(fun, device_bytes=AS_WRITTEN, tune=True)
    run(again, state, x, 1)
    assert (again.plan.programs, again.tuned, len(took.names)) == (0, step.tuned, took_so_far)


@pytest.mark.long
def test_of_a_step_with_state_on_the_host_all_programs_take_it_there(took):
    fun, state, x = make_step([])
    step = jaxoff.jit(fun, device_bytes=WITH_STATE, tune=True, donate_argnums=0)
    took.fast.append("planned, ordered")
    expected, _ = run(jax.jit(fun), state, x, 9)
    losses, state = run(step, state, x, 9)
    assert losses == pytest.approx(expected, rel=1e-4)
    assert len(set(took.names)) > 1 and {name.partition(",")[0] for name in took.names} == {"planned"}
    assert "pinned_host" in {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state)}
    assert "state" in str(step.plan)


def test_a_step_without_another_program_is_not_timed(took, cache):
    step = jaxoff.jit(lambda x: x + 1, device_bytes=1e6, tune=True)
    assert step(jnp.ones(3)).tolist() == [2, 2, 2]
    assert (took.names, step.tuned, cache.exists()) == ([], {}, False)


def test_a_recipe_goes_with_no_budget():
    with pytest.raises(ValueError, match=r"device_bytes= chooses the recipe.*got recipe='stock'"):
        jaxoff.jit(lambda x: x, device_bytes=1e6, recipe="stock")
