"""Plans checked by compilation: what XLA assigns is then known, not predicted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jaxoff._compiled.verify import program_nbytes
from jaxoff._plan.result import BudgetError, Plan, fullest
from jaxoff._report.tables import format_nbytes

type CompileStep = Callable[[Any], jax.stages.Compiled]

# A plan that its compiled program refuted is made again for less than it needs by at least this.
_FINER = 0.999
# The smallest plan is found in its budget, whatever precision the search has.
_COARSER = 1.000001
# Compiled programs may take less than predicted, but not less than this part.
_LEAST = 0.8
# After one that fits, so many plans more are compiled that are faster by so much of a step.
_TRIES, _FASTER = 3, 1e-3


def fitting(
    plan_for: Callable[[float], Plan], device_bytes: float, resident_bytes: int, compile_step: CompileStep
) -> Plan:
    """A plan whose compiled step fits a budget.

    Args:
      plan_for: the fastest plan for a budget, as predicted.
      device_bytes: the budget.
      resident_bytes: what else is on the device all the time.
      compile_step: as for `jaxoff.plan`.

    Raises:
      BudgetError: if none was found.
      TypeError: if what `compile_step` returns is not compiled.
    """
    steps = _Steps(device_bytes, resident_bytes, compile_step)
    limit, too_much = device_bytes, None
    while True:
        try:
            plan = plan_for(max(0, limit))
        except BudgetError as error:
            if error.smallest_bytes is None or _LEAST * error.smallest_bytes > device_bytes:
                raise
            # It may take less than predicted, or be short by less than another plan was.
            limit = _COARSER * error.smallest_bytes
            plan = plan_for(limit)
            if plan.policy in steps.refused:
                raise steps.error(plan) from None
        found = steps.checked(plan)
        if plan.policy not in steps.refused:
            break
        # So that what is refused is not found again, by whatever precision the search has.
        too_much, limit = limit, _FINER * min(limit, steps.allowed_by(found))
    return _faster(limit, too_much, found, plan_for, steps)


def _faster(
    limit: float, too_much: float | None, found: Plan, plan_for: Callable[[float], Plan], steps: _Steps
) -> Plan:
    """The fastest plan found for more than a limit whose plan fits.

    Where the plan for a higher limit was refused, what is between may be short by less than that one. Where
    none was, the plan may have taken less than predicted: so much more is then allowed.
    """
    tries = _TRIES
    while tries:
        more = steps.allowed_by(found) if too_much is None else (limit + too_much) / 2
        if _FINER * more < limit:
            break
        plan = plan_for(more)
        refused = plan.policy in steps.refused
        if not refused and plan.step_ms < (1 - _FASTER) * found.step_ms:
            tries -= 1
            checked = steps.checked(plan)
            refused = plan.policy in steps.refused
            found = found if refused else checked
        elif too_much is None:
            break
        if refused:
            too_much = more
        else:
            limit = more
    return found


class _Steps:
    """Compiles the steps of plans.

    Attributes:
      refused: by policy whose step takes more than the budget, how much it takes.
    """

    def __init__(self, device_bytes: float, resident_bytes: int, compile_step: CompileStep):
        self._device_bytes, self._resident_bytes = device_bytes, resident_bytes
        self._compile_step = compile_step
        self.refused: dict[Any, int] = {}

    def checked(self, plan: Plan) -> Plan:
        """A plan with what its compiled step takes."""
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

    def allowed_by(self, plan: Plan) -> float:
        """What may be predicted of a plan if predictions are as far off as that of one that was checked."""
        assert plan.compiled_bytes is not None
        return self._device_bytes + plan.peak_bytes - plan.compiled_bytes

    def error(self, smallest: Plan) -> BudgetError:
        """That the smallest plan was refused, too."""
        least, predicted = min(self.refused.values()), format_nbytes(smallest.peak_bytes)
        more = format_nbytes(self.refused[smallest.policy] - smallest.peak_bytes)
        return BudgetError(
            f"device_bytes={format_nbytes(int(self._device_bytes))} is less than any compiled step takes: of "
            f"{len(self.refused)} plans the smallest takes {least} bytes ({format_nbytes(least)}). The plan "
            "of least "
            f"memory, predicted {predicted}, takes {more} more. {fullest(smallest.peak)}",
            least,
        )
