"""The program with its batch divided throughout, where recipes that hide copies exchange too much without.

In jaxoff's order the compiler may divide values otherwise than in the program as given, and exchange
activations between devices: 65 GB a step of a decoder divided by columns, 36 GB as given, and 9.7 GB with the
batch divided throughout (bench/LOG.md).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from jaxoff._jaxpr.faults import FAULTS
from jaxoff._report.finding import Finding
from jaxoff._report.progress import Progress
from jaxoff._schedule.call import Call
from jaxoff._schedule.divided_batch import pin_batch
from jaxoff._schedule.recipes import Candidate, Recipe, choose_beside
from jaxoff._schedule.rewrite import Rewritten
from jaxoff._schedule.settings import Setting, complete, list_settings
from jaxoff._schedule.sharding_marks import Lower
from jaxoff._schedule.traced import Traced
from jaxoff._schedule.vanished import find_vanished


@dataclasses.dataclass(frozen=True)
class Divided:
    """A program with its batch divided throughout: its setting, `jax.jit` function and findings."""

    setting: Setting
    instance: Any
    findings: Sequence[Finding]


def is_passed_over(chosen: Recipe, candidates: Iterable[Candidate]) -> bool:
    """Whether recipes hide copies better than `chosen`, and exchange too many bytes between devices."""
    by_recipe = {candidate.recipe: candidate for candidate in candidates}
    stock, others = by_recipe.get(Recipe.STOCK), (c for r, c in by_recipe.items() if r.hides_copies)
    return not chosen.hides_copies and any(c.exchanges_more_than(stock) for c in others)


def divide_traced(
    call: Call,
    traced: Traced,
    fun: Callable[..., Any],
    keywords: dict[str, Any],
    ask: Lower,
    rewrite: Callable[..., Rewritten],
) -> Traced | None:
    """A call's program with its batch divided throughout; None where nothing is to change.

    Args:
      call, traced: the call and its program.
      fun, keywords: the function, and its keywords of `jax.jit`.
      ask: lowers a program, to read the compiler's divisions.
      rewrite: (call, program, ask) -> the rewritten program.
    """
    positions = traced.signature[1]
    _, donated, _ = call.describe_arguments(fun, positions, keywords)
    _, pinned = pin_batch(traced.given, donated, call.list_divisions(positions), ask)
    if pinned is traced.given:
        return None
    return dataclasses.replace(traced, given=pinned, program=rewrite(call, pinned, ask))


def choose_divided(
    call: Call,
    divide: Callable[[], Traced | None],
    candidates: Sequence[Candidate],
    make_instance: Callable[[Call, Setting, Traced], Any],
    options: Mapping[str, Any],
) -> Divided | None:
    """The program of `divide_traced` by the first recipe within the limits of the candidates; None without.

    Args:
      call: the call.
      divide: divides the batch of its program throughout; None where nothing is to change.
      candidates: of the program in the compiler's own divisions.
      make_instance: makes the `jax.jit` function of a program.
      options: the caller's compiler options.
    """
    try:
        made = divide()
        return None if made is None else _choose(call, made, candidates, make_instance, options)
    except (ValueError, *FAULTS) as fault:  # ValueError: of JAX, over shardings that do not fit
        Progress().say(f"the batch stays as the compiler divides it ({type(fault).__name__}: {fault})")
        return None


def _choose(
    call: Call,
    made: Traced,
    candidates: Sequence[Candidate],
    make_instance: Callable[[Call, Setting, Traced], Any],
    options: Mapping[str, Any],
) -> Divided | None:
    listed = list_settings(made.program, options, has_twin=False)
    settings = {s.recipe: s for s in listed if s.recipe is not Recipe.STOCK}
    found: dict[Recipe, Divided] = {}

    def make(call: Call, setting: Setting) -> Any:
        return make_instance(call, setting, made)

    def compile_recipe(recipe: Recipe) -> jax.stages.Compiled:
        setting = complete(settings[recipe], call, make)
        instance = make(call, setting)
        compiled = call.lower(instance).compile()
        findings = find_vanished(made.given, call.devices, compiled) if call.is_on_gpu else ()
        found[recipe] = Divided(setting, instance, tuple(findings))
        return compiled

    recipe = choose_beside([*settings], compile_recipe, candidates)
    return None if recipe is None else found[recipe]
