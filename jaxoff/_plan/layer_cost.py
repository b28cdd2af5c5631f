"""The cost of a layer under a placement of its residuals: durations, device memory, host memory.

`jaxoff._plan.step_cost` adds up the layers of a step. The integer program in `jaxoff._plan.search` states the
same rules as linear constraints; each method here with a counterpart there names the counterpart.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Mapping

from jaxoff._device.profile import Device
from jaxoff._plan.calibrations import COPY_SLOWDOWN, RELOADED_LAYERS, UNSHARED_PART
from jaxoff._plan.layer import KernelUse, Layer, LayerValue, Placements, RecomputeFusion
from jaxoff._plan.layer_states import Times, ValueStates
from jaxoff._policy.decision import Placement
from jaxoff._schedule.calibrations import LEAST_RELOAD_SLACK, RELOAD_SLACK, SEND_SLACK
from jaxoff._schedule.copy_times import LongKernel, find_unhindered_start


class LayerModel:
    """The cost of an iteration of a layer group under a placement.

    Attributes:
      layer: the iteration.
      count: number of equal layer groups in the step.
      device: rates of the device and of its link.
      runs: how often a step runs each group; more than once in a loop over microbatches.
      numbers: positions of the groups in their `jaxoff.layers`, in the order of the forward pass; empty
        outside of `jaxoff.layers`.
    """

    def __init__(
        self, layer: Layer, count: int, device: Device, runs: int = 1, numbers: tuple[int, ...] = ()
    ):
        self.layer, self.count, self.device, self.runs = layer, count, device, runs
        self.numbers = numbers

    @property
    def iterations(self) -> int:
        """The number of iterations of all equal groups in a step."""
        return self.layer.iterations * self.count * self.runs

    @property
    def is_loop(self) -> bool:
        """Whether the groups are `jaxoff.scan` loops, which may be divided into two loops."""
        return self.layer.is_ordered and self.layer.iterations > 1

    def split(self, first: int) -> list[LayerModel]:
        """Divides the layers into first layers and others, with separate labels. Leaves out an empty side.

        Args:
          first: number of first layers of each `jaxoff.scan` and `jaxoff.layers`. Layers outside of both
            belong to the others.
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
                self.layer.restrict(n, of_others=of_others),
                count,
                self.device,
                self.runs,
                tuple(numbers[of_others]),
            )
            for of_others, (n, count) in zip((False, True), sizes, strict=True)
            if n and count
        ]

    def split_holders(self, number: int, first: int, *, first_runs: bool) -> list[int]:
        """Divides the holders of residuals into groups of first layers and groups of others.

        Args:
          number: how many groups hold residuals; the earliest of the forward pass.
          first: as for `split`.
          first_runs: whether the first layers of a group run, so that its other layers hold nothing yet, or
            nothing any more.
        """
        if self.is_loop:
            return [number, number - first_runs]
        early = sum(n < first for n in self.numbers[:number])
        return [early, number - early]

    @functools.cached_property
    def readers(self) -> dict[int, list[int]]:
        """Index of a value -> indices of the values computed from it."""
        readers: dict[int, list[int]] = {n: [] for n in range(len(self.layer.values))}
        for n, value in enumerate(self.layer.values):
            for read in value.reads:
                readers[read].append(n)
        return readers

    def find_verb(self, value: LayerValue, placements: Placements) -> Placement:
        """Returns the placement of a value, if the backward pass needs the value."""
        if value.is_carried:
            return "save"
        if value.fixed is not None or value.label is None:
            return value.fixed or "recompute"
        return placements.get(value.label, "recompute")

    def find_states(self, placements: Placements) -> ValueStates:
        """Finds the state of each value: the values the backward pass needs, back to the nearest kept ones.

        `_LayerVariables.__init__` of the search states the same rule as constraints.
        """
        found: dict[Placement, set[int]] = {"save": set(), "offload": set(), "recompute": set()}
        for n in reversed(range(len(self.layer.values))):
            value = self.layer.values[n]
            if value.first_reader is not None or any(r in found["recompute"] for r in self.readers[n]):
                found[self.find_verb(value, placements)].add(n)
        recomputed, saved, offloaded = (frozenset(found[verb]) for verb in ("recompute", "save", "offload"))
        has_copies = bool(offloaded)
        return ValueStates(recomputed, saved, offloaded, self.layer.is_ordered or has_copies, has_copies)

    def d2h_ms(self, n: int) -> float:
        """Duration of the copy of a value to the host."""
        return self.device.d2h_ms(self.layer.values[n].nbytes)

    def h2d_ms(self, n: int) -> float:
        """Duration of the copy of a value back to the device."""
        return self.device.h2d_ms(self.layer.values[n].nbytes)

    def joint_reload_ms(self, n: int) -> float:
        """Duration of the reloads of a value and of all values with its label and its first reader."""
        value = self.layer.values[n]
        if value.label is None or value.first_reader is None:
            return self.h2d_ms(n)
        read = (value.label, value.first_reader)
        same = (m for m, other in enumerate(self.layer.values) if (other.label, other.first_reader) == read)
        return sum(map(self.h2d_ms, same))

    def slowdown_ms(self, n: int) -> float:
        """Slowdown of kernels during the copies of a value: copies take memory bandwidth, too."""
        copies = self.d2h_ms(n) + self.h2d_ms(n)
        return max(COPY_SLOWDOWN * copies, self.device.pass_ms(self.layer.values[n].nbytes))

    def times(self, states: ValueStates) -> Times:
        """The duration of an iteration. Counterpart in the search: `_LayerVariables._add_times`."""
        forward, backward = self.layer.forward_ms, self.layer.backward_ms
        recompute = sum(self.layer.values[n].recompute_ms for n in states.recomputed)
        send, reload = sum(map(self.d2h_ms, states.offloaded)), sum(map(self.h2d_ms, states.offloaded))
        return Times(
            kernels=forward + backward,
            recomputed=recompute,
            slowed=sum(map(self.slowdown_ms, states.offloaded)),
            exposed_forward=max(0.0, send - forward),
            exposed_backward=max(0.0, reload - backward - recompute),
            stored=sum(self.layer.values[n].store_ms for n in states.saved),
        )

    def residual_nbytes(self, states: ValueStates) -> int:
        """Bytes of saved residuals of all iterations. Counterpart: `_LayerVariables.residual_terms`."""
        return self.layer.iterations * sum(self.layer.values[n].nbytes for n in states.saved)

    def is_large_residual(self, n: int) -> bool:
        """Whether a saved value has a large buffer: of a large value, or the stack of a loop."""
        return self.layer.iterations > 1 or self.layer.values[n].is_large

    def large_residual_nbytes(self, states: ValueStates) -> int:
        """Bytes of saved residuals in large buffers, of all iterations."""
        large = filter(self.is_large_residual, states.saved)
        return self.layer.iterations * sum(self.layer.values[n].nbytes for n in large)

    def large_working_nbytes(self, states: ValueStates) -> int:
        """Bytes of large values in the working set of the backward pass of a layer outside of loops.

        The offloaded residuals of the last `RELOADED_LAYERS` layers are on the device when the backward pass
        starts. Counterpart: `_LayerVariables.large_working_terms`.
        """
        large = (n for n in states.offloaded if self.layer.values[n].is_large)
        offloaded = sum(self.layer.values[n].nbytes for n in large)
        return RELOADED_LAYERS * offloaded + max(self.nbytes_by_kernel(states)[1], default=0)

    def lingering_nbytes(self, states: ValueStates) -> int:
        """Bytes of offloaded values on the device between a loop's forward and backward pass.

        The last forward iteration does not free a value that the first backward iteration could not reload in
        time. Counterpart: `_LayerVariables._find_lingering`.
        """
        if self.layer.iterations == 1:
            return 0
        starts = self.find_recompute_starts(states)
        lingering = (n for n in states.offloaded if self.find_first_use(n, starts) <= self.lingers_until(n))
        return sum(self.layer.values[n].nbytes for n in lingering)

    @functools.cache  # noqa: B019 - lives as long as the model
    def lingers_until(self, n: int) -> int:
        """Returns the last kernel before which, as first reader, no reload can arrive; -1 if none."""
        if self.is_offloaded_late(n):
            return len(self.layer.backward)
        kernels = range(len(self.layer.backward))
        return max((first for first in kernels if self.find_arrival(n, first) < 0), default=-1)

    def find_first_use(self, n: int, starts: Mapping[int, int]) -> int:
        """Returns the first kernel in need of an offloaded value.

        Args:
          n: index of the value.
          starts: index of a recomputed value -> kernel before which the value is recomputed.
        """
        return min([self.find_use_range(n)[0], *(starts[r] for r in self.readers[n] if r in starts)])

    def host_nbytes(self, states: ValueStates) -> int:
        """Bytes in host memory, of all iterations; the host stacks of a loop have a spare row.

        Counterpart: `_LayerVariables.host_terms`.
        """
        rows = self.layer.iterations + (self.layer.iterations > 1)
        return rows * sum(self.layer.values[n].nbytes for n in states.offloaded)

    def is_offloaded_late(self, n: int) -> bool:
        """Whether the copy to the host ends after its own iteration."""
        value = self.layer.values[n]
        return value.produced_ms + SEND_SLACK * self.d2h_ms(n) > self.layer.scheduled_forward_ms

    def find_arrival(self, n: int, first: int) -> int:
        """Returns the kernel from which on a reloaded value is on the device, given the value's first reader.

        -1 stands for a reload from the iteration before, because a reload in the same iteration
        could not be in time. XLA then keeps the reloaded value in a buffer of its own for the whole
        iteration, beside the buffer of the current iteration's value until the last reader of the latter
        (programs compiled for an H200).
        """
        return self._find_arrivals(n)[first]

    @functools.cache  # noqa: B019 - lives as long as the model
    def _find_arrivals(self, n: int) -> list[int]:
        """First reader -> kernel from which on a reloaded value is on the device; never decreasing."""
        ends, ms = [kernel.ends_ms for kernel in self.layer.backward], self.joint_reload_ms(n)
        kernels = zip(self.layer.backward, (0.0, *ends), strict=False)
        long = [
            LongKernel(s, began, use.ends_ms) for s, (use, began) in enumerate(kernels) if use.fills_device
        ]
        found = []
        for needed in (0.0, *ends):
            starts = needed - RELOAD_SLACK * ms
            kernel = bisect.bisect_right(ends, starts)
            found.append(
                -1 if starts < 0 else find_unhindered_start(kernel, needed - LEAST_RELOAD_SLACK * ms, long)
            )
        return list(itertools.accumulate(reversed(found), min))[::-1]

    def count_copies(self, n: int, first: int, s: int) -> int:
        """Counts the copies of a reloaded value on the device while a kernel runs.

        Counterpart: `_LayerVariables._add_copies`.

        Args:
          n: index of the value.
          first: index of the value's first reader.
          s: index of the kernel.
        """
        arrival, last = self.find_arrival(n, first), self.find_use_range(n)[1]
        return 1 + (s <= last) if arrival < 0 else int(arrival <= s <= last)

    @functools.cache  # noqa: B019
    def find_use_range(self, n: int) -> tuple[int, int]:
        """Returns the first and the last reader of a value, directly or through recomputed values."""
        value = self.layer.values[n]
        kernels = [s for s in (value.first_reader, value.last_reader) if s is not None]
        if not kernels:
            kernels = [self.find_use_range(reader)[0] for reader in self.readers[n] if self.is_needed(reader)]
        return min(kernels), max(kernels)

    @functools.cache  # noqa: B019
    def is_needed(self, n: int) -> bool:
        """Whether the backward pass reads a value, or another value computed from it."""
        return self.layer.values[n].first_reader is not None or any(map(self.is_needed, self.readers[n]))

    @functools.cache  # noqa: B019
    def find_row_copy(self, n: int) -> tuple[int, int] | None:
        """Returns the first and the last kernel that need a copy of a saved value's row, or None."""
        if self.layer.iterations == 1:
            return None
        aliases = [v for m, v in enumerate(self.layer.values) if m == n or n in self.find_aliased(m)]
        ends = [s for v in aliases for s in v.row_copy or ()]
        return (min(ends), max(ends)) if ends else None

    def find_row_copy_start(self, first: int, n: int, states: ValueStates, starts: Mapping[int, int]) -> int:
        """Returns the kernel before which XLA copies the row of a saved value.

        In ordered iterations, kernels that recompute other values from the row read the same copy earlier. In
        CUDA graphs with data dependencies, XLA may copy the row at any time: from kernel 0 on.

        Args:
          first: index of the first reader of the copy.
          n: index of the value.
          states: the state of each value.
          starts: index of a recomputed value -> kernel before which the value is recomputed.
        """
        if not states.is_ordered:
            return first
        return 0 if states.has_copies else min([first, *(starts[r] for r in self.readers[n] if r in starts)])

    @functools.cache  # noqa: B019
    def find_aliased(self, n: int) -> frozenset[int]:
        """Returns the indices of all values of which a value is an alias.

        Counterpart: `_LayerVariables._add_alone`.
        """
        other = self.layer.values[n].alias_of
        return frozenset() if other is None else self.find_aliased(other) | {other}

    @functools.cache  # noqa: B019
    def find_alias_end(self, n: int) -> int:
        """Returns the last kernel during which a value is on the device under another name; -1 if none."""
        lasts = (self.layer.values[other].last_reader for other in self.find_aliased(n))
        return max((last for last in lasts if last is not None), default=-1)

    def find_recompute_starts(self, states: ValueStates) -> dict[int, int]:
        """Returns: index of a recomputed value -> kernel before which the value is recomputed.

        The kernel is the first reader in ordered iterations, and kernel 0 otherwise. Counterpart:
        `_LayerVariables._find_recomputed_by`.
        """
        if not states.is_ordered:
            return dict.fromkeys(states.recomputed, 0)
        starts: dict[int, int] = {}
        for n in sorted(states.recomputed, reverse=True):
            first = self.layer.values[n].first_reader
            later = [
                starts[r] for r in self.readers[n] if r in states.recomputed and not self.is_read_twice(n)
            ]
            starts[n] = min([*later, *([first] if first is not None else [])])
        return starts

    @functools.cache  # noqa: B019
    def is_read_twice(self, n: int) -> bool:
        """Whether ordered iterations read a row from its stack twice: for recomputation, and for the backward
        pass.

        XLA does so for large rows, such as the weights of experts (programs compiled for an H200).
        """
        value = self.layer.values[n]
        return value.is_large and not value.reads and not value.is_carried and value.first_reader is not None

    def forward_nbytes(self, states: ValueStates) -> int:
        """Bytes of the working set of the forward pass. Counterpart: `_LayerVariables.forward_terms`."""
        late = sum(self.layer.values[n].nbytes for n in states.offloaded if self.is_offloaded_late(n))
        kernels = self.layer.forward
        small = max((kernel.small_nbytes for kernel in kernels), default=0)
        return late + small + max((kernel.large_nbytes for kernel in kernels), default=0)

    def in_place_nbytes(self, kernel: KernelUse, *, is_ordered: bool) -> int:
        """Bytes of a kernel's small results without a buffer of their own.

        In stock order, the kernel writes gradients into their stacks. In the order of `jaxoff.jit`, the
        kernel writes sums of cotangents into the buffer of a cotangent.
        """
        return kernel.in_cotangent_nbytes if is_ordered else kernel.stacked_nbytes

    def is_fused(self, fusion: RecomputeFusion, states: ValueStates) -> bool:
        """Whether XLA makes a fusion. Barriers between the kernels of ordered iterations prevent fusions."""
        aliases = self.find_aliased(fusion.value) | {fusion.value}
        has_row = not aliases.isdisjoint(states.saved)
        return has_row and not states.is_ordered and not states.recomputed.isdisjoint(fusion.recomputed)

    def working_nbytes(self, states: ValueStates) -> tuple[int, str]:
        """Bytes of the working set of the backward pass, and the operation at which most bytes are in use.

        Where each value has a buffer for the whole iteration, XLA puts few small values into buffers of large
        ones. The working set is then nearer to the largest sum of large values plus the largest sum of small
        values than to the largest sum of both at one kernel; see `UNSHARED_PART`. Counterpart: the end of
        `_LayerVariables.__init__`.
        """
        if not self.layer.backward:
            return 0, ""
        small, large = self.nbytes_by_kernel(states)
        both = [sum(sizes) for sizes in zip(small, large, strict=True)]
        operation = self.layer.backward[both.index(max(both))].operation
        apart = 0.0 if states.is_packed else UNSHARED_PART if states.is_ordered else 1.0
        return round((1 - apart) * max(both) + apart * (max(small) + max(large))), operation

    def find_fullest(self, states: ValueStates) -> set[int]:
        """Returns the kernels of the backward pass with most small, most large, and most bytes in use."""
        small, large = self.nbytes_by_kernel(states)
        both = [sum(sizes) for sizes in zip(small, large, strict=True)]
        return {sizes.index(max(sizes)) for sizes in (both, small, large)}

    def nbytes_by_kernel(self, states: ValueStates) -> tuple[list[int], list[int]]:
        """Bytes of small and of large values in use, by kernel of the backward pass.

        Counterpart: `_LayerVariables._add_memory`.
        """
        small = [
            kernel.small_nbytes - self.in_place_nbytes(kernel, is_ordered=states.is_ordered)
            for kernel in self.layer.backward
        ]
        large = [kernel.large_nbytes for kernel in self.layer.backward]
        for s, kernel in enumerate(self.layer.backward):
            for fusion in kernel.fusions:
                if self.is_fused(fusion, states):
                    small[s] += fusion.small_nbytes
                    large[s] += fusion.large_nbytes

        def add(n: int, first: int, last: int) -> None:
            value = self.layer.values[n]
            for s in range(first, last + 1):
                (large if value.is_large else small)[s] += value.nbytes

        starts = self.find_recompute_starts(states)
        for n, start in starts.items():
            last, alias_end = self.layer.values[n].last_reader, self.find_alias_end(n)
            if last is not None and not (self.find_aliased(n) & (states.saved | states.offloaded)):
                add(n, max(start, alias_end + 1), last)
        for n in states.saved:
            if (row := self.find_row_copy(n)) is not None:
                add(n, self.find_row_copy_start(row[0], n, states, starts), row[1])
        for n in states.offloaded:
            first = self.find_first_use(n, starts)
            value = self.layer.values[n]
            for s in range(len(small)):
                (large if value.is_large else small)[s] += value.nbytes * self.count_copies(n, first, s)
        return small, large
