"""The forms of a program that a search takes: whole, or with regions in parts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

from jaxoff._budget.choose import choose_placements
from jaxoff._budget.costs import Costs
from jaxoff._budget.joint_graph import JointGraph, Placements
from jaxoff._budget.limits import Budget
from jaxoff._budget.parts import write_layers_in_parts
from jaxoff._budget.placements import LayeredProgram
from jaxoff._budget.regions import Region
from jaxoff._budget.segments import Segments
from jaxoff._device.kernel_time import lower_clock, program_ms
from jaxoff._device.profile import Device
from jaxoff._jaxpr.compat import ClosedJaxpr
from jaxoff._jaxpr.joined_conditions import join_conditions
from jaxoff._jaxpr.kernels import KernelGraph
from jaxoff._jaxpr.merged_maps import merge_shard_maps

NO_COPIES = 0.0  # bytes of host memory


@dataclasses.dataclass(frozen=True, eq=False)
class Form:
    """A form of the program: whole, or with regions in parts.

    Attributes:
      layered: the program, its values on the device.
      regions: the regions in parts.
      pairs: its layers.
      costs: by pair.
      fastest: the fastest placements in any memory, and the time they add to a step, in ms.
    """

    layered: LayeredProgram
    regions: tuple[Region, ...]
    pairs: tuple[JointGraph, ...]
    costs: tuple[Costs, ...]
    fastest: tuple[list[Placements], float]
    _device: Device
    _least: dict[float | None, tuple[list[Placements], float] | None] = dataclasses.field(
        default_factory=dict
    )

    @property
    def spared_nbytes(self) -> int:
        """Bytes of values that exist only in parts."""
        return sum(region.nbytes for region in self.regions)

    def choose_least(self, host_nbytes: float | None) -> tuple[list[Placements], float] | None:
        """The placements with the least memory, as of `choose_placements`; chosen once."""
        if host_nbytes not in self._least:
            self._least[host_nbytes] = choose_placements(self.costs, self._device, None, host_nbytes)
        return self._least[host_nbytes]

    def settle_segments(self, estimate_least: Callable[[Form], float]) -> Form:
        """The form with or without segments of its layers, by the estimate of the least program's memory.

        The values kept between segments are those of all layers, which may be more than segments spare.
        """
        if not any(cost.segments.passed for cost in self.costs):
            return self
        costs = tuple(
            dataclasses.replace(cost, segments=Segments((sum(cost.segments.nbytes),))) for cost in self.costs
        )
        joined = dataclasses.replace(self, costs=costs, _least={})
        return min((self, joined), key=estimate_least)

    def write(self, placements: Iterable[Placements], **options: bool) -> ClosedJaxpr:
        """The program with placements of its layers; options as for `LayeredProgram.write`."""
        left = iter(placements)
        # A forward `jax.shard_map` that is made again is part of the backward one, as in a checkpoint.
        return join_conditions(merge_shard_maps(self.layered.write(lambda _: next(left), **options)))

    def count_parts_ms(self, placements: Sequence[Placements], least_nbytes: float, devices: int) -> float:
        """The time in ms that layers in parts add to a step with placements.

        Args:
          placements: of the layers.
          least_nbytes, devices: as for `write_layers_in_parts`.
        """
        whole = self.write(placements)  # in loops of known lengths
        program, _ = write_layers_in_parts(whole, least_nbytes, devices=devices)
        times = [step_ms(closed, self.pairs, self._device) for closed in (program, whole)]
        return max(0.0, times[0] - times[1])

    @staticmethod
    def of(layered: LayeredProgram, regions: Sequence[Region], device: Device, budget: Budget) -> Form:
        pairs = layered.list_joint_graphs()
        costs = [Costs.of(pair, device, budget.compress) for pair in pairs]
        fastest = choose_placements(costs, device, math.inf, NO_COPIES)
        assert fastest is not None  # everything may be saved
        return Form(layered, tuple(regions), tuple(pairs), tuple(costs), fastest, device)


def step_ms(program: ClosedJaxpr, layers: Sequence[JointGraph], device: Device) -> float:
    """The time of a step without copies in ms, at the clock that its layers leave."""
    if layers:
        graph = KernelGraph(layers[0].rest, frozenset())
        device = lower_clock(graph, graph.kernels, device)
    return program_ms(program.jaxpr, device)
