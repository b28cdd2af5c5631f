"""The error that a user of the training program can mend."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """Options, data or a folder that training cannot start from. Its message is one line."""


def near_miss(got: str, choices: Iterable[str]) -> str:
    """' Did you mean ...?' for a misspelt word, or ''."""
    near = difflib.get_close_matches(got, list(choices), 1)
    return f" Did you mean {near[0]!r}?" if near else ""
