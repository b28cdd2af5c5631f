"""One order for the values of a program that moves residuals, so that their memory is used again.

Under CUDA graphs scheduled CONCURRENT, XLA lets two values share memory only where one is provably before
the other by dependency. Gradients of weights and recomputed values hang loosely in a backward pass, so that
nearly everything would live at once. Optimization barriers from one large value to the next give the
dependencies back; the copies between device and host stay outside of that chain and run beside it.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence

from jaxoff import _compat
from jaxoff._compat import JaxprEqn, Var
from jaxoff._cost import Device
from jaxoff._inline import Renamed, now

# Equations that XLA computes again wherever they are read, within the kernel that reads them.
_CHEAP_NAMES = """
abs add add_any and bitcast_convert_type broadcast_in_dim cbrt ceil clamp convert_element_type copy cos cosh
div eq erf erf_inv erfc exp exp2 expand_dims expm1 floor ge gt integer_pow iota is_finite le log log1p
logistic lt max min mul name ne neg not optimization_barrier or pow pvary reduce_precision rem reshape round
rsqrt select_n sign sin sinh slice split sqrt square squeeze stop_gradient sub tan tanh transpose xor
"""
# Of an argument, a layer's weights for one, these are read in place, or copied just before they are read.
_VIEW_NAMES = """
convert_element_type dynamic_slice expand_dims name optimization_barrier reduce_precision reshape slice split
squeeze transpose
"""
# Kernels that only move or sum up what they read: no reason to hold anything else back.
_MOVING_NAMES = """
argmax argmin concatenate cummax cummin cumprod cumsum device_put dynamic_slice dynamic_update_slice gather
pad random_bits random_seed random_unwrap random_wrap reduce_and reduce_max reduce_min reduce_or reduce_prod
reduce_sum rev scatter scatter-add scatter_add sort top_k
"""
_CHEAP = frozenset(_CHEAP_NAMES.split())
_VIEWS = frozenset(_VIEW_NAMES.split())
_LIGHT = _CHEAP | frozenset(_MOVING_NAMES.split())
# Values of fewer bytes are not worth a place in the chain.
LARGE_NBYTES = 1 << 20
# How many equations ahead may be taken first while a copy is on its way.
_LOOKAHEAD = 8
# Copies are planned for this many times their estimated length.
_SLACK = 1.5


@dataclasses.dataclass(frozen=True)
class Straight:
    """A straight-line program, its calls inlined; see `jaxoff._inline`.

    Attributes:
      eqns: equations in program order.
      outs: the results.
      in_order: by equation, whether it keeps its place in the order. The others, which compute values again,
        come just before their first reader.
      holds_copies: whether the program waits for its copies to the host: without that XLA puts them off to
        where they are read back. In the body of a loop they end with the body.
    """

    eqns: tuple[JaxprEqn, ...]
    outs: frozenset[Var]
    in_order: tuple[bool, ...]
    holds_copies: bool


def ordered(program: Straight, device: Device, large_nbytes: int = LARGE_NBYTES) -> list[JaxprEqn]:
    """Puts the large values of a straight-line program into one chain.

    An equation that has to wait for a copy from the host lets a later one go first. What frees as much memory
    as it takes comes at once. A copy from the host starts as late as it can and still be in time.

    Args:
      program: the program.
      device: speeds, to estimate when copies arrive.
      large_nbytes: from how many bytes on a value has a place in the chain.

    Returns:
      Equations that compute the same results, with barriers between them.
    """
    # First as if every copy were there, to see when each is needed; then with the copies in that order.
    reloads = _Reloads()
    for _ in range(2):
        draft = _Order(program, device, large_nbytes, reloads)
        draft.run()
        reloads = draft.reloads()
    return _Order(program, device, large_nbytes, reloads).run()


@dataclasses.dataclass(frozen=True)
class _Reloads:
    """A plan for the copies from the host, by equation.

    Attributes:
      order: those of values that are on the host from the beginning, as they are needed.
      starts: the place in the chain behind which each starts.
    """

    order: tuple[int, ...] = ()
    starts: dict[int, int] = dataclasses.field(default_factory=dict)


class _Order:
    """The state of an ordering.

    A unit is an equation whose results are stored. The rest is cheap, and is computed in the units that read
    it.
    """

    def __init__(self, program: Straight, device: Device, large_nbytes: int, reloads: _Reloads):
        self._eqns, self._program, self._device, self._plan = program.eqns, program, device, reloads
        self._large_nbytes = large_nbytes
        self._maker = {v: i for i, eqn in enumerate(self._eqns) for v in eqn.outvars}
        self._units = _units(self._eqns, program.outs)
        # By unit: the stored values that it reads, and the cheap equations in between.
        self._reads: dict[int, list[Var]] = {}
        self._between: dict[int, list[int]] = {}
        self._readers: dict[Var, list[int]] = {}
        for i in sorted(self._units):
            self._reads[i], self._between[i] = self._trace_back(i)
            for v in self._reads[i]:
                self._readers.setdefault(v, []).append(i)
        self._unread = {v: len(readers) for v, readers in self._readers.items()}
        self._placed: set[int] = set()
        self._out: list[JaxprEqn] = []
        self._last: Var | None = None
        self._length = 0
        self._level: dict[Var, int] = {}  # the last place in the chain that a value is known to follow
        self._arrives: dict[Var, float] = {}
        self._time = 0.0
        self._ends: list[float] = []  # of each place in the chain
        self._needed: dict[int, int] = {}  # by copy from the host, the place in the chain that first reads it
        self._leaving: dict[Var, float] = {}  # copies to the host under way, and when they are done
        self._left: Renamed = {}  # by copy to the host, what stands for it once it is waited for

    def run(self) -> list[JaxprEqn]:
        self._start_reloads()
        waiting = [i for i in sorted(self._units) if self._program.in_order[i] and is_heavy(self._eqns[i])]
        while waiting:
            ahead = waiting[:_LOOKAHEAD]
            ready = {i: self._ready_at(i) for i in ahead}
            first = next((i for i in ahead if ready[i] <= self._time), min(ahead, key=lambda i: ready[i]))
            self._time = max(self._time, ready[first])
            self._place(first)
            waiting = [i for i in waiting if i not in self._placed]
        for i in sorted(self._units):
            self._place(i)
        return self._out

    def _trace_back(self, i: int) -> tuple[list[Var], list[int]]:
        reads: dict[Var, None] = {}
        between, todo = set(), list(_variables(self._eqns[i]))
        while todo:
            v = todo.pop()
            j = self._maker.get(v)
            if j is None or j in self._units:
                reads[v] = None
            elif j not in between:
                between.add(j)
                todo += _variables(self._eqns[j])
        return list(reads), sorted(between)

    def _start_reloads(self) -> None:
        """Says when copies from the host arrive; puts first what is not to start later."""
        time, arrives = 0.0, {}
        for i in self._plan.order:
            time += self._device.h2d_ms(_compat.nbytes(self._eqns[i].outvars[0].aval))
            arrives[i] = time
        order = dict.fromkeys((*self._plan.order, *sorted(self._units)))
        for i in order:
            if _compat.transfer_in(self._eqns[i]) == "H2D":
                self._arrives[self._eqns[i].outvars[0]] = arrives.get(i, 0.0)
                if self._is_there_from_the_beginning(i) and not self._plan.starts.get(i):
                    self._emit(i, {})

    def _is_there_from_the_beginning(self, i: int) -> bool:
        return not any(v in self._maker for v in self._reads[i])

    def reloads(self) -> _Reloads:
        """A plan from when copies were needed: each as late as it can start and be in time.

        The copies of one direction follow each other, so the last one is planned first.
        """
        needed = sorted(self._needed.items(), key=lambda item: item[1])
        starts, busy_from = {}, float("inf")
        for i, place in reversed(needed):
            before = self._ends[place - 2] if place > 1 else 0.0
            nbytes = _compat.nbytes(self._eqns[i].outvars[0].aval)
            busy_from = min(before, busy_from) - _SLACK * self._device.h2d_ms(nbytes)
            starts[i] = bisect.bisect_right(self._ends, busy_from)
        return _Reloads(tuple(i for i, _ in needed if self._is_there_from_the_beginning(i)), starts)

    def _ready_at(self, i: int) -> float:
        """When the copies from the host have arrived that a unit, or one that it still needs, waits for."""
        time, todo, seen = 0.0, [i], set()
        while todo:
            for v in self._reads[todo.pop()]:
                time = max(time, self._arrives.get(v, 0.0))
                j = self._maker.get(v)
                if j is not None and j not in self._placed and j not in seen:
                    seen.add(j)
                    todo.append(j)
        return time

    def _place(self, i: int) -> None:
        """Places a unit and what it needs, then all that frees at least as much memory as it takes."""
        todo = [i]
        while todo:
            j = todo[-1]
            missing = {self._maker[v] for v in self._reads[j] if v in self._maker} - self._placed
            if missing and j not in self._placed:
                todo += sorted(missing, reverse=True)
                continue
            todo.pop()
            if j not in self._placed:
                self._add(j)
                todo += reversed(self._free_after(j))

    def _add(self, i: int) -> None:
        eqn = self._eqns[i]
        if not self._is_link(eqn):
            self._emit(i, {})
            return
        if is_heavy(eqn):
            self._start_due_reloads()
        self._emit(i, self._behind_the_last(i))
        self._time += self._device.compute_ms(eqn) if is_heavy(eqn) else 0.0
        self._ends.append(self._time)

    def _start_due_reloads(self) -> None:
        for j, start in self._plan.starts.items():
            if j not in self._placed and start <= self._length and self._can_return(j):
                self._emit(j, self._tied(self._reads[j], j))

    def _free_after(self, i: int) -> list[int]:
        """The units that an added one makes free; what only leaves the program is added at once."""
        readers = {j: None for v in self._eqns[i].outvars for j in self._readers.get(v, ())}
        free = []
        for j in readers:
            if j not in self._placed and self._is_free(j):
                free.append(j)
            elif j not in self._placed and self._only_leaves(j):
                self._emit(j, {}, is_link=False)
        return free

    def _is_link(self, eqn: JaxprEqn) -> bool:
        """Whether an equation has a place in the chain."""
        if _compat.transfer_in(eqn):
            return False
        largest = max((_compat.nbytes(v.aval) for v in eqn.outvars), default=0)
        return largest > 0 and (is_heavy(eqn) or largest >= self._large_nbytes)

    def _can_return(self, i: int) -> bool:
        """Whether what a copy from the host reads is on the host."""
        return all(v not in self._maker or v in self._left for v in self._reads[i])

    def _is_free(self, i: int) -> bool:
        """Whether a light unit could be computed now, in the memory of what only it still reads."""
        eqn, reads = self._eqns[i], self._reads[i]
        if _compat.transfer_in(eqn) == "D2H":
            return all(self._maker.get(v, -1) in self._placed for v in reads)
        if is_heavy(eqn) or not self._is_link(eqn):
            return False
        if any(v in self._maker and self._maker[v] not in self._placed for v in reads):
            return False
        if any(self._arrives.get(v, 0.0) > self._time for v in reads):
            return False
        freed = sum(_compat.nbytes(v.aval) for v in reads if v in self._maker and self._unread[v] == 1)
        return sum(_compat.nbytes(v.aval) for v in eqn.outvars) <= freed

    def _only_leaves(self, i: int) -> bool:
        """Whether a light unit makes a result of the program, larger than what it reads, and nothing else.

        A loop writes it into its stack in the same kernel, if nothing waits for it.
        """
        eqn, made = self._eqns[i], set(self._eqns[i].outvars)
        if is_heavy(eqn) or not made <= self._program.outs or any(v in self._readers for v in made):
            return False
        return all(self._maker.get(v, -1) in self._placed or v not in self._maker for v in self._reads[i])

    def _behind_the_last(self, i: int) -> Renamed:
        """Ties what a unit reads to the last link of the chain; says what stands for it."""
        reads = self._reads[i]
        if self._last is None or not reads:
            return {}
        loose = [v for v in reads if self._level.get(v, 0) < self._length]
        tied = [v for v in loose if v in self._maker and _compat.nbytes(v.aval) >= self._large_nbytes]
        arrived = [v for v, done in self._leaving.items() if done <= self._time]
        if not tied and (len(loose) == len(reads) or arrived):
            tied = [min(reads, key=lambda v: _compat.nbytes(v.aval))]
        if not tied:
            return {}
        behind = self._tied([*tied, *arrived], i)
        for v in arrived:
            del self._leaving[v]
            self._left[v] = behind.pop(v)
        return behind

    def _tied(self, values: list[Var], i: int) -> Renamed:
        operands = [now(self._left, v) for v in values]
        outs, barrier = _compat.barrier([*operands, self._last], like=self._eqns[i])
        self._out.append(barrier)
        self._level |= dict.fromkeys(outs, self._length)
        return dict(zip(values, outs[:-1], strict=True))

    def _emit(self, i: int, behind: Renamed, *, is_link: bool | None = None) -> None:
        self._placed.add(i)
        renamed = self._left | behind
        for j in self._between[i]:
            eqn = self._eqns[j]
            outs = [Var(v.aval) for v in eqn.outvars]
            self._out.append(eqn.replace(invars=[now(renamed, v) for v in eqn.invars], outvars=outs))
            renamed.update(zip(eqn.outvars, outs, strict=True))
        eqn = self._eqns[i]
        self._out.append(eqn.replace(invars=[now(renamed, v) for v in eqn.invars]))
        level = max((self._level.get(now(behind, v), 0) for v in self._reads[i]), default=0)
        if self._is_link(eqn) if is_link is None else is_link:
            self._length += 1
            level = self._length
            self._last = max(eqn.outvars, key=lambda v: _compat.nbytes(v.aval))
        self._level |= dict.fromkeys(eqn.outvars, level)
        if self._program.holds_copies and _compat.transfer_in(eqn) == "D2H":
            out = eqn.outvars[0]
            begins = max([self._time, *self._leaving.values()])
            self._leaving[out] = begins + _SLACK * self._device.d2h_ms(_compat.nbytes(out.aval))
        for v in self._reads[i]:
            self._unread[v] -= 1
            if v in self._arrives:
                self._needed.setdefault(self._maker[v], self._length)


def is_heavy(eqn: JaxprEqn) -> bool:
    """Whether an equation is one kernel or several that take their time."""
    return eqn.primitive.name not in _LIGHT


def _units(eqns: Sequence[JaxprEqn], outs: frozenset[Var]) -> set[int]:
    """The equations whose results are stored: those that are not cheap, and what they and the caller read."""
    stored = set(outs)
    for eqn in eqns:
        if is_heavy(eqn) or _compat.transfer_in(eqn):
            stored.update(_variables(eqn))
    units, made = set(), set()
    for i, eqn in enumerate(eqns):
        is_view = eqn.primitive.name in _VIEWS and made.isdisjoint(_variables(eqn))
        if is_view and outs.isdisjoint(eqn.outvars):
            continue
        made.update(eqn.outvars)
        if eqn.primitive.name not in _CHEAP or not stored.isdisjoint(eqn.outvars):
            units.add(i)
    return units


def _variables(eqn: JaxprEqn) -> list[Var]:
    return [v for v in eqn.invars if isinstance(v, Var)]


def dependents(eqns: Sequence[JaxprEqn], of: set[Var]) -> list[bool]:
    """For each equation, whether it depends on any of the variables."""
    found, out = set(of), []
    for eqn in eqns:
        depends = any(v in found for v in _variables(eqn))
        out.append(depends)
        if depends:
            found.update(eqn.outvars)
    return out
