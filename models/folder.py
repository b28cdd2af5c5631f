"""The folder of a run: its files, and the checks before a run writes there."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator
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
    def lock_file(self) -> Path:
        """File whose lock a live run holds; the system ends the lock with the process, however it ends."""
        return self.path / "run.lock"

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
          InputError: the folder is refused, is a file, is in use or cannot be written.
        """
        if self.path.exists() and not self.path.is_dir():
            raise InputError(f"--out takes a folder, got {str(self.path)!r}, which is a file.")
        parent = next(p for p in (self.path, *self.path.resolve().parents) if p.exists())
        written = [parent, self.checkpoints] if self.checkpoints.exists() else [parent]
        for folder in written:
            if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
                raise InputError(
                    f"--out takes a folder that can be written, got {str(self.path)!r}: {folder} cannot."
                )
        self._check_free()
        self.check_contents(resume=resume)

    def check_contents(self, *, resume: bool) -> None:
        """Refuses a folder that holds a run or, to resume, that holds none.

        Raises:
          InputError: the folder is refused.
        """
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

    def _check_free(self) -> None:
        if self.lock_file.exists():
            with self.lock():
                pass

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Holds the folder, which is made if missing, for this process alone.

        Where the disk has no locks, as some network disks, the folder is not held.

        Raises:
          InputError: another process holds the folder, or the folder cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            stream = self.lock_file.open("a+")
        except OSError as error:
            raise self._cannot_write(error) from None
        with stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                stream.seek(0)
                raise InputError(
                    f"{self.path} is in use by another run ({stream.read().strip() or 'just started'}). "
                    "Wait for its end, stop it, or give another --out."
                ) from None
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                    raise
            yield

    def sign_lock(self) -> None:
        """Writes into the held lock who holds it, for the message to others."""
        self.lock_file.write_text(f"process {os.getpid()} on {socket.gethostname()}\n")

    def saved_run(self) -> dict[str, Any]:
        """Reads the description written by `write_run`."""
        try:
            run = json.loads(self.run_file.read_text())
            if not isinstance(run, dict) or not isinstance(run.get("identity"), dict):
                raise ValueError('it has no object "identity"')
        except (OSError, ValueError) as error:
            raise InputError(
                f"{self.run_file} does not say what the run is: {error}. Start anew with another --out."
            ) from None
        return run

    def write_run(self, run: dict[str, Any]) -> None:
        """Makes the folder and writes the description of the run.

        Raises:
          InputError: the folder cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_json(self.run_file, run)
        except OSError as error:
            raise self._cannot_write(error) from None

    def _cannot_write(self, error: OSError) -> InputError:
        why = error.strerror or error
        return InputError(f"--out takes a folder that can be written, got {str(self.path)!r}: {why}.")


def check_same_run(
    where: object, saved: dict[str, Any], now: dict[str, Any], done: int | None = None
) -> None:
    """Refuses to resume from the files of another run.

    A finished run may be continued with more steps. The learning rates of the further steps are then those of
    a run with all the steps, and the warm-up may differ, too.

    Args:
      where: the files, for the message.
      saved, now: the identities of the run that wrote them, and of this run.
      done: number of steps already taken; None if unknown.

    Raises:
      InputError: the descriptions differ; the message names the fields.
    """
    if not (different := differences(saved, now)):
        return
    if differences(saved, now | {key: saved.get(key) for key in ("steps", "warmup")}):
        fix = ""
    elif done == saved.get("steps") < now["steps"]:
        return
    else:
        fix = f"A run that has finished its --steps {saved.get('steps')} can be trained further with more. "
    raise InputError(
        f"{where} was made by another run, so --resume cannot continue it: {'; '.join(different)}. "
        f"{fix}Give the same options, or another --out."
    )


def write_json(path: Path, content: Any) -> None:
    """Writes a JSON file atomically: under a temporary name, then renamed."""
    aside = path.with_name(path.name + ".tmp")
    aside.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(aside, path)
