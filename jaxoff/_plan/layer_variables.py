"""The variables and constraints of a kind of layer in the integer program of `jaxoff._plan.search`."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np

from jaxoff._budget.integer_program import IntegerProgram
from jaxoff._plan.calibrations import RELOADED_LAYERS, UNSHARED_PART
from jaxoff._plan.layer import Label
from jaxoff._plan.layer_cost import LayerModel
from jaxoff._policy.decision import Placement


class LayerVariables:
    """The variables and constraints of a kind of layer group.

    Attributes:
      recomputed, saved, offloaded: index of a value -> variable that is 1 if the value is in this state.
      offloads: variable that is 1 if the layer offloads a value. For ordered layers: if any layer of the step
        does.
      small, large, both, working: variables of the working set of the backward pass: the largest sum of small
        values, of large values, of both at one kernel, and the bytes allocated by XLA.
    """

    def __init__(
        self,
        program: IntegerProgram,
        model: LayerModel,
        save: dict[Label, int],
        offload: dict[Label, int],
        step_offloads: int,
    ):
        """Adds the layer to a program. Counterparts: `LayerModel.find_states` and
        `LayerModel.working_nbytes`.

        Args:
          program: the integer program.
          model: the costs of the layer.
          save, offload: label -> binary variable that is 1 if the label's values are saved or offloaded.
          step_offloads: variable that is 1 if any layer of the step offloads a value.
        """
        self._program, self._model = program, model
        self.layer, values = model.layer, model.layer.values
        self.recomputed = {n: program.add_variable() for n in range(len(values))}
        self.saved = {n: program.add_variable() for n in range(len(values))}
        self.offloaded = {n: program.add_variable() for n in range(len(values))}
        self.offloads = step_offloads if self.layer.is_ordered else program.add_variable(integer=True)
        self.small, self.large, self.both, self.working = (program.add_variable(np.inf) for _ in range(4))
        kernels = (
            kernel.small_nbytes
            + kernel.large_nbytes
            + sum(fusion.small_nbytes + fusion.large_nbytes for fusion in kernel.fusions)
            for kernel in self.layer.backward
        )
        # A bound above every working set: a constraint lower by the bound has no effect.
        bound = 2 * sum(value.nbytes for value in values) + max(kernels, default=0)
        self._bound = bound / self._program.unit
        self._recomputed_by: dict[int, dict[int, int]] = {}
        self._lingering: dict[int, int] | None = None
        self._exact_kernels: set[int] = set()
        for n, value in enumerate(values):
            kept: list[tuple[int, float]] = []
            always: Placement | None = "save" if value.is_carried else value.fixed
            if always is None and value.label is not None:
                kept = [(save[value.label], 1.0), (offload[value.label], 1.0)]
            states: dict[Placement, int] = {
                "recompute": self.recomputed[n],
                "save": self.saved[n],
                "offload": self.offloaded[n],
            }
            # The value is needed if a reason is 1: the sum of its terms, or 1 without terms.
            reasons: list[list[tuple[int, float]]] = [[(self.recomputed[r], 1.0)] for r in model.readers[n]]
            reasons += [[]] if value.first_reader is not None else []
            for reason in reasons:
                constant = 0.0 if reason else 1.0
                if always is not None:
                    program.add_lower_bound(states[always], reason, constant)
                    continue
                program.add_lower_bound(states["recompute"], [*reason, *((v, -f) for v, f in kept)], constant)
                for verb, variable in zip(("save", "offload"), kept, strict=False):
                    program.add_lower_bound(states[verb], [*reason, variable], constant - 1.0)
            is_read = value.first_reader is not None
            self._bound_states(states, always, kept, [r[0][0] for r in reasons if r], is_read=is_read)
        self._add_times()
        for s in range(len(self.layer.backward)):
            for is_ordered in (True,) if self.layer.is_ordered else (False, True):
                self._add_memory(s, is_ordered=is_ordered)
        offloaded = list(self.offloaded.values())
        if not self.layer.is_ordered:
            program.add_upper_bound([(self.offloads, 1.0), *((v, -1.0) for v in offloaded)], 0.0)
        for variable in offloaded:
            for offloads in {self.offloads, step_offloads}:
                program.add_upper_bound([(variable, 1.0), (offloads, -1.0)], 0.0)
        with_copies = [
            (self.both, 1 - UNSHARED_PART),
            (self.small, UNSHARED_PART),
            (self.large, UNSHARED_PART),
        ]
        if self.layer.is_ordered:  # packed without copies: by `_add_memory`
            program.add_lower_bound(self.working, [*with_copies, (self.offloads, self._bound)], -self._bound)
        else:  # without copies in stock order: small and large values share no buffers
            program.add_lower_bound(self.working, with_copies)
            apart = [(self.small, 1.0), (self.large, 1.0)]
            program.add_lower_bound(self.working, [*apart, (self.offloads, -self._bound)])

    def _bound_states(
        self,
        states: Mapping[Placement, int],
        always: Placement | None,
        kept: list[tuple[int, float]],
        readers: list[int],
        *,
        is_read: bool,
    ) -> None:
        """Bounds the states of a value from above: none if the value is not needed, else the state of its
        label.

        Args:
          states: placement -> variable of the state.
          always: the placement of the value if no label places it.
          kept: the variables of the value's label, or none.
          readers: variables of the values recomputed from the value.
          is_read: whether the backward pass reads the value.
        """
        everything = [(variable, 1.0) for variable in states.values()]
        if not is_read:
            self._program.add_upper_bound([*everything, *((r, -1.0) for r in readers)], 0.0)
        self._program.add_upper_bound(everything, 1.0)
        keeping: tuple[Placement, Placement] = ("save", "offload")
        for verb, variable in zip(keeping, kept, strict=False):
            self._program.add_upper_bound([(states[verb], 1.0), (variable[0], -1.0)], 0.0)
        for verb in () if kept else keeping:
            if verb != always:
                self._program.add_upper_bound([(states[verb], 1.0)], 0.0)
        if always not in (None, "recompute"):
            self._program.add_upper_bound([(states["recompute"], 1.0)], 0.0)

    def _add_times(self) -> None:
        """Adds the duration of all iterations to the cost. Counterpart: `LayerModel.times`."""
        program, model, layer = self._program, self._model, self.layer
        iterations = model.iterations
        exposed = program.add_variable(np.inf), program.add_variable(np.inf)
        recompute = [(v, layer.values[n].recompute_ms) for n, v in self.recomputed.items()]
        send = [(v, model.d2h_ms(n)) for n, v in self.offloaded.items()]
        reload = [(v, model.h2d_ms(n)) for n, v in self.offloaded.items()]
        program.add_lower_bound(exposed[0], send, -layer.forward_ms)
        program.add_lower_bound(exposed[1], [*reload, *((v, -ms) for v, ms in recompute)], -layer.backward_ms)
        store = [(v, layer.values[n].store_ms) for n, v in self.saved.items()]
        slowdown = [(v, model.slowdown_ms(n)) for n, v in self.offloaded.items()]
        for variable, ms in (*recompute, *store, *slowdown):
            program.cost[variable] += iterations * ms
        for variable in exposed:
            program.cost[variable] += iterations

    def residual_terms(
        self, groups: int, waiting: int, *, only_large: bool = False
    ) -> list[tuple[int, float]]:
        """Returns the terms of residuals on the device.

        Counterparts: `LayerModel.residual_nbytes`, `large_residual_nbytes` and `lingering_nbytes`.

        Args:
          groups: number of groups with residuals.
          waiting: number of these groups other than the running group.
          only_large: whether only residuals in large buffers count.
        """
        values = self.layer.values
        terms = [
            (v, groups * self.layer.iterations * values[n].nbytes)
            for n, v in self.saved.items()
            if self._model.is_large_residual(n) or not only_large
        ]
        lingering = self._find_lingering() if waiting and self.layer.iterations > 1 else {}
        terms += [(v, waiting * self.layer.values[n].nbytes) for n, v in lingering.items()]
        return [(v, nbytes / self._program.unit) for v, nbytes in terms]

    def large_working_terms(self) -> list[tuple[int, float]]:
        """Returns terms of large values in use. Counterpart: `LayerModel.large_working_nbytes`."""
        offloaded = [
            (v, RELOADED_LAYERS * self.layer.values[n].nbytes / self._program.unit)
            for n, v in self.offloaded.items()
            if self.layer.values[n].is_large
        ]
        return [(self.large, 1.0), *offloaded]

    def _find_lingering(self) -> dict[int, int]:
        """Returns: index of a value -> variable that is 1 if the last iteration leaves the value on the
        device.

        Counterpart: `LayerModel.lingering_nbytes`.
        """
        if self._lingering is None:
            self._lingering = lingering = {}
            needed = (n for n in self.offloaded if self._model.is_needed(n))
            for n, until in ((n, self._model.lingers_until(n)) for n in needed):
                if self._model.find_use_range(n)[0] <= until:
                    lingering[n] = self.offloaded[n]
                    continue
                by_then = self._find_recomputed_by(until) if until >= 0 else {}
                if readers := [by_then[r] for r in self._model.readers[n] if r in by_then]:
                    lingering[n] = self._program.add_variable()
                    for reader in readers:
                        self._program.add_lower_bound(
                            lingering[n], [(reader, 1.0), (self.offloaded[n], 1.0)], -1.0
                        )
        return self._lingering

    def host_terms(self) -> list[tuple[int, float]]:
        """Returns the terms of host memory. Counterpart: `LayerModel.host_nbytes`."""
        rows = self.layer.iterations + (self.layer.iterations > 1)
        factor = self._model.count * rows / self._program.unit
        return [(v, factor * self.layer.values[n].nbytes) for n, v in self.offloaded.items()]

    def forward_terms(self) -> tuple[list[tuple[int, float]], float]:
        """Returns terms and constant of the forward pass. Counterpart: `LayerModel.forward_nbytes`."""
        late = [n for n in self.offloaded if self._model.is_offloaded_late(n)]
        terms = [(self.offloaded[n], self.layer.values[n].nbytes / self._program.unit) for n in late]
        kernels = self.layer.forward
        most = max((k.small_nbytes for k in kernels), default=0)
        most += max((k.large_nbytes for k in kernels), default=0)
        return terms, most / self._program.unit

    def add_exact_memory(self, s: int) -> bool:
        """Adds the memory of values that are on the device at a kernel only to recompute other values from
        them.

        Returns whether the program changes: False for an exact kernel.
        """
        if s in self._exact_kernels:
            return False
        self._exact_kernels.add(s)
        self._add_memory(s, is_ordered=True, is_exact=True)
        return True

    def _find_recomputed_by(self, s: int) -> dict[int, int]:
        """Returns: index of a value -> variable that is 1 if an ordered iteration recomputes the value by a
        kernel.

        Counterpart: `LayerModel.find_recompute_starts`.
        """
        if s not in self._recomputed_by:
            found = self._recomputed_by[s] = {}
            for n in reversed(range(len(self.layer.values))):
                value = self.layer.values[n]
                if value.first_reader is not None and value.first_reader <= s:
                    found[n] = self.recomputed[n]
                elif readers := [found[r] for r in self._model.readers[n] if r in found]:
                    found[n] = self._program.add_variable()
                    for reader in readers:
                        self._program.add_lower_bound(
                            found[n], [(reader, 1.0), (self.recomputed[n], 1.0)], -1.0
                        )
        return self._recomputed_by[s]

    def _add_memory(self, s: int, *, is_ordered: bool, is_exact: bool = False) -> None:
        """Bounds the working set from below by the bytes in use at a kernel of the backward pass.

        Counterpart: `LayerModel.nbytes_by_kernel`.

        Args:
          s: index of the kernel.
          is_ordered: whether the bound is for the order of `jaxoff.jit`, or for stock order.
          is_exact: whether values count that are on the device only to recompute other values from them.
        """
        kernel, model = self.layer.backward[s], self._model
        terms: dict[bool, list[tuple[int, float]]] = {False: [], True: []}
        without_copies: list[tuple[int, float]] = []  # negative: no early row copies
        recomputed = self._find_recomputed_by(s) if is_exact else {}
        for n, value in enumerate(self.layer.values):
            size, held = value.nbytes / self._program.unit, terms[value.is_large]
            if not model.is_needed(n):
                continue
            first, last = value.first_reader, value.last_reader
            if last is not None and model.find_alias_end(n) < s <= last and first is not None:
                if not is_ordered or first <= s:
                    held.append((self._add_alone(n, self.recomputed[n]), size))
                elif n in recomputed and not model.is_read_twice(n):
                    held.append((self._add_alone(n, recomputed[n]), size))
            row, (first_use, _) = model.find_row_copy(n), model.find_use_range(n)
            if row is not None and s <= row[1] and (is_ordered or row[0] <= s):
                held.append((self.saved[n], size))
                if s < row[0]:
                    without_copies.append((self.saved[n], -size))
                    if is_exact:
                        without_copies.append((self._add_saved_and_read(n, recomputed), size))
            if is_ordered and is_exact:
                held.append((self._add_copies(n, s), size))
            elif is_ordered:
                held.append((self.offloaded[n], model.count_copies(n, first_use, s) * size))
        for fusion in () if is_ordered else kernel.fusions:
            variable = self._program.add_variable()
            aliases = model.find_aliased(fusion.value) | {fusion.value}
            for alias, n in itertools.product(aliases, fusion.recomputed):
                self._program.add_lower_bound(
                    variable, [(self.saved[alias], 1.0), (self.recomputed[n], 1.0)], -1.0
                )
            terms[False].append((variable, fusion.small_nbytes / self._program.unit))
            terms[True].append((variable, fusion.large_nbytes / self._program.unit))
        own = (
            (kernel.small_nbytes - model.in_place_nbytes(kernel, is_ordered=is_ordered)) / self._program.unit,
            kernel.large_nbytes / self._program.unit,
        )
        for size, is_large in ((self.small, False), (self.large, True)):
            off, constant = [], own[is_large]
            if not self.layer.is_ordered:
                off.append((self.offloads, self._bound if is_ordered else -self._bound))
                constant -= self._bound if is_ordered else 0.0
            self._program.add_lower_bound(size, [*terms[is_large], *off], constant)
        if is_ordered:
            off = [] if self.layer.is_ordered else [(self.offloads, self._bound)]
            constant = sum(own) - (0.0 if self.layer.is_ordered else self._bound)
            self._program.add_lower_bound(self.both, [*terms[False], *terms[True], *off], constant)
        if self.layer.is_ordered:
            self._program.add_lower_bound(
                self.working, [*terms[False], *terms[True], *without_copies], sum(own)
            )

    def _add_saved_and_read(self, n: int, recomputed: Mapping[int, int]) -> int:
        """Adds a variable that is 1 if a value is saved and a kernel recomputes another value from it.

        Args:
          n: index of the value.
          recomputed: see `_find_recomputed_by`.
        """
        read = self._program.add_variable()
        for reader in (recomputed[r] for r in self._model.readers[n] if r in recomputed):
            self._program.add_lower_bound(read, [(self.saved[n], 1.0), (reader, 1.0)], -1.0)
        return read

    def _add_alone(self, n: int, recomputed: int) -> int:
        """Adds a variable that is 1 if a value is recomputed and no alias of the value is kept.

        Args:
          n: index of the value.
          recomputed: variable that is 1 if the value is recomputed.
        """
        aliases = self._model.find_aliased(n)
        if not aliases:
            return recomputed
        alone = self._program.add_variable()
        kept = [v[m] for v in (self.saved, self.offloaded) for m in aliases]
        self._program.add_lower_bound(alone, [(recomputed, 1.0), *((v, -1.0) for v in kept)])
        return alone

    def _add_copies(self, n: int, s: int) -> int:
        """Adds a variable: number of copies of an offloaded value on the device at a kernel.

        Counterpart: `LayerModel.count_copies`.
        """
        program, model = self._program, self._model
        first_use, last_use = model.find_use_range(n)
        copies = program.add_variable(2.0)
        program.add_lower_bound(copies, [(self.offloaded[n], model.count_copies(n, first_use, s))])
        # Number of copies -> the latest first reader with this number.
        latest = {model.count_copies(n, first, s): first for first in range(last_use + 1)}
        for number, first in latest.items():
            recomputed = self._find_recomputed_by(first) if number else {}
            for reader in (recomputed[r] for r in model.readers[n] if r in recomputed):
                program.add_lower_bound(copies, [(reader, number), (self.offloaded[n], number)], -number)
        return copies
