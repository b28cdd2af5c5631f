"""Copies of indexed rows into a ring's slots, for a product whose rows are gathered on the way in.

The copy engine of Hopper takes consecutive rows only. Here the threads of the copying warpgroup copy the rows
by `cp.async`. The completion of such copies is known to the thread that waits, so a step is published a few
steps after its copies start, while the later steps' copies are in flight.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._compat import (
    await_row_copies,
    commit_row_copies,
    in_interpret_mode,
    start_row_copies,
)
from pallas_kernels._mosaic.ring import Ring


class RowCopies(NamedTuple):
    """The copying warpgroup's side of a ring whose slots take gathered rows.

    Attributes:
      ring: the ring. A slot's barrier `full` counts one arrival for the gathered operand.
      transforms: the transforms of the slots.
    """

    ring: Ring
    transforms: tuple[Any, ...]

    @property
    def lag(self) -> int:
        """Steps between the start of a step's copies and the step's publication."""
        return max(1, self.ring.stages - 2)

    def start(self, x, columns, index, rows, target) -> None:
        """Starts the copies `target[i] = x[index[rows][i], columns]`, one group."""
        if not in_interpret_mode():
            start_row_copies(x.at[:, columns], index.at[rows], target, self.transforms)
            return

        # The interpreter knows no inline code.
        def copy_row(i, _):
            token = index[rows.start + i]
            target[pl.ds(i, 1)] = x[pl.ds(token, 1), columns]

        lax.fori_loop(0, target.shape[0], copy_row, None)

    def skip(self) -> None:
        """Counts a group without copies."""
        if not in_interpret_mode():
            commit_row_copies()

    def publish(self, step) -> None:
        """Publishes the step `lag` steps before `step`, whose group was the last to start."""

        @pl.when(step >= self.lag)
        def _():
            self._publish(step - self.lag, self.lag)

    def finish(self, steps) -> None:
        """Publishes the last steps, after `steps` steps."""
        for left in range(self.lag - 1, -1, -1):

            @pl.when(steps > left)
            def _(left=left):
                self._publish(steps - 1 - left, left)

    def _publish(self, step, groups: int) -> None:
        if not in_interpret_mode():
            await_row_copies(groups)
        # The tensor cores read the slot by another path than these copies' writes.
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.ring.full.at[self.ring.slot(step)])


def pad_index(index: jnp.ndarray, rows: int) -> jnp.ndarray:
    """Pads an index: a tile or a step may begin at the last rows and read past them."""
    return jnp.pad(index, (0, rows))
