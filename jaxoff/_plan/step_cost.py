"""The predicted cost of a placement of residuals: duration, device memory over a step, host memory.

Per iteration of a layer group, with R the duration of recomputation, and D and H the durations of all copies
to the host and back:

    forward  = kernels + max(0, D - kernels)
    backward = kernels + R + max(0, H - kernels - R)

To these come the slowdown of kernels during copies (`COPY_SLOWDOWN`, at least the memory traffic of the
copies) and the copies of saved values into stacks (bench/LOG.md).

The peak is the largest moment of a step: arguments, gradients computed so far and other live values,
residuals of all layer groups whose backward pass is not over, and the working set of the running layer group.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence

from jaxoff._plan.calibrations import SECOND_LOOP_PART
from jaxoff._plan.layer import Label, Placements
from jaxoff._plan.layer_cost import LayerModel
from jaxoff._plan.layer_states import Times, ValueStates
from jaxoff._plan.timeline import Point


@dataclasses.dataclass(frozen=True)
class Moment:
    """Device memory at a moment of a step, in bytes.

    Attributes:
      what: the running kernel, or the running pass of a layer group.
      arguments: arguments of the step, such as weights and inputs.
      resident: other data on the device for the whole step, such as an optimizer's state.
      alive: gradients and other values outside of layer groups.
      residuals: residuals of layer groups on the device.
      working: working set of the running layer group: computed, recomputed and reloaded values.
      results: part of `alive`: results of the step.
    """

    what: str
    arguments: int
    resident: int
    alive: int
    residuals: int
    working: int
    results: int = 0

    @property
    def nbytes(self) -> int:
        """The sum of all parts."""
        return self.arguments + self.resident + self.alive + self.residuals + self.working

    def find_budget(self, margin: float) -> int:
        """Returns the smallest budget for this moment, in bytes.

        Args:
          margin: unused part of the budget less arguments and results.
        """
        known = self.arguments + self.resident + self.results
        return math.ceil(_add_margin(self.nbytes, known, margin))


def _add_margin(nbytes: int, known: int, margin: float) -> float:
    """Returns the budget for some bytes of which the known part is exact and the rest may be short."""
    return known + (nbytes - known) / (1 - margin)


@dataclasses.dataclass(frozen=True)
class Cost:
    """The predicted cost of a placement.

    Attributes:
      times: duration of a step, by cause.
      peak: the moment with most device memory in use.
      host_nbytes: pinned host memory.
    """

    times: Times
    peak: Moment
    host_nbytes: int


@dataclasses.dataclass(frozen=True)
class StepModel:
    """The cost of a step under any placement.

    Attributes:
      layers: a model for each kind of layer group. Equal groups are of the same kind.
      points: points of the step, in order.
      argument_nbytes, resident_nbytes: as `arguments` and `resident` of `Moment`.
      outside_ms: duration of all kernels outside of layer groups.
      margin: unused part of the budget less arguments and results.
    """

    layers: tuple[LayerModel, ...]
    points: tuple[Point, ...]
    argument_nbytes: int
    resident_nbytes: int
    outside_ms: float
    margin: float = 0.0

    @functools.cached_property
    def labels(self) -> tuple[Label, ...]:
        """The labels whose placement is free, in the order in which their values are computed."""
        return tuple(dict.fromkeys(label for kind in self.layers for label in kind.layer.labels))

    @functools.cached_property
    def inner_names(self) -> frozenset[str]:
        """Names of values in loops and branches inside of layers."""
        return frozenset(name for kind in self.layers for name in kind.layer.inner_names)

    @functools.cached_property
    def decisive_points(self) -> tuple[Point, ...]:
        """The points which can be the peak or decide the budget: of equal residuals and pass, the largest."""
        found: dict[Point, None] = {}
        for margin in {0.0, self.margin}:
            largest: dict[tuple, tuple[float, Point]] = {}
            for point in self.points:
                key = point.holds, point.kind, point.is_backward, self.competes_with_results(point)
                budget = _add_margin(point.nbytes, point.results_nbytes, margin)
                if key not in largest or largest[key][0] < budget:
                    largest[key] = budget, point
            found |= dict.fromkeys(point for _, point in largest.values())
        return tuple(found)

    def competes_with_results(self, point: Point) -> bool:
        """Whether buffers of pending results add to the memory of a point.

        XLA allocates results for the whole step. Until a result is computed, its buffer may hold other
        values, but in a step without loops one small value at a time. Results of loops are stacks, which the
        backward loop fills.
        """
        in_no_loop = point.kind is not None and self.layers[point.kind].layer.iterations == 1
        return in_no_loop and point.is_backward and bool(point.pending_nbytes)

    def shareable_nbytes(self, point: Point) -> int:
        """Bytes of small values in buffers of pending results."""
        small = self._small_residual_nbytes
        return small * sum(nbytes >= small for nbytes in point.pending_nbytes)

    @functools.cached_property
    def _small_residual_nbytes(self) -> int:
        """Bytes of the largest small value with a label in a layer outside of loops."""
        values = (v for kind in self.layers if kind.layer.iterations == 1 for v in kind.layer.values)
        return max((v.nbytes for v in values if v.label is not None and not v.is_large), default=0)

    @property
    def kernels_ms(self) -> float:
        """Duration of the kernels of every placement."""
        per_kind = (
            kind.iterations * (kind.layer.forward_ms + kind.layer.backward_ms) for kind in self.layers
        )
        return self.outside_ms + sum(per_kind)

    def split(self, first: int) -> StepModel:
        """Returns the same step with separate labels for first layers and for the others.

        A second loop adds `SECOND_LOOP_PART` of the step's duration.

        Args:
          first: number of first layers of each `jaxoff.scan` and `jaxoff.layers`. Layers outside of both
            belong to the others.
        """
        kinds: list[LayerModel] = []
        divided: list[Sequence[int]] = []  # kind before -> kinds after
        for kind in self.layers:
            parts = kind.split(first)
            divided.append(range(len(kinds), len(kinds) + len(parts)))
            kinds += parts

        def split_point(point: Point) -> Iterator[Point]:
            running: Sequence[int | None] = (None,)
            if point.kind is not None:
                running = divided[point.kind]
                if numbers := self.layers[point.kind].numbers:
                    # The running group is the last of the groups with residuals.
                    is_first = numbers[point.holds[point.kind] - 1] < first
                    running = running[:1] if is_first else running[-1:]
            for part in running:
                holds: list[int] = []
                for kind, of, number in zip(self.layers, divided, point.holds, strict=True):
                    both = kind.split_holders(number, first, first_runs=part == of[0])
                    holds += both if len(of) == 2 else [number]
                yield dataclasses.replace(point, holds=tuple(holds), kind=part)

        points = tuple(part for point in self.points for part in split_point(point))
        has_second = any(kind.is_loop and len(of) == 2 for kind, of in zip(self.layers, divided, strict=True))
        outside_ms = self.outside_ms + has_second * SECOND_LOOP_PART * self.kernels_ms
        return dataclasses.replace(self, layers=tuple(kinds), points=points, outside_ms=outside_ms)

    def find_states(self, placements: Placements) -> list[ValueStates]:
        """Finds the states of the values of each kind of layer group."""
        states = [kind.find_states(placements) for kind in self.layers]
        has_copies = any(kind.offloaded for kind in states)
        return [dataclasses.replace(kind, has_copies=has_copies) for kind in states]

    def find_budget(self, placements: Placements) -> int:
        """Returns the smallest budget of device memory for a placement, in bytes."""
        return max(moment.find_budget(self.margin) for moment in self.timeline(placements))

    def find_kept_labels(self, placements: Placements) -> set[Label | None]:
        """Finds the labels with a saved or offloaded value; None for values without a label."""
        kept = set()
        for kind, states in zip(self.layers, self.find_states(placements), strict=True):
            kept |= {kind.layer.values[n].label for n in states.saved | states.offloaded}
        return kept

    def cost(self, placements: Placements) -> Cost:
        """The predicted cost of a placement."""
        states = self.find_states(placements)
        times, host = Times(self.outside_ms), 0
        for kind, of_kind in zip(self.layers, states, strict=True):
            times += kind.times(of_kind) * kind.iterations
            host += kind.count * kind.host_nbytes(of_kind)
        return Cost(times, max(self.timeline(placements), key=lambda moment: moment.nbytes), host)

    def timeline(self, placements: Placements) -> Iterator[Moment]:
        """Yields device memory over a step: the forward pass, then the backward pass.

        `_PlacementSearch.__init__` of the search states the same rule as constraints.
        """
        kinds = list(zip(self.layers, self.find_states(placements), strict=True))
        saved = [kind.residual_nbytes(states) for kind, states in kinds]
        lingering = [kind.lingering_nbytes(states) for kind, states in kinds]
        large = [kind.large_residual_nbytes(states) for kind, states in kinds]
        for point in self.decisive_points:
            held = sum(n * nbytes for n, nbytes in zip(point.holds, saved, strict=True))
            residuals = held + sum(n * nbytes for n, nbytes in zip(point.waiting, lingering, strict=True))
            what, working = point.what, 0
            if point.kind is not None:
                kind, states = kinds[point.kind]
                direction = "backward" if point.is_backward else "forward"
                what = f"{direction} pass of {kind.layer.source or 'a layer'}"
                if point.is_backward:
                    working, operation = kind.working_nbytes(states)
                    what = f"{what}, {operation}"
                else:
                    working = kind.forward_nbytes(states)
            always = self.argument_nbytes, self.resident_nbytes
            yield Moment(what, *always, point.nbytes, residuals, working, point.results_nbytes)
            if point.kind is not None and self.competes_with_results(point):
                held_large = sum(n * nbytes for n, nbytes in zip(point.holds, large, strict=True))
                residuals = max(held_large, held - self.shareable_nbytes(point))
                kind, states = kinds[point.kind]
                working = kind.large_working_nbytes(states)
                alive, results = (n + sum(point.pending_nbytes) for n in (point.nbytes, point.results_nbytes))
                yield Moment(what, *always, alive, residuals, working, results)
