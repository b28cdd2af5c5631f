"""Settings: recipes with the compiler options for a program."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxoff._compiled import hlo
from jaxoff._compiled.copy_starts import make_profile
from jaxoff._jaxpr.faults import FAULTS
from jaxoff._runtime import flags
from jaxoff._runtime.disk import write_text
from jaxoff._runtime.flags import COMMAND_BUFFER, DISABLED_PASSES, PROFILE, PROFILE_CHECK, parse_xla_flags
from jaxoff._schedule.call import Call
from jaxoff._schedule.recipes import Recipe, list_recipes
from jaxoff._schedule.rewrite import Rewritten
from jaxoff._schedule.traced import Traced

type Options = tuple[tuple[str, Any], ...]

JAXLIB = importlib.metadata.version("jaxlib")


@dataclasses.dataclass(frozen=True)
class Setting:
    """A recipe with its compiler options for a program.

    Attributes:
      recipe: the recipe.
      options: the compiler options.
      program: within a budget, what the program is: "planned", or another that fits, e.g. "as written".
    """

    recipe: Recipe
    options: Options
    program: str = ""

    def __str__(self) -> str:
        """The recipe's name, with a note where no kernel is captured into CUDA graphs."""
        name = self.recipe.value + (" without graphs" if dict(self.options).get(COMMAND_BUFFER) == "" else "")
        return f"{self.program}, {name}" if self.program else name

    @property
    def is_complete(self) -> bool:
        """Whether no option is missing; see `complete`."""
        return self.recipe is not Recipe.EARLY or PROFILE in dict(self.options)

    def without_graphs(self) -> Setting:
        """The setting with no kernel captured into CUDA graphs."""
        options = tuple((dict(self.options) | {COMMAND_BUFFER: ""}).items())
        return dataclasses.replace(self, options=options)


def list_settings(
    program: Rewritten, given: Mapping[str, Any], *, has_twin: bool, budgeted: bool = False
) -> list[Setting]:
    """The settings for a program, the preferred one first.

    Args:
      program: the rewritten program.
      given: the caller's compiler options.
      has_twin: whether the program has a saved twin to run instead.
      budgeted: whether the program is one of a search within a budget.
    """
    xla_flags = parse_xla_flags(os.environ.get("XLA_FLAGS", ""))
    capture = given.get(COMMAND_BUFFER, xla_flags.get(COMMAND_BUFFER))
    recipes = list_recipes(
        loops=program.loops,
        scanned=program.scanned,
        flat=program.flat,
        has_twin=has_twin,
        graphs="FUSION" in flags.parse_captured_commands(capture),
        breaks_graphs=program.breaks_graphs,
        profiled=bool(given.get(PROFILE, xla_flags.get(PROFILE))),
    )
    disabled = xla_flags.get(DISABLED_PASSES, "")
    return [
        Setting(recipe, _choose_options(recipe, program, disabled, budgeted=budgeted)) for recipe in recipes
    ]


def list_for_call(
    call: Call, traced: Traced, given: Mapping[str, Any], recipe: Recipe | None, *, compares: bool
) -> list[Setting]:
    """The settings for a call, the preferred one first; a single one where nothing is to choose.

    Args:
      call, traced: the call and its program.
      given: the caller's compiler options.
      recipe: the caller's recipe, if any.
      compares: whether programs are compared, by memory or by time.
    """
    may_save = compares or recipe is Recipe.SAVED
    has_twin = may_save and traced.has_copies and traced.twin is not None
    settings = list_settings(traced.program, given, has_twin=has_twin)
    if recipe is not None:
        return [s for s in settings if s.recipe is recipe] or settings[:1]
    return settings if compares else list_for_cpus(settings, call.devices)


def list_for_cpus(settings: list[Setting], devices: int) -> list[Setting]:
    """The settings of a program on CPUs, where nothing is compared: the first that compiles.

    Over several devices the second is the program as given, for one that JAX or XLA cannot divide otherwise.
    """
    return [settings[0], *(s for s in settings[1:] if s.recipe is Recipe.STOCK and devices > 1)]


def add_without_graphs(settings: list[Setting], given: Mapping[str, Any]) -> list[Setting]:
    """Settings to be timed: also without CUDA graphs where a setting captures XLA's default commands.

    A copy outside of loops waits inside of a CUDA graph for the kernels before it.
    """
    offloading = [s for s in settings if s.recipe is not Recipe.SAVED]
    if COMMAND_BUFFER in given:
        return settings
    return settings + [s.without_graphs() for s in offloading if COMMAND_BUFFER not in dict(s.options)]


def complete(setting: Setting, call: Call, make_jitted: Callable[[Call, Setting], Any]) -> Setting:
    """The setting with all of its options; those of the recipe "early" come of a compiled program.

    On a GPU the program is compiled without them first. The setting is returned as it is where XLA refuses
    the program, where no loop of it copies, and where no file can be written.

    Args:
      setting: the setting.
      call: the call.
      make_jitted: makes the `jax.jit` function of a setting.
    """
    if setting.is_complete or not call.is_on_gpu:
        return setting
    try:
        text = call.lower(make_jitted(call, setting)).compile().as_text() or ""
        profile = make_profile(hlo.parse(text))
        file = write_text("starts", profile) if profile else None
    except (jax.errors.JaxRuntimeError, OSError, ValueError, *FAULTS):  # such as text of a later XLA
        file = None
    if file is None:
        return setting
    options = (PROFILE, str(file)), (PROFILE_CHECK, "PGLE_STRICTNESS_LEVEL_OFF")
    return dataclasses.replace(setting, options=setting.options + options)


def _choose_options(recipe: Recipe, program: Rewritten, disabled: str, *, budgeted: bool) -> Options:
    if recipe is Recipe.SAVED:
        return ()
    if recipe is Recipe.STOCK:
        outside = flags.COPIES_OUTSIDE_GRAPHS if program.scanned or program.streamed else ()
        return (*outside, flags.leave_out_row_copies(disabled)) if budgeted else outside
    return flags.choose_options(
        concurrent=recipe is Recipe.CONCURRENT,
        early=recipe is Recipe.EARLY,
        loops=program.loops,
        scanned=program.scanned,
        flat=program.flat,
        streamed=program.streamed,
        budgeted=budgeted,
        jaxlib=JAXLIB,
        disabled=disabled,
    )
