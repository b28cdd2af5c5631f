"""A user's function, given on the command line as `MODULE:FUNCTION`."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from typing import Any

from jaxoff._report.near_miss import near_miss


def load_user_function(text: str) -> tuple[Any, ...]:
    """Imports a user's module, calls a function of the module, and returns its checked result.

    Python's path and the current folder are searched for the module.

    Args:
      text: "module:function". The function takes no arguments.

    Returns:
      A train step, followed by its arguments: arrays or `jax.ShapeDtypeStruct`s.

    Raises:
      ValueError: for text without both parts, an unknown module or function, a result other than a tuple of a
        function and arguments, and arguments unfit for the function.
    """
    module_name, colon, name = text.partition(":")
    if not (module_name and colon and name):
        raise ValueError(f"A function is given as MODULE:FUNCTION, such as train:setup, got {text!r}.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(f"{text}: {error}. Python's path and this folder were searched.") from None
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{module_name} has no function {name!r}.{near_miss(name, dir(module))}")
    found = function()
    if not isinstance(found, tuple) or len(found) < 2 or not callable(found[0]):
        raise ValueError(
            f"{text} returns (train step, *arguments): a function and at least one "
            f"argument of it, arrays or jax.ShapeDtypeStructs; got {type(found).__name__}."
        )
    fun, *arguments = found
    try:
        inspect.signature(fun).bind(*arguments)
    except TypeError as error:
        raise ValueError(
            f"{text} returns (train step, *arguments), the arguments one after the "
            f"other, as in `return step, state, batch`; got {len(arguments)} for "
            f"{getattr(fun, '__name__', fun)}{inspect.signature(fun)}: {error}."
        ) from None
    except ValueError:  # a callable written in C has no signature
        pass
    return found
