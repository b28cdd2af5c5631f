"""The fastest placement within a budget, exactly: an integer program for the solver HiGHS, by way of scipy.

Two binary variables for each label say whether its values are saved or offloaded. All other variables are
continuous, and as large as the constraints demand: whether a value is needed (the backward pass reads the
value, or recomputes another value from it), whether it is recomputed (needed, and neither saved nor
offloaded), how many copies are on the device at a kernel.

`StepModel` and `LayerModel` state the same rules as functions of a placement; each method here with a
counterpart there names the counterpart. At first the integer program is a relaxation: ordered iterations
recompute a value just before its first use, which may be the recomputation of another value. If a solution
breaks the budget for this reason, the search adds exact constraints for the fullest kernels and solves again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from jaxoff._budget.integer_program import IntegerProgram
from jaxoff._plan.layer import UNNAMED_DOTS, Label, Placements
from jaxoff._plan.layer_variables import LayerVariables
from jaxoff._plan.step_cost import StepModel
from jaxoff._policy.decision import Placement

# Factor by which a budget exceeds the memory of a placement so that the search, with its tolerance, finds the
# placement.
BUDGET_FACTOR = 1.000001
# Bytes in a unit of memory variables, at most.
_GB = 1e9
# The same for small models, as a part of the model's peak: HiGHS distinguishes values of order 1 best.
_PEAK_PART = 0.1
# Error of a constraint in a solution, in units of memory: twice the tolerance of HiGHS, 1e-6.
_TOLERANCE = 2e-6
# Bytes by which a budget and a peak may differ by rounding up: the model counts whole bytes.
_ROUNDED = 2
# Tie-break, in percent of a step: the charge for keeping unnamed dots, so that among equally fast placements
# the search finds one with named values. HiGHS distinguishes costs with a difference of 1e-6.
_UNNAMED_CHARGE = 3e-5
# Weight of the duration, in percent of a step, where the search minimises memory: a tie-break, too.
_TIME_WEIGHT = 1e-6


def find_fastest(
    model: StepModel, device_bytes: int, host_bytes: int | None, fixed: Placements, below_ms: float = math.inf
) -> Placements | None:
    """Finds the placement with the shortest step within budgets of device and host memory; None if none fits.

    Args:
      model: the costs.
      device_bytes: budget of device memory, of which the model's margin stays unused.
      host_bytes: budget of pinned host memory, or None.
      fixed: placements of some labels.
      below_ms: duration below which a step must be.
    """
    return _PlacementSearch(model, host_bytes, fixed).solve(device_bytes, below_ms)


def find_smallest(model: StepModel, host_bytes: int | None, fixed: Placements) -> Placements | None:
    """Finds the placement with the least device memory; None if none fits the host. Of equals, a fast one."""
    return _PlacementSearch(model, host_bytes, fixed).solve(None)


class _PlacementSearch:
    """The integer program of a whole step."""

    def __init__(self, model: StepModel, host_bytes: int | None, fixed: Placements):
        """Builds the program. Counterpart: `StepModel.timeline`.

        Args:
          model: the costs.
          host_bytes: budget of pinned host memory, or None.
          fixed: placements of some labels.
        """
        self._model, self._fixed = model, fixed
        least = model.cost({}).peak.nbytes
        self._program = program = IntegerProgram(max(1.0, min(_GB, _PEAK_PART * least)))
        self._save, self._offload = {}, {}
        for label in model.labels:
            verb = fixed.get(label)
            for variables, kept in ((self._save, "save"), (self._offload, "offload")):
                upper, lower = float(verb in (None, kept)), float(verb == kept)
                variables[label] = program.add_variable(upper, lower=lower, integer=True)
            program.add_upper_bound([(self._save[label], 1.0), (self._offload[label], 1.0)], 1.0)
        offloads = program.add_variable(integer=True)
        self._kinds = [
            LayerVariables(program, kind, self._save, self._offload, offloads) for kind in model.layers
        ]
        self._peak = program.add_variable(np.inf)
        for point in model.decisive_points:
            alive = (point.nbytes - point.results_nbytes) / self._program.unit
            terms, constant = [], alive
            for groups, waiting, kind in zip(point.holds, point.waiting, self._kinds, strict=True):
                terms += kind.residual_terms(groups, waiting) if groups else []
            if point.kind is not None:
                kind = self._kinds[point.kind]
                if point.is_backward:
                    terms.append((kind.working, 1.0))
                else:
                    more, most = kind.forward_terms()
                    terms, constant = terms + more, constant + most
            self._bound_peak(point.results_nbytes, terms, constant)
            if point.kind is not None and model.competes_with_results(point):
                results = point.results_nbytes + sum(point.pending_nbytes)
                working = self._kinds[point.kind].large_working_terms()
                held = [*zip(point.holds, self._kinds, strict=True)]
                large = [
                    term for groups, kind in held for term in kind.residual_terms(groups, 0, only_large=True)
                ]
                self._bound_peak(results, [*large, *working], alive)
                every = [term for groups, kind in held for term in kind.residual_terms(groups, 0)]
                shareable = model.shareable_nbytes(point) / self._program.unit
                self._bound_peak(results, [*every, *working], alive - shareable)
        if host_bytes is not None:
            program.add_upper_bound(
                [term for kind in self._kinds for term in kind.host_terms()], host_bytes / self._program.unit
            )

    def _bound_peak(self, results: int, terms: Iterable[tuple[int, float]], constant: float) -> None:
        """Bounds the peak from below by the memory of a moment.

        Args:
          results: bytes of results, to which the margin does not apply.
          terms, constant: all other memory, without arguments and resident data.
        """
        model, scale = self._model, 1 / (1 - self._model.margin)
        known = (model.argument_nbytes + model.resident_nbytes + results) / self._program.unit
        terms = [(variable, scale * factor) for variable, factor in terms]
        self._program.add_lower_bound(self._peak, terms, known + scale * constant)

    def solve(self, device_bytes: int | None, below_ms: float = math.inf) -> Placements | None:
        """Finds the fastest placement for a budget, or the placement with least memory; None if none fits.

        Args:
          device_bytes: the budget, or None to minimise memory.
          below_ms: duration below which a step must be.
        """
        unit = self._model.kernels_ms / 100 or 1.0  # costs are in percent of a step without recomputation
        cost = {variable: ms / unit for variable, ms in self._program.cost.items()}
        if below_ms < math.inf:
            self._program.add_upper_bound(cost.items(), below_ms / unit - 100)
        for label in (label for label in self._model.labels if label.name == UNNAMED_DOTS):
            for variable in (self._save[label], self._offload[label]):
                cost[variable] = cost.get(variable, 0.0) + _UNNAMED_CHARGE
        if device_bytes is None:
            cost = {variable: _TIME_WEIGHT * ms for variable, ms in cost.items()} | {self._peak: 1.0}
        else:
            self._program.add_upper_bound([(self._peak, 1.0)], device_bytes / self._program.unit)
        while True:
            solution = self._program.minimise(cost)
            if solution is None:
                return None
            placements = self._read_placements(solution)
            needed = self._model.find_budget(placements)
            promised = solution[self._peak] * self._program.unit if device_bytes is None else device_bytes
            if needed <= promised + _TOLERANCE * self._program.unit + _ROUNDED:
                return placements
            if not self._add_exact_memory(placements):
                raise RuntimeError(
                    f"The planner's search and its model disagree: {needed} bytes by the model, at most "
                    f"{promised:.0f} by the search. A bug in jaxoff: please report it and the program."
                )

    def _read_placements(self, solution: np.ndarray) -> Placements:
        """Reads the placement from a solution. Labels without a needed value are recomputed, unless fixed."""
        found: dict[Label, Placement] = {}
        for label in self._model.labels:
            saved, offloaded = solution[self._save[label]] > 0.5, solution[self._offload[label]] > 0.5
            found[label] = "save" if saved else "offload" if offloaded else "recompute"
        kept = self._model.find_kept_labels(found)
        return {k: verb if k in kept or k in self._fixed else "recompute" for k, verb in found.items()}

    def _add_exact_memory(self, placements: Placements) -> bool:
        """Adds exact constraints for the fullest kernels of ordered layers; False if all are exact."""
        changed = False
        states = self._model.find_states(placements)
        for kind, model, of_kind in zip(self._kinds, self._model.layers, states, strict=True):
            for s in model.find_fullest(of_kind) if of_kind.is_ordered else ():
                changed = kind.add_exact_memory(s) or changed
        return changed
