"""Errors of a user's own code, told by the lines of that code."""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_LIBRARIES = tuple(
    sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")
)

BAD_INPUT = 2


class UserCodeError(Exception):
    """The user's module or function raised; the error is the cause."""


@contextlib.contextmanager
def report_errors() -> Iterator[None]:
    """Prints the errors of a command's input, and ends the program with exit status 2.

    Of an error raised in the user's code, or called from there, the standard error shows the lines of that
    code and the error. A `ValueError` or `OSError` without such lines is a line. Other errors are errors of
    jaxoff and pass through.
    """
    try:
        yield
    except UserCodeError as error:
        print(describe_error(error.__cause__ or error), file=sys.stderr)
        raise SystemExit(BAD_INPUT) from None
    except Exception as error:
        if list_own_frames(error):
            print(describe_error(error), file=sys.stderr)
        elif isinstance(error, ValueError | OSError | ModuleNotFoundError):
            print(f"error: {error}", file=sys.stderr)
        else:
            raise
        raise SystemExit(BAD_INPUT) from None


def list_own_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Lists the frames of an error that are neither of jaxoff nor of installed or standard libraries."""
    frames = traceback.extract_tb(error.__traceback__)
    return [
        frame
        for frame in frames
        if not frame.filename.startswith((_PACKAGE + os.sep, "<frozen", *_LIBRARIES))
        and os.path.basename(frame.filename) != "jaxoff"  # the console script
    ]


def describe_error(error: BaseException) -> str:
    """Describes an error as Python does, with the frames of the user's code alone."""
    lines = ["error: in the code of the function:\n", *traceback.format_list(list_own_frames(error))]
    notes, error.__notes__ = getattr(error, "__notes__", []), []  # JAX's, on its traceback
    lines += traceback.format_exception_only(error)
    error.__notes__ = notes
    return "".join(lines).rstrip("\n")
