"""`jax.jit` for programs that move residuals: an order and compiler options that let the copies overlap."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import os
import threading
import types
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any

import jax
from jax.core import Tracer

from jaxoff._device.profile import H200, Device, checked_device
from jaxoff._jaxpr import compat, meshes
from jaxoff._jaxpr.saved_twin import build_saved_twin
from jaxoff._policy.marks import is_recording
from jaxoff._report.finding import Finding
from jaxoff._runtime import flags
from jaxoff._runtime.flags import COMMAND_BUFFER, DISABLED_PASSES, parse_xla_flags
from jaxoff._runtime.pinned_pool import refuse_small_pool
from jaxoff._runtime.versions import refuse_wrong_jaxlib
from jaxoff._schedule.call import Call, find_statics
from jaxoff._schedule.host_memory import peak_host_nbytes
from jaxoff._schedule.recipes import Recipe, checked_recipe, choose_recipe, find_fallback, list_recipes
from jaxoff._schedule.requests import Watch, find_lost_order, find_vanished
from jaxoff._schedule.rewrite import Rewritten, rewrite
from jaxoff._schedule.sharding_marks import find_loop_shardings

type Options = tuple[tuple[str, Any], ...]

# `jax.jit = jaxoff.jit` must not make this module call itself.
_jax_jit = jax.jit
# Beginnings of paths of jaxoff, of JAX and of context managers: a warning names the caller of these.
_OWN_FILES = (
    *(os.path.dirname(package) for package in (os.path.dirname(__file__), jax.__file__)),
    contextlib.__file__.removesuffix(".py"),
)
_JAXLIB = importlib.metadata.version("jaxlib")


def jit(
    fun: Callable[..., Any] | None = None,
    /,
    *,
    compiler_options: Mapping[str, Any] | None = None,
    device: Device | None = None,
    recipe: str | None = None,
    **kwargs: Any,
) -> Any:
    """`jax.jit`, with copies between device and pinned host memory beside the compute.

    Where the program moves residuals, and in loops of `jaxoff.scan` that keep all of theirs on the device,
    barriers put its large values into one order. In that order memory is reused, and a copy starts as late as
    it can and still be in time. The program computes the same values; un-named values may round elsewhere.
    XLA's own rematerialization is off in a program in order. Differentiate inside, as in
    `jaxoff.jit(jax.value_and_grad(loss))`: outside of the differentiation there is no backward pass to see.

    A program that offloads residuals is compiled by one of four recipes:

    - "concurrent" (loops only): jaxoff's order in CUDA graphs with edges by the use of data, the copies and
      the collectives among them;
    - "ordered": jaxoff's order under XLA's own scheduler, the copies of loops outside of CUDA graphs;
    - "stock": the program as given, the copies of loops outside of CUDA graphs;
    - "saved": the program without its copies, its residuals on the device.

    On a GPU, the first call with new types of arguments compiles "stock" and "saved" as well. It runs the
    first recipe that takes no more device memory than either (1% tolerance) and exchanges no more bytes
    between devices than "stock", or "saved" if the copies win no memory. Unless that is the first recipe, a
    warning and `findings` of the result say so, with the bytes. Compilation takes three to four times as
    long. JAX's persistent compilation cache keeps the programs, but programs whose loops the compiler divides
    over devices only under `jax_remove_custom_partitioning_ptr_from_cache_key`.

    Args:
      fun: as for `jax.jit`; without it, a decorator.
      compiler_options: as for `jax.jit`; they win over the ones chosen here. What is known to harm is warned
        of.
      device: rates of the accelerator and its link, to plan the copies with; None is an H200. A program on
        several devices is planned with the link that they share (`Device.sharing`).
      recipe: the recipe to use instead of a choice; compiles one program.
      **kwargs: as for `jax.jit`: static and donated arguments, shardings.

    Returns:
      A function like that of `jax.jit`, with `lower`, `trace` and `eval_shape`; `recipe`, `options` and
      `findings` describe the latest program. Called inside another transformation it is an inner `jax.jit`.

    Warns:
      UserWarning: of each finding, once: a policy's rule that matches no name, a value that a policy offloads
        and that stays on the device, a call with copies inside another transformation, updates of flax.nnx
        objects that are lost (`jaxoff.nnx_jit` keeps them), another recipe than the first.

    Raises:
      TypeError: for a device that is no `jaxoff.Device`.
      ValueError: for an unknown recipe.
      RuntimeError: when the program is traced, at the first call or by `lower`, if it moves residuals on a
        GPU and jaxlib is older than 0.11.1, which computes wrong gradients then; or if it needs more pinned
        host memory at once than XLA's pool has, which XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB sets.

    Example:
      >>> import jax, jax.numpy as jnp, jaxoff
      >>> def layer(x, w):
      ...     return jnp.tanh(jaxoff.name(x, "x_in") @ w), None
      >>> def loss(w, x):
      ...     return jaxoff.scan(layer, x, w, policy=jaxoff.policy(offload=["x_in"]))[0].sum()
      >>> step = jaxoff.jit(jax.value_and_grad(loss))
      >>> value, grads = step(jnp.ones((3, 8, 8)), jnp.ones((2, 8)))
      >>> grads.shape
      (3, 8, 8)
    """
    if fun is None:
        return functools.partial(
            jit, compiler_options=compiler_options, device=device, recipe=recipe, **kwargs
        )
    options, rates = dict(compiler_options or {}), checked_device(H200 if device is None else device)
    return Jitted(fun, options, rates, checked_recipe(recipe), kwargs)


@dataclasses.dataclass(frozen=True)
class _Traced:
    """A traced and rewritten program, for the later attempts of one call.

    Attributes:
      signature: the tree of the arguments, and by position the types of the traced arguments.
      given: the user's program.
      shapes: its results.
      program: the rewritten program.
      findings: its unmet requests.
    """

    signature: tuple[Any, ...]
    given: compat.ClosedJaxpr
    shapes: Any
    program: Rewritten
    findings: tuple[Finding, ...] = ()

    @functools.cached_property
    def twin(self) -> compat.ClosedJaxpr | None:
        """The saved twin of the user's program, if there is one."""
        return build_saved_twin(self.given)

    def follow(self, recipe: Recipe) -> compat.ClosedJaxpr:
        """The program by a recipe."""
        if recipe is Recipe.SAVED and self.twin is not None:
            return self.twin
        return self.given if recipe is Recipe.STOCK else self.program.jaxpr

    @property
    def is_reusable(self) -> bool:
        """Whether the program holds no tracer of a trace that may have ended."""
        return not compat.holds_tracers(self.given)


@dataclasses.dataclass(frozen=True)
class _Setting:
    """A recipe with the compiler options that it needs for a program."""

    recipe: Recipe
    options: Options


class _ProbedError(Exception):
    """Ends a trace whose only purpose was the program, with `(signature, given, shapes, findings)`."""

    def __init__(self, *found: Any):
        self.found = found


class Jitted:
    """What `jaxoff.jit` returns; see there.

    JAX takes compiler options before a trace, and the program decides them. So the first call with new types
    of arguments traces the user's function in a probe that ends with `_ProbedError`; the settings that are
    tried, and the setting that is chosen, take over the traced program. The user's function runs once.

    Attributes:
      findings: the findings of the calls so far, each once.
    """

    def __init__(
        self,
        fun,
        compiler_options: dict[str, Any],
        device: Device,
        recipe: Recipe | None,
        kwargs: dict[str, Any],
    ):
        self._fun, self._given, self._device, self._kwargs = fun, compiler_options, device, kwargs
        self._recipe = recipe
        self._inner: Any = _jax_jit(fun, **kwargs)
        self._statics = find_statics(fun, kwargs)
        self._chosen: dict[Hashable, _Setting] = {}  # types of a call's arguments -> setting
        self._instances: dict[Hashable, Any] = {}  # types and setting -> the `jax.jit` function
        self._latest = _Setting(Recipe.ORDERED, ())
        self._probed = threading.local()  # `traced`: the program of the call under way
        self.findings: tuple[Finding, ...] = ()
        functools.update_wrapper(self, fun, updated=())  # not the attributes of a Jitted inside of it

    def __call__(self, *args, **kwargs):
        call = Call.of(args, kwargs, self._kwargs, self._statics)
        if call.is_traced:
            if not is_recording():
                traced = self._inner.trace(*args, **kwargs)  # of JAX's cache, which the call reads, too
                self._report(find_lost_order(traced.jaxpr.jaxpr, getattr(self, "__name__", "the function")))
            return self._inner(*args, **kwargs)
        with self._settle(call) as jitted:
            return jitted(*args, **kwargs)

    def lower(self, *args, **kwargs) -> Any:
        """As `jax.jit(fun).lower`; `compile` uses the recipe and the options chosen."""
        call = Call.of(args, kwargs, self._kwargs, self._statics)
        if call.key in self._chosen:
            return self._find_instance(call, self._chosen[call.key]).lower(*args, **kwargs)
        with self._probe(call) as traced:
            settings = self._list_settings(call, traced)
            self._latest = settings[0]
            lowered = self._find_instance(call, settings[0]).lower(*args, **kwargs)
        if len(settings) == 1:
            return lowered
        mesh = meshes.current_mesh()

        def lower_chosen() -> jax.stages.Lowered:
            with meshes.under_mesh(mesh), self._settle(call, traced) as jitted:
                return jitted.lower(*args, **kwargs)

        return LoweredByRecipe(lowered, lower_chosen)

    def trace(self, *args, **kwargs) -> Any:
        """As `jax.jit(fun).trace`, of the program in its new order."""
        call = Call.of(args, kwargs, self._kwargs, self._statics)
        with self._probe(call) as traced:
            setting = self._chosen.get(call.key) or self._list_settings(call, traced)[0]
            self._latest = setting
            return self._find_instance(call, setting).trace(*args, **kwargs)

    def eval_shape(self, *args, **kwargs) -> Any:
        """As `jax.jit(fun).eval_shape`."""
        return self._inner.eval_shape(*args, **kwargs)

    def clear_cache(self) -> None:
        """As `jax.jit(fun).clear_cache`."""
        for jitted in (self._inner, *self._instances.values()):
            jitted.clear_cache()
        self._chosen.clear()
        self._instances.clear()

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Binds the function to an instance, as a method of a class."""
        return self if instance is None else types.MethodType(self, instance)

    def _cache_size(self) -> int:
        return sum(jitted._cache_size() for jitted in (self._inner, *self._instances.values()))

    @property
    def options(self) -> dict[str, Any]:
        """The compiler options of the latest call."""
        return dict(self._latest.options) | self._given

    @property
    def recipe(self) -> str:
        """The recipe of the latest call: "concurrent", "ordered", "stock" or "saved"."""
        return self._latest.recipe.value

    @contextlib.contextmanager
    def _settle(self, call: Call, traced: _Traced | None = None) -> Iterator[Any]:
        """Yields the `jax.jit` function for a call, and chooses its setting the first time."""
        if call.key in self._chosen:
            self._latest = self._chosen[call.key]
            yield self._find_instance(call, self._latest)
            return
        with self._probe(call, traced) as traced:
            self._latest = self._chosen[call.key] = self._choose(call, traced)
            yield self._find_instance(call, self._latest)

    @contextlib.contextmanager
    def _probe(self, call: Call, traced: _Traced | None = None) -> Iterator[_Traced]:
        """Traces the user's function for a call; the traces in the context take the program over."""
        if traced is None:
            try:
                self._find_instance(call, None).trace(*call.args, **call.kwargs)
                raise AssertionError("a probe ends with _ProbedError")
            except _ProbedError as error:
                signature, given, shapes, findings = error.found
            program = self._rewrite(call, signature, given, shapes)
            traced = _Traced(signature, given, shapes, program, findings)
            self._report(traced.findings)
        self._probed.traced = traced if traced.is_reusable else None
        try:
            yield traced
        finally:
            self._probed.traced = None

    def _rewrite(self, call: Call, signature: Any, given: compat.ClosedJaxpr, shapes: Any) -> Rewritten:
        """Rewrites a call's program; asks the compiler how it divides the loops, where it may."""
        device, one_device = self._share_link(call.devices), call.devices == 1
        rewrite_for = functools.partial(rewrite, given, device, one_device=one_device)
        if one_device or compat.holds_tracers(given):
            return rewrite_for()

        def compile_marked(marked: compat.ClosedJaxpr) -> None:
            program = Rewritten(marked, loops=0, scanned=0, flat=False, spare_nbytes=0)
            self._probed.traced = _Traced(signature, marked, shapes, program)
            stock = self._overlapped(call.devices, _Setting(Recipe.STOCK, ()))
            _jax_jit(stock, **self._kwargs).lower(*call.args, **call.kwargs).compile()

        return rewrite_for(shardings=find_loop_shardings(given, compile_marked))

    def _share_link(self, devices: int) -> Device:
        """The rates of one of several devices."""
        return self._device.sharing(max(1, devices // jax.process_count()))

    def _choose(self, call: Call, traced: _Traced) -> _Setting:
        """The setting of the recipe that a program runs by; compiles the candidates if there are several."""
        settings = self._list_settings(call, traced)
        if len(settings) == 1:
            return settings[0]
        vanished: dict[Recipe, tuple[Finding, ...]] = {}

        def compile_setting(recipe: Recipe) -> jax.stages.Compiled:
            setting = next(s for s in settings if s.recipe is recipe)
            compiled = self._find_instance(call, setting).lower(*call.args, **call.kwargs).compile()
            vanished[recipe] = tuple(find_vanished(traced.given, call.devices, compiled))
            return compiled

        recipes = [s.recipe for s in settings]
        recipe, candidates = choose_recipe(recipes, compile_setting, several_devices=call.devices > 1)
        finding = find_fallback(recipe, candidates)
        self._report([finding] if finding is not None else [])
        if recipe is not Recipe.SAVED:  # of which the fallback says it
            self._report(vanished.get(recipe, ()))
        return next(s for s in settings if s.recipe is recipe)

    def _report(self, findings: Iterable[Finding]) -> None:
        """Adds findings to `findings`, and warns of each the first time, on the line of the user's call."""
        for finding in findings:
            if finding not in self.findings:
                self.findings += (finding,)
                warnings.warn(str(finding), skip_file_prefixes=_OWN_FILES)

    def _list_settings(self, call: Call, traced: _Traced) -> list[_Setting]:
        """The settings for a program, the preferred one first; a single one where nothing is to choose."""
        program = traced.program
        xla_flags = parse_xla_flags(os.environ.get("XLA_FLAGS", ""))
        capture = self._given.get(COMMAND_BUFFER, xla_flags.get(COMMAND_BUFFER))
        recipes = list_recipes(
            loops=program.loops,
            scanned=program.scanned,
            flat=program.flat,
            has_twin=(call.is_on_gpu or self._recipe is Recipe.SAVED) and traced.twin is not None,
            graphs="FUSION" in flags.parse_captured_commands(capture),
        )
        if self._recipe is not None:
            recipes = (self._recipe,) if self._recipe in recipes else recipes[:1]
        elif not call.is_on_gpu:
            recipes = recipes[:1]
        disabled = xla_flags.get(DISABLED_PASSES, "")
        return [_Setting(recipe, self._choose_options(recipe, program, disabled)) for recipe in recipes]

    @staticmethod
    def _choose_options(recipe: Recipe, program: Rewritten, disabled: str) -> Options:
        if recipe is Recipe.SAVED:
            return ()
        if recipe is Recipe.STOCK:
            return flags.COPIES_OUTSIDE_GRAPHS if program.scanned else ()
        return flags.choose_options(
            concurrent=recipe is Recipe.CONCURRENT,
            loops=program.loops,
            scanned=program.scanned,
            flat=program.flat,
            jaxlib=_JAXLIB,
            disabled=disabled,
        )

    def _find_instance(self, call: Call, setting: _Setting | None) -> Any:
        """The `jax.jit` function for a call's types and a setting; without a setting, a probe."""
        key = call.key, setting
        if key not in self._instances:
            options = (dict(setting.options) if setting else {}) | self._given
            self._instances[key] = _jax_jit(
                self._overlapped(call.devices, setting), compiler_options=options or None, **self._kwargs
            )
        return self._instances[key]

    def _overlapped(self, devices: int, setting: _Setting | None) -> Callable[..., Any]:
        @functools.wraps(self._fun)
        def overlapped(*args, **kwargs):
            leaves, tree = jax.tree.flatten((args, kwargs))
            traced = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tracer)]
            watch = Watch()

            def of_traced(*values):
                filled = list(leaves)  # static arguments stay as they are
                for i, value in zip(traced, values, strict=True):
                    filled[i] = value
                positional, named = jax.tree.unflatten(tree, filled)
                return watch.call(self._fun, positional, named)

            signature = tree, tuple(traced), tuple(jax.typeof(leaves[i]) for i in traced)
            made: _Traced | None = getattr(self._probed, "traced", None)
            if made is None or made.signature != signature:
                with watch:
                    closed, shapes = jax.make_jaxpr(of_traced, return_shape=True)(
                        *(leaves[i] for i in traced)
                    )
                if setting is None:
                    raise _ProbedError(signature, closed, shapes, watch.find(closed))
                program = rewrite(closed, self._share_link(devices), one_device=devices == 1)
                made = _Traced(signature, closed, shapes, program)
            if setting is None:
                raise AssertionError("a probe has no program to take over")
            self._check(made.given, made.program)
            results = compat.jaxpr_as_fun(made.follow(setting.recipe))(*(leaves[i] for i in traced))
            return jax.tree.unflatten(jax.tree.structure(made.shapes), results)

        return overlapped

    def _check(self, given: compat.ClosedJaxpr, program: Rewritten) -> None:
        platform = jax.default_backend()
        # A process has one pool for its devices; whole arrays are spread over those of all processes.
        nbytes = (
            (peak_host_nbytes(given) + program.spare_nbytes) * jax.local_device_count() // jax.device_count()
        )
        refuse_small_pool(nbytes, os.environ, platform)
        if not (program.scanned or program.flat):
            return
        refuse_wrong_jaxlib(_JAXLIB, platform)
        level = jax.config.jax_optimization_level
        for text in flags.find_harmful_options(self._given, scanned=bool(program.scanned), level=level):
            warnings.warn(text, stacklevel=2)


class LoweredByRecipe:
    """A `jax.stages.Lowered` whose `compile` chooses the recipe; everything else is the first recipe's."""

    def __init__(self, lowered: jax.stages.Lowered, lower_chosen: Callable[[], jax.stages.Lowered]):
        self._lowered, self._lower_chosen = lowered, lower_chosen

    def compile(self, compiler_options: Mapping[str, Any] | None = None, **kwargs) -> jax.stages.Compiled:
        """As `jax.stages.Lowered.compile`, of the recipe that takes no more memory than `jax.jit`."""
        options = dict(compiler_options) if compiler_options else None
        return self._lower_chosen().compile(options, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lowered, name)
