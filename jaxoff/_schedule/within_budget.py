"""The step within a budget: placements of its values, the step as written, or state on the host."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from jax.sharding import Sharding

from jaxoff._budget.budget_error import BudgetError, find_least
from jaxoff._budget.estimated import find_estimated
from jaxoff._budget.fit import find_fitting
from jaxoff._budget.forms import NO_COPIES, step_ms
from jaxoff._budget.joint_graph import JointGraph
from jaxoff._budget.limits import Budget, UnmatchedError
from jaxoff._budget.loop_pairs import roll_loops
from jaxoff._budget.memory import ESTIMATE_MARGIN, estimate_nbytes
from jaxoff._budget.report import Plan, make_plan_as_written
from jaxoff._budget.state import State
from jaxoff._budget.tried import Tried
from jaxoff._device.joined import join_devices
from jaxoff._device.profile import Device
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import ClosedJaxpr
from jaxoff._jaxpr.faults import FAULTS
from jaxoff._jaxpr.lowered import has_ordered_effects
from jaxoff._jaxpr.merged_maps import merge_shard_maps
from jaxoff._jaxpr.shares import nbytes_on_device
from jaxoff._report.finding import Finding, FindingCode
from jaxoff._report.progress import Progress
from jaxoff._report.tables import format_nbytes
from jaxoff._schedule.call import Call
from jaxoff._schedule.compiled_programs import Compiled, Compiler
from jaxoff._schedule.divided_batch import divide_batch
from jaxoff._schedule.faults import describe_fault, name_fault
from jaxoff._schedule.host_memory import peak_host_nbytes
from jaxoff._schedule.settings import Setting
from jaxoff._schedule.sharding_marks import Lower
from jaxoff._schedule.traced import Traced

# A program without copies is compiled in jaxoff's order, too, where XLA's takes this many times the estimate.
_OUT_OF_ORDER = 1.1
# The same where the estimate is over the budget, too, and only the error's least memory is at stake.
_FAR_OUT_OF_ORDER = 1.25
# The same over several devices, for whose parts there is no estimate, where XLA's takes this many times the
# budget at most: layers in a list on two CPUs took 1.24 to 1.30 times the memory of jaxoff's order.
_MAY_BE_OUT_OF_ORDER = 1.3
# A step as written is compiled where it takes less than this part of the time of a program without copies.
_WRITTEN_WINS = 0.99
_ORDERED_EFFECTS = (
    "No value goes to the host: the step has ordered effects, such as io_callback(..., ordered=True), and "
    "JAX does not lower a program with both."
)


def limit_copies(budget: Budget, closed: ClosedJaxpr) -> Budget:
    """The budget of a program, without host memory if the program has ordered effects."""
    return dataclasses.replace(budget, host_nbytes=NO_COPIES) if has_ordered_effects(closed) else budget


@dataclasses.dataclass(frozen=True)
class Written:
    """The step as the user wrote it: its setting, device memory and program."""

    setting: Setting
    nbytes: float
    program: ClosedJaxpr

    @property
    def size(self) -> str:
        """Its device memory as text."""
        return format_nbytes(int(self.nbytes)) if math.isfinite(self.nbytes) else "too much"


@dataclasses.dataclass(frozen=True)
class Within:
    """A step within a budget.

    Attributes:
      setting: its recipe and compiler options.
      plan: its plan.
      compiled: its program; None for the step as the user wrote it.
      findings: what the user should know.
      list_others: compiles other steps within the budget, to be compared by time.
    """

    setting: Setting
    plan: Plan
    compiled: Compiled | None = None
    findings: tuple[Finding, ...] = ()
    list_others: Callable[[], Iterable[Within]] = tuple

    def label(self, program: str) -> Within:
        """The step with a name for its program."""
        return dataclasses.replace(self, setting=dataclasses.replace(self.setting, program=program))


@dataclasses.dataclass(frozen=True)
class StepSearch:
    """A search for the step within a budget.

    The fastest placements that fit come first, then the step as the user wrote it, then placements with state
    on the host. Placements with copies come behind a step as written that is faster by the model. State that
    must leave the device, since the arguments alone are beyond the budget, leaves it at once.

    Attributes:
      twin: the step with every value on the device.
      call, traced: of the step.
      device: rates of the device.
      budget: the memory of the device and its host.
      compiler: compiles programs.
      compile_written: compiles the step as the user wrote it.
      lower_given: lowers a program as `jax.jit` does, for a compilation that is only read.
      paths: the name of each argument.
      donated: for each argument, whether the program may reuse its memory.
      shardings: of the arguments over several devices, else None.
    """

    twin: ClosedJaxpr
    call: Call
    traced: Traced
    device: Device
    budget: Budget
    compiler: Compiler
    compile_written: Callable[[], Written]
    lower_given: Lower
    paths: Sequence[str]
    donated: Sequence[bool]
    shardings: Sequence[Sharding | None]

    def run(self) -> Within:
        """Finds the step; after a fault of jaxoff the step as the user wrote it, if it fits.

        Raises:
          BudgetError: if no program fits.
        """

        def find(budget: Budget) -> Within:
            error: BudgetError | None = None
            for twin in self._list_twins():
                try:
                    return dataclasses.replace(self, twin=twin, budget=budget)._find()
                except BudgetError as other:
                    error = min(error or other, other, key=BudgetError.least_bytes)
            assert error is not None
            raise error

        try:
            found = find(self.budget)
            return dataclasses.replace(found, list_others=functools.partial(self._list_others, found))
        except BudgetError as error:
            error = find_least(error, self.budget, lambda near: find(near).plan.peak_bytes)
            if has_ordered_effects(self.twin):
                error = error.extend(_ORDERED_EFFECTS)
            if error.smallest_bytes is None and self.compiler.refusals:
                error = error.extend(f"XLA says: {self.compiler.refusals[0]}")
            raise error from None
        except UnmatchedError:
            raise
        except (ValueError, *FAULTS) as fault:  # ValueError: of JAX, over a program that is not well formed
            written, doing = self.compile_written(), "the search for a program in its budget"
            if written.nbytes > self.budget.device_nbytes:
                text = f"{name_fault(fault, doing)}, and the step as it is written takes {written.size}."
                raise BudgetError(f"{text} Please report the program.", None) from fault
            finding = describe_fault(fault, doing)
            return dataclasses.replace(self._as_written(written), findings=(finding,))

    def _list_others(self, found: Within) -> Iterator[Within]:
        """Other steps within the budget that take their state from where the step found takes it.

        The same program by its other recipes, a program that copies nothing to the host, and the step as the
        user wrote it.
        """
        if found.compiled is None or not (found.plan.values or found.plan.in_parts):
            return
        for nbytes, compiled in self.compiler.compile_others(found.compiled):
            plan = dataclasses.replace(found.plan, peak_bytes=nbytes)
            yield dataclasses.replace(found, setting=compiled.setting, plan=plan, compiled=compiled)
        if found.compiled.traced.has_host_arguments:
            return
        if found.plan.host_bytes:
            budget = dataclasses.replace(self.budget, host_nbytes=NO_COPIES)
            with contextlib.suppress(BudgetError):
                without = dataclasses.replace(self, budget=budget).run()
                if without.compiled is not None:
                    yield without.label("nothing offloaded")
        written = self.compile_written()
        if written.nbytes <= self.budget.device_nbytes:
            yield self._as_written(written).label("as written")

    def _list_twins(self) -> Iterator[ClosedJaxpr]:
        """The twin in the forms to search, the preferred one first.

        With the batch divided throughout, unless more is exchanged then; with the loops rolled up that the
        user unrolled; with the batch divided as the compiler divides it.
        """
        merged, divided = self._merged_and_divided
        yield divided
        if (rolled := compat.map_open(divided, roll_loops)) is not divided:
            yield rolled
        if merged is not divided:
            yield merged

    @functools.cached_property
    def _merged_and_divided(self) -> tuple[ClosedJaxpr, ClosedJaxpr]:
        merged = merge_shard_maps(self.twin)
        if self.call.devices == 1:
            return merged, merged
        try:
            divisions = self.call.list_divisions(self.traced.signature[1])
            return merged, divide_batch(merged, self.donated, divisions, self.lower_given)
        except (ValueError, *FAULTS) as fault:  # ValueError: of JAX, over shardings that do not fit
            text = f"the batch stays as the compiler divides it ({type(fault).__name__}: {fault})"
            self._progress.say(text)
            return merged, merged

    def _find(self) -> Within:
        arguments = sum(
            nbytes_on_device(v.aval, sharding)
            for v, sharding in zip(self.twin.jaxpr.invars, self.shardings, strict=True)
        )
        beyond = arguments - self.budget.device_nbytes
        if beyond > 0 and self.call.why_state_stays is None and self._state.fits(self.budget.host_nbytes):
            alone = BudgetError(f"the arguments alone take {format_nbytes(arguments)}.", None)
            try:
                return self._find_with_state(alone, beyond + self._state.gradient_nbytes)
            except BudgetError as error:
                with_state = error
            try:
                return self._find_on_device()
            except BudgetError as error:
                nbytes = format_nbytes(self._state.nbytes)
                error = error.extend(f"{nbytes} of the arguments are state that may rest on the host.")
                raise min(with_state, error, key=BudgetError.least_bytes) from None
        try:
            return self._find_on_device()
        except BudgetError as error:
            on_device = error
        if arguments <= self.call.devices * self.budget.device_nbytes:  # `jit` may divide them
            written = self.compile_written()
            if written.nbytes <= self.budget.device_nbytes:
                return self._as_written(written)
            on_device = _count_written(on_device, written)
        if self.call.why_state_stays is not None:
            raise on_device.extend(f"State on the host may help; {self.call.why_state_stays}") from None
        return self._find_with_state(on_device, on_device.least_bytes() - self.budget.device_nbytes)

    def _find_on_device(self) -> Within:
        """The step with all state on the device."""
        found = self._find_fitting(self.twin, self.budget)
        within = self._make_within(found)
        # The model has no time of the user's copies to the host, and none of the copies into stacks of loops.
        if self.traced.has_copies or not (within.plan.host_bytes or _are_outside_loops(found.pairs)):
            return within
        part = 1.0 if within.plan.host_bytes else _WRITTEN_WINS
        device = join_devices(self.device, self.call.devices)
        if step_ms(self.traced.given, found.pairs, device) >= part * within.plan.step_ms:
            return within
        written = self.compile_written()
        return self._as_written(written) if written.nbytes <= self.budget.device_nbytes else within

    def _find_with_state(self, error: BudgetError, missing_nbytes: float) -> Within:
        """The step with state on the host; `error` and `missing_nbytes` as for `State.search`."""
        limits = self.device, self.budget, error
        found, hosted = self._state.search(
            self.paths, *limits, self._find_fitting, missing_nbytes, self._progress
        )
        within = self._make_within(found)
        return dataclasses.replace(within, plan=hosted.add_to(within.plan))

    def _find_fitting(self, closed: ClosedJaxpr, budget: Budget) -> Tried[Compiled]:
        def compile_preferred(program: ClosedJaxpr) -> tuple[float, Compiled]:
            compiled = self.compiler.compile_program(program, preferred=True)
            assert compiled is not None  # every program has a recipe
            if self._is_out_of_order(program, compiled[0]):
                in_order = self.compiler.compile_program(program, preferred=True, in_order=True)
                compiled = min(compiled, in_order or compiled, key=lambda made: made[0])
            return compiled

        def compile_otherwise(program: ClosedJaxpr) -> tuple[float, Compiled] | None:
            return self.compiler.compile_program(program, preferred=False) if self.call.is_on_gpu else None

        # The preferred recipes hide the copies best; others may take less memory.
        return find_fitting(
            closed,
            self.device,
            budget,
            self.donated,
            compile_preferred,
            devices=self.call.devices,
            compile_otherwise=compile_otherwise,
            progress=self._progress,
        )

    def _is_out_of_order(self, program: ClosedJaxpr, nbytes: float) -> bool:
        """Whether a program without copies is over the budget, and XLA's order may be why."""
        if nbytes <= self.budget.device_nbytes or peak_host_nbytes(program):
            return False
        if self.call.devices > 1:
            return nbytes <= _MAY_BE_OUT_OF_ORDER * self.budget.device_nbytes
        estimate = estimate_nbytes(program, self.donated)
        fits = estimate <= self.budget.device_nbytes
        return estimate <= nbytes / (_OUT_OF_ORDER if fits else _FAR_OUT_OF_ORDER)

    @functools.cached_property
    def _progress(self) -> Progress:
        return Progress()

    @functools.cached_property
    def _state(self) -> State:
        return State.find(self.twin, self.donated, self.shardings, self.call.devices)

    def _make_within(self, found: Tried[Compiled]) -> Within:
        plan = found.make_plan(self.budget, self.device, None)
        return Within(found.program.setting, plan, found.program)

    def _as_written(self, written: Written) -> Within:
        return _plan_as_written(self.call, self.traced, written, self.budget, self.device)


def _plan_as_written(call: Call, traced: Traced, written: Written, budget: Budget, device: Device) -> Within:
    sizes, device = (written.nbytes, peak_host_nbytes(written.program)), join_devices(device, call.devices)
    return Within(written.setting, make_plan_as_written(traced.given, sizes, budget, device, None))


def find_within(
    call: Call,
    traced: Traced,
    device: Device,
    budget: Budget,
    compiler: Compiler,
    compile_written: Callable[[], Written],
    *facts: Any,
) -> Within:
    """The step within a budget; a step that a budget cannot place as the user wrote it, if that fits.

    Args:
      call, traced, device, budget, compiler, compile_written: as for `StepSearch`.
      facts: the other attributes of `StepSearch`.

    Raises:
      BudgetError: if no program fits.
    """
    reason = traced.why_not_placed
    if reason is None:
        twin = traced.take_twin()
        limited = limit_copies(budget, twin)
        return StepSearch(twin, call, traced, device, limited, compiler, compile_written, *facts).run()
    written = compile_written()
    if written.nbytes > budget.device_nbytes:
        raise BudgetError(f"{reason} As it is written, the step takes {written.size}.", None)
    finding = Finding(FindingCode.RUNS_AS_WRITTEN, f"{reason} The step fits the budget as it is written.")
    return dataclasses.replace(_plan_as_written(call, traced, written, budget, device), findings=(finding,))


def _count_written(error: BudgetError, written: Written) -> BudgetError:
    """The error of a search, with the step as written as the least program if it takes less."""
    if written.nbytes >= error.least_bytes():
        return error
    nbytes = math.ceil(written.nbytes)
    return error.extend(f"The step as it is written takes {format_nbytes(nbytes)}.", nbytes)


def _are_outside_loops(layers: Sequence[JointGraph]) -> bool:
    """Whether no layer is an iteration of a loop."""
    return not any(layer.has_stacks for layer in layers)


def estimate_within(
    twin: ClosedJaxpr,
    call: Call,
    device: Device,
    budget: Budget,
    paths: Sequence[str],
    donated: Sequence[bool],
    shardings: Sequence[Sharding | None],
) -> Plan:
    """The plan of a step within a budget by an estimate of memory; arguments as for `StepSearch`.

    Raises:
      BudgetError: if no program fits.
    """

    def find(closed: ClosedJaxpr, budget: Budget) -> Tried[None]:
        return find_estimated(closed, device, budget, donated, devices=call.devices)

    def estimate(budget: Budget) -> Plan:
        try:
            return find(twin, budget).make_plan(budget, device, None, is_compiled=False)
        except BudgetError as error:
            if call.why_state_stays is not None:
                raise
            missing = error.least_bytes() - budget.device_nbytes
            found, hosted = State.find(twin, donated, shardings, call.devices).search(
                paths, device, budget, error, find, missing, Progress()
            )
            return hosted.add_to(found.make_plan(budget, device, None, is_compiled=False))

    twin, budget = merge_shard_maps(twin), limit_copies(budget, twin)
    try:
        return estimate(budget)
    except BudgetError as error:
        part = 1 - ESTIMATE_MARGIN
        raise find_least(error, budget, lambda near: estimate(near).peak_bytes / part) from None
