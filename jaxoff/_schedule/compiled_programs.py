"""The programs compiled by a search within a budget."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jaxoff._jaxpr.compat import ClosedJaxpr
from jaxoff._runtime.program_memory import lowered_nbytes
from jaxoff._schedule.call import Call
from jaxoff._schedule.rewrite import Rewritten
from jaxoff._schedule.settings import Setting, add_without_graphs, complete, list_settings
from jaxoff._schedule.traced import Traced

# The name of a search's programs, among the programs of a call that are compared by time.
PLANNED = "planned"


@dataclasses.dataclass(frozen=True, eq=False)
class Compiled:
    """A compiled program.

    Attributes:
      setting: its recipe and compiler options.
      instance: its `jax.jit` function.
      traced: the program, for its other recipes.
    """

    setting: Setting
    instance: Any
    traced: Traced


@dataclasses.dataclass(frozen=True)
class Compiler:
    """Compiles the programs of a call for a budget.

    Attributes:
      call, traced: of the step.
      device_nbytes: the budget of a device.
      given: the caller's compiler options.
      rewrite: (program, in_order=) -> the rewritten program.
      make_instance: (call, setting, made=) -> the `jax.jit` function of a traced program by a setting.
      refusals: XLA's reasons against programs refused by XLA.
    """

    call: Call
    traced: Traced
    device_nbytes: float
    given: Mapping[str, Any]
    rewrite: Callable[..., Rewritten]
    make_instance: Callable[..., Any]
    refusals: list[str] = dataclasses.field(default_factory=list)

    def compile_program(
        self, closed: ClosedJaxpr, *, preferred: bool, in_order: bool = False
    ) -> tuple[float, Compiled] | None:
        """Compiles a program by a recipe.

        Args:
          closed: the program.
          preferred: whether to take the first recipe within the budget among the recipes with hidden copies,
            or the recipe of the least memory among the others.
          in_order: whether to order the program in any case.

        Returns:
          Bytes on the device, and the compiled program; None without other recipes.
        """
        program = self.rewrite(closed, in_order=in_order)
        made = dataclasses.replace(self.traced, given=closed, program=program)
        settings = self._list_settings(made)
        hiding = [s for s in settings if s.recipe.hides_copies] or settings[:1]
        found: list[tuple[float, Compiled]] = []
        for setting in hiding if preferred else settings[len(hiding) :]:
            if preferred and any(nbytes <= self.device_nbytes for nbytes, _ in found):
                break
            found.append(self._compile(made, setting))
        return min(found, key=lambda made: made[0], default=None)

    def compile_others(self, compiled: Compiled) -> Iterator[tuple[float, Compiled]]:
        """Compiles a program by its other recipes, also without graphs; yields those within the budget."""
        made = compiled.traced
        for setting in add_without_graphs(self._list_settings(made), self.given):
            if str(setting) != str(compiled.setting):
                nbytes, other = self._compile(made, setting)
                if nbytes <= self.device_nbytes:
                    yield nbytes, other

    def _list_settings(self, made: Traced) -> list[Setting]:
        settings = list_settings(made.program, self.given, has_twin=False, budgeted=True)
        return [dataclasses.replace(setting, program=PLANNED) for setting in settings]

    def _compile(self, made: Traced, setting: Setting) -> tuple[float, Compiled]:
        call, make_instance = self.call, functools.partial(self.make_instance, made=made)
        setting = complete(setting, call, make_instance)
        jitted = make_instance(call, setting)
        lowered, options = call.lower(jitted), dict(setting.options) | dict(self.given)
        nbytes = lowered_nbytes(lowered, call.device, call.devices, options, self.refusals)
        if not call.is_on_gpu:  # where the two memories are one
            nbytes -= made.count_host_arguments(call.list_shardings(made.signature[1]))
        return nbytes, Compiled(setting, jitted, made)
