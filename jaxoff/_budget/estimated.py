"""The search for the fastest program within a budget where nothing can be compiled."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from jaxoff._budget.budget_error import BudgetError
from jaxoff._budget.fit import find_fitting
from jaxoff._budget.limits import Budget
from jaxoff._budget.memory import ESTIMATE_MARGIN, estimate_nbytes
from jaxoff._budget.tried import Tried
from jaxoff._device.profile import Device
from jaxoff._jaxpr.compat import ClosedJaxpr
from jaxoff._report.tables import format_nbytes


def find_estimated(
    closed: ClosedJaxpr,
    device: Device,
    budget: Budget,
    donated: Sequence[bool],
    *,
    devices: int = 1,
) -> Tried[None]:
    """Finds the fastest program within a budget by `estimate_nbytes`, with a part of the budget left free.

    Args:
      closed, device, budget, donated, devices: as for `find_fitting`.

    Raises:
      BudgetError: if no program fits.
    """

    def estimate(program: ClosedJaxpr) -> tuple[float, None]:
        return estimate_nbytes(program, donated) / devices, None

    part = 1 - ESTIMATE_MARGIN
    free = dataclasses.replace(budget, device_nbytes=part * budget.device_nbytes)
    try:
        return find_fitting(closed, device, free, donated, estimate, devices=devices)
    except BudgetError as error:
        limit, least = format_nbytes(int(budget.device_nbytes)), error.smallest_bytes
        text = f"Memory is estimated; {limit} less a fifth is used."
        error = error.extend(text, None if least is None else math.ceil(least / part))
        raise error from None
