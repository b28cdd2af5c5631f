"""A stack of residuals in host memory, between the loop writing its rows and the loop reading its rows."""

from __future__ import annotations

import contextlib
import dataclasses

from jaxoff._jaxpr import scopes
from jaxoff._jaxpr.provenance import Origin


@dataclasses.dataclass(frozen=True)
class HostStack:
    """A stack in host memory which one loop writes and another loop reads in the opposite direction.

    Attributes:
      writer, reader: indices of the equations of the two loops.
      ys, xs: index of the stack among the ys of the writer, and among the xs of the reader.
      prefetched: iteration i of the reader reloads the row of iteration i+1.
      send_deferred: iteration i of the writer sends the value of iteration i-1, because the send would not
        finish in its own iteration. Implies `prefetched`: the last value stays on the device and starts the
        reader.
      overwrites: with `send_deferred`, whether the writer's kernel writes the new value into the buffer of
        the previous value, which is sent before. Otherwise the device copies the new value there after the
        send.
      row_offset: number of rows before the first layer's row: 1 if the spare row is first, 0 if it is last.
      value: the origin of a row.
    """

    writer: int
    ys: int
    reader: int
    xs: int
    prefetched: bool
    send_deferred: bool
    overwrites: bool
    row_offset: int
    value: Origin = dataclasses.field(repr=False, compare=False)

    def mark_copies(self) -> contextlib.AbstractContextManager[None]:
        """A context for the equations that write or read a row: they name the value."""
        eqn, tag = self.value.eqn, self.value.tag
        return contextlib.nullcontext() if eqn is None else scopes.mark_copies(eqn, tag and tag.label)
