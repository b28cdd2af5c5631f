"""The standard output of the process."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def to_standard_error() -> Iterator[None]:
    """A context in which the process writes its standard output, that of C code too, to standard error.

    The solver HiGHS runs in it, which prints a line where it repairs a solution, under any options. So does
    `jaxoff plan --json`, as a user's function may print under the trace.
    """
    try:
        flush_c, kept = ctypes.CDLL(None).fflush, os.dup(1)
    except (AttributeError, OSError, TypeError):  # no C library of that kind, or no standard output
        yield
        return
    sys.stdout.flush()
    flush_c(None)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        flush_c(None)
        os.dup2(kept, 1)
        os.close(kept)
