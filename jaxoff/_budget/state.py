"""State on the host within a budget: which of a step's arguments rest there, and the search with them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from jax.sharding import Sharding

from jaxoff._budget.budget_error import BudgetError
from jaxoff._budget.costs import streamed_ms
from jaxoff._budget.labels import format_type
from jaxoff._budget.limits import Budget
from jaxoff._budget.report import PlacedValue, Plan
from jaxoff._budget.search import CLOSE_ENOUGH
from jaxoff._budget.tried import Tried
from jaxoff._device.profile import Device
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import ClosedJaxpr
from jaxoff._jaxpr.inline import inline_program
from jaxoff._jaxpr.shares import nbytes_on_device
from jaxoff._report.progress import Progress
from jaxoff._report.tables import format_nbytes
from jaxoff._state.backward import EarlyUpdates, find_early
from jaxoff._state.manual import ManualStep
from jaxoff._state.stream import list_streamable, plan_loops, stream_updates
from jaxoff._state.updates import LEAST_NBYTES, Update, find_updates

# Bytes to win beyond the missing bytes, as a part of these: kernels' workspaces differ between programs.
_SPARE = 0.05
# State is worth programs with state on the host if it takes this part of the missing bytes, since updates in
# blocks also free some of the gradients, or this part of the least program without: an error says the least.
_LEAST_OF_MISSING = 0.5
_LEAST_OF_PROGRAM = 0.05
# Searches for a program with state on the host: with as much as is missing, with what the first lacked, with
# all. One more follows where a program fits with this part of its state or less, to copy less.
_TRIES = 3
_FEWER = 0.9


@dataclasses.dataclass(frozen=True)
class HostedState:
    """A program whose state rests on the host, found within a budget.

    Attributes:
      values: a row for each argument on the host.
      milliseconds: the time added to a step by the copies of state in blocks, by the model. Copies of state
        in backward passes are part of the time of the layers' placements.
    """

    values: tuple[PlacedValue, ...]
    milliseconds: float

    def add_to(self, plan: Plan) -> Plan:
        """A plan of the program's other values, with the state."""
        return dataclasses.replace(
            plan,
            host_bytes=plan.host_bytes + sum(value.nbytes for value in self.values),
            step_ms=plan.step_ms + self.milliseconds,
            is_fastest=False,
            values=(*self.values, *plan.values),
        )


@dataclasses.dataclass(frozen=True)
class State:
    """The state of a step that may rest on the host.

    Attributes:
      closed: the step, its calls inlined.
      manual: the step in a `jax.shard_map`, where the state is updated there.
      updates: the updates of the state.
      is_donated: whether the step donates an argument.
      devices: the number of devices of the step.
    """

    closed: ClosedJaxpr
    manual: ManualStep | None
    updates: tuple[Update, ...]
    is_donated: bool
    devices: int

    @staticmethod
    def find(
        closed: ClosedJaxpr,
        donated: Sequence[bool],
        shardings: Sequence[Sharding | None] = (),
        devices: int = 1,
    ) -> State:
        """Finds the state of a step.

        Args:
          closed: the step.
          donated: for each argument, whether its memory may be reused.
          shardings: of the arguments over several devices, else None.
          devices: the number of devices of the step. Of several, state is an argument with a sharding.
        """
        closed = compat.map_open(closed, inline_program)
        updates = find_updates(closed.jaxpr, donated)
        known = {v: s for v, s in zip(closed.jaxpr.invars, shardings, strict=False) if s is not None}
        manual = None if updates else ManualStep.of(closed)
        if manual is not None:
            updates = [
                update for update in manual.find(donated) if manual.list_arguments(update) <= known.keys()
            ]
        elif devices > 1:
            divided = [found for update in updates if (found := update.divide(known))]
            updates = [update for update in divided if update.has_mesh_of(divided[0])]
        return State(closed, manual, tuple(list_streamable(updates)), any(donated), devices)

    def fits(self, host_nbytes: float | None) -> bool:
        """Whether there is state to rest on the host, all of the state within a budget of host memory."""
        return bool(self.updates) and (host_nbytes is None or _count_nbytes(self.updates) <= host_nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes of a device's parts of the state."""
        return _count_nbytes(self.updates)

    @property
    def gradient_nbytes(self) -> int:
        """Bytes of a device's parts of what the updates read: gradients that exist all together."""
        return sum(nbytes_on_device(v.aval, update.sharding) for update in self.updates for v in update.read)

    def search[P](
        self,
        paths: Sequence[str],
        device: Device,
        budget: Budget,
        error: BudgetError,
        find: Callable[[ClosedJaxpr, Budget], Tried[P]],
        missing_nbytes: float,
        progress: Progress,
    ) -> tuple[Tried[P], HostedState]:
        """Finds a program within a budget with as little state on the host as needed, else with all of it.

        Args:
          paths: the name of each argument.
          device: rates of the device.
          budget: the memory of the device and its host.
          error: of the search with all state on the device.
          find: searches for a program within a budget.
          missing_nbytes: bytes on the device beyond the budget with all state there.
          progress: of the searches.

        Raises:
          BudgetError: if no program fits, or if there is no state that may rest on the host.
        """
        self._refuse_hopeless(error, missing_nbytes)
        most = _choose_within(self.updates, budget.host_nbytes)
        if len(most) < len(self.updates):
            nbytes = format_nbytes(_count_nbytes(self.updates))
            error = error.extend(f"{nbytes} of state would rest on the host, beyond host_bytes.")

        def find_with(chosen: Sequence[Update], *, early: bool = False) -> tuple[Tried[P], HostedState]:
            nbytes = _count_nbytes(chosen)
            progress.say(f"the next programs keep {format_nbytes(nbytes)} of state on the host")
            stream = functools.partial(stream_updates, early=self._find_early(chosen) if early else ())
            program = self.manual.stream(chosen, stream) if self.manual else stream(self.closed, chosen)
            left = None if budget.host_nbytes is None else budget.host_nbytes - nbytes
            found = find(program, dataclasses.replace(budget, host_nbytes=left))
            in_blocks = self._list_in_blocks(chosen) if early else chosen
            values = self._list_values(chosen, paths, in_blocks)
            return found, HostedState(tuple(values), streamed_ms(_count_nbytes(in_blocks), device))

        wanted, too_few = (1 + _SPARE) * missing_nbytes, 0
        # Beside the backward pass copies take the least time. Its few rows are large, and may not fit.
        for chosen in self._list_early_choices(most, wanted):
            try:
                return find_with(chosen, early=True)
            except BudgetError as latest:
                error = _join_errors(error, latest, chosen)
        # Best by an estimate: where that was wrong, all state fits in blocks.
        first = _TRIES - 1 if self._is_best_early(most) else 0
        for attempt in range(first, _TRIES if most else 0):
            chosen = _choose(most, wanted) if attempt < _TRIES - 1 else most
            try:
                found = find_with(chosen)
            except BudgetError as latest:
                error = _join_errors(error, latest, chosen)
                if len(chosen) == len(most):
                    break
                too_few = _count_lowered(chosen)
                wanted = too_few + (1 + _SPARE) * (latest.least_bytes() - budget.device_nbytes)
                continue
            spare = (1 - CLOSE_ENOUGH) * budget.device_nbytes - found[0].nbytes
            fewer = _choose(most, _count_lowered(chosen) - spare)
            is_less = _count_nbytes(fewer) < _FEWER * _count_nbytes(chosen)
            if found[0].is_fastest and is_less and _count_lowered(fewer) > too_few:
                with contextlib.suppress(BudgetError):
                    found = min(found, find_with(fewer), key=_sum_ms)
            return found
        raise error from None

    def _refuse_hopeless(self, error: BudgetError, missing_nbytes: float) -> None:
        """Raises the error of the search before, where there is no state, or far too little."""
        nbytes = _count_nbytes(self.updates)
        if self.updates:
            if nbytes >= min(_LEAST_OF_MISSING * missing_nbytes, _LEAST_OF_PROGRAM * error.least_bytes()):
                return
            text = (
                f"The state that may rest on the host takes {format_nbytes(nbytes)}, and "
                f"{format_nbytes(int(missing_nbytes))} are missing."
                if math.isfinite(missing_nbytes)
                else "State on the host does not help."
            )
        elif self.is_donated:
            text = (
                "No donated argument is state that may rest on the host: of "
                f"{format_nbytes(LEAST_NBYTES)} or more, read by an elementwise update alone that replaces "
                "it, returned in the order of the arguments, outside of conditions (optax.MultiSteps, "
                "optax.apply_if_finite), and on several devices with a NamedSharding."
            )
        else:
            text = "No argument is donated (donate_argnums), so no state may rest on the host."
        raise error.extend(text) from None

    def _find_early(self, chosen: Sequence[Update]) -> list[EarlyUpdates]:
        return find_early(self.manual.inner if self.manual else self.closed.jaxpr, chosen)

    def _is_best_early(self, most: Sequence[Update]) -> bool:
        """Whether all state leaves the most memory if it is updated in backward passes wherever it can be."""
        return bool(self._find_early(most)) and self._count_lowered_early(most) >= _count_lowered(most)

    def _list_early_choices(self, most: Sequence[Update], nbytes: float) -> list[list[Update]]:
        """Updates to try, early ones first: as few as may be enough, then all where that is best."""
        first = [update for each in self._find_early(most) for update in each.updates]
        in_turn = sorted(most, key=lambda update: not any(update is other for other in first))
        chosen = _choose_in_turn(in_turn, nbytes, self._count_lowered_early) if first else []
        if not chosen or self._count_lowered_early(chosen) < nbytes:
            return [in_turn] if self._is_best_early(most) else []
        return [chosen, *([in_turn] if len(chosen) < len(most) and self._is_best_early(most) else [])]

    def _count_lowered_early(self, chosen: Sequence[Update]) -> int:
        """As `_count_lowered`, with updates in backward passes wherever they can be.

        There are rows of the state on their way from the host, in use and on their way back, new rows of the
        weights, and no stacks of gradients.
        """
        early = [(u.shape[0], u) for each in self._find_early(chosen) for u in each.updates]
        lowered = _count_lowered(self._list_in_blocks(chosen))
        for length, update in early:
            replaced = compat.nbytes_of(v for v, _ in update.replaced)
            rows = (3 * update.local_nbytes + 2 * replaced) // length
            lowered += update.local_nbytes + compat.nbytes_of(update.read) - rows
        return lowered

    def _list_in_blocks(self, chosen: Sequence[Update]) -> list[Update]:
        """The updates that cannot run in backward passes."""
        early = {id(update) for each in self._find_early(chosen) for update in each.updates}
        return [update for update in chosen if id(update) not in early]

    def _list_values(
        self, chosen: Sequence[Update], paths: Sequence[str], in_blocks: Sequence[Update]
    ) -> Iterator[PlacedValue]:
        """The rows of updates' states, with the bytes of all devices' parts; `paths` of the arguments."""
        names = dict(zip(self.closed.jaxpr.invars, paths, strict=True))
        for update in chosen:
            for state, _ in update.states:
                argument = self.manual.argument_of[state] if self.manual else state
                nbytes = self.devices * nbytes_on_device(state.aval, update.sharding)
                text = format_type(argument.aval)
                way = "blocks" if any(update is other for other in in_blocks) else "the backward pass"
                source = f"state, updated in {way}"
                yield PlacedValue(names[argument], text, 1, nbytes, "offload", source)


def _join_errors(error: BudgetError, latest: BudgetError, chosen: Sequence[Update]) -> BudgetError:
    """The error with the least memory, of a search before and of one with updates' state on the host."""
    rest = f"{format_nbytes(_count_nbytes(chosen))} of state rest on the host."
    is_less = latest.least_bytes() <= error.least_bytes()
    return latest.extend(rest) if is_less else error.extend(f"It takes more where {rest}")


def _sum_ms(found: tuple[Tried[Any], HostedState]) -> float:
    """The time of a step, by the model."""
    tried, hosted = found
    return tried.milliseconds() + hosted.milliseconds


def _choose(updates: Sequence[Update], nbytes: float) -> list[Update]:
    """Updates that lower the memory on the device by a number of bytes, all if no fewer do.

    Large ones come first, and the last is the smallest that is enough.
    """
    chosen: list[Update] = []
    left = sorted(updates, key=lambda update: -update.local_nbytes)
    while left and _count_lowered([*chosen, left[0]]) < nbytes:
        chosen.append(left.pop(0))
    enough = (update for update in reversed(left) if _count_lowered([*chosen, update]) >= nbytes)
    return [*chosen, *itertools.islice(enough, 1)]


def _choose_in_turn(
    updates: Sequence[Update], nbytes: float, count: Callable[[Sequence[Update]], int]
) -> list[Update]:
    """The first updates that lower the memory by a number of bytes, as `count` says; all if no fewer do."""
    low, high = 0, len(updates)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if count(updates[:middle]) >= nbytes else (middle + 1, high)
    return list(updates[:low])


def _choose_within(updates: Sequence[Update], host_nbytes: float | None) -> list[Update]:
    """The most updates, large ones first, whose state is within a budget of host memory."""
    chosen: list[Update] = []
    for update in sorted(updates, key=lambda update: -update.local_nbytes):
        if host_nbytes is None or _count_nbytes([*chosen, update]) <= host_nbytes:
            chosen.append(update)
    return chosen


def _count_nbytes(updates: Iterable[Update]) -> int:
    return sum(update.local_nbytes for update in updates)


def _count_lowered(updates: Sequence[Update]) -> int:
    """Bytes by which updates in blocks lower the memory on the device."""
    return _count_nbytes(updates) - sum(loop.buffer_nbytes for loop in plan_loops(updates))
