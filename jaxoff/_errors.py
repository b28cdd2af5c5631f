"""Wording shared by error messages and findings."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(got: object, choices: Iterable[str]) -> str | None:
    """The choice that a misspelt word most likely meant, or None."""
    return next(iter(difflib.get_close_matches(str(got), list(choices), n=1, cutoff=0.6)), None)


def near_miss(got: object, choices: Iterable[str]) -> str:
    """' Did you mean ...?' for a misspelt word, or ''."""
    guess = nearest(got, choices)
    return f" Did you mean {guess!r}?" if guess else ""
