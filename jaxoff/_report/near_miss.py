"""Wording shared by error messages and findings."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def near_miss(got: object, choices: Iterable[str], *, likeness: float = 0.6) -> str:
    """Returns ' Did you mean ...?' with the choice closest to a misspelt word, or ''.

    Args:
      likeness: the least `difflib.SequenceMatcher.ratio` of a choice: 0.8 for one wrong letter in five.
    """
    near = difflib.get_close_matches(str(got), list(choices), 1, likeness)
    return f" Did you mean {near[0]!r}?" if near else ""
