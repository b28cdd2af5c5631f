"""A search for the fastest program whose compiled memory is within a budget, in one form of the program."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from jaxoff._budget.budget_error import NO_LAYERS, BudgetError, list_largest, make_uncompiled
from jaxoff._budget.calibrations import DIVIDED_COPIES_WIN, GROUPS_SLOWER
from jaxoff._budget.choose import choose_placements, exposed_state_ms, saved_nbytes
from jaxoff._budget.costs import refuse_unmatched
from jaxoff._budget.forms import NO_COPIES, Form, step_ms
from jaxoff._budget.joint_graph import Placements
from jaxoff._budget.limits import Budget
from jaxoff._budget.mask_loops import make_masks_in_readers
from jaxoff._budget.memory import argument_nbytes, estimate_nbytes
from jaxoff._budget.narrow import narrow_stacks
from jaxoff._budget.parts import Region, write_in_parts, write_layers_in_parts
from jaxoff._budget.placements import LayeredProgram
from jaxoff._budget.report import describe_kept
from jaxoff._budget.tried import Tried, correct_room
from jaxoff._device.joined import join_devices
from jaxoff._device.profile import Device
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import ClosedJaxpr
from jaxoff._jaxpr.dataflow import drop_dead
from jaxoff._jaxpr.nested_loops import merge_nested_loops
from jaxoff._report.progress import Progress
from jaxoff._report.tables import format_nbytes

# Compilations at most, of programs without copies to the host and again of programs with copies.
TRIES = 4
# Programs that are compiled once more, by other options, where none fits.
_SMALLEST = 2
# The most by which a program may be over the budget to be compiled so, as it was compiled or by the estimate:
# other options have won 16% (bench/LOG.md, "2026-11-26, night: the first program by liveness").
_WITHIN_REACH = 1.25
# Compiled bytes of large programs, as a part of `estimate_nbytes`: 1.01 to 1.07, with a decoder's 1.14.
_OF_ESTIMATE = 1.03
# A program within this part of the budget is not followed by a further search.
CLOSE_ENOUGH = 0.04
# Part of the layers' time by which a program with copies must be faster, by the model, to be tried: copies
# hide less well than the model believes (bench/LOG.md, "2026-11-26: budgets win time").
_COPIES_WIN = 0.01
# Part of a step's time by which loops in layers may be faster if placed alone to be tried so.
_OPENED_WINS = 0.02
# The least program is not compiled first where its estimate is this many times the budget: programs have
# taken from 0.9 to 1.4 times their estimates.
_FAR_BEYOND = 1.5
# Part of the least program's memory, by the estimate, that remains where another form is worth a search.
_TILES_WIN = 0.97
# The most by which a program may be over the budget where waiting for sums may help. A ResNet's least takes
# 1.3% less (bench/LOG.md, "waits that XLA drops, settled control flow, sums of cotangents").
_SUMS_WIN = 1.1
# Values from this part of the budget on are worth a loop over parts of their rows.
_LARGE = 1 / 64
# Part of a step by which a further program must be faster, by the model, to be worth a compilation.
_FASTER = 2e-3


class Search[P]:
    """A search for the fastest program within a budget.

    The first program has the room for kept values which arguments and temporaries leave, by an estimate of
    the latter. Its compiled memory, and the memory of each further program, corrects the room.

    Attributes:
      devices: the number of devices over which the compiler divides the values; bytes in the search are those
        of all these devices together.
      tried: the programs compiled.
    """

    def __init__(
        self,
        closed: ClosedJaxpr,
        device: Device,
        budget: Budget,
        donated: Sequence[bool],
        compile_program: Callable[[ClosedJaxpr], tuple[float, P]],
        devices: int,
        progress: Progress,
        is_opened: bool = False,
        is_tiled: bool = False,
        merges: bool = True,
    ):
        self._compile, self._donated, self._fills = compile_program, donated, devices > 1
        options = {"is_opened": is_opened, "sends_apart": is_tiled}
        whole = compat.map_open(make_masks_in_readers(closed), drop_dead)  # a nest of loops may make masks
        whole = narrow_stacks(merge_nested_loops(whole) if merges else whole)
        layered = LayeredProgram.of(whole, **options)
        self._is_manual, self._all_devices = layered.is_manual, devices
        self.devices = 1 if self._is_manual else devices
        self._device, self._budget = join_devices(device, self.devices), budget.times(self.devices)
        self._tile_nbytes = _LARGE * self._budget.device_nbytes
        in_parts, regions = write_in_parts(
            layered.closed, self._tile_nbytes, devices=devices, adds_up=is_tiled
        )
        self._whole = self._in_parts = Form.of(layered, (), self._device, budget)
        if regions:
            self._in_parts = Form.of(LayeredProgram.of(in_parts, **options), regions, self._device, budget)
        if not is_opened:
            refuse_unmatched(self._whole.costs, budget.compress)
        self._step_ms = sum(
            c.pair.count * c.pair.runs * (c.forward_ms + c.backward_ms) for c in self._whole.costs
        )
        self._written: tuple[Any, ClosedJaxpr, tuple[Region, ...]] | None = None  # the latest program
        self._compiled: dict[Any, Tried[P]] = {}
        self._waits_for_sums = False  # as for `write_sequences`: once nothing fits otherwise
        self._least_nbytes: dict[tuple[Form, float | None], float] = {}
        self._is_tiled, self._is_opened, self._closed, self._progress = is_tiled, is_opened, closed, progress
        self._form, self._room = self._begin(devices if self._is_manual else None)
        self.tried: list[Tried[P]] = []
        self._settings = device, budget, donated, compile_program, devices, progress

    def open(self, found: Tried[P] | None) -> Search[P] | None:
        """A search that places the loops within the backward passes of the least program.

        Layers in a loop over parts of a batch are an equation of that loop's body: its backward pass makes
        all of their values again at once. None where no layers hold loops; beside a program found, where none
        in a list do, or the search has nothing clearly faster by the model.
        """
        least = self._form.choose_least(NO_COPIES)
        outside = (pair for pair in self._form.pairs if found is None or not pair.has_stacks)
        if least is None or not any(pair.holds_loops for pair in outside):
            return None
        left = iter(least[0])
        program = self._form.layered.write(lambda _: next(left))
        opened = Search(program, *self._settings, is_opened=True)
        wins = found is None or opened._fastest_ms < (1 - _OPENED_WINS) * found.milliseconds()
        return opened if wins else None

    def tile(self, *, copies: bool) -> Search[P] | None:
        """A search for programs with the row-wise work of layers in parts, whose sums are in another order.

        None where the least program has no such work, or is still far beyond the budget.
        """
        search = Search(self._closed, *self._settings, is_tiled=True)
        form, host_nbytes = search._in_parts, self._budget.host_nbytes if copies else NO_COPIES
        least = form.choose_least(host_nbytes)
        if least is None or not (form.regions or search._list_tiles(form, least[0])):
            return None
        nbytes = search._estimate_least(form, host_nbytes)
        wins = self._is_manual or nbytes <= _TILES_WIN * self._estimate_least(self._in_parts, host_nbytes)
        return search if wins and nbytes <= _WITHIN_REACH * self._budget.device_nbytes else None

    def keep_groups(self, found: Tried[P] | None) -> Search[P] | None:
        """A search in which loops over groups of iterations stay, to make a group again at a time.

        None without such loops, and beside a program found where none is as fast by the model, or nearly.
        """
        if merge_nested_loops(self._closed) is self._closed:
            return None
        groups = Search(self._closed, *self._settings, merges=False)
        wins = found is None or groups._fastest_ms <= (1 + GROUPS_SLOWER) * found.milliseconds()
        return groups if wins else None

    def is_slowed(self, found: Tried[P]) -> bool:
        """Whether a program's copies add more time than the least placements without copies."""
        least = self._form.choose_least(NO_COPIES)
        has_copies = any(placed.offloaded for placed in found.placements)
        return has_copies and least is not None and found.added_ms > least[1]

    @property
    def is_far_beyond(self) -> bool:
        """Whether the least program is so far beyond the budget by the estimate that no compilation helps."""
        if self._is_manual or math.isinf(self._room):  # not estimated, or everything fits
            return False
        least = (self._estimate_least(self._in_parts, host) for host in (NO_COPIES, self._budget.host_nbytes))
        return all(_FAR_BEYOND * self._budget.device_nbytes < nbytes < math.inf for nbytes in least)

    def _estimate_least(self, form: Form, host_nbytes: float | None) -> float:
        """The estimate of a form's least program, made once; infinite where there is none."""
        key = form, host_nbytes
        if key not in self._least_nbytes:
            least = form.choose_least(host_nbytes)
            self._least_nbytes[key] = math.inf if least is None else self._estimate(form, least[0])
        return self._least_nbytes[key]

    def _begin(self, manual_devices: int | None) -> tuple[Form, float]:
        """The form of the first program, and its room for kept values: bytes as `saved_nbytes` counts them.

        In a `jax.shard_map` of `manual_devices` values belong to a single device, and arguments to all: there
        temporaries are left to compilation.
        """
        whole, in_parts, limit = self._whole, self._in_parts, self._budget.device_nbytes
        arguments = argument_nbytes(whole.layered.closed)
        if manual_devices is not None:
            room = max(0.0, limit - arguments / manual_devices)
            everything = saved_nbytes(whole.costs, whole.fastest[0])
            return (whole if everything + in_parts.spared_nbytes <= room else in_parts), room
        if self._estimate(whole, whole.fastest[0]) <= limit:
            return whole, math.inf
        estimate = functools.partial(self._estimate_least, host_nbytes=NO_COPIES)
        self._whole = whole = whole.settle_segments(estimate)
        in_parts = in_parts.settle_segments(estimate) if in_parts.regions else whole
        if self._estimate_least(whole, NO_COPIES) < _TILES_WIN * self._estimate_least(in_parts, NO_COPIES):
            in_parts = whole
        self._in_parts, least = in_parts, in_parts.choose_least(NO_COPIES)
        assert least is not None  # the inputs of layers may be saved
        nbytes = _OF_ESTIMATE * self._estimate_least(in_parts, NO_COPIES)
        temporaries = max(0.0, nbytes - arguments - saved_nbytes(in_parts.costs, least[0]))
        return in_parts, max(0.0, limit - arguments - temporaries)

    @functools.cached_property
    def _base_ms(self) -> float:
        """The time of a step without what its placements add: that of the fastest, less what they add.

        The time of the fastest leaves out copies of state, which its placements have in theirs.
        """
        placements, added_ms = self._whole.fastest
        exposed_ms = sum(c.pair.count * c.pair.runs * exposed_state_ms(c) for c in self._whole.costs)
        return step_ms(self._whole.write(placements), self._whole.pairs, self._device) + exposed_ms - added_ms

    @property
    def _fastest_ms(self) -> float:
        """The time of the fastest program in any memory, by the model."""
        return self._base_ms + self._whole.fastest[1]

    def run_both(self) -> Tried[P] | None:
        """The fastest program found within the budget; None if none fits."""
        found = self.run(copies=False)
        if found is None:
            return self.run(copies=True) if self._form.costs else None
        part = _COPIES_WIN if self.devices == 1 else DIVIDED_COPIES_WIN
        limit_ms = found.added_ms - part * self._step_ms  # what a program with copies may add
        chosen = choose_placements(self._form.costs, self._device, self._room, self._budget.host_nbytes)
        if chosen is None or chosen[1] >= limit_ms:
            return found
        with_copies = self.run(copies=True)
        return with_copies if with_copies and with_copies.added_ms < limit_ms else found

    def run(self, *, copies: bool) -> Tried[P] | None:
        """The fastest program found within the budget, with or without copies; None if none fits."""
        limit = self._budget.device_nbytes
        host_nbytes = self._budget.host_nbytes if copies else NO_COPIES
        mine: list[Tried[P]] = []
        skipped: list[tuple[Placements, ...]] = []  # of the form that the search is at

        for _ in range(4 * TRIES):
            if len(mine) == TRIES:
                break
            costs, fastest = self._form.costs, self._form.fastest[0]
            chosen = choose_placements(costs, self._device, self._room, host_nbytes)
            chosen = chosen or self._form.choose_least(host_nbytes)
            if chosen is None:
                break
            alike = [t for t in mine if t.regions == self._form.regions]
            fits = [t for t in alike if t.nbytes <= limit]
            if tuple(chosen[0]) in (*skipped, *(t.placements for t in alike)):
                beyond = [t.placements for t in alike if t.nbytes > limit]
                over = [saved_nbytes(costs, placements) for placements in (*beyond, *skipped, fastest)]
                low = max((saved_nbytes(costs, t.placements) for t in fits), default=0.0)
                if any(tuple(chosen[0]) == t.placements for t in fits):
                    low = max(low, self._room)  # less room gives nothing faster
                middle = (low + min(over)) / 2
                if middle in (self._room, low):
                    break
                self._room = middle
                continue
            if fits and chosen[1] >= min(t.added_ms for t in fits) - _FASTER * self._step_ms:
                break
            if fits and self._is_beyond(chosen[0], alike):
                skipped.append(tuple(chosen[0]))
                continue
            latest = self._try(*chosen)
            mine.append(latest)
            if latest.nbytes <= limit and latest.placements == tuple(fastest):
                break
            if 0 <= limit - latest.nbytes <= CLOSE_ENOUGH * limit:
                break
            self._room = correct_room(costs, [t for t in mine if t.regions == self._form.regions], limit)
            if self._form is not self._in_parts and latest.nbytes > limit:
                self._form, self._room = self._in_parts, self._room + self._in_parts.spared_nbytes
                skipped.clear()
        if all(t.nbytes > limit for t in mine):
            # Less kept may take more memory: the least of an error is the least of all budgets.
            least = self._form.choose_least(host_nbytes)
            if least is not None and all(t.placements != tuple(least[0]) for t in mine):
                mine.append(self._try(*least))
            nearest = min((t.nbytes for t in mine), default=math.inf)
            are_loops = all(pair.has_stacks for pair in self._form.pairs)
            if least is not None and not are_loops and limit < nearest <= _SUMS_WIN * limit:
                self._waits_for_sums = True
                mine.append(self._try(*least))
        return self._find_fastest(mine)

    def run_again(
        self, compile_otherwise: Callable[[ClosedJaxpr], tuple[float, P] | None]
    ) -> Tried[P] | None:
        """The fastest of the smallest programs found within the budget if compiled otherwise."""
        mine: list[Tried[P]] = []
        for tried in sorted(self.tried, key=lambda t: t.nbytes)[:_SMALLEST]:
            form = self._form_of(tried)
            nbytes = min(tried.nbytes, self._estimate(form, tried.placements))
            if nbytes > _WITHIN_REACH * self._budget.device_nbytes:
                continue
            compiled = compile_otherwise(self._write(form, tried.placements))
            if compiled is not None:
                mine.append(self._add(form, tried.placements, tried.added_ms, compiled))
        return self._find_fastest(mine)

    def _is_beyond(self, placements: Sequence[Placements], alike: Sequence[Tried[P]]) -> bool:
        """Whether a program is over the budget by the estimate, scaled by what the nearest other takes."""
        limit = self._budget.device_nbytes
        nearest = min(alike, key=lambda t: abs(t.nbytes - limit))
        scale = nearest.nbytes / self._estimate(self._form, nearest.placements)
        return scale * self._estimate(self._form, placements) > (1 + CLOSE_ENOUGH) * limit

    def _find_fastest(self, tried: Sequence[Tried[P]]) -> Tried[P] | None:
        fits = (t for t in tried if t.nbytes <= self._budget.device_nbytes)
        return min(fits, key=lambda t: t.added_ms, default=None)

    def _form_of(self, tried: Tried[P]) -> Form:
        return self._in_parts if tried.regions == self._in_parts.regions else self._whole

    def _try(self, placements: Sequence[Placements], added_ms: float) -> Tried[P]:
        key = self._form, tuple(placements), self._waits_for_sums
        if key not in self._compiled:  # the least with and without copies may be one program
            compiled = self._compile(self._write(self._form, placements))
            self._compiled[key] = self._add(self._form, placements, added_ms, compiled)
        return self._compiled[key]

    def _estimate(self, form: Form, placements: Sequence[Placements]) -> float:
        return estimate_nbytes(self._write(form, placements), self._donated)

    def _write(self, form: Form, placements: Sequence[Placements]) -> ClosedJaxpr:
        """The program of a form with placements, which is estimated first and then compiled."""
        key = form, tuple(placements), self._waits_for_sums
        if self._written is None or self._written[0] != key:
            program = form.write(placements, fills=self._fills, waits_for_sums=self._waits_for_sums)
            tiles: Sequence[Region] = ()
            if self._is_tiled:
                program, tiles = write_layers_in_parts(program, self._tile_nbytes, devices=self.devices)
            self._written = key, program, tuple(tiles)
        return self._written[1]

    def _list_tiles(self, form: Form, placements: Sequence[Placements]) -> tuple[Region, ...]:
        """The regions of layers in parts, in the program of a form with placements."""
        self._write(form, placements)
        assert self._written is not None
        return self._written[2]

    def _add(
        self, form: Form, placements: Sequence[Placements], added_ms: float, compiled: tuple[float, P]
    ) -> Tried[P]:
        nbytes, handle = compiled
        made = form.pairs, tuple(placements), form.regions
        is_fastest = form is self._whole and not self._is_opened and made[1] == tuple(form.fastest[0])
        self._progress.programs = number = self._progress.programs + 1
        tiles = self._list_tiles(form, placements)
        parts_ms = form.count_parts_ms(placements, self._tile_nbytes, self.devices) if tiles else 0.0
        times = added_ms, is_fastest, self._base_ms + parts_ms
        tried = Tried(*made, *times, self.devices * nbytes, number, handle, tiles)
        self.tried.append(tried)
        text = f"program {number} for {self._format_budget()} of device memory "
        self._progress.say(text + tried.describe(self._budget.device_nbytes, self.devices))
        return tried

    def _format_budget(self) -> str:
        return format_nbytes(int(self._budget.device_nbytes / self.devices))

    def make_error(self) -> BudgetError:
        """The error of a search that found nothing, with the least of its programs."""
        least, budget = min(self.tried, key=lambda t: t.nbytes, default=None), self._format_budget()
        if least is None or math.isinf(least.nbytes):
            return make_uncompiled(budget, self._budget.host_nbytes, len(self.tried))
        nbytes = int(least.nbytes / self.devices)
        kept = describe_kept(least.list_values())
        kept += "" if self._form.pairs else NO_LAYERS
        outside = "values outside of jax.shard_map" if self._is_manual else "values"
        devices = self._all_devices
        whole = f" ({outside} are counted whole; {devices} devices divide them)" if devices > 1 else ""
        return BudgetError(
            f"no program fits {budget} of device memory. The least that was tried takes "
            f"{format_nbytes(nbytes)}, with {kept}{whole}.",
            nbytes,
            lambda: list_largest(self._write(self._form_of(least), least.placements), least.list_values()),
        )
