"""Plans whose memory is checked by compilation of the step, instead of predicted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jaxoff._plan.result import BudgetError, Plan, describe_peak
from jaxoff._plan.search import BUDGET_FACTOR
from jaxoff._report.tables import format_nbytes
from jaxoff._runtime.program_memory import program_nbytes

type CompileStep = Callable[[Any], jax.stages.Compiled]

# Budget of the next prediction after a refused plan, as a part of the refused plan's budget: below it by more
# than the search's tolerance.
_FINER = 0.999
# Smallest expected ratio of compiled to predicted memory. Chosen, not fitted: the smallest ratio in
# bench/LOG.md is 0.85, of a plan over eight H200s (2026-11-23, evening: every plan of the MoE frontiers by
# compilation timed and run).
_LEAST = 0.8
# Number of further plans compiled after a plan fits. Each compilation takes minutes.
_TRIES = 3
# Part of a step by which a further plan must be faster to be worth a compilation.
_FASTER = 1e-3


def find_fitting(
    plan_for: Callable[[float], Plan], device_bytes: float, resident_bytes: int, compile_step: CompileStep
) -> Plan:
    """Finds a fast plan whose compiled step fits a budget.

    Args:
      plan_for: returns the fastest plan for a budget, by prediction.
      device_bytes: the budget.
      resident_bytes: bytes of other data on the device for the whole step.
      compile_step: as for `jaxoff.plan`.

    Raises:
      BudgetError: if no compiled step fits.
      TypeError: if `compile_step` returns no compiled step.
    """
    checker = _StepChecker(device_bytes, resident_bytes, compile_step)
    limit, too_much = device_bytes, None
    while True:
        try:
            plan = plan_for(max(0, limit))
        except BudgetError as error:
            if error.smallest_bytes is None or _LEAST * error.smallest_bytes > device_bytes:
                raise
            # The smallest plan may take less memory than predicted, or exceed the prediction by less than
            # others.
            limit = BUDGET_FACTOR * error.smallest_bytes
            plan = plan_for(limit)
            if plan.policy in checker.refused:
                raise checker.build_error(plan) from None
        found = checker.check(plan)
        if plan.policy not in checker.refused:
            break
        # `_FINER` keeps the search from finding the refused plan again.
        too_much, limit = limit, _FINER * min(limit, checker.find_allowance(found))
    return _find_faster(limit, too_much, found, plan_for, checker)


def _find_faster(
    limit: float,
    too_much: float | None,
    found: Plan,
    plan_for: Callable[[float], Plan],
    checker: _StepChecker,
) -> Plan:
    """Finds a faster plan by prediction for larger budgets.

    If the plan for a larger budget was refused, plans between both budgets may exceed their predictions by
    less. If no plan was refused, the plan may take less memory than predicted, and the next prediction may
    exceed the budget by the difference.

    Args:
      limit: predicted budget of a fitting plan.
      too_much: predicted budget of a refused plan, or None.
      found: the fitting plan.
      plan_for: as for `find_fitting`.
      checker: compiles the steps.
    """
    tries = _TRIES
    while tries:
        more = checker.find_allowance(found) if too_much is None else (limit + too_much) / 2
        if _FINER * more < limit:
            break
        plan = plan_for(more)
        refused = plan.policy in checker.refused
        if not refused and plan.step_ms < (1 - _FASTER) * found.step_ms:
            tries -= 1
            checked = checker.check(plan)
            refused = plan.policy in checker.refused
            found = found if refused else checked
        elif too_much is None:
            break
        if refused:
            too_much = more
        else:
            limit = more
    return found


class _StepChecker:
    """Compiles the steps of plans and compares their memory with a budget.

    Attributes:
      refused: policy of a step above the budget -> bytes of the compiled step.
    """

    def __init__(self, device_bytes: float, resident_bytes: int, compile_step: CompileStep):
        self._device_bytes, self._resident_bytes = device_bytes, resident_bytes
        self._compile_step = compile_step
        self.refused: dict[Any, int] = {}

    def check(self, plan: Plan) -> Plan:
        """Compiles the step of a plan, and returns the plan with the bytes of the compiled step."""
        step = self._compile_step(plan.policy)
        if not isinstance(step, jax.stages.Compiled):
            raise TypeError(
                "compile_step returns a compiled step, as in lambda policy: step(policy).lower(*args)"
                f".compile(); got {type(step).__name__}."
            )
        held = program_nbytes(step) + self._resident_bytes
        if held > self._device_bytes:
            self.refused[plan.policy] = held
        return dataclasses.replace(plan, device_bytes=int(self._device_bytes), compiled_bytes=held)

    def find_allowance(self, plan: Plan) -> float:
        """Returns the largest prediction within the budget, if predictions err as for a checked plan."""
        assert plan.compiled_bytes is not None
        return self._device_bytes + plan.peak_bytes - plan.compiled_bytes

    def build_error(self, smallest: Plan) -> BudgetError:
        """Builds the error for a budget below the smallest compiled plan."""
        least, predicted = min(self.refused.values()), format_nbytes(smallest.peak_bytes)
        more = format_nbytes(self.refused[smallest.policy] - smallest.peak_bytes)
        return BudgetError(
            f"device_bytes={format_nbytes(int(self._device_bytes))} is less than any compiled step takes: of "
            f"{len(self.refused)} plans the smallest takes {least} bytes ({format_nbytes(least)}). The plan "
            f"of least memory, predicted {predicted}, takes {more} more. {describe_peak(smallest.peak)}",
            least,
        )
