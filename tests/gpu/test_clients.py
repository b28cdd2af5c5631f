"""Other people's steps on a GPU: two orders of one graph give the same bits."""

import dataclasses

import jax
import numpy as np
import pytest

import jaxoff
from bench.client_steps import PROGRAMS
from tests.aot.test_clients import DEEP

pytestmark = pytest.mark.gpu

STEPS = 200
DETERMINISTIC = {"xla_gpu_deterministic_ops": True, "xla_gpu_autotune_level": 0}


def test_two_hundred_steps_have_the_same_bits_in_both_orders_of_a_graph():
    step = PROGRAMS["decoder-scan"].build(dataclasses.replace(DEEP, vocabulary=1 << 13), attention="xla")
    batch = step.make_batch(jax.random.key(1))

    def take_steps(recipe):
        jitted = step.jit(jaxoff.jit, compiler_options=DETERMINISTIC, recipe=recipe)
        state, losses = jax.jit(step.initialize)(jax.random.key(0)), []
        for _ in range(STEPS):
            state, loss = jitted(state, batch)
            losses.append(loss)
        moved = jitted.lower(state, batch).compile().memory_analysis().host_temp_size_in_bytes
        return [float(loss) for loss in losses], jax.tree.map(np.asarray, state), moved

    losses, state, moved = take_steps("concurrent")
    ordered_losses, ordered_state, _ = take_steps("ordered")
    assert moved > 0
    assert losses[-1] < losses[0]
    assert losses == ordered_losses
    jax.tree.map(np.testing.assert_array_equal, state, ordered_state)
