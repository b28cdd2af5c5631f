"""The step within a budget: placements of its values, the step as written, or state on the host."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from jaxoff._budget.budget_error import BudgetError
from jaxoff._budget.fit import Tried, find_estimated, find_fitting
from jaxoff._budget.limits import Budget
from jaxoff._budget.report import Plan, make_plan_as_written
from jaxoff._budget.state import State
from jaxoff._device.profile import Device
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import ClosedJaxpr
from jaxoff._report.finding import Finding
from jaxoff._report.tables import format_nbytes
from jaxoff._schedule.call import Call
from jaxoff._schedule.faults import FAULTS, describe_fault
from jaxoff._schedule.host_memory import peak_host_nbytes
from jaxoff._schedule.settings import Setting
from jaxoff._schedule.traced import Traced

# The setting of a program, with its `jax.jit` function.
type _Made = tuple[Setting, Any]


@dataclasses.dataclass(frozen=True)
class Written:
    """The step as the user wrote it: its setting, device memory and program."""

    setting: Setting
    nbytes: float
    program: ClosedJaxpr


@dataclasses.dataclass(frozen=True)
class Within:
    """A step within a budget: its setting, its plan, and its `jax.jit` function unless it is the user's."""

    setting: Setting
    plan: Plan
    instance: Any = None
    findings: tuple[Finding, ...] = ()


def find_within(
    twin: ClosedJaxpr,
    call: Call,
    traced: Traced,
    device: Device,
    budget: Budget,
    compile_program: Callable[..., tuple[float, _Made] | None],
    compile_written: Callable[[], Written],
    paths: Sequence[str],
    donated: Sequence[bool],
    refusals: Sequence[str],
) -> Within:
    """Finds the step within a budget; after a fault of jaxoff the step as the user wrote it, if it fits.

    The fastest placements that fit come first, then the step as the user wrote it, then placements with state
    on the host.

    Args:
      twin: the step with every value on the device.
      call, traced: of the step.
      device: rates of the device.
      budget: the memory of the device and its host.
      compile_program: (program, whether to take the preferred recipe, or of the others that of the least
        memory) -> bytes on the device, and the compiled program's setting and function; None without others.
      compile_written: compiles the step as the user wrote it.
      paths: the name of each argument.
      donated: for each argument, whether the program may reuse its memory.
      refusals: XLA's reasons for the programs that it did not compile.

    Raises:
      BudgetError: if no program fits.
    """

    def find(closed: ClosedJaxpr, budget: Budget) -> Tried[_Made]:
        def compile_preferred(program: ClosedJaxpr) -> tuple[float, _Made]:
            compiled = compile_program(program, preferred=True)
            assert compiled is not None  # every program has a recipe
            return compiled

        def compile_otherwise(program: ClosedJaxpr) -> tuple[float, _Made] | None:
            return compile_program(program, preferred=False) if call.is_on_gpu else None

        # The preferred recipe hides the copies best; others may take less memory.
        return find_fitting(
            closed,
            device,
            budget,
            donated,
            compile_preferred,
            devices=call.devices,
            compile_otherwise=compile_otherwise,
        )

    arguments = compat.nbytes_of(twin.jaxpr.invars)
    find_state = functools.cache(lambda: State.find(twin, donated))

    def search_with_state(error: BudgetError, missing_nbytes: float) -> Within:
        found, hosted = find_state().search(paths, device, budget, error, find, missing_nbytes)
        within = _make_within(found, budget, device)
        return dataclasses.replace(within, plan=hosted.add_to(within.plan))

    def search() -> Within:
        missing = arguments - budget.device_nbytes
        if missing > 0 and _may_host_state(call) and find_state().fits(budget.host_nbytes):
            alone = BudgetError(f"the arguments alone take {format_nbytes(arguments)}.", None)
            try:
                return search_with_state(alone, missing)
            except BudgetError as error:
                with_state = error
            try:
                return _make_within(find(twin, budget), budget, device)
            except BudgetError as error:
                raise min(with_state, error, key=BudgetError.least_bytes) from None
        try:
            return _make_within(find(twin, budget), budget, device)
        except BudgetError as error:
            if arguments <= call.devices * budget.device_nbytes:
                written = compile_written()
                if written.nbytes <= budget.device_nbytes:
                    return _as_written(written, traced, budget, device)
                if written.nbytes < error.least_bytes():
                    nbytes = math.ceil(written.nbytes)
                    error = error.extend(f"The step as it is written takes {format_nbytes(nbytes)}.")
                    error.smallest_bytes = nbytes
            if not _may_host_state(call):
                raise error from None
            return search_with_state(error, error.least_bytes() - budget.device_nbytes)

    try:
        return search()
    except BudgetError as error:
        if error.smallest_bytes is None and refusals:
            raise error.extend(f"XLA says: {refusals[0]}") from None
        raise
    except FAULTS as fault:
        written, finding = compile_written(), describe_fault(fault, "the search for a program in its budget")
        if written.nbytes > budget.device_nbytes:
            nbytes = format_nbytes(int(written.nbytes)) if math.isfinite(written.nbytes) else "too much"
            text = f"no program fits: the step as it is written takes {nbytes}. {finding.message}"
            raise BudgetError(text, None) from fault
        return dataclasses.replace(_as_written(written, traced, budget, device), findings=(finding,))


def estimate_within(
    twin: ClosedJaxpr,
    call: Call,
    device: Device,
    budget: Budget,
    paths: Sequence[str],
    donated: Sequence[bool],
) -> Plan:
    """The plan of a step within a budget by an estimate of memory; arguments as for `find_within`.

    Raises:
      BudgetError: if no program fits.
    """

    def find(closed: ClosedJaxpr, budget: Budget) -> Tried[None]:
        return find_estimated(closed, device, budget, donated, devices=call.devices)

    try:
        return find(twin, budget).make_plan(budget, device, None, is_compiled=False)
    except BudgetError as error:
        if not _may_host_state(call):
            raise
        missing = error.least_bytes() - budget.device_nbytes
        found, hosted = State.find(twin, donated).search(paths, device, budget, error, find, missing)
        return hosted.add_to(found.make_plan(budget, device, None, is_compiled=False))


def _as_written(written: Written, traced: Traced, budget: Budget, device: Device) -> Within:
    sizes = written.nbytes, peak_host_nbytes(written.program)
    return Within(written.setting, make_plan_as_written(traced.given, sizes, budget, device, None))


def _may_host_state(call: Call) -> bool:
    return call.devices == 1 and not call.has_shardings


def _make_within(found: Tried[_Made], budget: Budget, device: Device) -> Within:
    setting, instance = found.program
    return Within(setting, found.make_plan(budget, device, None), instance)
