"""Copies of indexed rows into a ring's slots, for a product whose rows are gathered on the way in.

The copy engine of Hopper takes consecutive rows only. Here the threads of the copying warpgroup copy the rows
by `cp.async`. The completion of such copies is known to the thread that waits, so a step is published a few
steps after its copies start, while the later steps' copies are in flight. The writes of these copies and the
tensor cores' reads take different paths to shared memory: each reader orders them by a fence, after it has
seen the publication. A fence of the writer would wait for the copies in flight.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._compat import (
    await_row_copies,
    fence_row_copies,
    in_interpret_mode,
    start_row_copies,
)
from pallas_kernels._mosaic.ring import Ring

# Columns of a tile in shared memory. Widths are multiples.
_PIECE = 64


class RowCopies(NamedTuple):
    """The copying warpgroup's side of a ring whose slots take gathered rows.

    Attributes:
      ring: the ring. A slot's barrier `full` counts one arrival for the gathered operand.
      transforms: the transforms of the slots.
      bounded: whether indices may be negative, and columns past the last.
    """

    ring: Ring
    transforms: tuple[Any, ...]
    bounded: bool

    @property
    def lag(self) -> int:
        """Steps whose copies are in flight before one of them is published.

        A slot is free once the step after its step is multiplied, so at most `stages - 1` steps start before
        a publication. With one step less, a step is published while the slot of the next is still in use.
        """
        return max(self.ring.stages - 2, 1)

    def start(self, step, x, columns, index, target) -> None:
        """Starts the copies of a step, `target[i] = x[index[i], columns]`.

        With `bounded`, a row with a negative index is zero, and so are columns past the last.
        """
        if in_interpret_mode():
            _copy_rows(x, columns, index, target)
        else:
            start_row_copies(x, columns.start, index, target, self.transforms, bounded=self.bounded)

    def publish_before(self, step) -> None:
        """Publishes an earlier step, once its copies are complete. Comes before a step's claim of its slot.

        After the claim, a publication would wait for the product that frees the slot.
        """

        @pl.when(step >= self.lag)
        def _():
            self._publish(step - self.lag, self.lag - 1)

    def finish(self, steps) -> None:
        """Publishes the last steps, after `steps` steps."""
        for left in range(self.lag - 1, -1, -1):

            @pl.when(steps > left)
            def _(left=left):
                self._publish(steps - 1 - left, left)

    def _publish(self, step, groups: int) -> None:
        if in_interpret_mode():
            plgpu.commit_smem()
        else:
            await_row_copies(groups)
        plgpu.barrier_arrive(self.ring.full.at[self.ring.slot(step)])


def _copy_rows(x, columns, index, target) -> None:
    """Copies rows in the interpreter, which knows no inline code."""
    tokens = index[...]
    for first in range(0, target.shape[1], _PIECE):
        column = columns.start + first
        piece = x[:, pl.ds(jnp.where(column < x.shape[1], column, 0), _PIECE)]
        inside = (tokens >= 0) & (column < x.shape[1])
        rows = piece.at[jnp.maximum(tokens, 0)].get(mode="promise_in_bounds")
        target[:, pl.ds(first, _PIECE)] = jnp.where(inside[:, None], rows, jnp.zeros_like(rows))


def fence_rows() -> None:
    """Orders a published step's copies before this warpgroup's products."""
    if not in_interpret_mode():
        fence_row_copies()


def pad_index(index: jax.Array, rows: int) -> jax.Array:
    """Pads an index: a tile or a step may begin at the last rows and read past them."""
    return jnp.pad(index, (0, rows))
