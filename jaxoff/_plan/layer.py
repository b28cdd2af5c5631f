"""A layer as a planner sees it: what it makes, what that costs, and who needs it when."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxoff._policy.decision import Placement

# Stands for the outputs of dots and convolutions that have no name.
UNNAMED_DOTS = "(dots)"
# All that stands for values without a name.
UNNAMED = (UNNAMED_DOTS, "(offload)", "(not_offload)")
# Ends the labels of layers that are placed otherwise than the first ones.
_OTHERS = "\0others"


@dataclasses.dataclass(frozen=True)
class Value:
    """What the forward pass of a layer makes, or takes from the layer before.

    Attributes:
      nbytes: of one iteration.
      is_large: whether it is more than half as large as the layer's largest.
      ms: how long making it again takes.
      reads: numbers of the values that it is made from, smaller than its own.
      first, last: the first and the last step of the backward pass that reads it; None if none does.
      label: what decides where it lives, if something does.
      fixed: where a mark puts it.
      carried: whether the layer takes it from the layer before.
      shape, source: for people.
      made_ms: when the forward pass has made it.
      stored_ms: how long it takes to write it into the stack that saves it, unless the elementwise kernel
        that makes it writes it there alone.
      copied: the first and the last step of the backward pass that needs a copy of it if it is in a stack.
      same_as: the number of a value that this is another name of, in the same memory.
    """

    nbytes: int
    is_large: bool
    ms: float
    reads: tuple[int, ...]
    first: int | None = None
    last: int | None = None
    label: str | None = None
    fixed: Placement | None = None
    carried: bool = False
    shape: str = ""
    source: str = ""
    made_ms: float = 0.0
    stored_ms: float = 0.0
    copied: tuple[int, int] | None = None
    same_as: int | None = None


@dataclasses.dataclass(frozen=True)
class Step:
    """A kernel, and the memory that is in use while it runs but for values of the forward pass that wait.

    Attributes:
      what: the operation.
      small, large: bytes in use, of values up to half as large as the layer's largest and of others.
      written: of the small ones, results of the part, which can be written to their place at once.
      ends_ms: when it is done.
      handed_on: of the small ones, what can take the memory of the cotangent.
      shared: kernels that it may be one with.
      fills: whether small kernels find no room beside it.
    """

    what: str
    small: int
    large: int
    written: int
    ends_ms: float
    handed_on: int = 0
    shared: tuple[Shared, ...] = ()
    fills: bool = False


@dataclasses.dataclass(frozen=True)
class Shared:
    """What a kernel reads of a stack, and others read to make values again: XLA makes one kernel of them.

    It has several results, and writes none of them over what it reads.

    Attributes:
      value: the number of what they read.
      again: the numbers of what the others make.
      small, large: bytes that the kernel alone would have written over something.
    """

    value: int
    again: tuple[int, ...]
    small: int
    large: int


@dataclasses.dataclass(frozen=True)
class Layer:
    """An iteration of a part.

    Attributes:
      iterations: how many.
      values: of the forward pass.
      forward, backward: the steps of the two passes; the backward pass if nothing is made again.
      source: where it is written.
      in_order: whether `jaxoff.jit` puts its iterations in order even if it moves nothing.
      paced_ms: the times of the two passes; None for those at which the last steps end.
      within: labels of what loops and branches in it make: a policy would keep it for each of their
        iterations.
    """

    iterations: int
    values: tuple[Value, ...]
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    source: str
    in_order: bool = False
    paced_ms: tuple[float, float] | None = None
    within: frozenset[str] = frozenset()

    @property
    def forward_ms(self) -> float:
        return self.paced_ms[0] if self.paced_ms else _ends_ms(self.forward)

    @property
    def backward_ms(self) -> float:
        return self.paced_ms[1] if self.paced_ms else _ends_ms(self.backward)

    @property
    def forward_ends_ms(self) -> float:
        """When the forward pass ends by the estimates of `jaxoff.jit`, which times copies by them."""
        return _ends_ms(self.forward)

    def with_iterations(self, iterations: int, *, others: bool) -> Layer:
        """The same layer in so many iterations: first ones, or others."""
        if not others:
            return dataclasses.replace(self, iterations=iterations)
        values = tuple(
            value if value.label is None else dataclasses.replace(value, label=of_others(value.label))
            for value in self.values
        )
        return dataclasses.replace(self, iterations=iterations, values=values)

    def labels(self) -> dict[str, None]:
        """What decides, in the order in which it is made."""
        return {value.label: None for value in self.values if value.label is not None and not value.fixed}


def of_others(label: str) -> str:
    """The label that stands for a name in layers that are placed otherwise than the first ones."""
    return label + _OTHERS


def is_of_others(label: str) -> bool:
    """Whether a label stands for a name there."""
    return label.endswith(_OTHERS)


def name_of(label: str) -> str:
    """The name that a label stands for."""
    return label.removesuffix(_OTHERS)


def _ends_ms(steps: Sequence[Step]) -> float:
    return steps[-1].ends_ms if steps else 0.0
