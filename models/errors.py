"""The errors that a user of the training program can mend."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """Training cannot start from the given options, data or folder. The message has a single line."""


class SaveError(OSError):
    """A file of a run cannot be written, e.g. on a full disk. The message has a single line."""


def near_miss(got: str, choices: Iterable[str]) -> str:
    """Suggests the nearest choice for a misspelt word: ' Did you mean ...?', or ''."""
    near = difflib.get_close_matches(got, list(choices), 1)
    return f" Did you mean {near[0]!r}?" if near else ""
