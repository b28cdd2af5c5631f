"""The losses of a run, one JSON object a line, whole up to the last line even if the process is killed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class History:
    """Losses by step, in memory and in a file.

    Args:
      path: the file.
      upto: keep the lines of the first `upto` steps that the file already holds; a resumed run makes the
        later ones again.

    Attributes:
      records: one dict a line, each with "step"; those of a step's training have "loss", those of held-out
        text have "held_out".
    """

    def __init__(self, path: str | Path, *, upto: int = 0):
        self.path = Path(path)
        self.records = [r for r in read(self.path) if r["step"] <= upto]
        aside = self.path.with_suffix(".tmp")
        aside.write_text("".join(_line(r) for r in self.records))
        os.replace(aside, self.path)
        self._file = self.path.open("a")

    def append(self, step: int, **values: float) -> None:
        """Adds a line and hands it to the operating system, which keeps it if this process dies."""
        self.records.append({"step": step, **values})
        self._file.write(_line(self.records[-1]))
        self._file.flush()

    def of(self, key: str) -> list[tuple[int, float]]:
        """(step, value) of every line that has the key."""
        return [(r["step"], r[key]) for r in self.records if key in r]

    def __enter__(self) -> History:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()


def read(path: str | Path) -> list[dict[str, Any]]:
    """The whole lines of a file; none if there is no file. A half-written last line is left out."""
    path = Path(path)
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record) + "\n"
