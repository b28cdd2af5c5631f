"""What a placement of residuals costs: time, device memory over a step, host memory. A model; see `plan`.

Per iteration of a part, with R the values that are made again, O those moved to the host and c their copies:

    forward  = kernels + max(0, sum of c to the host over O - kernels)
    backward = kernels + R + max(0, sum of c from the host over O - kernels - R)

and 2% of the time of the copies, by which kernels beside them are slower, or what their traffic takes, and
the time to write what is saved into stacks (bench/LOG.md).

The peak is the largest of the moments of a step: arguments, gradients so far and what else is alive, the
residuals of all parts whose backward pass is not over, and the working set of the part that runs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence

from jaxoff._plan.layer_cost import Choice, LayerModel, Times, Use
from jaxoff._plan.timeline import Point

# Of a step, what a second loop costs: two that the model had 0.03% faster than one were 0.5% slower.
SECOND_LOOP = 0.003


@dataclasses.dataclass(frozen=True)
class Moment:
    """Device memory at a moment of a step, in bytes.

    Attributes:
      what: what runs.
      arguments: of the step, weights and inputs.
      resident: what else is on the device all the time, such as an optimizer's state.
      alive: gradients and other values outside of parts.
      residuals: what parts keep on the device for their backward pass.
      working: of the part that runs: what it makes, makes again, or has just reloaded.
      results: what of `alive` is results of the step.
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
        """All of it."""
        return self.arguments + self.resident + self.alive + self.residuals + self.working

    def needed(self, margin: float) -> int:
        """The budget of which this leaves a part free: of what arguments and results leave of it."""
        known = self.arguments + self.resident + self.results
        return math.ceil(_with_margin(self.nbytes, known, margin))


def _with_margin(nbytes: int, known: int, margin: float) -> float:
    """The budget of which, but for what is known, a part stays free."""
    return known + (nbytes - known) / (1 - margin)


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a placement costs, by the model.

    Attributes:
      times: of a step.
      peak: the moment at which most device memory is in use.
      host_nbytes: pinned host memory.
    """

    times: Times
    peak: Moment
    host_nbytes: int


@dataclasses.dataclass(frozen=True)
class Model:
    """The costs of a step.

    Attributes:
      layers: the kinds of parts.
      points: the moments of a step.
      argument_nbytes, resident_nbytes: as in `Moment`.
      outside_ms: of what is in no part.
      margin: the part that stays free of what arguments and results, which are known, leave of a budget.
    """

    layers: tuple[LayerModel, ...]
    points: tuple[Point, ...]
    argument_nbytes: int
    resident_nbytes: int
    outside_ms: float
    margin: float = 0.0

    @functools.cached_property
    def labels(self) -> tuple[str, ...]:
        """What decides, in the order in which it is made."""
        return tuple(dict.fromkeys(label for kind in self.layers for label in kind.layer.labels()))

    @functools.cached_property
    def within(self) -> frozenset[str]:
        """The labels of what loops and branches in layers make, too."""
        return frozenset(label for kind in self.layers for label in kind.layer.within)

    @functools.cached_property
    def telling_points(self) -> tuple[Point, ...]:
        """The points that can be the peak or decide the budget, of those with the same parts."""
        found: dict[Point, None] = {}
        for margin in {0.0, self.margin}:
            largest: dict[tuple, tuple[float, Point]] = {}
            for point in self.points:
                key = point.holds, point.kind, point.backward, self.is_beside_results(point)
                needed = _with_margin(point.nbytes, point.results_nbytes, margin)
                if key not in largest or largest[key][0] < needed:
                    largest[key] = needed, point
            found |= dict.fromkeys(point for _, point in largest.values())
        return tuple(found)

    def is_beside_results(self, point: Point) -> bool:
        """Whether the memory of results that are not made yet has to be reckoned with.

        Results have memory from the beginning. Before they are made, others may take it, but in XLA one value
        at a time: small ones. In loops results are stacks, which the loop back makes.
        """
        in_no_loop = point.kind is not None and self.layers[point.kind].layer.iterations == 1
        return in_no_loop and point.backward and bool(point.to_come)

    def places(self, point: Point) -> int:
        """Bytes of small values that results which are not made yet have the memory for."""
        return self._small_nbytes * sum(nbytes >= self._small_nbytes for nbytes in point.to_come)

    @functools.cached_property
    def _small_nbytes(self) -> int:
        """The largest of the small values that layers in no loop may keep."""
        values = (v for kind in self.layers if kind.layer.iterations == 1 for v in kind.layer.values)
        return max((v.nbytes for v in values if v.label is not None and not v.is_large), default=0)

    @property
    def kernels_ms(self) -> float:
        """What a step takes in any case."""
        per_kind = (
            kind.iterations * (kind.layer.forward_ms + kind.layer.backward_ms) for kind in self.layers
        )
        return self.outside_ms + sum(per_kind)

    def in_two(self, first: int) -> Model:
        """The same step with so many first layers in each `jaxoff.scan` and `jaxoff.layers`.

        The others' labels differ; what is in neither goes with them. A second loop costs time; see
        `SECOND_LOOP`.
        """
        kinds: list[LayerModel] = []
        parts: list[Sequence[int]] = []  # by kind, which it has become
        for kind in self.layers:
            made = kind.in_two(first)
            parts.append(range(len(kinds), len(kinds) + len(made)))
            kinds += made

        def divided(point: Point) -> Iterator[Point]:
            running: Sequence[int | None] = (None,)
            if point.kind is not None:
                running = parts[point.kind]
                if numbers := self.layers[point.kind].numbers:
                    # The one that runs is the last one that holds its residuals.
                    is_first = numbers[point.holds[point.kind] - 1] < first
                    running = running[:1] if is_first else running[-1:]
            for part in running:
                holds: list[int] = []
                for kind, of, number in zip(self.layers, parts, point.holds, strict=True):
                    both = kind.held_in_two(number, first, first_runs=part == of[0])
                    holds += both if len(of) == 2 else [number]
                yield dataclasses.replace(point, holds=tuple(holds), kind=part)

        points = tuple(part for point in self.points for part in divided(point))
        is_second = any(kind.is_loop and len(of) == 2 for kind, of in zip(self.layers, parts, strict=True))
        outside_ms = self.outside_ms + is_second * SECOND_LOOP * self.kernels_ms
        return dataclasses.replace(self, layers=tuple(kinds), points=points, outside_ms=outside_ms)

    def uses(self, choice: Choice) -> list[Use]:
        """What becomes of the values of each kind of part."""
        uses = [kind.use(choice) for kind in self.layers]
        concurrent = any(use.moved for use in uses)
        return [dataclasses.replace(use, concurrent=concurrent) for use in uses]

    def needed(self, choice: Choice) -> int:
        """The smallest budget of device memory that a choice fits."""
        return max(moment.needed(self.margin) for moment in self.timeline(choice))

    def kept_labels(self, choice: Choice) -> set[str]:
        """Those of whose values something is saved or moved under a choice."""
        kept = set()
        for kind, use in zip(self.layers, self.uses(choice), strict=True):
            kept |= {kind.layer.values[n].label or "" for n in use.saved | use.moved}
        return kept

    def cost(self, choice: Choice) -> Cost:
        """What a choice costs."""
        uses = self.uses(choice)
        times = Times(self.outside_ms)
        for kind, use in zip(self.layers, uses, strict=True):
            times += kind.times(use) * kind.iterations
        host = sum(kind.count * kind.host_nbytes(use) for kind, use in zip(self.layers, uses, strict=True))
        return Cost(times, max(self.timeline(choice), key=lambda moment: moment.nbytes), host)

    def timeline(self, choice: Choice) -> Iterator[Moment]:
        """Device memory over a step: forward, then backward."""
        uses = self.uses(choice)
        kept = [kind.residual_nbytes(use) for kind, use in zip(self.layers, uses, strict=True)]
        left = [kind.left_nbytes(use) for kind, use in zip(self.layers, uses, strict=True)]
        large = [kind.large_residual_nbytes(use) for kind, use in zip(self.layers, uses, strict=True)]
        for point in self.telling_points:
            held = sum(n * nbytes for n, nbytes in zip(point.holds, kept, strict=True))
            residuals = held + sum(n * nbytes for n, nbytes in zip(point.waiting, left, strict=True))
            what, working = point.what, 0
            if point.kind is not None:
                kind, use = self.layers[point.kind], uses[point.kind]
                what = (
                    f"{'backward' if point.backward else 'forward'} pass of {kind.layer.source or 'a layer'}"
                )
                if point.backward:
                    working, step = kind.working_nbytes(use)
                    what = f"{what}, {step}"
                else:
                    working = kind.forward_nbytes(use)
            always = self.argument_nbytes, self.resident_nbytes
            yield Moment(what, *always, point.nbytes, residuals, working, point.results_nbytes)
            if point.kind is not None and self.is_beside_results(point):
                held_large = sum(n * nbytes for n, nbytes in zip(point.holds, large, strict=True))
                residuals = max(held_large, held - self.places(point))
                working = self.layers[point.kind].large_working_nbytes(uses[point.kind])
                alive, results = (n + sum(point.to_come) for n in (point.nbytes, point.results_nbytes))
                yield Moment(what, *always, alive, residuals, working, results)
