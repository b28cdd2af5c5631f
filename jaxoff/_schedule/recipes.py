"""Recipes: the ways to compile a program that offloads residuals, and the choice between them.

No recipe is best for every program (bench/LOG.md, "2026-11-25: recipes"). CONCURRENT hides copies best, but
XLA then shares memory between whole values only: a program with one very large value outside of its loops
takes more memory than `jax.jit`. So the choice is by compilation: the first recipe whose program takes no
more device memory than the program as given.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterable, Sequence

import jax

from jaxoff._report.finding import Finding, FindingCode
from jaxoff._report.near_miss import near_miss
from jaxoff._report.tables import format_nbytes
from jaxoff._runtime.program_memory import program_nbytes

# A recipe may take this part more device memory than the program as given: buffer assignment varies.
TOLERANCE = 0.01


class Recipe(enum.StrEnum):
    """A way to compile a program that offloads residuals.

    CONCURRENT: jaxoff's order; the copies are in CUDA graphs, whose edges follow the use of data.
    ORDERED: jaxoff's order, scheduled by XLA's default mode; the copies are outside of CUDA graphs.
    STOCK: the program as given; the copies are outside of CUDA graphs.
    """

    CONCURRENT = "concurrent"
    ORDERED = "ordered"
    STOCK = "stock"


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A recipe's device memory.

    Attributes:
      recipe: the recipe.
      nbytes: device memory of the compiled program in bytes; None if XLA refused to compile it.
      reason: the error of a refusal, or "".
    """

    recipe: Recipe
    nbytes: int | None
    reason: str = ""


def checked_recipe(name: str | None) -> Recipe | None:
    """The recipe of a name.

    Raises:
      ValueError: for an unknown name.
    """
    try:
        return None if name is None else Recipe(name)
    except ValueError:
        choices = [recipe.value for recipe in Recipe]
        raise ValueError(
            f"recipe is one of {', '.join(map(repr, choices))}, or None for a choice; got {name!r}."
            f"{near_miss(name, choices)}"
        ) from None


def list_recipes(*, loops: int, scanned: int, flat: bool, graphs: bool = True) -> tuple[Recipe, ...]:
    """The recipes for a program, fastest first; the last one is the program as given.

    Args:
      graphs: whether kernels are captured into CUDA graphs; without graphs nothing is concurrent in them.
      loops: the number of loops written out.
      scanned: the number of loops with offloaded residuals.
      flat: whether residuals are offloaded outside of loops.
    """
    if scanned and graphs:
        return (Recipe.CONCURRENT, Recipe.ORDERED, Recipe.STOCK)
    return (Recipe.ORDERED, Recipe.STOCK) if loops or scanned or flat else (Recipe.ORDERED,)


def choose_recipe(
    recipes: Sequence[Recipe], compile_recipe: Callable[[Recipe], jax.stages.Compiled]
) -> tuple[Recipe, list[Candidate]]:
    """The first recipe that takes no more memory than the last one, and the candidates compiled for that."""
    stock = _try_candidate(recipes[-1], compile_recipe)
    tried: list[Candidate] = []
    for recipe in recipes[:-1]:
        candidate = _try_candidate(recipe, compile_recipe)
        tried.append(candidate)
        if candidate.nbytes is None:
            continue
        if stock.nbytes is None or candidate.nbytes <= (1 + TOLERANCE) * stock.nbytes:
            return recipe, [*tried, stock]
    return recipes[-1], [*tried, stock]


def _try_candidate(recipe: Recipe, compile_recipe: Callable[[Recipe], jax.stages.Compiled]) -> Candidate:
    try:
        return Candidate(recipe, program_nbytes(compile_recipe(recipe)))
    except jax.errors.JaxRuntimeError as error:  # out of memory at compilation, or a program that XLA refuses
        return Candidate(recipe, None, str(error).splitlines()[0])


def find_fallback(chosen: Recipe, candidates: Iterable[Candidate]) -> Finding | None:
    """The finding for a program that does not run by its first recipe."""
    by_recipe = {candidate.recipe: candidate for candidate in candidates}
    first, own = next(iter(by_recipe.values())), by_recipe[chosen]
    if first.recipe is chosen:
        return None
    took = f"took {format_nbytes(first.nbytes)}" if first.nbytes is not None else f"failed: {first.reason}"
    now = "" if own.nbytes is None else f" of {format_nbytes(own.nbytes)}"
    return Finding(
        FindingCode.RECIPE_REPLACED,
        f"the program runs by the recipe {chosen.value!r}{now}: by {first.recipe.value!r} it {took}. "
        f"Its copies may be hidden less well; recipe={first.recipe.value!r} in jaxoff.jit takes the memory.",
    )
