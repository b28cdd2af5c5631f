"""A user's function, given on the command line as `MODULE:FUNCTION`."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from typing import Any

from jaxoff._cli.user_errors import UserCodeError
from jaxoff._report.near_miss import near_miss


def load_user_function(text: str) -> tuple[Any, ...]:
    """Imports a user's module, calls a function of the module, and returns its checked result.

    Python's path and the current folder are searched for the module.

    Args:
      text: "module:function" or "file.py:function". The function takes no arguments.

    Returns:
      A train step or loss, followed by its arguments: arrays or `jax.ShapeDtypeStruct`s.

    Raises:
      ValueError: for text without both parts, an unknown module or function, a function that takes arguments,
        a result other than a tuple of a function and arguments, and arguments unfit for the function.
      UserCodeError: if the module or the function raises.
    """
    module_name, colon, name = text.rpartition(":")
    if not (module_name and colon and name):
        raise ValueError(f"A function is given as MODULE:FUNCTION, such as train:setup, got {text!r}.")
    folder = os.getcwd()
    if module_name.endswith(".py"):
        folder, file = os.path.split(os.path.abspath(module_name))
        module_name = file.removesuffix(".py")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise UserCodeError from error  # a module that the user's imports
        raise ValueError(f"{text}: {error}. Python's path and {folder} were searched.") from None
    except Exception as error:
        raise UserCodeError from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{module_name} has no function {name!r}.{near_miss(name, dir(module))}")
    _check_call(text, function)
    try:
        found = function()
    except Exception as error:
        raise UserCodeError from error
    if not isinstance(found, tuple) or len(found) < 2 or not callable(found[0]):
        raise ValueError(
            f"{text} returns (train step or loss, *arguments): a function and at least one "
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


def _check_call(text: str, function: Any) -> None:
    """Refuses a function that cannot be called without arguments."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a callable written in C has none
        return
    try:
        signature.bind()
    except TypeError as error:
        name = text.rpartition(":")[2]
        raise ValueError(
            f"{text} is called without arguments and returns (train step or loss, *arguments); "
            f"got {name}{signature}: {error}. Add a function such as `def setup(): return {name}, ...`."
        ) from None
