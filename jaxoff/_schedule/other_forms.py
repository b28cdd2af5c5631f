"""Other forms of a program in jaxoff's order, for what its first form does badly.

In jaxoff's order the compiler may divide values otherwise than in the program as given: a decoder divided by
columns exchanged 65 GB a step, 36 GB as given, and 9.7 GB with its batch divided throughout. And it gathers
an operand for each product that a barrier parts from the others: with batch and features divided (Megatron's
mesh) 26.8 GB, as given and with shared operands 17.0. Outside of loops XLA leaves out copies to the host that
the link does not keep up with: of an ensemble of networks 0.5 of 8.1 GB moved, and 7.0 GB where the kernels
keep pace with the link (bench/LOG.md).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from jaxoff._jaxpr.faults import FAULTS
from jaxoff._report.finding import Finding
from jaxoff._report.progress import Progress
from jaxoff._schedule.call import Call
from jaxoff._schedule.divided_batch import pin_batch
from jaxoff._schedule.problem import OrderOptions
from jaxoff._schedule.recipes import REFERENCES, TOLERANCE, Candidate, Recipe, choose_beside
from jaxoff._schedule.rewrite import Rewritten
from jaxoff._schedule.settings import Setting, complete, list_settings
from jaxoff._schedule.sharding_marks import Lower
from jaxoff._schedule.traced import Traced
from jaxoff._schedule.vanished import Vanished, find_vanished


@dataclasses.dataclass(frozen=True)
class OtherForm:
    """Another form of a program: its setting, `jax.jit` function and findings."""

    setting: Setting
    instance: Any
    findings: Sequence[Finding]


@dataclasses.dataclass(frozen=True)
class FormMaker:
    """Makes a form of a program.

    Attributes:
      make: makes the program; None where nothing is to change.
      most_nbytes: the most device memory that the form may take, in bytes.
    """

    make: Callable[[], Traced | None]
    most_nbytes: float = math.inf


def exchanges_too_much(chosen: Recipe, candidates: Iterable[Candidate]) -> bool:
    """Whether a reference is `chosen`, and recipes in jaxoff's order exchange too many bytes."""
    by_recipe = {candidate.recipe: candidate for candidate in candidates}
    stock, ordered = by_recipe.get(Recipe.STOCK), (c for r, c in by_recipe.items() if r not in REFERENCES)
    return chosen in REFERENCES and any(c.exchanges_more_than(stock) for c in ordered)


@dataclasses.dataclass(frozen=True)
class Ways:
    """How a call's program is made in another form.

    Attributes:
      fun, keywords: the function, and its keywords of `jax.jit`.
      ask: lowers a program, to read the compiler's divisions.
      rewrite: (call, program, ask, options=) -> the rewritten program.
      make_instance: makes the `jax.jit` function of a program.
      options: the caller's compiler options.
    """

    fun: Callable[..., Any]
    keywords: dict[str, Any]
    ask: Lower
    rewrite: Callable[..., Rewritten]
    make_instance: Callable[[Call, Setting, Traced], Any]
    options: Mapping[str, Any]


def find_form(
    call: Call,
    traced: Traced,
    ways: Ways,
    chosen: Recipe,
    candidates: Sequence[Candidate],
    findings: Iterable[Finding],
) -> OtherForm | None:
    """Another form of a call's program, where the first form does something badly and the other does not.

    Args:
      call, traced: the call and its program.
      ways: how the form is made.
      chosen, candidates: the recipe chosen of the first form, and the candidates.
      findings: of the chosen recipe's program.
    """
    forms = list_forms(call, traced, ways, chosen, candidates, findings)
    return choose_form(call, forms, candidates, ways)


def list_forms(
    call: Call,
    traced: Traced,
    ways: Ways,
    chosen: Recipe,
    candidates: Sequence[Candidate],
    findings: Iterable[Finding],
) -> list[FormMaker]:
    """The makers of the forms that `find_form` tries; none where the first form does well.

    Where the first form exchanges too much, the batch is divided throughout, or else products share their
    operands. Where most of the copies were left out, kernels keep pace with the link.
    """

    def divide_batch() -> Traced | None:
        positions = traced.signature[1]
        _, donated, _ = call.describe_arguments(ways.fun, positions, ways.keywords)
        _, pinned = pin_batch(traced.given, donated, call.list_divisions(positions), ways.ask)
        if pinned is traced.given:
            return None
        return dataclasses.replace(traced, given=pinned, program=ways.rewrite(call, pinned, ways.ask))

    def order(**options: bool) -> Traced:
        program = ways.rewrite(call, traced.given, ways.ask, options=OrderOptions(**options))
        return dataclasses.replace(traced, program=program)

    def keep_pace() -> Traced | None:
        paced = order(keeps_pace=True)
        return None if str(paced.program.jaxpr) == str(traced.program.jaxpr) else paced

    if exchanges_too_much(chosen, candidates):
        return [FormMaker(divide_batch), FormMaker(functools.partial(order, shares_operands=True))]
    leaves_out = chosen in REFERENCES or any(isinstance(f, Vanished) and f.is_most for f in findings)
    if leaves_out and call.is_on_gpu and len(candidates) > 1:  # else the caller insists on the recipe
        taken = min(c.nbytes or math.inf for c in candidates if c.recipe is chosen)
        return [FormMaker(keep_pace, (1 - TOLERANCE) * taken)]
    return []


def choose_form(
    call: Call, forms: Iterable[FormMaker], candidates: Sequence[Candidate], ways: Ways
) -> OtherForm | None:
    """The first form of a program with a recipe within the limits of the candidates, by that recipe."""
    for form in forms:
        try:
            made = form.make()
            if made and (found := _choose(call, made, candidates, form.most_nbytes, ways)):
                return found
        except (ValueError, *FAULTS) as fault:  # ValueError: of JAX, over shardings that do not fit
            Progress().say(f"no other form of the program ({type(fault).__name__}: {fault})")
    return None


def _choose(
    call: Call, made: Traced, candidates: Sequence[Candidate], most_nbytes: float, ways: Ways
) -> OtherForm | None:
    listed = list_settings(made.program, ways.options, has_twin=False)
    settings = {s.recipe: s for s in listed if s.recipe is not Recipe.STOCK}
    found: dict[Recipe, OtherForm] = {}

    def make(call: Call, setting: Setting) -> Any:
        return ways.make_instance(call, setting, made)

    def compile_recipe(recipe: Recipe) -> jax.stages.Compiled:
        setting = complete(settings[recipe], call, make)
        instance = make(call, setting)
        compiled = call.lower(instance).compile()
        findings = find_vanished(made.given, call.devices, compiled) if call.is_on_gpu else ()
        found[recipe] = OtherForm(setting, instance, tuple(findings))
        return compiled

    recipe = choose_beside([*settings], compile_recipe, candidates, call.devices, most_nbytes)
    return None if recipe is None else found[recipe]
