"""`jaxoff.jit(tune=True)`: every program takes real steps, the fastest stays, the decision is kept."""

import json

import jax
import jax.numpy as jnp
import pytest

import jaxoff
from jaxoff._schedule import tuning
from jaxoff._schedule.recipes import Recipe
from jaxoff._schedule.settings import Setting
from jaxoff._schedule.tuning import SAMPLES, WARMUPS, find_fastest, list_within_limit
from tests.jaxoff.schedule.test_recipes import compiled_of

pytestmark = pytest.mark.usefixtures("cache")


def make_step(loop, calls):
    """An SGD step over three layers that offload their products: (weights, x) -> (weights, loss)."""

    def layer(w, x):
        return jnp.tanh(jaxoff.name(x @ w, "act")) + x

    block = jax.checkpoint(layer, policy=jaxoff.policy(offload=["act"], min_bytes=0), prevent_cse=not loop)

    def loss_of(ws, x):
        if loop:
            return jax.lax.scan(lambda x, w: (block(w, x), None), x, ws)[0].sum()
        for w in ws:
            x = block(w, x)
        return x.sum()

    def step(ws, x):
        calls.append(1)
        loss, grads = jax.value_and_grad(loss_of)(ws, x)
        return ws - 0.01 * grads, loss

    return step, jnp.full((3, 8, 8), 0.1, "float32"), jnp.ones((4, 8))


def run(step, ws, x, count):
    losses = []
    for _ in range(count):
        ws, loss = step(ws, x)
        losses.append(float(loss))
    return losses


PROGRAMS = {
    True: {"concurrent", "ordered", "stock", "saved"},
    False: {"ordered", "stock", "ordered without graphs", "stock without graphs", "saved"},
}


@pytest.fixture
def any_memory(monkeypatch):
    """All programs are within the limit of memory, which a CPU's programs need not be."""
    compiled = []

    def compile_all(settings, compile_setting):
        for setting in settings:
            compile_setting(setting)
        compiled.extend(map(str, settings))
        return settings

    monkeypatch.setattr("jaxoff._schedule.jitted.list_within_limit", compile_all)
    return compiled


@pytest.mark.parametrize("loop", [True, False])
def test_all_programs_take_steps_and_the_fastest_stays(loop, took, any_memory, cache):
    calls, count = [], len(PROGRAMS[loop]) * (WARMUPS + SAMPLES)
    fun, ws, x = make_step(loop, calls)
    step = jaxoff.jit(fun, tune=True, donate_argnums=0)
    expected = run(jax.jit(make_step(loop, [])[0]), ws, x, count + 3)
    assert run(step, ws, x, count + 3) == pytest.approx(expected, rel=1e-5)
    assert len(calls) == 1
    assert set(any_memory) == set(took.names) == set(step.tuned) == PROGRAMS[loop]
    assert [took.names.count(name) for name in PROGRAMS[loop]] == [WARMUPS + SAMPLES] * len(PROGRAMS[loop])
    assert step.recipe == "stock"
    assert step.tuned["stock"] == 1000
    assert step.findings == ()
    (file,) = cache.iterdir()
    assert json.loads(file.read_text())["milliseconds"] == step.tuned


def test_a_known_decision_is_taken_at_once(took, any_memory, cache):
    fun, ws, x = make_step(True, calls := [])
    first = jaxoff.jit(fun, tune=True)
    run(first, ws, x, 20)
    count = len(took.names), len(any_memory)
    again = jaxoff.jit(fun, tune=True)
    run(again, ws, x, 2)
    assert (len(took.names), len(any_memory)) == count
    assert (again.recipe, again.tuned) == ("stock", first.tuned)
    assert len(calls) == 2  # once for each function
    (file,) = cache.iterdir()
    file.write_text(file.read_text()[:20])  # torn
    third = jaxoff.jit(fun, tune=True)
    run(third, ws, x, 20)
    assert json.loads(file.read_text())["milliseconds"] == third.tuned


@pytest.mark.usefixtures("any_memory")
def test_other_types_are_timed_by_themselves_and_a_lowered_program_does_not_decide(took):
    fun, ws, x = make_step(True, [])
    step = jaxoff.jit(fun, tune=True)
    with pytest.warns(UserWarning, match="recipe-replaced"):
        step.lower(ws, x).compile()
    run(step, ws, x, 16)
    took.fast.append("ordered")
    run(step, ws, jnp.ones((2, 8)), 16)
    assert step.recipe == "ordered"
    run(step, ws, x, 1)
    assert step.recipe == "stock"


@pytest.mark.usefixtures("any_memory")
def test_a_program_that_offloads_nothing_is_said(took):
    took.fast.append("saved")
    fun, ws, x = make_step(True, [])
    step = jaxoff.jit(fun, tune=True)
    with pytest.warns(
        UserWarning, match="nothing is offloaded: a step takes 1000.0 ms, and 2000.0 ms by 'con"
    ):
        run(step, ws, x, 17)
    assert step.recipe == "saved"


def test_a_program_that_moves_nothing_has_nothing_to_tune(took, cache):
    step = jaxoff.jit(lambda x: x + 1, tune=True)
    assert step(jnp.ones(3)).tolist() == [2, 2, 2]
    assert (took.names, step.tuned, cache.exists()) == ([], {}, False)


def test_a_recipe_and_tune_exclude_each_other():
    with pytest.raises(ValueError, match=r"recipe= insists on one recipe.*got recipe='stock'"):
        jaxoff.jit(lambda x: x, tune=True, recipe="stock")


def test_one_of_several_processes_is_refused(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="in one process; got 2 processes"):
        tuning.refuse_several_processes()


def test_no_program_above_the_limit_is_timed():
    gigabytes: dict[str, float | None] = {"concurrent": 55.8, "ordered": 47.7, "stock": 48.4, "saved": 50.4}
    settings = [Setting(Recipe(name), ()) for name in gigabytes]

    def compile_setting(setting):
        if gigabytes[setting.recipe] is None:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")
        return compiled_of(int(1e9 * gigabytes[setting.recipe]))

    assert [s.recipe for s in list_within_limit(settings, compile_setting)] == ["ordered", "stock"]
    gigabytes["stock"] = None
    assert [s.recipe for s in list_within_limit(settings, compile_setting)] == ["ordered", "saved"]
    gigabytes.update(dict.fromkeys(gigabytes))
    assert [s.recipe for s in list_within_limit(settings, compile_setting)] == ["concurrent"]


def test_of_equal_times_the_preferred_program_stays():
    settings = [Setting(Recipe(name), ()) for name in ("concurrent", "ordered", "stock")]
    assert find_fastest(settings, {"concurrent": 100.2, "ordered": 100.0, "stock": 99.95}) is settings[0]
    assert find_fastest(settings, {"concurrent": 101.0, "ordered": 100.0, "stock": 99.95}) is settings[1]
    assert find_fastest(settings, {}) is None
