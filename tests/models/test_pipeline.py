"""The schedule of the pipeline: who does what in which tick, and how many ticks nobody needs."""

import jax.numpy as jnp
import numpy as np
import pytest

from models.errors import InputError
from models.pipeline import Schedule

SHAPES = [(1, 1, 3), (1, 2, 3), (2, 1, 2), (2, 2, 4), (4, 1, 8), (4, 2, 4), (4, 3, 8)]


@pytest.mark.parametrize(("pipe", "virtual", "microbatches"), SHAPES)
def test_each_microbatch_passes_all_stages_one_after_the_other(pipe, virtual, microbatches):
    schedule, seen = Schedule(pipe, virtual, microbatches), {}
    for tick in range(schedule.ticks):
        for rank in range(pipe):
            at = schedule.at(jnp.int32(tick), jnp.int32(rank))
            if at.busy:
                stage = int(at.stage) * pipe + rank
                seen.setdefault(int(at.microbatch), []).append((stage, tick))
    assert sorted(seen) == list(range(microbatches))
    for stages in seen.values():  # one tick apart: what a rank hands on is used at once
        first = stages[0][1]
        assert stages == [(stage, first + stage) for stage in range(pipe * virtual)]


@pytest.mark.parametrize(("pipe", "virtual", "microbatches"), SHAPES)
def test_the_bubble_is_that_of_the_formula(pipe, virtual, microbatches):
    schedule = Schedule(pipe, virtual, microbatches)
    ticks = jnp.arange(schedule.ticks)
    for rank in range(pipe):
        busy = int(schedule.at(ticks, jnp.int32(rank)).busy.sum())
        assert busy == microbatches * virtual
        assert (schedule.ticks - busy) / busy == schedule.bubble == (pipe - 1) / (virtual * microbatches)


@pytest.mark.parametrize(("pipe", "virtual", "microbatches"), SHAPES)
def test_finished_microbatches_come_from_the_last_stage_in_their_order(pipe, virtual, microbatches):
    schedule = Schedule(pipe, virtual, microbatches)
    at = schedule.at(jnp.arange(schedule.ticks), jnp.int32(pipe - 1))
    made = jnp.stack([at.microbatch, at.stage, at.busy.astype(jnp.int32)], axis=1)
    want = [[i, virtual - 1, 1] for i in range(microbatches)]
    np.testing.assert_array_equal(schedule.select_finished(made), want)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, 0, 2), "--virtual is at least 1, got 0"),
        ((4, 1, 6), "a multiple of 4 microbatches a step, got 6"),
        ((2, 1, 0), "got 0"),
    ],
)
def test_a_pipeline_that_does_not_fill_is_refused(shape, message):
    with pytest.raises(InputError, match=message):
        Schedule(*shape)
