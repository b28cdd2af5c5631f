"""A ring of slots in shared memory, which passes operands from the copying to the multiplying warpgroups."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


class Ring(NamedTuple):
    """The barriers of a ring. Step s of a program, counted through all tiles, uses slot s modulo the stages.

    Attributes:
      full: barrier of each slot, on which the copies into the slot arrive.
      empty: barrier of each slot, on which each multiplying warpgroup arrives after its reads of the slot.
      stages: number of slots.
    """

    full: Any
    empty: Any
    stages: int

    def slot(self, step):
        return lax.rem(step, jnp.int32(self.stages))

    def claim(self, step):
        """Waits until the step's slot is free and returns the slot."""
        slot = self.slot(step)

        @pl.when(step >= self.stages)
        def _():
            plgpu.barrier_wait(self.empty.at[slot])

        return slot

    def release(self, step) -> None:
        plgpu.barrier_arrive(self.empty.at[self.slot(step)])

    def multiply(self, begin, end, step, issue: Callable[[Any], None]):
        """Issues the products of a tile's steps `begin` to `end`. Step `begin` is `step` of the ring.

        A step's products run while the next step's are issued. Then the slot of the earlier step is released.
        `finish` releases the last slot. `issue` starts one product.

        Returns:
          The ring's step after the products.
        """

        def multiply_step(k, step):
            slot = self.slot(step)
            plgpu.barrier_wait(self.full.at[slot])
            issue(slot)
            plgpu.wgmma_wait(1)

            @pl.when(k > 0)
            def _():
                self.release(step + (self.stages - 1))

            return step + 1

        return lax.fori_loop(begin, end, multiply_step, step)

    def finish(self, step) -> None:
        """Waits for a tile's last product, with the ring at `step`, and releases the product's slot."""
        plgpu.wgmma_wait(0)
        self.release(step + (self.stages - 1))

    def skip(self, step, count) -> None:
        """Releases `count` steps without a product, for a warpgroup with an empty half tile."""

        def skip_step(_, step):
            plgpu.barrier_wait(self.full.at[self.slot(step)])
            self.release(step)
            return step + 1

        lax.fori_loop(0, count, skip_step, step)

    def drain(self, steps) -> None:
        """Waits for the last phase of every slot: a kernel may not end with an unobserved barrier phase."""

        def await_slot(j, _):
            plgpu.barrier_wait(self.empty.at[self.slot(steps + j)])

        lax.fori_loop(jnp.maximum(0, self.stages - steps), self.stages, await_slot, None)
