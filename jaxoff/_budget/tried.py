"""A program that a search tried, and what its compiled memory says of the next."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from jaxoff._budget.choose import saved_nbytes
from jaxoff._budget.costs import Costs
from jaxoff._budget.joint_graph import JointGraph, Placements
from jaxoff._budget.limits import Budget
from jaxoff._budget.regions import Region
from jaxoff._budget.report import PlacedValue, Plan, describe_kept, list_values, merge_rows, shorten
from jaxoff._device.profile import Device
from jaxoff._report.tables import format_nbytes

# The most by which a step towards the budget may be longer than the excess: the reciprocal.
_LEAST_SLOPE = 1 / 16


@dataclasses.dataclass(frozen=True)
class Tried[P]:
    """A program of the search.

    Attributes:
      pairs: the pairs of loops.
      placements: by pair of loops.
      regions: the regions in parts.
      added_ms: the time added to a step by the placements, by the model.
      is_fastest: whether no placements are faster in any memory, by the model.
      base_ms: the time of a step without what its placements add, by the model.
      nbytes: device memory of the compiled program.
      programs: the number of programs tried up to now.
      program: the second result of the caller's `compile_program`.
      tiles: the regions of layers in parts.
    """

    pairs: tuple[JointGraph, ...]
    placements: tuple[Placements, ...]
    regions: tuple[Region, ...]
    added_ms: float
    is_fastest: bool
    base_ms: float
    nbytes: float
    programs: int
    program: P
    tiles: tuple[Region, ...] = ()

    def milliseconds(self) -> float:
        """The time of a step, by the model."""
        return self.base_ms + self.added_ms

    def describe(self, device_nbytes: float, devices: int) -> str:
        """What the program takes of a budget, as text.

        Args:
          device_nbytes: the budget.
          devices: the number of devices whose bytes are counted together.
        """
        takes = format_nbytes(int(self.nbytes / devices)) if self.compiles else "more than XLA compiles"
        takes += ", too much" if self.compiles and self.nbytes > device_nbytes else ""
        return f"takes {takes}, with {describe_kept(self.list_values())}{' on all devices' * (devices > 1)}"

    @property
    def compiles(self) -> bool:
        """Whether XLA compiles the program."""
        return math.isfinite(self.nbytes)

    def list_values(self) -> tuple[PlacedValue, ...]:
        """The values of all layers with their placements."""
        pairs = zip(self.pairs, self.placements, strict=True)
        return merge_rows(list_values(pair, placements) for pair, placements in pairs)

    def make_plan(self, budget: Budget, device: Device, step: Any, *, is_compiled: bool = True) -> Plan:
        """The plan of this program, for a step within the budget by a profile's rates."""
        values = self.list_values()
        return Plan(
            device_bytes=budget.device_nbytes,
            peak_bytes=self.nbytes,
            host_bytes=sum(v.nbytes for v in values if v.placement == "offload"),
            step_ms=self.milliseconds(),
            device=device.name,
            is_compiled=is_compiled,
            programs=self.programs,
            values=values,
            in_parts=tuple(dict.fromkeys(shorten(str(region)) for region in (*self.regions, *self.tiles))),
            is_fastest=self.is_fastest,
            step=step,
        )


def correct_room(costs: Sequence[Costs], tried: Sequence[Tried[Any]], device_nbytes: float) -> float:
    """Room for kept values, by the compiled memory of the programs nearest to the budget."""
    nearest = min(tried, key=lambda t: abs(t.nbytes - device_nbytes))
    if math.isinf(nearest.nbytes):
        return saved_nbytes(costs, nearest.placements) / 2
    over = nearest.nbytes - device_nbytes
    # Down by a little more than the excess, up by a little less than the rest.
    room = saved_nbytes(costs, nearest.placements) - over / _find_slope(costs, tried, device_nbytes)
    return max(0.0, room - abs(over) * 0.05)


def _find_slope(costs: Sequence[Costs], tried: Sequence[Tried[Any]], device_nbytes: float) -> float:
    """Compiled bytes by byte of kept values, where the two latest programs are over the budget.

    Memory may be largest where few of the values are held that the latest program keeps no longer. Where it
    takes more than the one before, the two say nothing.
    """
    if len(tried) < 2 or not all(device_nbytes < t.nbytes < math.inf for t in tried[-2:]):
        return 1.0
    before, latest = tried[-2:]
    if before.nbytes < latest.nbytes:
        return 1.0
    fewer = saved_nbytes(costs, before.placements) - saved_nbytes(costs, latest.placements)
    return min(1.0, max((before.nbytes - latest.nbytes) / fewer, _LEAST_SLOPE)) if fewer > 0 else 1.0
