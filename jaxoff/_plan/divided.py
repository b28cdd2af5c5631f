"""A step divided into layer groups and the rest: the result of `divide_loss` and of `divide_step`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from jaxoff._plan.layer import Layer
from jaxoff._plan.timeline import Point


@dataclasses.dataclass(frozen=True)
class DividedStep:
    """A step divided into layer groups and the rest.

    A layer group is a checkpointed layer outside of loops, or a loop over such layers. Groups with equal
    programs are of the same kind.

    Attributes:
      layers: a layer for each kind of group.
      counts: kind -> number of groups.
      numbers: kind -> positions of the groups in their `jaxoff.layers`, in the order of the forward pass;
        empty outside of `jaxoff.layers`.
      runs: kind -> how often a step runs each group; more than once in a loop over microbatches.
      points: points of the step, in order.
      argument_nbytes: bytes of arguments and constants, which live for the whole step.
      outside_ms: estimated duration of all kernels outside of groups.
      devices: number of devices of the step. All other attributes apply to a single device.
    """

    layers: tuple[Layer, ...]
    counts: tuple[int, ...]
    numbers: tuple[tuple[int, ...], ...]
    runs: tuple[int, ...]
    points: tuple[Point, ...]
    argument_nbytes: int
    outside_ms: float
    devices: int = 1


@dataclasses.dataclass(frozen=True)
class ProgramKey:
    """The identity of programs: two programs are equal if jax prints both alike.

    Attributes:
      text: the program as jax prints it, with its variables numbered from the start.
    """

    text: str

    @classmethod
    def of(cls, jaxpr: Any) -> ProgramKey:
        """Returns the key of a program, open or closed."""
        return cls(str(jaxpr))


def collect_numbers(groups: Iterable[tuple[int, int | None]]) -> tuple[tuple[int, ...], ...]:
    """Returns: kind -> numbers of its groups; see `DividedStep.numbers`.

    Args:
      groups: kind and number of each group, in the order of the forward pass.
    """
    found: dict[int, list[int]] = {}
    for kind, number in groups:
        found.setdefault(kind, []).extend([] if number is None else [number])
    return tuple(tuple(found[kind]) for kind in sorted(found))
