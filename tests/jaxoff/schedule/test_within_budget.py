"""What runs within a budget: the placements found, or the step as its user wrote it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxoff
from jaxoff._budget.joint_graph import Placements
from jaxoff._budget.placements import LayeredProgram
from jaxoff._budget.tried import Tried
from jaxoff._jaxpr.primitives import holds_copies
from jaxoff._schedule import within_budget


@pytest.mark.parametrize(("plan_ms", "is_written"), [(1e6, True), (0.0, False)])
def test_the_step_as_written_runs_where_it_fits_and_is_faster_than_placements_with_copies(
    monkeypatch, plan_ms, is_written
):
    def find_with_copies(closed, device, budget, donated, compile_program, **options):
        layered = LayeredProgram(closed)
        (pair,) = layered.list_joint_graphs()
        placed = Placements((), tuple(range(len(pair.carried))))
        nbytes, program = compile_program(layered.write(lambda _: placed))
        times = {"added_ms": plan_ms, "is_fastest": False, "base_ms": 0.0}
        return Tried((pair,), (placed,), (), nbytes=nbytes, programs=1, program=program, **times)

    monkeypatch.setattr(within_budget, "find_fitting", find_with_copies)
    layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None), policy=jax.checkpoint_policies.dots_saveable)

    def loss(w, x):
        return lax.scan(layer, x, w)[0].sum()

    w, x = jnp.full((3, 8, 8), 0.1), jnp.ones((4, 8))
    step = jaxoff.jit(jax.grad(loss), device_bytes="1GB")
    np.testing.assert_allclose(step(w, x), jax.jit(jax.grad(loss))(w, x), rtol=1e-6)
    assert (step.plan.host_bytes == 0) == is_written
    assert holds_copies(step.trace(w, x).jaxpr.jaxpr) != is_written
