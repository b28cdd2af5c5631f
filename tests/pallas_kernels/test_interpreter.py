"""The interpreter sees what the tests of the kernels rely on it to see."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._implementation import count_cores
from tests.pallas_kernels.interpreter import interpreted, interpreting


def handover(ordered: bool):
    """One warpgroup writes a buffer and another reads it, with or without a barrier between."""

    def body(out_gmem, buffer, ready):
        wg = lax.axis_index("wg")

        @pl.when(wg == 0)
        def _():
            buffer[...] = jnp.ones((64, 64), jnp.float32)
            plgpu.barrier_arrive(ready)

        @pl.when(wg == 1)
        def _():
            if ordered:
                plgpu.barrier_wait(ready)
            out_gmem[...] = buffer[...]
            if not ordered:
                plgpu.barrier_wait(ready)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((64, 64), jnp.float32),
        grid=(1,),
        grid_names=("program",),
        num_threads=2,
        thread_name="wg",
        scratch_types=[plgpu.SMEM((64, 64), jnp.float32), plgpu.Barrier()],
    )


def test_a_race_fails_and_its_repair_passes():
    assert (interpreted(handover(ordered=True))() == 1).all()
    # jax 0.11 prints it and `interpreting` raises; jax 0.12 raises by itself.
    with pytest.raises((AssertionError, jax.errors.JaxRuntimeError), match="RACE DETECTED"):
        interpreted(handover(ordered=False))()


def test_what_a_kernel_does_not_write_is_nan():
    nothing = plgpu.kernel(
        lambda out: None,
        out_type=jax.ShapeDtypeStruct((8, 8), jnp.float32),
        grid=(1,),
        grid_names=("program",),
    )
    assert jnp.isnan(interpreted(nothing)()).all()


def test_the_number_of_programs_is_the_one_asked_for():
    with interpreting(5):
        assert count_cores() == 5
