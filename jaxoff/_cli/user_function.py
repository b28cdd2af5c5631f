"""A function of the user's, named on a command line."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from typing import Any

from jaxoff._report.near_miss import near_miss


def user_function(text: str) -> tuple[Any, ...]:
    """What a function returns that `module:function` names: a loss or a train step, and its arguments.

    Modules of the current folder are found, too.

    Raises:
      ValueError: for other text, a module or function that there is not, and another result, such as
        arguments that what it returns does not take.
    """
    module_name, colon, name = text.partition(":")
    if not (module_name and colon and name):
        raise ValueError(f"A function is given as MODULE:FUNCTION, such as train:setup, got {text!r}.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(f"{text}: {error}. It is looked for in this folder and on Python's path.") from None
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{module_name} has no function {name!r}.{near_miss(name, dir(module))}")
    found = function()
    if not isinstance(found, tuple) or len(found) < 2 or not callable(found[0]):
        raise ValueError(
            f"{text} returns (loss, *arguments) or (train step, *arguments): a function and at least one "
            f"argument of it, arrays or jax.ShapeDtypeStructs; got {type(found).__name__}."
        )
    fun, *arguments = found
    try:
        inspect.signature(fun).bind(*arguments)
    except TypeError as error:
        raise ValueError(
            f"{text} returns (loss, *arguments) or (train step, *arguments), the arguments one after the "
            f"other, as in `return loss, weights, tokens`; got {len(arguments)} for "
            f"{getattr(fun, '__name__', fun)}{inspect.signature(fun)}: {error}."
        ) from None
    except ValueError:  # a callable of C, which has no signature
        pass
    return found
