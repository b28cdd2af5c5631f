"""What functions around a `jaxoff.jit` function have in common: `jaxoff.nnx_jit` and `jaxoff.filter_jit`."""

from __future__ import annotations

import abc
import functools
import types
from collections.abc import Callable
from typing import Any

from jaxoff._budget.report import Plan
from jaxoff._report.finding import Finding


class WrappedJitted(abc.ABC):
    """A function of objects around a function of their arrays.

    Attributes:
      jitted: the function of arrays, of `jaxoff.jit`.
      transform: the name of the transformation that made it.
    """

    transform: str

    def __init__(self, fun: Callable[..., Any], jitted: Any):
        self.jitted, self._fun = jitted, fun
        functools.update_wrapper(self, fun, updated=())

    @abc.abstractmethod
    def __call__(self, /, *args, **kwargs):
        """Calls the function."""

    def __repr__(self) -> str:
        return f"{self.transform}({self._fun!r})"

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Binds the function to an instance, as a method of a class."""
        return self if instance is None else types.MethodType(self, instance)

    def clear_cache(self) -> None:
        """Forgets the compiled programs."""
        self.jitted.clear_cache()

    @property
    def options(self) -> dict[str, Any]:
        """The compiler options of the latest call."""
        return self.jitted.options

    @property
    def recipe(self) -> str:
        """The recipe of the latest call: "concurrent", "early", "ordered", "stock" or "saved"."""
        return self.jitted.recipe

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The findings of the calls so far, each once."""
        return self.jitted.findings

    @property
    def tuned(self) -> dict[str, float]:
        """Milliseconds of a step by each program that `tune` compared."""
        return self.jitted.tuned

    @property
    def plan(self) -> Plan | None:
        """The `jaxoff.Plan` within `device_bytes`, of the latest call; None before."""
        return self.jitted.plan
