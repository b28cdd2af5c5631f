"""Durations of a layer, and the states of its values under a placement."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Times:
    """The duration of a step, in ms, by cause.

    Attributes:
      kernels: kernels of every placement.
      recomputed: recomputation kernels.
      slowed: slowdown of kernels during copies.
      exposed_forward, exposed_backward: copies not hidden by kernels.
      stored: copies of saved values into the stacks of loops.
    """

    kernels: float = 0.0
    recomputed: float = 0.0
    slowed: float = 0.0
    exposed_forward: float = 0.0
    exposed_backward: float = 0.0
    stored: float = 0.0

    @property
    def total(self) -> float:
        """The sum of all causes."""
        return sum(dataclasses.astuple(self))

    def __add__(self, other: Times) -> Times:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Times(*(a + b for a, b in pairs))

    def __mul__(self, times: int) -> Times:
        return Times(*(times * part for part in dataclasses.astuple(self)))


@dataclasses.dataclass(frozen=True)
class ValueStates:
    """The state of each value of a layer under a placement, by the value's index.

    A value without use in the backward pass is in none of the three sets.

    Attributes:
      recomputed: indices of values recomputed in the backward pass.
      saved, offloaded: indices of values waiting on the device and in host memory.
      is_ordered: whether `jaxoff.jit` orders the kernels of an iteration.
      has_copies: whether any layer of the step offloads a value. XLA then runs the step as CUDA graphs whose
        edges are data dependencies.
    """

    recomputed: frozenset[int]
    saved: frozenset[int]
    offloaded: frozenset[int]
    is_ordered: bool
    has_copies: bool

    @property
    def is_packed(self) -> bool:
        """Whether the kernels run strictly in sequence, so that a buffer may hold several values in turn.

        In CUDA graphs with data dependencies, which copies need, each value has a buffer for the whole
        iteration.
        """
        return self.is_ordered and not self.has_copies
