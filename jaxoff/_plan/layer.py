"""A layer for the planner: the values of its forward pass, their costs, and the kernels of both passes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jaxoff._policy.decision import Placement

# Label -> placement of all values with this label. A label without an entry is recomputed.
type Placements = Mapping[Label, Placement]

# The name under which the outputs of dots and convolutions without a name are placed.
UNNAMED_DOTS = "(dots)"
# All names of values without a name: unnamed dots, and values with a mark only.
UNNAMED = (UNNAMED_DOTS, "(offload)", "(not_offload)")


@dataclasses.dataclass(frozen=True)
class Label:
    """The unit of placement: all values with the same label have the same placement.

    Attributes:
      name: as given to `jaxoff.name`, or a member of `UNNAMED`.
      of_others: whether the label covers the layers after the first ones. False where first layers are not
        placed apart from the others.
    """

    name: str
    of_others: bool = False


@dataclasses.dataclass(frozen=True)
class LayerValue:
    """An array of a layer's forward pass: a kernel's result, the layer's input, or a row of a stack of
    weights.

    Attributes:
      nbytes: bytes of one iteration.
      is_large: whether the value is large; see `LARGE_PART`. XLA seldom puts small values into buffers of
        large ones.
      recompute_ms: duration of recomputation.
      reads: indices of the values from which the kernel computes this value; all smaller than its own index.
      first_reader, last_reader: indices of the first and the last reader of the value among the kernels of
        the backward pass; None without a reader.
      label: the label of the value, or None.
      fixed: the placement by a mark, or None.
      is_carried: whether the value is a result of the layer before.
      shape: dtype and shape, for tables.
      produced_ms: time at which the forward pass has computed the value, by the scheduler's estimates.
      store_ms: duration of the copy into the stack of saved rows; 0 where an elementwise kernel writes
        its result into the stack directly.
      row_copy: indices of the first and the last kernel of the backward pass that need a copy of the value's
        row, if the value is saved in a stack; None where all kernels read the row in the stack.
      alias_of: index of the value with the same contents in the same buffer under another name, or None.
    """

    nbytes: int
    is_large: bool
    recompute_ms: float
    reads: tuple[int, ...]
    first_reader: int | None = None
    last_reader: int | None = None
    label: Label | None = None
    fixed: Placement | None = None
    is_carried: bool = False
    shape: str = ""
    produced_ms: float = 0.0
    store_ms: float = 0.0
    row_copy: tuple[int, int] | None = None
    alias_of: int | None = None


@dataclasses.dataclass(frozen=True)
class KernelUse:
    """A kernel of a pass, and the memory in use while the kernel runs, without the residuals.

    Attributes:
      operation: primitive and source line, for messages.
      small_nbytes, large_nbytes: bytes in use, of small and of large values.
      stacked_nbytes: part of `small_nbytes`: gradients written into their stacks directly.
      ends_ms: time from the start of the pass to the kernel's end, by the scheduler's estimates.
      in_cotangent_nbytes: part of `small_nbytes`: results in the buffer of a cotangent.
      fusions: possible fusions with recomputation kernels.
      fills_device: whether no small kernel can run concurrently.
    """

    operation: str
    small_nbytes: int
    large_nbytes: int
    stacked_nbytes: int
    ends_ms: float
    in_cotangent_nbytes: int = 0
    fusions: tuple[RecomputeFusion, ...] = ()
    fills_device: bool = False


@dataclasses.dataclass(frozen=True)
class RecomputeFusion:
    """A stack row read both by a kernel of the backward pass and by recomputation kernels.

    XLA fuses the readers into a multi-output kernel, whose results cannot reuse the buffer of an operand.

    Attributes:
      value: index of the value in the row.
      recomputed: indices of the values recomputed by the other readers.
      small_nbytes, large_nbytes: bytes of operands whose buffers the kernel alone would reuse.
    """

    value: int
    recomputed: tuple[int, ...]
    small_nbytes: int
    large_nbytes: int


@dataclasses.dataclass(frozen=True)
class Layer:
    """One iteration of a layer group: a loop over equal layers, or a layer outside of loops.

    Attributes:
      iterations: iterations of the loop; 1 outside of loops.
      values: the values of the forward pass.
      forward, backward: the kernels of both passes; the backward pass without recomputation.
      source: file and line of the layer.
      is_ordered: whether `jaxoff.jit` orders the kernels of an iteration even without copies, as in
        `jaxoff.scan`.
      pass_times_ms: durations of the forward and the backward pass within a step; None for the times at which
        the last kernels end.
      inner_names: names of values in loops and branches inside of the layer. A policy would keep these values
        for each inner iteration.
    """

    iterations: int
    values: tuple[LayerValue, ...]
    forward: tuple[KernelUse, ...]
    backward: tuple[KernelUse, ...]
    source: str
    is_ordered: bool = False
    pass_times_ms: tuple[float, float] | None = None
    inner_names: frozenset[str] = frozenset()

    @property
    def forward_ms(self) -> float:
        """Duration of the forward pass within a step."""
        return self.pass_times_ms[0] if self.pass_times_ms else _end_ms(self.forward)

    @property
    def backward_ms(self) -> float:
        """Duration of the backward pass within a step, without recomputation."""
        return self.pass_times_ms[1] if self.pass_times_ms else _end_ms(self.backward)

    @property
    def scheduled_forward_ms(self) -> float:
        """Duration of the forward pass by the estimates with which `jaxoff.jit` times copies."""
        return _end_ms(self.forward)

    @property
    def labels(self) -> tuple[Label, ...]:
        """The labels whose placement is free, in the order in which their values are computed."""
        labels = (value.label for value in self.values if not value.fixed)
        return tuple(dict.fromkeys(label for label in labels if label is not None))

    def restrict(self, iterations: int, *, of_others: bool) -> Layer:
        """Returns the same layer with another number of iterations, as first layers or as the others."""
        if not of_others:
            return dataclasses.replace(self, iterations=iterations)
        values = tuple(
            value if value.label is None else dataclasses.replace(value, label=Label(value.label.name, True))
            for value in self.values
        )
        return dataclasses.replace(self, iterations=iterations, values=values)


def _end_ms(kernels: Sequence[KernelUse]) -> float:
    return kernels[-1].ends_ms if kernels else 0.0
