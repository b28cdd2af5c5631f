"""Budgets on a GPU: the steps of the plain program, in the memory that was asked for."""

import dataclasses

import jax
import numpy as np
import pytest

import jaxoff
from bench.client_steps import PROGRAMS
from jaxoff._runtime.program_memory import program_nbytes
from tests.aot.test_clients import DEEP

pytestmark = pytest.mark.gpu

STEPS = 5


@pytest.mark.parametrize("name", ["decoder-scan", "nnx-scan", "decoder-python", "nnx-list"])
def test_steps_within_a_budget_are_those_of_the_plain_program(name):
    program = dataclasses.replace(PROGRAMS[name], offloads=None)
    step = program.build(dataclasses.replace(DEEP, vocabulary=1 << 15), attention="xla")
    batch = step.make_batch(jax.random.key(1))

    def take_steps(jitted):
        state, losses = jax.jit(step.initialize)(jax.random.key(0)), []
        for _ in range(STEPS):
            state, loss = jitted(state, batch)
            losses.append(float(loss))
        return losses

    plain = jax.jit(step.fun, donate_argnums=0)
    most = program_nbytes(plain.lower(step.state, step.batch).compile())
    expected = take_steps(plain)
    assert expected[-1] < expected[0]
    for part in (2.0, 0.4):
        planned = jaxoff.jit(step.fun, donate_argnums=0, device_bytes=part * most)
        np.testing.assert_allclose(take_steps(planned), expected, rtol=1e-2)
        assert program_nbytes(planned.lower(step.state, step.batch).compile()) <= part * most
        assert planned.plan.peak_bytes <= part * most
    assert planned.plan.in_parts


def test_programs_within_a_budget_are_compared_by_time(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXOFF_CACHE_DIR", str(tmp_path))
    step = dataclasses.replace(PROGRAMS["decoder-scan"], offloads=None).build(DEEP, attention="xla")
    batch = step.make_batch(jax.random.key(1))
    plain = jax.jit(step.fun, donate_argnums=0)
    budget = 1.01 * program_nbytes(plain.lower(step.state, step.batch).compile())
    tuned = jaxoff.jit(step.fun, donate_argnums=0, device_bytes=budget, tune=True)
    state = jax.jit(step.initialize)(jax.random.key(0))
    for _ in range(32):
        state, _ = tuned(state, batch)
    assert any(name.startswith("as written") for name in tuned.tuned)
    assert any(name.startswith("planned") for name in tuned.tuned)
    assert tuned.plan.peak_bytes <= budget
    assert program_nbytes(tuned.lower(step.state, step.batch).compile()) <= budget
    fastest = min(tuned.tuned.values())
    assert any(tuned.recipe in name and ms <= 1.003 * fastest for name, ms in tuned.tuned.items())


def test_the_budget_that_fits_is_the_limit_of_the_allocator():
    step = dataclasses.replace(PROGRAMS["decoder-scan"], offloads=None).build(DEEP, attention="xla")
    batch = step.make_batch(jax.random.key(1))
    planned = jaxoff.jit(step.fun, donate_argnums=0, device_bytes="fit")
    planned(jax.jit(step.initialize)(jax.random.key(0)), batch)[1].block_until_ready()
    limit = jax.local_devices()[0].memory_stats()["bytes_limit"]
    assert 0 < planned.plan.peak_bytes <= planned.plan.device_bytes <= limit
