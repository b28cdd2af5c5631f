"""A run's inputs, checked before anything is written or put on a device."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

import jaxoff
from models import data, policy_text, summary
from models.checkpoints import list_finished
from models.errors import InputError
from models.folder import RunFolder, check_same_run
from models.options import Options
from models.parallel import ParallelProgram
from models.program import Program


@dataclasses.dataclass(frozen=True)
class Job:
    """The checked inputs of a run, before anything is written or put on a device.

    Attributes:
      options, folder, resume: the user's options.
      corpus, batches, windows: the data, its batches to train on and its held-out windows (K, B, S + 1).
      program: computations of the run.
      again: command to continue the run.
    """

    options: Options
    folder: RunFolder
    resume: bool
    corpus: data.Corpus
    batches: data.Batches
    windows: np.ndarray
    program: Program
    again: str

    @property
    def run(self) -> dict[str, Any]:
        """The description of the run, JSON-ready; a checkpoint with another "identity" is not resumed."""
        return {
            "identity": self.options.identity(self.corpus),
            "policy": self.options.policy,
            "versions": summary.versions(),
        }

    def check_same(self, where: Path, saved: dict[str, Any], done: int | None = None) -> None:
        """Refuses the files of another run; `done` is the number of steps taken so far."""
        check_same_run(where, saved["identity"], self.run["identity"], done)

    def start_folder(self) -> None:
        """Signs the locked folder, and writes the description of a run that is not resumed."""
        self.folder.check_contents(resume=self.resume)
        self.folder.sign_lock()
        if not self.resume:
            self.folder.write_run(self.run)

    def update_folder(self) -> int | None:
        """Writes the description of a resumed run that takes more steps than before.

        Returns:
          The number of steps before; None for a run that takes no more.
        """
        before = self.folder.saved_run()["identity"]
        if before == self.run["identity"]:
            return None
        self.folder.write_run(self.run)
        return before["steps"]

    @property
    def newest_step(self) -> int | None:
        """Step of the newest checkpoint in the folder, before any is read."""
        return max(list_finished(self.folder.checkpoints), default=None)


def prepare(
    options: Options,
    out: Path,
    *,
    resume: bool,
    again: str,
    device_gb: float | None = None,
    host_gb: float | None = None,
    device: jaxoff.Device | None = None,
) -> Job:
    """Reads the data, checks all inputs, and plans the step if a budget of memory is given.

    Raises:
      InputError: an input is wrong or contradicts another.
    """
    folder = RunFolder(out)
    folder.check(resume=resume)
    if options.config().vocab_size < data.VOCABULARY:
        raise InputError(
            f"A model of bytes needs vocab_size >= {data.VOCABULARY}, got {options.config().vocab_size}."
        )
    corpus = data.load(options.data)
    batches = data.Batches(corpus.train, options.batch, options.seq, options.seed)
    kind = Program if options.layout is None else ParallelProgram
    if device_gb is None:
        program = kind(options, policy_text.parse(options.policy))
    else:
        host_bytes = None if host_gb is None else host_gb * 1e9
        program = kind(options, None, device_gb * 1e9, device, host_bytes)
        try:
            program.plan  # noqa: B018  # raises where nothing fits
        except ValueError as error:
            raise InputError(f"--device-gb {device_gb:g}: {error}") from None
    windows = program.held_out_windows(corpus.held_out)
    job = Job(options, folder, resume, corpus, batches, windows, program, again)
    if resume:
        job.check_same(folder.run_file, folder.saved_run(), job.newest_step)
    return job
