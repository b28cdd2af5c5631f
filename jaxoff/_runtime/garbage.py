"""Pauses of Python's garbage collector while programs are rewritten."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Pauses the collector of reference cycles, also as a decorator.

    A program of 10,000 equations is some hundred thousand long-lived objects. As they grow in number, the
    collector reads all objects of the process again and again: a third of the time to lower such a program.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
