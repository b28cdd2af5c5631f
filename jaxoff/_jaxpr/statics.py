"""The static arguments of a function, as `jax.jit` reads them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.core import Tracer


def find_statics(fun: Callable[..., Any], given: Mapping[str, Any]) -> frozenset[int | str]:
    """The positions and names of a function's static arguments, each by position and by name as JAX does."""
    numbers, names = given.get("static_argnums"), given.get("static_argnames")
    found: set[int | str] = {numbers} if isinstance(numbers, int) else {*(numbers or ())}
    found |= {names} if isinstance(names, str) else {*(names or ())}
    parameters = list_parameters(fun)
    count = len(parameters)
    found = {name + count if isinstance(name, int) and name < 0 else name for name in found}
    pairs = [pair for pair in enumerate(parameters) if not found.isdisjoint(pair)]
    return frozenset(found.union(*pairs))


def list_parameters(fun: Callable[..., Any]) -> list[str]:
    """The names of a function's parameters; none for a callable without a signature."""
    try:
        return list(inspect.signature(fun).parameters)
    except (TypeError, ValueError):
        return []


def list_statics(static_argnums: Any, static_argnames: Any) -> dict[str, Any] | None:
    """The options of a caller as keywords of `jax.jit`; None without any."""
    given = {"static_argnums": static_argnums, "static_argnames": static_argnames}
    return {name: value for name, value in given.items() if value is not None} or None


def drop_statics(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a function under trace, with None in the place of each without a tracer."""

    def keep_traced(argument: Any) -> Any:
        return argument if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(argument)) else None

    return [keep_traced(arg) for arg in args], {name: keep_traced(arg) for name, arg in kwargs.items()}
