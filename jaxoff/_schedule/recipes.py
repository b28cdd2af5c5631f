"""Recipes: the ways to compile a program that offloads residuals, and the choice between them.

No recipe is best for every program (bench/LOG.md, "2026-11-25, night: recipes, chosen by compiled memory").
CONCURRENT hides copies best, but XLA then shares memory between whole values only: a program with one very
large value outside of its loops takes more memory than under `jax.jit`, and where the copies take longer than
the compute EARLY hides more of them. So the choice is by compilation: the first recipe whose program takes no
more device memory than the program as given, and no more than its saved twin; on one device, of CONCURRENT
and EARLY the one that takes less, which in seven programs was the faster one, too, or slower by less than 1%.
Over several devices CONCURRENT hid 1 to 3% more of a step beside collectives.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from jaxoff._compiled import hlo
from jaxoff._compiled.exchange import copied_nbytes, exchanged_nbytes
from jaxoff._report.finding import Finding, FindingCode
from jaxoff._report.near_miss import near_miss
from jaxoff._report.tables import format_nbytes
from jaxoff._runtime.flags import PlacedBy, remember_options, remember_placement
from jaxoff._runtime.program_memory import describe_refusal, program_nbytes

# A recipe may take this part more device memory than the program as given: buffer assignment varies.
TOLERANCE = 0.01
# A recipe may exchange more bytes than the program as given, up to this part of the bytes that the program
# copies to and from the host. Links between devices are no slower than the host's, and the program as given
# does not hide most of its copies.
_EXCHANGED_FOR_COPIES = 0.1


class Recipe(enum.StrEnum):
    """A way to compile a program that offloads residuals.

    CONCURRENT: jaxoff's order; the copies are in CUDA graphs, whose edges follow the use of data.
    EARLY: jaxoff's order, scheduled by XLA's default mode, which starts each copy of a loop as soon as the
      order allows; the copies are outside of CUDA graphs.
    ORDERED: as EARLY, but XLA starts a copy 5 ms before its end, by its own estimate of time, or later: less
      memory.
    STOCK: the program as given; the copies are outside of CUDA graphs.
    SAVED: the program without its copies to and from host memory; residuals stay on the device.
    """

    CONCURRENT = "concurrent"
    EARLY = "early"
    ORDERED = "ordered"
    STOCK = "stock"
    SAVED = "saved"

    @property
    def hides_copies(self) -> bool:
        """Whether the copies of loops start as early as the order allows."""
        return self in (Recipe.CONCURRENT, Recipe.EARLY)


# The program as given and its saved twin, which limit the memory and the exchange of the other recipes.
REFERENCES = (Recipe.STOCK, Recipe.SAVED)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A recipe's device memory.

    Attributes:
      recipe: the recipe.
      nbytes: device memory of the compiled program in bytes; None if XLA refused to compile it.
      reason: the error of a refusal, or "".
      exchanged: bytes that the program's collectives exchange on a device.
      copied: bytes that the program copies to and from the host on a device; counted over several devices.
    """

    recipe: Recipe
    nbytes: int | None
    reason: str = ""
    exchanged: int = 0
    copied: int = 0

    def exchanges_more_than(self, other: Candidate | None) -> bool:
        """Whether the program exchanges too many bytes beyond the program as given, if that compiled."""
        if other is None or other.nbytes is None:
            return False
        allowed = max(TOLERANCE * other.exchanged, _EXCHANGED_FOR_COPIES * other.copied)
        return self.exchanged > other.exchanged + allowed

    def takes_at_most(self, nbytes: float) -> bool:
        """Whether the program compiled and takes no more device memory than a number of bytes."""
        return self.nbytes is not None and self.nbytes <= nbytes


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


def list_recipes(
    *,
    loops: int,
    scanned: int,
    flat: bool,
    has_twin: bool,
    graphs: bool = True,
    profiled: bool = False,
    breaks_graphs: bool = False,
) -> tuple[Recipe, ...]:
    """The recipes for a program, the preferred one first.

    Args:
      loops: the number of loops written out.
      scanned: the number of loops with offloaded residuals.
      flat: whether the equations outside of loops are ordered.
      has_twin: whether the program has copies, and a saved twin.
      graphs: whether kernels are captured into CUDA graphs; without graphs nothing is concurrent in them.
      profiled: whether the caller gives XLA a profile.
      breaks_graphs: whether a loop with offloaded residuals holds what no CUDA graph does: then XLA's
        schedule decides where copies start, under CONCURRENT, too.
    """
    if not (loops or scanned or flat):  # copies in calls that stay whole, or none
        return (Recipe.ORDERED, Recipe.STOCK, Recipe.SAVED) if has_twin else (Recipe.ORDERED,)
    found = [Recipe.CONCURRENT] if scanned and graphs else []
    found += [Recipe.EARLY] if scanned and not profiled else []
    found = found[::-1] if breaks_graphs else found
    return (
        *found,
        Recipe.ORDERED,
        Recipe.STOCK,
        *((Recipe.SAVED,) if has_twin and (scanned or flat) else ()),
    )


def choose_recipe(
    recipes: Sequence[Recipe],
    compile_recipe: Callable[[Recipe], jax.stages.Compiled],
    devices: int,
    *,
    compares: bool = True,
) -> tuple[Recipe, list[Candidate]]:
    """Chooses the recipe of a program by the memory of its compiled candidates.

    The limit is the memory of the program as given or of its saved twin, the smaller one. The first recipe
    within the limit wins, on one device the smaller of two that hide copies, or the saved twin if the recipe
    does not take less memory than the twin. A program in another order may need more communication, where
    the compiler divides values over devices: a recipe that exchanges more bytes than the program as given,
    by more than the copies are worth, does not win.

    Args:
      recipes: the recipes of `list_recipes`.
      compile_recipe: recipe -> compiled program.
      devices: the number of devices that the program runs on; on one, nothing is exchanged.
      compares: whether memory decides; otherwise the first recipe that compiles is chosen.

    Returns:
      The recipe, the first one if nothing compiles; and the candidates compiled, in the order of `recipes`.
    """
    references = [r for r in recipes if r in REFERENCES and compares]
    several_devices = devices > 1
    candidates = {r: _try_candidate(r, compile_recipe, several_devices) for r in references}
    chosen = _choose_within(recipes, compile_recipe, candidates, several_devices=several_devices)
    tried = [candidates[recipe] for recipe in recipes if recipe in candidates]
    return (chosen or tried[0]).recipe, tried


def choose_beside(
    recipes: Iterable[Recipe],
    compile_recipe: Callable[[Recipe], jax.stages.Compiled],
    candidates: Iterable[Candidate],
    devices: int,
    most_nbytes: float = math.inf,
) -> Recipe | None:
    """Chooses a recipe of another form of a program, by the limits of the program's own candidates.

    Args:
      recipes, compile_recipe, devices: as for `choose_recipe`, of the other form.
      candidates: of the program.
      most_nbytes: the most device memory that the form may take, in bytes.

    Returns:
      The recipe; None if all take or exchange too much.
    """
    known = {c.recipe: c for c in candidates if c.recipe in REFERENCES}
    limits = {"several_devices": devices > 1, "most_nbytes": most_nbytes}
    chosen = _choose_within(recipes, compile_recipe, known, **limits)
    return chosen.recipe if chosen and chosen.recipe not in REFERENCES else None


def _choose_within(
    recipes: Iterable[Recipe],
    compile_recipe: Callable[[Recipe], jax.stages.Compiled],
    candidates: dict[Recipe, Candidate],
    *,
    several_devices: bool,
    most_nbytes: float = math.inf,
) -> Candidate | None:
    """The first recipe within the limits of the candidates known so far; adds those compiled to these.

    On one device the one of less memory wins of the recipes that hide copies, where there are limits.
    """
    known = [c.nbytes for c in candidates.values() if c.nbytes is not None]
    limit = min((1 + TOLERANCE) * min(known, default=math.inf), most_nbytes)
    stock, twin = (candidates.get(recipe) for recipe in REFERENCES)
    fitting: list[Candidate] = []
    for recipe in recipes:
        if fitting and (several_devices or not (recipe.hides_copies and known)):
            break
        if recipe not in candidates:
            candidates[recipe] = _try_candidate(recipe, compile_recipe, several_devices)
        tried = candidates[recipe]
        exchanges_more = recipe is not Recipe.SAVED and tried.exchanges_more_than(stock)
        if tried.takes_at_most(limit) and not exchanges_more:
            fitting.append(tried)
    found = min(fitting, key=lambda c: c.nbytes or 0, default=None)
    if found is None or twin is None:
        return found
    return twin if twin.takes_at_most(min(limit, (1 + TOLERANCE) * (found.nbytes or 0))) else found


def _try_candidate(
    recipe: Recipe, compile_recipe: Callable[[Recipe], jax.stages.Compiled], several_devices: bool
) -> Candidate:
    try:
        compiled = compile_recipe(recipe)
        text = compiled.as_text() if several_devices else None
        if not text:
            return Candidate(recipe, program_nbytes(compiled))
        module = hlo.parse(text)
        nbytes, exchanged = program_nbytes(compiled), exchanged_nbytes(module)
        return Candidate(recipe, nbytes, exchanged=exchanged, copied=copied_nbytes(module))
    except jax.errors.JaxRuntimeError as error:  # out of memory at compilation, or a program that XLA refuses
        return Candidate(recipe, None, describe_refusal(error))


def find_fallback(chosen: Recipe, candidates: Iterable[Candidate]) -> list[Finding]:
    """The finding for a program that may hide its copies less well than by its first recipe, or has none."""
    by_recipe = {candidate.recipe: candidate for candidate in candidates}
    first, own, stock = next(iter(by_recipe.values())), by_recipe[chosen], by_recipe.get(Recipe.STOCK)
    if chosen is first.recipe or chosen.hides_copies:
        return []
    if first.nbytes is None and chosen is Recipe.SAVED:
        refused = "XLA does not compile the program with its copies, so nothing is offloaded"
        return [Finding(FindingCode.RECIPE_REPLACED, f"{refused}: {textwrap.shorten(first.reason, 400)}")]
    if chosen is Recipe.SAVED and own.nbytes is not None:
        wins = [c for c in by_recipe.values() if c.takes_at_most((1 - TOLERANCE) * own.nbytes)]
        first = min(wins, key=lambda c: c.nbytes or 0, default=first)  # refused for what it exchanges
    reason = textwrap.shorten(first.reason, 400).rstrip(".")
    took = f"took {format_nbytes(first.nbytes)}" if first.nbytes is not None else f"failed: {reason}"
    loss = "Its copies may be hidden less well"
    if chosen is Recipe.SAVED:
        loss = "Offloading wins no memory here, so nothing is offloaded"
    if stock and first.exchanges_more_than(stock):
        took += f" and exchanged {format_nbytes(first.exchanged)} for {format_nbytes(stock.exchanged)}"
        loss = "Nothing is offloaded" if chosen is Recipe.SAVED else loss
    now = "" if own.nbytes is None else f" of {format_nbytes(own.nbytes)}"
    text = (
        f"the program runs by the recipe {chosen.value!r}{now}: by {first.recipe.value!r} it {took}. {loss}; "
        f"recipe={first.recipe.value!r} in jaxoff.jit insists."
    )
    return [Finding(FindingCode.RECIPE_REPLACED, text)]


class LoweredByRecipe:
    """A `jax.stages.Lowered` whose `compile` chooses the recipe; everything else is the first recipe's."""

    def __init__(
        self,
        lowered: jax.stages.Lowered,
        lower_chosen: Callable[[], tuple[jax.stages.Lowered, Mapping[str, Any], PlacedBy | None]],
    ):
        """Takes a lowered program, and a function that returns that of the chosen recipe.

        The function returns the options of the recipe, too, and the origin of the placements.
        """
        self._lowered, self._lower_chosen = lowered, lower_chosen

    @classmethod
    def of(
        cls, lowered: jax.stages.Lowered, options: Mapping[str, Any], placed_by: PlacedBy | None
    ) -> LoweredByRecipe:
        """The lowered program of a recipe that is chosen already, by its compiler options."""
        return cls(lowered, lambda: (lowered, options, placed_by))

    def compile(self, compiler_options: Mapping[str, Any] | None = None, **kwargs) -> jax.stages.Compiled:
        """As `jax.stages.Lowered.compile`, of the recipe that takes no more memory than `jax.jit`."""
        options = dict(compiler_options) if compiler_options else None
        lowered, chosen, placed_by = self._lower_chosen()
        compiled = remember_placement(lowered.compile(options, **kwargs), placed_by)
        return remember_options(compiled, {**chosen, **(options or {})})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lowered, name)
