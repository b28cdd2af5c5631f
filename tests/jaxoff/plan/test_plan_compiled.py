"""`compile_step` of `jaxoff.plan`: plans checked by what their compiled programs take."""

import functools

import jax
import jax.numpy as jnp
import pytest

import jaxoff
from jaxoff._plan import compiled as compiled_plans
from jaxoff._plan.plan import Planner
from jaxoff._runtime.program_memory import program_nbytes
from tests.jaxoff.plan.planned import DEVICE, arguments, scanned
from tests.jaxoff.plan.test_plan import HOST, PLENTY, planned, smallest


@functools.cache
def compiled(policy):
    return jaxoff.jit(jax.value_and_grad(scanned(policy=policy), (0, 1))).lower(*arguments()).compile()


@pytest.mark.parametrize("share", [1.0, 0.8])
def test_a_compiled_plan_fits_where_a_predicted_one_may_not(share):
    """Programs for a CPU take more than is predicted for a GPU."""
    whole = planned(compile_step=compiled, host_bytes=HOST)
    assert whole.policy == planned(host_bytes=HOST).policy
    assert whole.compiled_bytes == program_nbytes(compiled(whole.policy)) > whole.peak_bytes
    budget = share * whole.compiled_bytes - 1
    tried = []

    def compile_step(policy):
        step = compiled(policy)
        tried.append(program_nbytes(step))
        return step

    found = planned(device_bytes=budget, compile_step=compile_step, host_bytes=HOST)
    assert found.compiled_bytes is not None
    assert found.compiled_bytes == max(nbytes for nbytes in tried if nbytes <= budget)
    assert found.device_bytes == int(budget) and found.policy != whole.policy
    assert f"(compiled {found.compiled_bytes / 1e3:.2f} kB)" in str(found)
    assert jaxoff.Plan.from_json(found.to_json()) == found
    more = dict(device_bytes=budget + 10**6, resident_bytes=10**6)
    resident = planned(**more, compile_step=compile_step, host_bytes=HOST)
    assert resident.compiled_bytes == found.compiled_bytes + 10**6


@pytest.mark.parametrize("excess", [0, 1])
def test_the_smallest_plan_is_tried_before_a_budget_is_given_up(monkeypatch, excess):
    """However much more than predicted another one took."""
    budget = int(1.5 * smallest(margin=0))
    held = iter([10 * budget, budget + excess])
    monkeypatch.setattr(compiled_plans, "program_nbytes", lambda _: next(held, 10 * budget))
    some_program = jax.jit(jnp.sin).lower(1.0).compile()

    def found():
        return planned(device_bytes=budget, compile_step=lambda _: some_program)

    if excess:
        with pytest.raises(jaxoff.BudgetError, match=f"of 2 plans the smallest takes {budget + 1} bytes"):
            found()
        return
    assert found().compiled_bytes == budget
    assert next(held, None) is None


def test_one_plan_that_takes_too_much_does_not_cost_the_others(monkeypatch):
    """Where all others take what is predicted, the best of those is found, whatever the first one takes."""
    some_program = jax.jit(jnp.sin).lower(1.0).compile()
    least, budget = smallest(margin=0), int(1.5 * smallest(margin=0))
    tried = []

    def compile_step(policy):
        tried.append(policy)
        return some_program

    def held(_):
        return 10 * budget if len(tried) == 1 else budget

    monkeypatch.setattr(compiled_plans, "program_nbytes", held)
    found = planned(device_bytes=budget, compile_step=compile_step)
    refused = planned(device_bytes=budget, margin=0.0)
    assert tried[0] == refused.policy != found.policy
    assert refused.step_ms <= found.step_ms < planned(device_bytes=1.001 * least, margin=0.0).step_ms
    assert len(tried) == len(set(tried)) <= 5


@pytest.fixture(scope="module")
def by_prediction():
    """Plans by budget, as predicted, and the least and the greatest of those budgets."""
    planner = Planner.of(scanned(), arguments(), {}, device=DEVICE)

    @functools.cache
    def cached(device_bytes=PLENTY):
        return planner.plan(device_bytes, HOST, {}, 0.0)

    least, most = smallest(margin=0, host_bytes=HOST), cached().peak_bytes
    plans = [cached(device_bytes=1.001 * (least + i * (most - least) / 120)) for i in range(121)]
    return cached, plans, least, most


@pytest.mark.parametrize("share", [0.8, 1.0])
def test_what_compiled_plans_leave_is_used(monkeypatch, by_prediction, share):
    """Where all take the same share of what is predicted, the plan is the one for as much more."""
    some_program = jax.jit(jnp.sin).lower(1.0).compile()
    predict, plans, least, most = by_prediction
    peaks = {plan.policy: plan.peak_bytes for plan in plans}
    tried = []

    def compile_step(policy):
        tried.append(policy)
        return some_program

    monkeypatch.setattr(compiled_plans, "program_nbytes", lambda _: round(share * peaks.get(tried[-1], most)))
    budget = (least + most) // 2
    found = planned(device_bytes=budget, host_bytes=HOST, compile_step=compile_step)
    assert tried[0] == predict(device_bytes=budget).policy
    assert found.compiled_bytes == round(share * found.peak_bytes) <= budget == found.device_bytes
    if share == 1.0:
        assert tried == [found.policy]
    else:
        assert found.step_ms < predict(device_bytes=budget).step_ms
        assert found.peak_bytes > budget
        assert len(tried) <= 4


def test_a_budget_that_no_compiled_plan_fits():
    budget = 1.01 * smallest(margin=0)
    with pytest.raises(jaxoff.BudgetError, match=r"is less than any compiled step takes: of ") as raised:
        planned(device_bytes=budget, compile_step=compiled)
    least = raised.value.smallest_bytes
    assert least is not None and least > budget
    assert "the device then holds arguments" in str(raised.value)
    assert planned(device_bytes=least, compile_step=compiled).compiled_bytes == least


def test_what_is_not_compiled_is_refused():
    with pytest.raises(TypeError, match=r"compile_step returns a compiled step, .*got Lowered"):
        planned(compile_step=lambda _: jax.jit(jnp.sin).lower(1.0))
