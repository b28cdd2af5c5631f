"""The losses of a run as JSON lines, whole up to the last line even after the process was killed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class History:
    """Losses by step, in memory and in a file.

    Args:
      path: file of the losses.
      upto: number of steps whose lines are kept; a resumed run recomputes the later lines.

    Attributes:
      records: a dict for each line, each with "step"; lines of training have "loss", lines of held-out text
        have "held_out".
      num_unreadable: number of whole lines that hold no such dict. They are left out.
    """

    def __init__(self, path: str | Path, *, upto: int = 0):
        self.path = Path(path)
        found, self.num_unreadable = _read_lines(self.path)
        self.records = [r for r in found if r["step"] <= upto]
        aside = self.path.with_suffix(".tmp")
        aside.write_text("".join(_line(r) for r in self.records))
        os.replace(aside, self.path)
        self._file = self.path.open("a")

    def append(self, step: int, **values: float) -> None:
        """Appends a line and flushes the file: the operating system keeps the line if this process dies."""
        self.records.append({"step": step, **values})
        self._file.write(_line(self.records[-1]))
        self._file.flush()

    def of(self, key: str) -> list[tuple[int, float]]:
        """Lists (step, value) of every line with the key."""
        return [(r["step"], r[key]) for r in self.records if key in r]

    def __enter__(self) -> History:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()


def read(path: str | Path) -> list[dict[str, Any]]:
    """Reads the whole lines of a file, without a half-written last line; a missing file has no lines."""
    return _read_lines(Path(path))[0]


def _read_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Returns the records of a file, and the number of whole lines without a record."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    records = [record for line in lines if (record := _parse(line)) is not None]
    return records, len(lines) - len(records)


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record) + "\n"
