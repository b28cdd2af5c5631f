"""The fastest placement within a budget, exactly: an integer program for HiGHS, by way of scipy.

Two binaries a label say whether it is saved or moved. What follows from them is continuous, and as large as
it must be: whether a value is needed (the backward pass reads it, or what is made again does), made again (it
is needed and not kept), on the device at a step. The integer program is a relaxation at first: in jaxoff's
order a value is made again just before its first use, which may be that of another one made from it. Where a
solution breaks the budget for that, the step at which it does is written out, and it is solved again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping

import numpy as np

from jaxoff._plan.integer_program import IntegerProgram
from jaxoff._plan.layer import UNNAMED_DOTS, name_of
from jaxoff._plan.layer_cost import APART, LAST, Choice, LayerModel
from jaxoff._plan.step_cost import Model
from jaxoff._policy.decision import Placement

# Bytes are counted in this, and for small models in a part of their own size: what HiGHS can tell apart.
_GB, _PART = 1e9, 0.1
# HiGHS keeps constraints up to 1e-6; the model counts whole bytes.
_TOLERANCE, _ROUNDED = 2e-6, 2
# What keeping dots without a name costs besides, in hundredths of what a step takes in any case: of choices
# that are equally fast, one that keeps what has a name is found. HiGHS tells differences above 1e-6.
_UNNAMED = 3e-5


def fastest(
    model: Model, device_bytes: int, host_bytes: int | None, fixed: Choice, below_ms: float = math.inf
) -> Choice | None:
    """The choice with the shortest step within budgets of device and host memory; None where none fits.

    Args:
      model: the costs.
      device_bytes: the budget, of which the model's margin stays free.
      host_bytes: at most so much pinned host memory, if given.
      fixed: placements of some labels.
      below_ms: only a shorter step is looked for.
    """
    return _Search(model, host_bytes, fixed).solve(device_bytes, below_ms)


def smallest(model: Model, host_bytes: int | None, fixed: Choice) -> Choice | None:
    """The choice that needs least device memory, and of those a fast one; None if none fits the host."""
    return _Search(model, host_bytes, fixed).solve(None)


class _Kind:
    """The variables of a kind of part.

    Attributes:
      again, saved, moved: by value, the variables that say so.
      moving: whether it moves anything, or may take the memory of what does; in jaxoff's order, whether the
        step does.
      small, large, both, working: of its working set in the backward pass.
    """

    def __init__(
        self,
        program: IntegerProgram,
        model: LayerModel,
        save: dict[str, int],
        move: dict[str, int],
        step_moves: int,
    ):
        self._program, self._model = program, model
        self.layer, values = model.layer, model.layer.values
        self.again = {n: program.variable() for n in range(len(values))}
        self.saved = {n: program.variable() for n in range(len(values))}
        self.moved = {n: program.variable() for n in range(len(values))}
        self.moving = step_moves if self.layer.in_order else program.variable(integer=True)
        self.small, self.large, self.both, self.working = (program.variable(np.inf) for _ in range(4))
        steps = (s.small + s.large + sum(t.small + t.large for t in s.shared) for s in self.layer.backward)
        # More than the working set can be: what it need not be at least is lower by as much.
        self._much = (2 * sum(value.nbytes for value in values) + max(steps, default=0)) / self._program.unit
        self._made_by: dict[int, dict[int, int]] = {}
        self._left_there: dict[int, int] | None = None
        self._written_out: set[int] = set()
        for n, value in enumerate(values):
            kept: list[tuple[int, float]] = []
            always: Placement | None = "save" if value.carried else value.fixed
            if always is None and value.label is not None:
                kept = [(save[value.label], 1.0), (move[value.label], 1.0)]
            states = {"recompute": self.again[n], "save": self.saved[n], "offload": self.moved[n]}
            # Each reason to need it: 1, or a variable.
            reasons: list[list[tuple[int, float]]] = [[(self.again[r], 1.0)] for r in model.readers[n]]
            reasons += [[]] if value.first is not None else []
            for reason in reasons:
                constant = 0.0 if reason else 1.0
                if always is not None:
                    program.at_least(states[always], reason, constant)
                    continue
                program.at_least(states["recompute"], [*reason, *((v, -f) for v, f in kept)], constant)
                for place, variable in zip(("save", "offload"), kept, strict=False):
                    program.at_least(states[place], [*reason, variable], constant - 1.0)
            self._exact(states, always, kept, [r[0][0] for r in reasons if r], value.first is not None)
        self._time()
        for s in range(len(self.layer.backward)):
            for ordered in (True,) if self.layer.in_order else (False, True):
                self._memory(s, ordered)
        moved = list(self.moved.values())
        if not self.layer.in_order:
            program.at_most([(self.moving, 1.0), *((v, -1.0) for v in moved)], 0.0)
        for variable in moved:
            for moves in {self.moving, step_moves}:
                program.at_most([(variable, 1.0), (moves, -1.0)], 0.0)
        beside_copies = [(self.both, 1 - APART), (self.small, APART), (self.large, APART)]
        if self.layer.in_order:  # what is packed takes less: the most at one step, by `_memory`
            program.at_least(self.working, [*beside_copies, (self.moving, self._much)], -self._much)
        else:  # in stock order it is all apart
            program.at_least(self.working, beside_copies)
            apart = [(self.small, 1.0), (self.large, 1.0)]
            program.at_least(self.working, [*apart, (self.moving, -self._much)])

    def _exact(self, states, always, kept, readers, is_read: bool) -> None:
        """A value that nothing needs is in no state, and one is in the state that its label says."""
        everything = [(variable, 1.0) for variable in states.values()]
        if not is_read:
            self._program.at_most([*everything, *((r, -1.0) for r in readers)], 0.0)
        self._program.at_most(everything, 1.0)
        for place, variable in zip(("save", "offload"), kept, strict=False):
            self._program.at_most([(states[place], 1.0), (variable[0], -1.0)], 0.0)
        for place in () if kept else ("save", "offload"):
            if place != always:
                self._program.at_most([(states[place], 1.0)], 0.0)
        if always not in (None, "recompute"):
            self._program.at_most([(states["recompute"], 1.0)], 0.0)

    def _time(self) -> None:
        program, model, layer = self._program, self._model, self.layer
        iterations = model.iterations
        exposed = program.variable(np.inf), program.variable(np.inf)
        again = [(v, layer.values[n].ms) for n, v in self.again.items()]
        sent = [(v, model.d2h_ms(n)) for n, v in self.moved.items()]
        back = [(v, model.h2d_ms(n)) for n, v in self.moved.items()]
        program.at_least(exposed[0], sent, -layer.forward_ms)
        program.at_least(exposed[1], [*back, *((v, -ms) for v, ms in again)], -layer.backward_ms)
        stored = [(v, layer.values[n].stored_ms) for n, v in self.saved.items()]
        slowed = [(v, model.slowed_ms(n)) for n, v in self.moved.items()]
        for variable, ms in (*again, *stored, *slowed):
            program.cost[variable] += iterations * ms
        for variable in exposed:
            program.cost[variable] += iterations

    def residuals(self, parts: int, waiting: int, *, large: bool = False) -> list[tuple[int, float]]:
        """What so many parts keep on the device, so many of which do not run; all, or large values."""
        values = self.layer.values
        terms = [
            (v, parts * self.layer.iterations * values[n].nbytes)
            for n, v in self.saved.items()
            if self._model.is_kept_large(n) or not large
        ]
        left = self._left() if waiting and self.layer.iterations > 1 else {}
        terms += [(v, waiting * self.layer.values[n].nbytes) for n, v in left.items()]
        return [(v, nbytes / self._program.unit) for v, nbytes in terms]

    def large_working(self) -> list[tuple[int, float]]:
        """The large values of the working set of a part in no loop."""
        moved = [
            (v, LAST * self.layer.values[n].nbytes / self._program.unit)
            for n, v in self.moved.items()
            if self.layer.values[n].is_large
        ]
        return [(self.large, 1.0), *moved]

    def _left(self) -> dict[int, int]:
        """By value, the variable that says whether the last iteration of a loop leaves it on the device."""
        if self._left_there is None:
            self._left_there = left = {}
            for n, until in ((n, self._model.left_until(n)) for n in self.moved if self._model.is_reached(n)):
                if self._model.reach(n)[0] <= until:
                    left[n] = self.moved[n]
                    continue
                made = self._made(until) if until >= 0 else {}
                if readers := [made[r] for r in self._model.readers[n] if r in made]:
                    left[n] = self._program.variable()
                    for reader in readers:
                        self._program.at_least(left[n], [(reader, 1.0), (self.moved[n], 1.0)], -1.0)
        return self._left_there

    def on_host(self) -> list[tuple[int, float]]:
        factor = (
            self._model.count * (self.layer.iterations + (self.layer.iterations > 1)) / self._program.unit
        )
        return [(v, factor * self.layer.values[n].nbytes) for n, v in self.moved.items()]

    def forward(self) -> tuple[list[tuple[int, float]], float]:
        """The working set of the forward pass, in the program's kernel: terms and a constant."""
        late = [n for n in self.moved if self._model.is_sent_late(n)]
        terms = [(self.moved[n], self.layer.values[n].nbytes / self._program.unit) for n in late]
        steps = self.layer.forward
        most = max((s.small for s in steps), default=0) + max((s.large for s in steps), default=0)
        return terms, most / self._program.unit

    def write_out(self, s: int) -> bool:
        """Adds what is on the device at a step for the sake of values that are made again from it.

        False if that was done before.
        """
        if s in self._written_out:
            return False
        self._written_out.add(s)
        self._memory(s, True, whole=True)
        return True

    def _made(self, s: int) -> dict[int, int]:
        """By value, the variable that says whether it is made again by a step, in jaxoff's order."""
        if s not in self._made_by:
            made = self._made_by[s] = {}
            for n in reversed(range(len(self.layer.values))):
                value = self.layer.values[n]
                if value.first is not None and value.first <= s:
                    made[n] = self.again[n]
                elif readers := [made[r] for r in self._model.readers[n] if r in made]:
                    made[n] = self._program.variable()
                    for reader in readers:
                        self._program.at_least(made[n], [(reader, 1.0), (self.again[n], 1.0)], -1.0)
        return self._made_by[s]

    def _memory(self, s: int, ordered: bool, *, whole: bool = False) -> None:
        """The working set is at least that of a step, in stock order or in that of `jaxoff.jit`.

        If not `whole`, without what is there for the sake of values that are made again from it.
        """
        step, model = self.layer.backward[s], self._model
        terms: dict[bool, list[tuple[int, float]]] = {False: [], True: []}
        if_moving: list[tuple[int, float]] = []  # copies of rows that wait beside others then, negative
        made = self._made(s) if whole else {}
        for n, value in enumerate(self.layer.values):
            size, held = value.nbytes / self._program.unit, terms[value.is_large]
            if not model.is_reached(n):
                continue
            if value.last is not None and model.hidden(n) < s <= value.last and value.first is not None:
                if not ordered or value.first <= s:
                    held.append((self._alone(n, self.again[n]), size))
                elif n in made and not model.is_read_anew(n):
                    held.append((self._alone(n, made[n]), size))
            row, (first, _) = model.copied_row(n), model.reach(n)
            if row is not None and s <= row[1] and (ordered or row[0] <= s):
                held.append((self.saved[n], size))
                if s < row[0]:
                    if_moving.append((self.saved[n], -size))
                    if whole:
                        if_moving.append((self._read_by(n, made), size))
            if ordered and whole:
                held.append((self._copies(n, s), size))
            elif ordered:
                held.append((self.moved[n], model.copies(n, first, s) * size))
        for shared in () if ordered else step.shared:
            variable = self._program.variable()
            names = model.names_of(shared.value) | {shared.value}
            for name, n in itertools.product(names, shared.again):
                self._program.at_least(variable, [(self.saved[name], 1.0), (self.again[n], 1.0)], -1.0)
            terms[False].append((variable, shared.small / self._program.unit))
            terms[True].append((variable, shared.large / self._program.unit))
        own = (
            (step.small - model.written(step, ordered)) / self._program.unit,
            step.large / self._program.unit,
        )
        for size, is_large in ((self.small, False), (self.large, True)):
            off, constant = [], own[is_large]
            if not self.layer.in_order:
                off.append((self.moving, self._much if ordered else -self._much))
                constant -= self._much if ordered else 0.0
            self._program.at_least(size, [*terms[is_large], *off], constant)
        if ordered:
            off = [] if self.layer.in_order else [(self.moving, self._much)]
            constant = sum(own) - (0.0 if self.layer.in_order else self._much)
            self._program.at_least(self.both, [*terms[False], *terms[True], *off], constant)
        if self.layer.in_order:
            self._program.at_least(self.working, [*terms[False], *terms[True], *if_moving], sum(own))

    def _read_by(self, n: int, made: Mapping[int, int]) -> int:
        """The variable that says that a value is saved, and read for one of those made again."""
        read = self._program.variable()
        for reader in (made[r] for r in self._model.readers[n] if r in made):
            self._program.at_least(read, [(self.saved[n], 1.0), (reader, 1.0)], -1.0)
        return read

    def _alone(self, n: int, made: int) -> int:
        """The variable that says that a value is made again and no other name of it is kept."""
        names = self._model.names_of(n)
        if not names:
            return made
        alone, kept = self._program.variable(), [v[m] for v in (self.saved, self.moved) for m in names]
        self._program.at_least(alone, [(made, 1.0), *((v, -1.0) for v in kept)])
        return alone

    def _copies(self, n: int, s: int) -> int:
        """The variable that says how many copies of a moved value are on the device at a step."""
        program, model = self._program, self._model
        copies, last = program.variable(2.0), model.reach(n)[1]
        program.at_least(copies, [(self.moved[n], model.copies(n, model.reach(n)[0], s))])
        # By number of copies, the latest step of a reader for which there are as many.
        latest = {model.copies(n, first, s): first for first in range(last + 1)}
        for number, first in latest.items():
            made = self._made(first) if number else {}
            for reader in (made[r] for r in model.readers[n] if r in made):
                program.at_least(copies, [(reader, number), (self.moved[n], number)], -number)
        return copies


class _Search:
    def __init__(self, model: Model, host_bytes: int | None, fixed: Choice):
        self._model, self._fixed = model, fixed
        least = model.cost({}).peak.nbytes
        self._program = program = IntegerProgram(max(1.0, min(_GB, _PART * least)))
        self._save, self._move = {}, {}
        for label in model.labels:
            place = fixed.get(label)
            for variables, name in ((self._save, "save"), (self._move, "offload")):
                possible = place in (None, name)
                variables[label] = program.variable(float(possible), lower=float(place == name), integer=True)
            program.at_most([(self._save[label], 1.0), (self._move[label], 1.0)], 1.0)
        moves = program.variable(integer=True)
        self._kinds = [_Kind(program, kind, self._save, self._move, moves) for kind in model.layers]
        self._peak = program.variable(np.inf)
        for point in model.telling_points:
            alive = (point.nbytes - point.results_nbytes) / self._program.unit
            terms, constant = [], alive
            for parts, waiting, kind in zip(point.holds, point.waiting, self._kinds, strict=True):
                terms += kind.residuals(parts, waiting) if parts else []
            if point.kind is not None:
                kind = self._kinds[point.kind]
                if point.backward:
                    terms.append((kind.working, 1.0))
                else:
                    more, most = kind.forward()
                    terms, constant = terms + more, constant + most
            self._fits(point.results_nbytes, terms, constant)
            if point.kind is not None and model.is_beside_results(point):
                results = point.results_nbytes + sum(point.to_come)
                working = self._kinds[point.kind].large_working()
                held = [*zip(point.holds, self._kinds, strict=True)]
                large = [term for parts, kind in held for term in kind.residuals(parts, 0, large=True)]
                self._fits(results, [*large, *working], alive)
                every = [term for parts, kind in held for term in kind.residuals(parts, 0)]
                self._fits(results, [*every, *working], alive - model.places(point) / self._program.unit)
        if host_bytes is not None:
            program.at_most(
                [term for kind in self._kinds for term in kind.on_host()], host_bytes / self._program.unit
            )

    def _fits(self, results: int, terms: Iterable[tuple[int, float]], constant: float) -> None:
        """The peak is at least that of a moment at which there are some bytes of results."""
        model, scale = self._model, 1 / (1 - self._model.margin)
        known = (model.argument_nbytes + model.resident_nbytes + results) / self._program.unit
        terms = [(variable, scale * factor) for variable, factor in terms]
        self._program.at_least(self._peak, terms, known + scale * constant)

    def solve(self, device_bytes: int | None, below_ms: float = math.inf) -> Choice | None:
        """The fastest choice with at most so much device memory; without a bound, that which needs least."""
        # In hundredths of what a step takes in any case.
        unit = self._model.kernels_ms / 100 or 1.0
        cost = {variable: ms / unit for variable, ms in self._program.cost.items()}
        if below_ms < math.inf:
            self._program.at_most(cost.items(), below_ms / unit - 100)
        for label in (label for label in self._model.labels if name_of(label) == UNNAMED_DOTS):
            for variable in (self._save[label], self._move[label]):
                cost[variable] = cost.get(variable, 0.0) + _UNNAMED
        if device_bytes is None:
            cost = {variable: 1e-6 * ms for variable, ms in cost.items()} | {self._peak: 1.0}
        else:
            self._program.at_most([(self._peak, 1.0)], device_bytes / self._program.unit)
        while True:
            solution = self._program.minimise(cost)
            if solution is None:
                return None
            choice = self._choice(solution)
            needed = self._model.needed(choice)
            promised = solution[self._peak] * self._program.unit if device_bytes is None else device_bytes
            if needed <= promised + _TOLERANCE * self._program.unit + _ROUNDED:
                return choice
            if not self._write_out(choice):
                raise RuntimeError(
                    f"The planner's search and its model disagree: {needed} bytes by the model, at most "
                    f"{promised:.0f} by the search. A bug in jaxoff: please report it and the program."
                )

    def _choice(self, solution: np.ndarray) -> Choice:
        choice: dict[str, Placement] = {}
        for label in self._model.labels:
            saved, moved = solution[self._save[label]] > 0.5, solution[self._move[label]] > 0.5
            choice[label] = "save" if saved else "offload" if moved else "recompute"
        kept = self._model.kept_labels(choice)
        # What nothing needs is kept in name only.
        return {k: place if k in kept or k in self._fixed else "recompute" for k, place in choice.items()}

    def _write_out(self, choice: Choice) -> bool:
        """Writes out the steps at which parts in jaxoff's order are fullest; False if there is none left."""
        found = False
        uses = self._model.uses(choice)
        for kind, model, use in zip(self._kinds, self._model.layers, uses, strict=True):
            for s in model.fullest(use) if use.ordered else ():
                found = kind.write_out(s) or found
        return found
