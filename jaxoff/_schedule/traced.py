"""A traced step with its rewritten program and its saved twin."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from jax.sharding import Sharding

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.host_values import HostValues
from jaxoff._jaxpr.one_hot import compare_labels
from jaxoff._jaxpr.saved_twin import build_saved_twin, move_all_to_device
from jaxoff._jaxpr.shares import nbytes_on_device
from jaxoff._report.finding import Finding
from jaxoff._runtime.garbage import collector_paused
from jaxoff._schedule.call import Call
from jaxoff._schedule.recipes import Recipe
from jaxoff._schedule.rewrite import Rewritten
from jaxoff._state import hosted


class ProbedError(Exception):
    """Ends a trace whose only purpose was the program, with `(signature, given, shapes, findings)`."""

    def __init__(self, *found: Any):
        self.found = found


@dataclasses.dataclass(frozen=True)
class Traced:
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

    @functools.cached_property
    def has_copies(self) -> bool:
        """Whether the user's program copies values to the host."""
        return bool(HostValues(self.given.jaxpr).sends)

    def is_judged(self, call: Call) -> bool:
        """Whether the compiled program says if the user's copies to the host are done."""
        return call.is_on_gpu and self.has_copies

    def follow(self, recipe: Recipe) -> compat.ClosedJaxpr:
        """The program by a recipe."""
        if recipe is Recipe.SAVED and self.twin is not None:
            return self.twin
        if recipe is Recipe.EARLY:
            return self._held_by_barriers
        return self.given if recipe is Recipe.STOCK else self.program.jaxpr

    @collector_paused()
    def run(self, recipe: Recipe, values: Sequence[Any]) -> list[Any]:
        """Runs the program by a recipe, for the values of its arguments."""
        program = self.follow(recipe)
        return compat.jaxpr_as_fun(program)(*hosted.move_to(program.jaxpr.invars, values))

    @functools.cached_property
    def _held_by_barriers(self) -> compat.ClosedJaxpr:
        make = self.program.hold_by_barriers
        return self.program.jaxpr if make is None else make().jaxpr

    @property
    def has_host_arguments(self) -> bool:
        """Whether the program takes arguments in host memory."""
        return any(compat.is_host(v.aval) for v in self.given.jaxpr.invars)

    def count_host_arguments(self, shardings: Sequence[Sharding | None]) -> int:
        """Bytes of the arguments in host memory, of a device's parts; `shardings` of all arguments."""
        places = zip(self.given.jaxpr.invars, shardings, strict=True)
        return sum(nbytes_on_device(v.aval, sharding) for v, sharding in places if compat.is_host(v.aval))

    @property
    def is_reusable(self) -> bool:
        """Whether the program holds no tracer of a trace that may have ended."""
        return not compat.holds_tracers(self.given)

    @functools.cached_property
    def _on_device(self) -> compat.ClosedJaxpr | None:
        twin = move_all_to_device(self.given)
        return None if twin is None else compare_labels(twin)

    @property
    def why_not_placed(self) -> str | None:
        """Why a budget cannot place the program's values; None where it can."""
        if self._on_device is None:
            return (
                "jaxoff.jit(device_bytes=...) places values of a program whose arguments and results are on "
                "the device; this one has arguments or results in host memory."
            )
        return None if self.is_reusable else "the program closes over values of a trace around it."

    def take_twin(self) -> compat.ClosedJaxpr:
        """The program with all values on the device, for a budget to place.

        Raises:
          ValueError: if a budget cannot place the program's values.
        """
        twin, reason = self._on_device, self.why_not_placed
        if twin is None or reason is not None:
            raise ValueError(reason)
        return twin
