"""The folder of a run: its files, and the checks before a run writes there."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from models.errors import InputError
from models.options import differences


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """The files of one run.

    Attributes:
      path: the folder.
    """

    path: Path

    @property
    def run_file(self) -> Path:
        """File with the description of the run, written at its start."""
        return self.path / "run.json"

    @property
    def losses_file(self) -> Path:
        return self.path / "losses.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def summary_file(self) -> Path:
        return self.path / "summary.json"

    @property
    def picture_file(self) -> Path:
        return self.path / "loss.png"

    def check(self, *, resume: bool) -> None:
        """Refuses a folder of another run or, to resume, a folder without a run. Writes nothing.

        Raises:
          InputError: the folder is refused, is a file or cannot be written.
        """
        if self.path.exists() and not self.path.is_dir():
            raise InputError(f"--out takes a folder, got {str(self.path)!r}, which is a file.")
        parent = next(p for p in (self.path, *self.path.resolve().parents) if p.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
            raise InputError(
                f"--out takes a folder that can be written, got {str(self.path)!r}: {parent} cannot."
            )
        taken = [
            p.name
            for p in (self.run_file, self.losses_file, self.checkpoints, self.summary_file)
            if p.exists()
        ]
        if taken and not resume:
            raise InputError(
                f"{self.path} holds a run already ({', '.join(taken)}). "
                "Give --resume to continue it, or another --out."
            )
        if resume and not self.run_file.exists():
            raise InputError(
                f"--resume needs a folder that holds a run, got {self.path}, which has no "
                f"{self.run_file.name}. Check --out."
            )

    def saved_run(self) -> dict[str, Any]:
        """Reads the description written by `write_run`."""
        try:
            return json.loads(self.run_file.read_text())
        except (OSError, ValueError) as error:
            raise InputError(
                f"{self.run_file} does not say what the run is: {error}. Start anew with another --out."
            ) from None

    def write_run(self, run: dict[str, Any]) -> None:
        """Makes the folder and writes the description of the run.

        Raises:
          InputError: the folder cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_json(self.run_file, run)
        except OSError as error:
            why = error.strerror or error
            raise InputError(
                f"--out takes a folder that can be written, got {str(self.path)!r}: {why}."
            ) from None


def check_same_run(where: object, saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuses to resume from the files of another run.

    Raises:
      InputError: the descriptions differ; the message names the fields.
    """
    if different := differences(saved, now):
        raise InputError(
            f"{where} was made by another run, so --resume cannot continue it: {'; '.join(different)}. "
            "Give the same options, or another --out."
        )


def write_json(path: Path, content: Any) -> None:
    """Writes a JSON file atomically: under a temporary name, then renamed."""
    aside = path.with_name(path.name + ".tmp")
    aside.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(aside, path)
