"""What `jaxoff.jit` returns: traces, rewrites, chooses how to compile, and calls."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from jaxoff._budget.limits import Budget
from jaxoff._budget.report import Plan
from jaxoff._device.at_hand import device_or_at_hand, profile_at_hand
from jaxoff._device.profile import Device
from jaxoff._jaxpr import compat, meshes, trace_state
from jaxoff._jaxpr.compat import ClosedJaxpr
from jaxoff._jaxpr.statics import find_statics
from jaxoff._policy.marks import is_recording
from jaxoff._report.finding import Finding
from jaxoff._report.warn import warn_of
from jaxoff._runtime.disk import make_key
from jaxoff._runtime.flags import UNTUNED, PlacedBy
from jaxoff._runtime.program_memory import program_nbytes_if_compiled
from jaxoff._schedule.argument_types import ArgumentTypes
from jaxoff._schedule.call import Call, Place
from jaxoff._schedule.compiled_programs import Compiler
from jaxoff._schedule.faults import describe_symbolic, rewrite_safely
from jaxoff._schedule.guards import refuse_what_fails
from jaxoff._schedule.other_forms import Ways, find_form
from jaxoff._schedule.recipes import LoweredByRecipe, Recipe, choose_recipe, find_fallback
from jaxoff._schedule.requests import find_lost_order
from jaxoff._schedule.rewrite import Rewritten
from jaxoff._schedule.settings import Setting, add_without_graphs, complete, list_for_call
from jaxoff._schedule.sharding_marks import Lower
from jaxoff._schedule.traced import ProbedError, Traced
from jaxoff._schedule.traced_arguments import TracedArguments
from jaxoff._schedule.tuning import (
    Tuning,
    find_fastest,
    find_saved,
    list_within_limit,
    read_decision,
    refuse_several_processes,
)
from jaxoff._schedule.vanished import find_vanished
from jaxoff._schedule.within_budget import Within, Written, estimate_within, find_within
from jaxoff._state import hosted

type _Unmet = dict[Setting, Sequence[Finding]]
_jax_jit = jax.jit  # `jax.jit = jaxoff.jit` must not make this module call itself


class Jitted:
    """What `jaxoff.jit` returns; see there.

    JAX takes compiler options before a trace, and the program decides them. So the first call with new types
    of arguments traces the user's function in a probe that ends with `ProbedError`; the settings that are
    tried, and the setting that is chosen, take over the traced program. The user's function runs once.

    Attributes:
      findings: the findings of the calls so far, each once.
      tuned: milliseconds of a step by each program that `tune` compared, for the latest types of arguments.
      plan: the `jaxoff.Plan` within `device_bytes`, for the latest types of arguments; None before.
    """

    def __init__(
        self,
        fun,
        compiler_options: dict[str, Any],
        device: Device | None,
        recipe: Recipe | None,
        tune: bool,
        budget: Budget | None,
        kwargs: dict[str, Any],
    ):
        self._fun, self._given, self._device, self._kwargs = fun, compiler_options, device, kwargs
        self._recipe, self._tunes, self._budget = recipe, tune, budget
        self._inner: Any = _jax_jit(fun, **kwargs)
        self._statics = find_statics(fun, kwargs)
        self._types = ArgumentTypes(ignores_host=budget is not None and not hosted.names_host(kwargs))
        self._chosen: dict[Hashable, Setting] = {}  # types of a call's arguments -> setting
        self._instances: dict[Hashable, Any] = {}  # types and setting -> the `jax.jit` function
        self._tunings: dict[Hashable, Tuning | None] = {}  # types -> programs to time; None: one is chosen
        self._latest = Setting(Recipe.ORDERED, ())
        self._probed = threading.local()  # `traced`: the program of the call under way
        self._choosing = threading.RLock()
        self.findings: tuple[Finding, ...] = ()
        self.tuned: dict[str, float] = {}
        self.plan: Plan | None = None
        functools.update_wrapper(self, fun, updated=())  # not the attributes of a Jitted inside of it

    def __call__(self, /, *args, **kwargs):
        if jax.config.jax_disable_jit:  # runs the function's equations one by one
            return self._inner(*args, **kwargs)
        call, has_budget = self._call(args, kwargs), self._budget is not None
        if call.is_traced:
            if has_budget or not is_recording():
                given = self._inner.trace(*args, **kwargs).jaxpr.jaxpr  # of JAX's cache, which the call reads
                self._report(find_lost_order(given, getattr(self, "__name__", "it"), has_budget=has_budget))
            return self._inner(*args, **kwargs)
        if self._tunes and (tuning := self._find_tuning(call)) is not None:
            return self._take_timed_step(call, tuning)
        with self._settle(call) as jitted:
            return jitted(*args, **kwargs)

    @property
    def device(self) -> Device:
        """The rates by which copies and budgets are planned."""
        return device_or_at_hand(self._device)

    def lower(self, /, *args, **kwargs) -> Any:
        """As `jax.jit(fun).lower`; `compile` uses the recipe and the options chosen."""
        call = self._call(args, kwargs)
        if self._runs_as_given(call):
            return self._inner.lower(*args, **kwargs)
        if call.key in self._chosen or self._budget is not None:
            with self._settle(call) as jitted:
                return LoweredByRecipe.of(jitted.lower(*args, **kwargs), self.options, self._placed_by)
        with self._probe(call) as traced:
            self._latest, *others = self._list_settings(call, traced)
            lowered = self._lower(call, self._latest)
        if not (others or traced.is_judged(call)) and self._latest.is_complete:
            return LoweredByRecipe.of(lowered, self.options, self._placed_by)
        mesh = meshes.current_mesh()

        def lower_chosen() -> tuple[jax.stages.Lowered, dict[str, Any], PlacedBy | None]:
            with meshes.under_mesh(mesh), self._settle(call, traced) as jitted:
                return jitted.lower(*args, **kwargs), self.options, self._placed_by

        return LoweredByRecipe(lowered, lower_chosen)

    def trace(self, /, *args, **kwargs) -> Any:
        """As `jax.jit(fun).trace`, of the program in its new order."""
        call = self._call(args, kwargs)
        if self._runs_as_given(call):
            return self._inner.trace(*args, **kwargs)
        if self._budget is not None:
            with self._settle(call) as jitted:
                return jitted.trace(*args, **kwargs)
        with self._probe(call) as traced:
            self._latest = setting = self._chosen.get(call.key) or self._list_settings(call, traced)[0]
            return self._find_instance(call, setting).trace(*args, **kwargs)

    def eval_shape(self, /, *args, **kwargs) -> Any:
        """As `jax.jit(fun).eval_shape`."""
        return self._inner.eval_shape(*args, **kwargs)

    def clear_cache(self) -> None:
        """As `jax.jit(fun).clear_cache`."""
        for jitted in (self._inner, *self._instances.values()):
            jitted.clear_cache()
        for kept in (self._chosen, self._tunings, self._instances):
            kept.clear()

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Binds the function to an instance, as a method of a class."""
        return self if instance is None else types.MethodType(self, instance)

    def __deepcopy__(self, memo: dict[int, Any]) -> Jitted:
        return self  # as a function does

    def __repr__(self) -> str:
        return f"jaxoff.jit({self._fun!r})"

    def _cache_size(self) -> int:
        return sum(jitted._cache_size() for jitted in (self._inner, *self._instances.values()))

    def _runs_as_given(self, call: Call) -> bool:
        """Whether a call is an inner `jax.jit`: within a trace, or with shapes that are not numbers."""
        if call.symbolic is not None and not call.is_traced:
            self._report([describe_symbolic(call.symbolic, has_budget=self._budget is not None)])
        return call.is_traced or call.symbolic is not None

    @property
    def options(self) -> dict[str, Any]:
        """The compiler options of the latest call."""
        return dict(self._latest.options) | self._given

    @property
    def recipe(self) -> str:
        """The recipe of the latest call: "concurrent", "early", "ordered", "stock" or "saved"."""
        return self._latest.recipe.value

    @property
    def _placed_by(self) -> PlacedBy | None:
        if self._budget is not None:
            return "budget"
        return "recipe" if self._latest.recipe is Recipe.SAVED else None

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """A call; within a budget, its state counts as on the device, wherever the last step left it."""
        return Call.of(args, kwargs, self._kwargs, self._statics, self._types)

    @contextlib.contextmanager
    def _settle(self, call: Call, traced: Traced | None = None) -> Iterator[Any]:
        """Yields the `jax.jit` function for a call, and chooses its setting the first time."""
        if call.key in self._chosen:
            self._latest = self._chosen[call.key]
            yield hosted.taking_host_arrays(self._find_instance(call, self._latest), call.moves_to_device)
            return
        with self._probe(call, traced) as traced:
            with self._choosing:  # of threads with the same first call one searches
                if call.key not in self._chosen:
                    is_free = self._budget is None
                    found = self._choose(call, traced) if is_free else self._fit(call, traced).setting
                    self._chosen[call.key] = found
            self._latest = self._chosen[call.key]
            yield hosted.taking_host_arrays(self._find_instance(call, self._latest), call.moves_to_device)

    @contextlib.contextmanager
    def _probe(self, call: Call, traced: Traced | None = None) -> Iterator[Traced]:
        """Traces the user's function for a call; the traces in the context take the program over."""
        if traced is None:
            try:
                call.trace(self._find_instance(call, None))
                raise AssertionError("a probe ends with ProbedError")
            except ProbedError as error:
                signature, given, shapes, findings = error.found
            ask = functools.partial(self._lower_given, call, signature, shapes)
            program = self._rewrite(call, given, ask)
            traced = Traced(signature, given, shapes, program, findings)
            unknown = profile_at_hand().findings if self._device is None else ()
            is_planned = program.scanned or program.flat or self._budget
            self._report((*traced.findings, *(unknown if is_planned else ())))
        self._probed.traced = traced if traced.is_reusable else None
        try:
            yield traced
        finally:
            self._probed.traced = None

    def _rewrite(self, call: Call, given: ClosedJaxpr, ask: Lower, **how: Any) -> Rewritten:
        """Rewrites a call's program; asks the compiler how loops are divided over several devices."""
        asks = call.devices > 1 and not compat.holds_tracers(given)
        place, device = call.place, self._share_link(call.devices)
        program, findings = rewrite_safely(given, device, place, ask if asks else None, **how)
        self._report(findings)
        return program

    def _lower_given(self, call: Call, signature: Any, shapes: Any, closed: ClosedJaxpr) -> Callable[[], Any]:
        """Lowers a program with a call's arguments and results as `jax.jit` does, to compile and be read."""
        held = Traced(signature, closed, shapes, Rewritten.as_given(closed))
        jitted = _jax_jit(self._overlapped(call.place, Setting(Recipe.STOCK, ()), held), **self._kwargs)
        return functools.partial(call.lower(jitted).compile, UNTUNED if call.is_on_gpu else None)

    def _share_link(self, devices: int) -> Device:
        return self.device.sharing(max(1, devices // jax.process_count()))

    def _choose(self, call: Call, traced: Traced) -> Setting:
        """The setting of the recipe that a program runs by; compiles the candidates if there are several."""
        first, *others = self._list_settings(call, traced)
        if not (others or traced.is_judged(call)):
            return complete(first, call, self._make_instance)
        settings, unmet = {s.recipe: s for s in (first, *others)}, dict[Setting, Sequence[Finding]]()

        def compile_recipe(recipe: Recipe) -> jax.stages.Compiled:
            settings[recipe] = complete(settings[recipe], call, self._make_instance)
            return self._compile(call, traced, unmet, settings[recipe])

        compares = call.is_on_gpu or self._tunes
        recipe, tried = choose_recipe([*settings], compile_recipe, call.devices, compares=compares)
        findings = unmet.get(settings[recipe], ())
        if traced.is_reusable and compares:
            ask = functools.partial(self._lower_given, call, traced.signature, traced.shapes)
            ways = Ways(self._fun, self._kwargs, ask, self._rewrite, self._make_instance, self._given)
            if found := find_form(call, traced, ways, recipe, tried, findings):
                self._instances[call.key, found.setting] = found.instance
                self._report(found.findings)
                return found.setting
        self._report([*find_fallback(recipe, tried), *findings])
        return settings[recipe]

    def _compile(self, call: Call, traced: Traced, unmet: _Unmet, setting: Setting) -> jax.stages.Compiled:
        """Compiles a setting's program; adds to `unmet` what it was to offload and does not."""
        compiled = self._lower(call, setting).compile()
        if call.is_on_gpu and setting.recipe is not Recipe.SAVED:  # whose choice is a finding itself
            unmet[setting] = tuple(find_vanished(traced.given, call.devices, compiled))
        return compiled

    def _fit(self, call: Call, traced: Traced) -> Within:
        """The step within the budget; its function takes the place of a choice."""
        self.plan = None
        assert self._budget is not None
        budget = self._budget.resolve(call.described)
        lower_given = functools.partial(self._lower_given, call, traced.signature, traced.shapes)
        rewrite = functools.partial(self._rewrite, call, ask=lower_given)
        compiler = Compiler(call, traced, budget.device_nbytes, self._given, rewrite, self._make_instance)

        def compile_written() -> Written:
            setting = self._choose(call, traced)
            nbytes = program_nbytes_if_compiled(self._lower(call, setting).compile)
            return Written(setting, nbytes, traced.follow(setting.recipe))

        facts = call.describe_arguments(self._fun, traced.signature[1], self._kwargs)
        device = self._share_link(call.devices)
        within = find_within(call, traced, device, budget, compiler, compile_written, lower_given, *facts)
        self._report(within.findings)
        self.plan = self._hold(call, within)
        return within

    def _hold(self, call: Call, within: Within) -> Plan:
        """Keeps the function of a step within the budget for the calls, and returns the step's plan."""
        written = within.label("").setting
        made = within.compiled.instance if within.compiled else self._find_instance(call, written)
        self._instances[call.key, within.setting] = made
        places = hosted.list_shardings(call.described[0], made)
        return dataclasses.replace(within.plan, step=self, in_shardings=places)

    def make_estimator(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Budget], Plan]:
        """Traces a call once, for its plans by an estimate of memory: budget -> plan, or a BudgetError."""
        call = self._call(args, kwargs)
        with self._probe(call) as traced:
            twin = traced.take_twin()
        device = self._share_link(call.devices)
        facts = call.describe_arguments(self._fun, traced.signature[1], self._kwargs)

        def estimate(budget: Budget) -> Plan:
            plan = estimate_within(twin, call, device, budget.resolve((args, kwargs)), *facts)
            return dataclasses.replace(plan, step=self.within(budget))

        return estimate

    def count_devices(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """The number of devices of a call."""
        return self._call(args, kwargs).devices

    def within(self, budget: Budget | None, device: Device | None = None) -> Jitted:
        """The same function, with the same keywords of `jax.jit`, within a budget."""
        return Jitted(self._fun, self._given, device or self._device, None, False, budget, self._kwargs)

    def _find_tuning(self, call: Call) -> Tuning | None:
        """The comparison of programs that a call belongs to; None once the setting is chosen."""
        if call.key not in self._tunings:
            with self._probe(call) as traced:
                (self._start_tuning if self._budget is None else self._start_tuning_within)(call, traced)
        return self._tunings[call.key]

    def _start_tuning(self, call: Call, traced: Traced) -> None:
        """Compiles the programs to compare, or chooses where the decision is known or there is only one."""
        settings, unmet, self.tuned = self._list_settings(call, traced), {}, {}
        if len(settings) > 1:
            refuse_several_processes()
            key = make_key(self._lower(call, settings[0]).as_text(), call.devices, call.device)
            settings = add_without_graphs(settings, self._given)
            self.tuned = read_decision(key)
            if not self.tuned:
                completed = (complete(setting, call, self._make_instance) for setting in settings)
                compile_setting = functools.partial(self._compile, call, traced, unmet)
                settings = list_within_limit([s for s in completed if s.is_complete], compile_setting)
            if not self.tuned and len(settings) > 1:
                self._tunings[call.key] = Tuning(settings, key, unmet)
                return
        setting = complete(find_fastest(settings, self.tuned) or settings[0], call, self._make_instance)
        call.trace(self._find_instance(call, setting))  # JAX keeps it for the call
        self._settle_on(call, setting, unmet, {})

    def _start_tuning_within(self, call: Call, traced: Traced) -> None:
        """Finds the steps within the budget to compare, or chooses where the decision is known."""
        refuse_several_processes()
        first = self._fit(call, traced)
        key = make_key(self._lower(call, first.setting).as_text(), call.devices, call.device, self._budget)
        self.tuned, found = read_decision(key), [first]
        if not self.tuned or find_fastest([first.setting], self.tuned) is None:
            found += first.list_others()
        plans = {within.setting: self._hold(call, within) for within in found}
        if self.tuned or len(found) == 1:
            self._settle_on(call, find_fastest([*plans], self.tuned) or first.setting, {}, plans)
        else:
            self._tunings[call.key] = Tuning([*plans], key, {}, plans)

    def _take_timed_step(self, call: Call, tuning: Tuning) -> Any:
        """Takes a step by the next program to be timed; after the last such step, chooses the fastest."""
        self._latest, self.plan = tuning.current, tuning.plans.get(tuning.current)
        jitted = hosted.taking_host_arrays(self._find_instance(call, tuning.current), call.moves_to_device)
        results = tuning.run(jitted, call.args, call.kwargs)
        self.tuned = tuning.milliseconds
        if tuning.is_done:
            fastest = tuning.decide()
            self._settle_on(call, fastest, tuning.unmet, tuning.plans)
            for setting in set(tuning.settings) - {fastest}:
                self._instances.pop((call.key, setting)).clear_cache()
        return results

    def _settle_on(self, call: Call, setting: Setting, unmet: _Unmet, plans: Mapping[Setting, Plan]) -> None:
        """Chooses the setting of a tuned call."""
        self._latest = self._chosen[call.key] = setting
        self._tunings[call.key], self.plan = None, plans.get(setting)
        if self._budget is None:  # within a budget the plan says what goes to the host
            self._report([*find_saved(setting, self.tuned), *unmet.get(setting, ())])

    def _report(self, findings: Iterable[Finding]) -> None:
        """Adds findings to `findings`, and warns of each the first time, on the line of the user's call."""
        for finding in findings:
            if finding not in self.findings:
                self.findings += (finding,)
                warn_of(finding)

    def _list_settings(self, call: Call, traced: Traced) -> list[Setting]:
        return list_for_call(call, traced, self._given, self._recipe, compares=call.is_on_gpu or self._tunes)

    def _find_instance(self, call: Call, setting: Setting | None) -> Any:
        """The `jax.jit` function for a call's types and a setting; without a setting, a probe."""
        key = call.key, setting
        if key not in self._instances:
            self._instances[key] = self._make_instance(call, setting)
        return self._instances[key]

    def _make_instance(self, call: Call, setting: Setting | None, made: Traced | None = None) -> Any:
        """A function for a setting, of the program `made` if given; it moves the state on the host."""
        options = (dict(setting.options) if setting else {}) | self._given or None
        overlapped = self._overlapped(call.place, setting, made)
        if made is None or not made.has_host_arguments:
            return _jax_jit(overlapped, compiler_options=options, **self._kwargs)
        program, positions = made.given.jaxpr, made.signature[1]
        keywords = hosted.move_shardings(self._kwargs, call.args, made.shapes, program)
        jitted = _jax_jit(overlapped, compiler_options=options, keep_unused=True, **keywords)
        return hosted.Hosted.of(jitted, program, positions)

    def _lower(self, call: Call, setting: Setting) -> jax.stages.Lowered:
        """Lowers the program of a setting for a call."""
        return call.lower(self._find_instance(call, setting))

    def _overlapped(
        self, place: Place, setting: Setting | None, held: Traced | None = None
    ) -> Callable[..., Any]:
        """The function that `jax.jit` traces: to the program `held`, else to that of the call under way."""

        @functools.wraps(self._fun)
        def overlapped(*args, **kwargs):
            if not trace_state.is_tracing():  # JAX looks for a nan, or jax.disable_jit
                return self._fun(*hosted.move_to_device(args), **hosted.move_to_device(kwargs))
            arguments = TracedArguments.of(args, kwargs)
            made: Traced | None = held or getattr(self._probed, "traced", None)
            if made is None or made.signature != arguments.signature:
                closed, shapes, findings = arguments.trace(self._fun, place)
                if setting is None:
                    raise ProbedError(arguments.signature, closed, shapes, findings)
                program, faults = rewrite_safely(closed, self._share_link(place.devices), place, None)
                self._report(faults)
                made = Traced(arguments.signature, closed, shapes, program)
            assert setting is not None, "a probe has no program to take over"
            refuse_what_fails(made.given, made.program, self._given)
            results = made.run(setting.recipe, arguments.tracers)
            return jax.tree.unflatten(jax.tree.structure(made.shapes), results)

        return overlapped
