"""A ring of slots in shared memory, through which operands pass from one warpgroup to those that multiply."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


class Ring(NamedTuple):
    """Steps are counted through all tiles of a program; step s uses slot s modulo the number of stages.

    Attributes:
      full: a barrier for each slot, on which the copies into it arrive.
      empty: a barrier for each slot, on which each multiplying warpgroup arrives when it is done with it.
      stages: how many slots there are.
    """

    full: Any
    empty: Any
    stages: int

    def slot(self, step):
        return lax.rem(step, jnp.int32(self.stages))

    def claim(self, step):
        """Waits until the step's slot is free to be filled, and returns it."""
        slot = self.slot(step)

        @pl.when(step >= self.stages)
        def _():
            plgpu.barrier_wait(self.empty.at[slot])

        return slot

    def release(self, step) -> None:
        plgpu.barrier_arrive(self.empty.at[self.slot(step)])

    def multiply(self, begin, end, step, issue: Callable[[Any], None]):
        """Issues the products of a tile's steps `begin` to `end`, the first of which is `step` of the ring.

        One product is under way while the next is issued; only then is the slot of the first released.
        `finish` releases the last.

        Returns:
          the ring's step after them.
        """

        def one(k, step):
            slot = self.slot(step)
            plgpu.barrier_wait(self.full.at[slot])
            issue(slot)
            plgpu.wgmma_wait(1)

            @pl.when(k > 0)
            def _():
                self.release(step + (self.stages - 1))

            return step + 1

        return lax.fori_loop(begin, end, one, step)

    def finish(self, step) -> None:
        """Waits for the last product of a tile of at least one step, after which the ring is at `step`."""
        plgpu.wgmma_wait(0)
        self.release(step + (self.stages - 1))

    def skip(self, step, count) -> None:
        """Passes over steps, as a warpgroup does whose half of a tile holds nothing to compute."""

        def one(_, step):
            plgpu.barrier_wait(self.full.at[self.slot(step)])
            self.release(step)
            return step + 1

        lax.fori_loop(0, count, one, step)

    def drain(self, steps) -> None:
        """Sees the last phase of every slot: a barrier may not be given up with one that nobody saw."""

        def one(j, _):
            plgpu.barrier_wait(self.empty.at[self.slot(steps + j)])

        lax.fori_loop(jnp.maximum(0, self.stages - steps), self.stages, one, None)
