"""When the copies of a program in order can start, and when they must be done, estimated."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Mapping, Sequence

from jaxoff._device.profile import Device
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import JaxprEqn, Var
from jaxoff._jaxpr.kernels import KernelGraph
from jaxoff._jaxpr.primitives import is_compute

# So many places, and ms of kernels, earlier than planned may a copy start.
_LEAD, _LEAD_MS = 2, 0.1
# Copies from and to the host are planned for so many times their estimated length.
SLACK, LEAST_SLACK, SEND_SLACK = 1.5, 1.1, 1.1


@dataclasses.dataclass(frozen=True)
class Reloads:
    """A plan for the copies from the host, by equation.

    Attributes:
      order: those of values that are on the host from the beginning, as they are needed.
      starts: the place in the chain behind which each starts.
    """

    order: tuple[int, ...] = ()
    starts: dict[int, int] = dataclasses.field(default_factory=dict)


def fills_device(eqn: JaxprEqn, ms: float) -> bool:
    """Whether small kernels find no room beside one that takes so long."""
    return is_compute(eqn) and ms > _LEAD_MS


@dataclasses.dataclass(frozen=True)
class Long:
    """A kernel that fills the device: behind how many places it comes, and its times in ms."""

    place: int
    began: float
    end: float


def unhindered(place: int, latest: float, long: Sequence[Long]) -> int:
    """Behind how many places a copy starts that must be under way by a time.

    A long kernel that begins when the small ones before the copy could, or 0.13 ms later, gives them no room:
    they run as it ends (`bench/LOG.md`, "what keeps a reload waiting"). Where that is late, the copy starts
    before the long kernel before that one.

    Args:
      place: behind how many places it is planned.
      latest: the time, in ms.
      long: such kernels, in order.
    """
    count = bisect.bisect_left(long, place, key=lambda kernel: kernel.place)
    before, after = long[:count], long[count:]
    if not after or not after[0].began < latest < after[0].end:
        return place
    return before[-1].place if before else 0


class CopyTimes:
    """The times of an order, in ms since it began.

    Attributes:
      sent: by copy to the host, when it can start.
      needed: by copy from the host, the place in the chain that first reads it.
    """

    def __init__(self, eqns: Sequence[JaxprEqn], graph: KernelGraph, device: Device):
        self._eqns, self._graph, self._device = eqns, graph, device
        self.sent: dict[int, float] = {}
        self.needed: dict[int, int] = {}
        self._ends: list[float] = []  # of each place in the chain
        self._long: list[Long] = []
        self._made: dict[Var, float] = {}  # when a value is made
        self._read_by: dict[Var, float] = {}  # when its latest reader is done

    @property
    def _end(self) -> float:
        return self._ends[-1] if self._ends else 0.0

    def add(self, i: int, end: float, *, is_chained: bool = True) -> None:
        """Adds a kernel that is done at a time; a link has the next place in the chain."""
        if is_chained:
            if fills_device(self._eqns[i], end - self._end):
                self._long.append(Long(len(self._ends), self._end, end))
            self._ends.append(end)
        self._made |= dict.fromkeys(self._eqns[i].outvars, end)
        self._read_by |= dict.fromkeys(self._graph.reads[i], end)

    def send(self, i: int) -> None:
        """Adds a copy to the host."""
        self.sent[i] = max((self._made.get(v, 0.0) for v in self._graph.reads[i]), default=0.0)

    def reloads(self, follows: Mapping[Var, Var]) -> Reloads:
        """A plan from when copies were needed: each as late as it can start and be in time.

        The copies of one direction follow each other, so the last one is planned first. Of those needed at
        once that is the one that has to wait longest for the readers of what it follows.
        """

        def iteration(item: tuple[int, float]) -> tuple[float, float]:
            i, time = item
            return time, self._free_at(self._eqns[i].outvars[0], follows)

        needed = sorted(self._by_need(), key=iteration)
        starts, busy_from, latest = {}, float("inf"), float("inf")
        for i, time in reversed(needed):
            busy_from = min(time, busy_from) - SLACK * self.reload_ms(i)
            latest = min(time, latest) - LEAST_SLACK * self.reload_ms(i)
            starts[i] = unhindered(self._place_before(busy_from), latest, self._long)
        order = tuple(i for i, _ in needed if self._is_there_from_the_beginning(i))
        return Reloads(order, starts)

    def _place_before(self, time: float) -> int:
        """Behind how many places a copy starts to be under way by a time.

        What writes the element are small kernels, which a large one that starts with them keeps waiting.
        """
        places = bisect.bisect_right(self._ends, time)
        if not places:
            return 0
        return max(0, min(places - _LEAD, bisect.bisect_right(self._ends, self._ends[places - 1] - _LEAD_MS)))

    def late(self, follows: Mapping[Var, Var]) -> list[Var]:
        """The copies from the host that cannot end with the program: what they follow is read too long.

        Copies follow each other, too. Of those that are in time alone but not together, the small ones are
        late: they take less memory elsewhere.
        """
        largest_first = sorted(follows, key=lambda v: compat.nbytes(v.aval), reverse=True)
        in_time: list[tuple[float, float]] = []
        found = []
        for copy in largest_first:
            began, ms = self._free_at(copy, follows), self.reload_ms(self._graph.maker[copy])
            if self._done_by([*in_time, (began, ms)]) <= self._end:
                in_time.append((began, ms))
            else:
                found.append(copy)
        return found

    def _free_at(self, copy: Var, follows: Mapping[Var, Var]) -> float:
        """When nothing reads any more what a copy follows."""
        return self._read_by.get(follows[copy], 0.0) if copy in follows else 0.0

    @staticmethod
    def _done_by(copies: Sequence[tuple[float, float]]) -> float:
        """When the last of some copies of one direction ends; of each when it can start, and its length."""
        busy = 0.0
        for time, ms in sorted(copies):
            busy = max(busy, time) + ms
        return busy

    def too_late(self) -> list[Var]:
        """The copies from the host that cannot be in time if they start with the program."""
        needed = [(i, time) for i, time in self._by_need() if self._is_there_from_the_beginning(i)]
        for first in range(len(needed)):
            busy, in_time = 0.0, True
            for i, time in needed[first:]:
                busy += SLACK * self.reload_ms(i)
                in_time = in_time and busy <= time
            if in_time:
                return [self._eqns[i].outvars[0] for i, _ in needed[:first]]
        return [self._eqns[i].outvars[0] for i, _ in needed]

    def unfinished(self) -> dict[Var, bool]:
        """The copies to the host that are still under way when the program ends, by their results.

        And whether each of them, if the next iteration began with all of them, would be done before that
        makes the
        value that it copies, however the link takes iterations: of copies that wait at one time, it takes
          any.
        """
        sent = sorted(self.sent.items(), key=lambda item: item[1])
        copies = [(time, self._send_ms(i)) for i, time in sent]
        in_time = max((n for n in range(len(sent) + 1) if self._done_by(copies[:n]) <= self._end), default=0)
        late = sent[in_time:]
        done = sum(ms for _, ms in copies[in_time:])
        for time, ms in copies[:in_time]:
            done += ms if time < done else 0.0  # it may go first
        return {self._eqns[i].outvars[0]: done <= time for i, time in late}

    def reload_ms(self, i: int) -> float:
        """How long a copy from the host takes."""
        return self._device.h2d_ms(compat.nbytes(self._eqns[i].outvars[0].aval))

    def _send_ms(self, i: int) -> float:
        return SEND_SLACK * self._device.d2h_ms(compat.nbytes(self._eqns[i].outvars[0].aval))

    def _is_there_from_the_beginning(self, i: int) -> bool:
        return not any(v in self._graph.maker for v in self._graph.reads[i])

    def _by_need(self) -> list[tuple[int, float]]:
        """The copies from the host and when each is needed, the first one first; results at the end."""
        times = {i: self._ends[place - 2] if place > 1 else 0.0 for i, place in self.needed.items()}
        for i in self._graph.kernels:
            if compat.transfer_in(self._eqns[i]) == "H2D":
                times.setdefault(i, self._end)
        return sorted(times.items(), key=lambda item: item[1])
