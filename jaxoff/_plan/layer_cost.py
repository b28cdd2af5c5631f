"""What the placement of its residuals costs a layer; see `jaxoff._plan.step_cost`."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Mapping

from jaxoff._device.profile import Device
from jaxoff._plan.layer import Layer, Shared, Step, Value
from jaxoff._policy.decision import Placement
from jaxoff._schedule.copy_times import LEAST_SLACK, SEND_SLACK, SLACK, Long, unhindered

type Choice = Mapping[str, Placement]

# Of so many parts in no loop, the last ones, what is moved is on the device when the pass back begins.
LAST = 2
# How much of the memory that small and large values could share they do not, beside copies.
APART = 0.75
# Kernels beside a copy take longer by so much of the copy's time.
SLOWED = 0.02


@dataclasses.dataclass(frozen=True)
class Times:
    """The time of a step, in ms.

    Attributes:
      kernels: if everything were kept.
      recomputed: of kernels that run again.
      slowed: by which kernels take longer beside copies.
      exposed_forward, exposed_backward: copies that nothing hides.
      stored: to write what is saved into the stacks of loops.
    """

    kernels: float = 0.0
    recomputed: float = 0.0
    slowed: float = 0.0
    exposed_forward: float = 0.0
    exposed_backward: float = 0.0
    stored: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return sum(dataclasses.astuple(self))

    def __add__(self, other: Times) -> Times:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Times(*(a + b for a, b in pairs))

    def __mul__(self, times: int) -> Times:
        return Times(*(times * part for part in dataclasses.astuple(self)))


@dataclasses.dataclass(frozen=True)
class Use:
    """What becomes of the values of a layer under a choice, by their numbers.

    Attributes:
      again: those made again in the backward pass.
      saved, moved: those that wait on the device and in host memory.
      ordered: whether `jaxoff.jit` puts the iteration in order.
      concurrent: whether the step moves anything, here or elsewhere: its graphs then have edges by data.
    """

    again: frozenset[int]
    saved: frozenset[int]
    moved: frozenset[int]
    ordered: bool
    concurrent: bool

    @property
    def packed(self) -> bool:
        """Whether iterations in order run one kernel after the other: a value may take any place free by
        then.

        In graphs with edges by data, which copies need, XLA gives every value a place for the whole
        iteration.
        """
        return self.ordered and not self.concurrent


class LayerModel:
    """The costs of an iteration of a part.

    Attributes:
      layer: the iteration.
      count: how many parts are like it.
      device: speeds.
      runs: how often each runs in a step.
      numbers: of the parts in their `jaxoff.layers`, in the order of the forward pass; none if in none.
    """

    def __init__(
        self, layer: Layer, count: int, device: Device, runs: int = 1, numbers: tuple[int, ...] = ()
    ):
        self.layer, self.count, self.device, self.runs = layer, count, device, runs
        self.numbers = numbers

    @property
    def iterations(self) -> int:
        """How many iterations of such parts a step has."""
        return self.layer.iterations * self.count * self.runs

    @property
    def is_loop(self) -> bool:
        """Whether its parts are each a `jaxoff.scan`, which two loops can compute."""
        return self.layer.in_order and self.layer.iterations > 1

    def in_two(self, first: int) -> list[LayerModel]:
        """Its first layers and its others, whose labels differ, or those of the two that there are.

        Args:
          first: how many layers are first in each `jaxoff.scan` and `jaxoff.layers`. All else is others.
        """
        iterations = self.layer.iterations
        if self.is_loop:
            sizes = [(min(first, iterations), self.count), (max(0, iterations - first), self.count)]
        else:
            early = sum(number < first for number in self.numbers)
            sizes = [(iterations, early), (iterations, self.count - early)]
        numbers = [n for n in self.numbers if n < first], [n for n in self.numbers if n >= first]
        return [
            LayerModel(
                self.layer.with_iterations(n, others=others),
                count,
                self.device,
                self.runs,
                tuple(numbers[others]),
            )
            for others, (n, count) in zip((False, True), sizes, strict=True)
            if n and count
        ]

    def held_in_two(self, number: int, first: int, *, first_runs: bool) -> list[int]:
        """How many first ones and how many others hold their residuals, of so many parts that do.

        Args:
          number: of the parts, the first ones in the forward pass.
          first: as for `in_two`.
          first_runs: whether the first layers of one of them run: its others have not begun, or are over.
        """
        if self.is_loop:
            return [number, number - first_runs]
        early = sum(n < first for n in self.numbers[:number])
        return [early, number - early]

    @functools.cached_property
    def readers(self) -> dict[int, list[int]]:
        """By value, those that are made from it."""
        readers: dict[int, list[int]] = {n: [] for n in range(len(self.layer.values))}
        for n, value in enumerate(self.layer.values):
            for read in value.reads:
                readers[read].append(n)
        return readers

    def placed(self, value: Value, choice: Choice) -> Placement:
        """Where a value would live, if it is needed."""
        if value.carried:
            return "save"
        return value.fixed or choice.get(value.label or "", "recompute")

    def use(self, choice: Choice) -> Use:
        """What is made again, saved and moved: what the backward pass needs, back to what is kept."""
        again, kept = set(), {"save": set(), "offload": set()}
        for n in reversed(range(len(self.layer.values))):
            value = self.layer.values[n]
            if value.first is not None or any(reader in again for reader in self.readers[n]):
                place = self.placed(value, choice)
                (again if place == "recompute" else kept[place]).add(n)
        moves = bool(kept["offload"])
        saved, moved = frozenset(kept["save"]), frozenset(kept["offload"])
        return Use(frozenset(again), saved, moved, self.layer.in_order or moves, moves)

    def d2h_ms(self, n: int) -> float:
        return self.device.d2h_ms(self.layer.values[n].nbytes)

    def h2d_ms(self, n: int) -> float:
        return self.device.h2d_ms(self.layer.values[n].nbytes)

    def together_ms(self, n: int) -> float:
        """Of the copies from the host of a value and of those of its label that are read first when it is."""
        value = self.layer.values[n]
        if value.label is None or value.first is None:
            return self.h2d_ms(n)
        read = (value.label, value.first)
        same = (m for m, other in enumerate(self.layer.values) if (other.label, other.first) == read)
        return sum(map(self.h2d_ms, same))

    def slowed_ms(self, n: int) -> float:
        """By which kernels take longer beside the copies of a value: those read and write memory, too."""
        copies = self.d2h_ms(n) + self.h2d_ms(n)
        return max(SLOWED * copies, self.device.pass_ms(self.layer.values[n].nbytes))

    def times(self, use: Use) -> Times:
        """Of an iteration."""
        forward, backward = self.layer.forward_ms, self.layer.backward_ms
        again = sum(self.layer.values[n].ms for n in use.again)
        sent, back = sum(map(self.d2h_ms, use.moved)), sum(map(self.h2d_ms, use.moved))
        return Times(
            kernels=forward + backward,
            recomputed=again,
            slowed=sum(map(self.slowed_ms, use.moved)),
            exposed_forward=max(0.0, sent - forward),
            exposed_backward=max(0.0, back - backward - again),
            stored=sum(self.layer.values[n].stored_ms for n in use.saved),
        )

    def residual_nbytes(self, use: Use) -> int:
        """On the device, of all iterations."""
        return self.layer.iterations * sum(self.layer.values[n].nbytes for n in use.saved)

    def is_kept_large(self, n: int) -> bool:
        """Whether a saved value takes a large place: a large one, or one of a loop's stacks."""
        return self.layer.iterations > 1 or self.layer.values[n].is_large

    def large_residual_nbytes(self, use: Use) -> int:
        """On the device, of all iterations, in large places."""
        kept = filter(self.is_kept_large, use.saved)
        return self.layer.iterations * sum(self.layer.values[n].nbytes for n in kept)

    def large_working_nbytes(self, use: Use) -> int:
        """The large values of the working set of a part in no loop, in the backward pass.

        What the last parts move is still there, or again, when that begins: by programs compiled for an H200,
        of two of them.
        """
        moved = sum(self.layer.values[n].nbytes for n in use.moved if self.layer.values[n].is_large)
        return LAST * moved + max(self.by_step(use)[1], default=0)

    def left_nbytes(self, use: Use) -> int:
        """On the device, between a loop's forward pass and its backward pass, of what it moves.

        Its last iteration leaves there what its first iteration back could not reload in time.
        """
        if self.layer.iterations == 1:
            return 0
        starts = self.starts(use)
        left = (n for n in use.moved if self.first_needed(n, starts) <= self.left_until(n))
        return sum(self.layer.values[n].nbytes for n in left)

    @functools.cache  # noqa: B019 - lives as long as the model
    def left_until(self, n: int) -> int:
        """The last step for which a reload that it needs first cannot be in time; -1 if there is none."""
        if self.is_sent_late(n):
            return len(self.layer.backward)
        steps = range(len(self.layer.backward))
        return max((first for first in steps if self.arrives(n, first) < 0), default=-1)

    def first_needed(self, n: int, starts: Mapping[int, int]) -> int:
        """The first step that needs a moved value, if others are made again before such steps."""
        return min([self.reach(n)[0], *(starts[r] for r in self.readers[n] if r in starts)])

    def host_nbytes(self, use: Use) -> int:
        """In host memory, of all iterations; stacks of a loop have a spare row."""
        rows = self.layer.iterations + (self.layer.iterations > 1)
        return rows * sum(self.layer.values[n].nbytes for n in use.moved)

    def is_sent_late(self, n: int) -> bool:
        """Whether a copy to the host does not end with the iteration that makes the value."""
        return self.layer.values[n].made_ms + SEND_SLACK * self.d2h_ms(n) > self.layer.forward_ends_ms

    def arrives(self, n: int, first: int) -> int:
        """The step from which on a reloaded value is on the device, if one needs it first.

        -1: a reload that could not be in time starts in the iteration before. By programs compiled for an
        H200 it then has its place all the time, beside that of the value of the iteration until that was read
        last.
        """
        return self._arrivals(n)[first]

    @functools.cache  # noqa: B019 - lives as long as the model
    def _arrivals(self, n: int) -> list[int]:
        """By the step that needs a value first, from when on it is there: not later than for later ones."""
        ends, ms = [step.ends_ms for step in self.layer.backward], self.together_ms(n)
        steps = zip(self.layer.backward, (0.0, *ends), strict=False)
        long = [Long(s, began, step.ends_ms) for s, (step, began) in enumerate(steps) if step.fills]
        found = []
        for needed in (0.0, *ends):
            starts = needed - SLACK * ms
            step = bisect.bisect_right(ends, starts)
            found.append(-1 if starts < 0 else unhindered(step, needed - LEAST_SLACK * ms, long))
        return list(itertools.accumulate(reversed(found), min))[::-1]

    def copies(self, n: int, first: int, s: int) -> int:
        """How many copies of a reloaded value are on the device at a step, if one needs it first."""
        arrives, last = self.arrives(n, first), self.reach(n)[1]
        return 1 + (s <= last) if arrives < 0 else int(arrives <= s <= last)

    @functools.cache  # noqa: B019
    def reach(self, n: int) -> tuple[int, int]:
        """The first and last step that reads a value, by way of others that may be made again, too."""
        value = self.layer.values[n]
        steps = [s for s in (value.first, value.last) if s is not None]
        if not steps:
            steps = [self.reach(reader)[0] for reader in self.readers[n] if self.is_reached(reader)]
        return min(steps), max(steps)

    @functools.cache  # noqa: B019
    def is_reached(self, n: int) -> bool:
        """Whether the backward pass needs a value, or one that is made from it."""
        return self.layer.values[n].first is not None or any(map(self.is_reached, self.readers[n]))

    @functools.cache  # noqa: B019
    def copied_row(self, n: int) -> tuple[int, int] | None:
        """The steps between which an iteration holds a copy of a saved value: a row of a stack."""
        if self.layer.iterations == 1:
            return None
        names = [v for m, v in enumerate(self.layer.values) if m == n or n in self.names_of(m)]
        ends = [s for v in names for s in v.copied or ()]
        return (min(ends), max(ends)) if ends else None

    def copied_from(self, first: int, n: int, use: Use, starts: Mapping[int, int]) -> int:
        """The step from which on there is a copy of a saved value's row, which a step reads first.

        In order, others that are made again from it read the same copy before. In graphs with edges by data,
        it is made at any time.
        """
        if not use.ordered:
            return first
        return 0 if use.concurrent else min([first, *(starts[r] for r in self.readers[n] if r in starts)])

    @functools.cache  # noqa: B019
    def names_of(self, n: int) -> frozenset[int]:
        """The values that a value is another name of."""
        other = self.layer.values[n].same_as
        return frozenset() if other is None else self.names_of(other) | {other}

    @functools.cache  # noqa: B019
    def hidden(self, n: int) -> int:
        """The last step at which a value is there anyway under another name; -1 if at none."""
        lasts = (self.layer.values[other].last for other in self.names_of(n))
        return max((last for last in lasts if last is not None), default=-1)

    def starts(self, use: Use) -> dict[int, int]:
        """The step before which each value is made again: at first use in order, else at the beginning."""
        if not use.ordered:
            return dict.fromkeys(use.again, 0)
        starts: dict[int, int] = {}
        for n in sorted(use.again, reverse=True):
            first = self.layer.values[n].first
            later = [starts[r] for r in self.readers[n] if r in use.again and not self.is_read_anew(n)]
            starts[n] = min([*later, *([first] if first is not None else [])])
        return starts

    @functools.cache  # noqa: B019
    def is_read_anew(self, n: int) -> bool:
        """Whether iterations in order read a value twice, for others that are made again and for itself.

        By programs compiled for an H200, large rows of stacks such as the weights of experts.
        """
        value = self.layer.values[n]
        return value.is_large and not value.reads and not value.carried and value.first is not None

    def forward_nbytes(self, use: Use) -> int:
        """The working set of the forward pass."""
        late = sum(self.layer.values[n].nbytes for n in use.moved if self.is_sent_late(n))
        steps = self.layer.forward
        return late + max((s.small for s in steps), default=0) + max((s.large for s in steps), default=0)

    def written(self, step: Step, ordered: bool) -> int:
        """What of a step takes no memory of its own.

        In stock order gradients go into their stacks; in jaxoff's, sums of cotangents into the memory of one.
        """
        return step.handed_on if ordered else step.written

    def is_shared(self, shared: Shared, use: Use) -> bool:
        """Whether XLA makes one kernel of several: barriers between them prevent it in jaxoff's order."""
        names = self.names_of(shared.value) | {shared.value}
        return not (use.ordered or names.isdisjoint(use.saved) or use.again.isdisjoint(shared.again))

    def working_nbytes(self, use: Use) -> tuple[int, str]:
        """The working set of the backward pass, and the step at which most of it is in use.

        Where every value has a place for the whole iteration, few small ones are put where large ones have
        been: it is nearer to the most that the large ones take at once, and the most that the small ones do,
        than to the most at one step.
        """
        if not self.layer.backward:
            return 0, ""
        small, large = self.by_step(use)
        both = [sum(sizes) for sizes in zip(small, large, strict=True)]
        what = self.layer.backward[both.index(max(both))].what
        apart = 0.0 if use.packed else APART if use.ordered else 1.0
        return round((1 - apart) * max(both) + apart * (max(small) + max(large))), what

    def fullest(self, use: Use) -> set[int]:
        """The steps of the backward pass at which the small and the large values take most, or both do."""
        small, large = self.by_step(use)
        both = [sum(sizes) for sizes in zip(small, large, strict=True)]
        return {sizes.index(max(sizes)) for sizes in (both, small, large)}

    def by_step(self, use: Use) -> tuple[list[int], list[int]]:
        """Bytes of small and of large values, by step of the backward pass."""
        small = [step.small - self.written(step, use.ordered) for step in self.layer.backward]
        large = [step.large for step in self.layer.backward]
        for s, step in enumerate(self.layer.backward):
            for shared in step.shared:
                if self.is_shared(shared, use):
                    small[s] += shared.small
                    large[s] += shared.large

        def add(n: int, first: int, last: int) -> None:
            value = self.layer.values[n]
            for s in range(first, last + 1):
                (large if value.is_large else small)[s] += value.nbytes

        starts = self.starts(use)
        for n, start in starts.items():
            last, hidden = self.layer.values[n].last, self.hidden(n)
            if last is not None and not (self.names_of(n) & (use.saved | use.moved)):
                add(n, max(start, hidden + 1), last)
        for n in use.saved:
            if (row := self.copied_row(n)) is not None:
                add(n, self.copied_from(row[0], n, use, starts), row[1])
        for n in use.moved:
            first = self.first_needed(n, starts)
            value = self.layer.values[n]
            for s in range(len(small)):
                (large if value.is_large else small)[s] += value.nbytes * self.copies(n, first, s)
        return small, large
