"""Estimates when the copies of an ordered program can start, and when they must end."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Mapping, Sequence

from jaxoff._device.profile import Device
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import JaxprEqn, Var
from jaxoff._jaxpr.kernels import KernelGraph
from jaxoff._jaxpr.primitives import is_compute
from jaxoff._schedule.calibrations import (
    LEAD_KERNELS,
    LEAD_MS,
    LEAST_RELOAD_SLACK,
    RELOAD_SLACK,
    SEND_SLACK,
)


@dataclasses.dataclass(frozen=True)
class ReloadPlan:
    """When each reload starts.

    Attributes:
      order: equations of the reloads whose operands are on the host at the start, in the order of need.
      starts: equation of a reload -> number of kernels of the chain before the reload's start.
    """

    order: tuple[int, ...] = ()
    starts: dict[int, int] = dataclasses.field(default_factory=dict)


def fills_device(eqn: JaxprEqn, ms: float) -> bool:
    """Whether small kernels find no room beside a kernel of a given duration."""
    return is_compute(eqn) and ms > LEAD_MS


@dataclasses.dataclass(frozen=True)
class LongKernel:
    """A kernel which fills the device.

    Attributes:
      kernels_before: number of kernels of the chain before it.
      began, end: times, in ms.
    """

    kernels_before: int
    began: float
    end: float


def find_unhindered_start(kernels_before: int, latest: float, long_kernels: Sequence[LongKernel]) -> int:
    """Finds a start of a reload which no long kernel delays too much.

    Small kernels start a reload (see `dependency_kernels.write_element`). A long kernel leaves no room for
    small kernels which become ready with its start, or up to 0.13 ms before: the small kernels run when the
    long kernel ends (`bench/LOG.md`, "what keeps a reload waiting"). If this end is too late for the reload,
    the small kernels go before the previous long kernel, and run when the previous long kernel ends.

    Args:
      kernels_before: number of kernels of the chain before the planned start.
      latest: time by which the reload must be under way, in ms.
      long_kernels: the kernels which fill the device, in order.

    Returns:
      The number of kernels of the chain before the start.
    """
    count = bisect.bisect_left(long_kernels, kernels_before, key=lambda kernel: kernel.kernels_before)
    before, after = long_kernels[:count], long_kernels[count:]
    if not after or not after[0].began < latest < after[0].end:
        return kernels_before
    return before[-1].kernels_before if before else 0


class CopyTimes:
    """The times of kernels and copies in an order, in ms from the start of the program.

    Attributes:
      send_starts: equation of a send -> time from which the send can start, in ms.
      first_reads: equation of a reload -> position in the chain at which a kernel first reads the result.
        Positions count from 1.
    """

    def __init__(self, eqns: Sequence[JaxprEqn], graph: KernelGraph, device: Device):
        self._eqns, self._graph, self._device = eqns, graph, device
        self.send_starts: dict[int, float] = {}
        self.first_reads: dict[int, int] = {}
        self._ends: list[float] = []  # the ends of the kernels of the chain
        self._long_kernels: list[LongKernel] = []
        self._made: dict[Var, float] = {}  # value -> end of its maker
        self._last_read: dict[Var, float] = {}  # value -> end of its latest reader

    @property
    def _end(self) -> float:
        return self._ends[-1] if self._ends else 0.0

    def add(self, i: int, end: float, *, is_chained: bool = True) -> None:
        """Adds kernel `i` with its end; a chained kernel takes the next position in the chain."""
        if is_chained:
            if fills_device(self._eqns[i], end - self._end):
                self._long_kernels.append(LongKernel(len(self._ends), self._end, end))
            self._ends.append(end)
        self._made |= dict.fromkeys(self._eqns[i].outvars, end)
        self._last_read |= dict.fromkeys(self._graph.reads[i], end)

    def add_send(self, i: int) -> None:
        """Adds send `i`, which can start when its operand is made."""
        self.send_starts[i] = max((self._made.get(v, 0.0) for v in self._graph.reads[i]), default=0.0)

    def plan_reloads(self, reuses_buffer_of: Mapping[Var, Var], most_ahead: int | None = None) -> ReloadPlan:
        """Plans each reload to start as late as possible and still be in time.

        The link serves the reloads in turn, so the plan begins with the last reload. Of reloads needed at the
        same time, the last is the reload whose buffer becomes free last.

        Args:
          reuses_buffer_of: as in `OrderProblem`.
          most_ahead: of a value that the program sends, a reload starts at most so many reloads ahead of its
            turn, in time or not: a value that is read back as soon as it is sent wins no memory.
        """

        def sort_key(item: tuple[int, float]) -> tuple[float, float]:
            i, time = item
            return time, self._find_free_time(self._eqns[i].outvars[0], reuses_buffer_of)

        needed = sorted(self._list_needed(), key=sort_key)
        starts, busy_from, latest = {}, float("inf"), float("inf")
        for k, (i, time) in reversed([*enumerate(needed)]):
            busy_from = min(time, busy_from) - RELOAD_SLACK * self.estimate_reload_ms(i)
            if most_ahead is not None and k >= most_ahead and not self._is_on_host_at_start(i):
                busy_from = max(busy_from, needed[k - most_ahead][1])
            latest = min(time, latest) - LEAST_RELOAD_SLACK * self.estimate_reload_ms(i)
            starts[i] = find_unhindered_start(self._find_start(busy_from), latest, self._long_kernels)
        order = tuple(i for i, _ in needed if self._is_on_host_at_start(i))
        return ReloadPlan(order, starts)

    def _find_start(self, time: float) -> int:
        """Returns the number of kernels of the chain before a reload which must be under way by a time.

        The small kernels of the reload wait for a large kernel which starts with the small kernels. Hence the
        lead, in kernels and in ms.
        """
        ended = bisect.bisect_right(self._ends, time)
        if not ended:
            return 0
        return max(
            0, min(ended - LEAD_KERNELS, bisect.bisect_right(self._ends, self._ends[ended - 1] - LEAD_MS))
        )

    def find_late_reloads(self, reuses_buffer_of: Mapping[Var, Var]) -> list[Var]:
        """Finds the reloads which cannot end with the program, because their buffers are read too long.

        The link serves one reload after another. If reloads are in time alone and not together, the smaller
        reloads are late: a buffer of their own takes less memory.
        """
        largest_first = sorted(reuses_buffer_of, key=lambda v: compat.nbytes(v.aval), reverse=True)
        in_time: list[tuple[float, float]] = []
        late = []
        for v in largest_first:
            start = self._find_free_time(v, reuses_buffer_of)
            ms = self.estimate_reload_ms(self._graph.maker[v])
            if self._find_end([*in_time, (start, ms)]) <= self._end:
                in_time.append((start, ms))
            else:
                late.append(v)
        return late

    def _find_free_time(self, v: Var, reuses_buffer_of: Mapping[Var, Var]) -> float:
        """Returns the end of the last reader of the buffer which reload result `v` takes, in ms."""
        return self._last_read.get(reuses_buffer_of[v], 0.0) if v in reuses_buffer_of else 0.0

    @staticmethod
    def _find_end(copies: Sequence[tuple[float, float]]) -> float:
        """Returns the end of the last copy of one direction, given earliest starts and durations in ms."""
        busy = 0.0
        for start, ms in sorted(copies):
            busy = max(busy, start) + ms
        return busy

    def find_reloads_to_prefetch(self) -> list[Var]:
        """Finds the reloads which cannot be in time even if they start with the program."""
        needed = [(i, time) for i, time in self._list_needed() if self._is_on_host_at_start(i)]
        for first in range(len(needed)):
            busy, in_time = 0.0, True
            for i, time in needed[first:]:
                busy += RELOAD_SLACK * self.estimate_reload_ms(i)
                in_time = in_time and busy <= time
            if in_time:
                return [self._eqns[i].outvars[0] for i, _ in needed[:first]]
        return [self._eqns[i].outvars[0] for i, _ in needed]

    def find_late_sends(self) -> dict[Var, bool]:
        """Maps each send which outlives the iteration to whether its source buffer may be reused.

        The next iteration then starts with the late sends of this iteration, and writes the new value into
        the buffer. The buffer may be reused if the send ends before the next iteration makes the new value,
        even if the link serves the send last: the link serves waiting copies in any order (`bench/LOG.md`,
        "why `nano`'s least budget was slow").
        """
        sends = sorted(self.send_starts.items(), key=lambda item: item[1])
        copies = [(start, self._estimate_send_ms(i)) for i, start in sends]
        in_time = max(
            (n for n in range(len(sends) + 1) if self._find_end(copies[:n]) <= self._end), default=0
        )
        done = sum(ms for _, ms in copies[in_time:])
        for start, ms in copies[:in_time]:
            done += ms if start < done else 0.0  # the link may serve this send before the late sends
        return {self._eqns[i].outvars[0]: done <= start for i, start in sends[in_time:]}

    def estimate_reload_ms(self, i: int) -> float:
        """Estimates the duration of reload `i`, without slack."""
        return self._device.h2d_ms(compat.nbytes(self._eqns[i].outvars[0].aval))

    def _estimate_send_ms(self, i: int) -> float:
        return SEND_SLACK * self._device.d2h_ms(compat.nbytes(self._eqns[i].outvars[0].aval))

    def _is_on_host_at_start(self, i: int) -> bool:
        return not any(v in self._graph.maker for v in self._graph.reads[i])

    def _list_needed(self) -> list[tuple[int, float]]:
        """Lists the reloads with the time when each is needed, in order of time.

        A reload is needed when the kernel before its first reader ends; an unread result, at the end.
        """
        times = {i: self._ends[n - 2] if n > 1 else 0.0 for i, n in self.first_reads.items()}
        for i in self._graph.kernels:
            if compat.transfer_in(self._eqns[i]) == "H2D":
                times.setdefault(i, self._end)
        return sorted(times.items(), key=lambda item: item[1])
