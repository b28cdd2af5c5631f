"""Checkpoints, written under a temporary name, then renamed: a killed run leaves the last good one."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import os
import re
import shutil
import sys
import threading
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from models.errors import InputError, SaveError
from models.folder import write_json
from models.processes import is_first, tell_all, wait_for_all

CHECKSUMS = "checksums.json"
"""File of a checkpoint with the size and the CRC-32 of each other file, as {path: [bytes, CRC-32]}."""

_PIECE_NBYTES = 1 << 20


class DamagedError(Exception):
    """A checkpoint is not as it was written. The message says how, in words for a parenthesis."""


@dataclasses.dataclass(frozen=True)
class Restored:
    """A state read back.

    Attributes:
      step: number of the step after which the state was saved.
      state: the state.
      damaged: newer checkpoints that are damaged: the path to which each was moved -> the damage.
    """

    step: int
    state: Any
    damaged: dict[Path, str]


class Checkpoints:
    """The checkpoints of a run, each with the state after a step and the run's description.

    A save copies the state to host memory and returns. A thread writes the copy under a temporary name, which
    becomes the step's name once everything is on disk, checksums of the files included. A save of state in
    host memory makes no copy and returns once it is written. Opening removes the temporary files of a killed
    process.

    Args:
      folder: directory of the checkpoints; made if missing.
      keep: number of newest checkpoints to keep.

    Example:
      >>> import tempfile, jax.numpy as jnp
      >>> from models.checkpoints import Checkpoints
      >>> with Checkpoints(tempfile.mkdtemp(), keep=2) as checkpoints:
      ...     checkpoints.save(3, {"w": jnp.ones(2)}, {"seed": 0})
      ...     checkpoints.wait()
      ...     checkpoints.latest
      3
    """

    def __init__(self, folder: str | Path, *, keep: int):
        self.folder = Path(folder).resolve()
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            cleanup_tmp_directories=True,
            step_prefix=None,
            # Where a folder made by its thread cannot be made, orbax waits for a signal that never comes.
            async_options=ocp.AsyncOptions(
                post_finalization_callback=self._add_checksums, create_directories_asynchronously=False
            ),
        )
        self._manager = ocp.CheckpointManager(self.folder, options=options, item_names=("state", "run"))
        self._newest = self._manager.latest_step()
        self._saved: list[int] = []  # by this process

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        # After an error, those of writing would hide it.
        with _as_save_error(self) if kind is None else contextlib.suppress(Exception):
            self._manager.close()

    @property
    def latest(self) -> int | None:
        """Step of the newest checkpoint, a checkpoint being written included; None without checkpoints."""
        return self._newest

    @property
    def count(self) -> int:
        return len(self._manager.all_steps())

    def path(self, step: int) -> Path:
        return self.folder / str(step)

    def save(self, step: int, state: Any, run: dict[str, Any]) -> None:
        """Starts to save a step without a checkpoint.

        Args:
          step: number of the step, which names the checkpoint.
          state: pytree of arrays; they may be donated once this returns.
          run: JSON-ready description of the run, which a resumed run compares with its own.

        Raises:
          SaveError: this checkpoint, or the one before it, cannot be written.
        """
        nbytes, free = sum(x.nbytes for x in jax.tree.leaves(state)), _free_bytes(self.folder)
        if free < nbytes:
            raise SaveError(
                f"a checkpoint of {nbytes / 1e6:,.1f} MB cannot be written into {self.folder}, which has "
                f"{free / 1e6:,.1f} MB free"
            )
        self._saved.append(step)
        with _as_save_error(self):
            self._manager.save(
                step, args=ocp.args.Composite(state=ocp.args.StandardSave(state), run=ocp.args.JsonSave(run))
            )
        self._newest = step
        if any(x.sharding.memory_kind == "pinned_host" for x in jax.tree.leaves(state)):
            self.wait()  # XLA donates no array whose memory the writing thread reads

    def wait(self) -> None:
        """Waits until all checkpoints are on disk.

        Raises:
          SaveError: a checkpoint cannot be written.
        """
        with _as_save_error(self):
            self._manager.wait_until_finished()

    def _add_checksums(self) -> None:
        """Adds the checksums of a checkpoint that is complete but for its name; called by orbax's thread."""
        for step in self._saved if is_first() else ():
            for path in self.folder.glob(f"{step}.orbax-checkpoint-tmp*"):
                write_json(path / CHECKSUMS, compute_checksums(path))

    def run(self, step: int) -> dict[str, Any]:
        """The description of the run, as given to `save`."""
        return self._manager.restore(step, args=ocp.args.Composite(run=ocp.args.JsonRestore()))["run"]

    def restore_newest(
        self, shapes: Any, check: Callable[[Path, dict[str, Any], int], None]
    ) -> Restored | None:
        """Reads the newest sound checkpoint, and moves newer, damaged ones to `STEP.damaged`.

        A checkpoint is sound if its files have their checksums and can be read. Earlier versions of this
        program wrote no checksums.

        Args:
          shapes: as for `restore`.
          check: called with the checkpoint's path, run and step before its state is read; may raise.

        Returns:
          The state; None where there is no checkpoint.

        Raises:
          InputError: there are checkpoints, and all are damaged.
        """
        damaged: dict[int, str] = {}
        for step in sorted(self._manager.all_steps(), reverse=True):
            try:
                state = self._read(step, shapes, check)
            except DamagedError as error:
                damaged[step] = str(error)
            else:
                moved = {self._move_aside(newer): damage for newer, damage in damaged.items()}
                wait_for_all("damaged checkpoints were moved")
                self._manager.reload()
                self._newest = step
                return Restored(step, state, moved)
        if damaged:
            reasons = "; ".join(f"{step}: {damage}" for step, damage in damaged.items())
            raise InputError(
                f"No checkpoint in {self.folder} is sound ({reasons}). Start anew with another --out."
            )
        return None

    def _read(self, step: int, shapes: Any, check: Callable[[Path, dict[str, Any], int], None]) -> Any:
        damage = (find_damage(self.path(step)) or "") if is_first() else ""
        if tell_all(bool(damage)):
            raise DamagedError(damage)
        with _as_damage():
            run = self.run(step)
        check(self.path(step), run, step)
        with _as_damage():
            return self.restore(step, shapes)

    def _move_aside(self, step: int) -> Path:
        aside = self.folder / f"{step}.damaged"
        if is_first():
            shutil.rmtree(aside, ignore_errors=True)
            self.path(step).rename(aside)
        return aside

    def restore(self, step: int, shapes: Any) -> Any:
        """Reads the state after a step, bit for bit, in the structure of `shapes`.

        The arrays lie on the devices of the shardings in `shapes`, or on the default device; the run that
        saved the state may have had other devices.
        """
        default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        target = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding or default), shapes
        )
        return self._manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(target)))[
            "state"
        ]


def silence_writers() -> None:
    """Keeps the errors of orbax's threads, which `Checkpoints` raises, from the standard error as well."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    sys.excepthook = _of_main_thread(sys.excepthook)
    sys.unraisablehook = _of_main_thread(sys.unraisablehook)


def _of_main_thread(hook: Callable[..., Any]) -> Callable[..., Any]:
    def call(*error: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            hook(*error)

    return call


@contextlib.contextmanager
def _as_save_error(checkpoints: Checkpoints) -> Iterator[None]:
    """Raises errors of writing as `SaveError`; orbax raises those of its thread with types of its own."""
    try:
        yield
    except jax.errors.JaxRuntimeError:  # of the device, or of another process
        raise
    except (OSError, RuntimeError, ValueError) as error:
        # TensorStore names each file inside the other, then the system's error.
        code = re.search(r"os_error_code='(\d+)'", str(error))
        why = os.strerror(int(code[1])) if code else error
        raise SaveError(f"a checkpoint cannot be written into {checkpoints.folder}: {why}") from error


@contextlib.contextmanager
def _as_damage() -> Iterator[None]:
    """Raises the errors of reading a checkpoint that lacks parts, or has others, as `DamagedError`."""
    try:
        yield
    except jax.errors.JaxRuntimeError:  # of the device, such as too little memory
        raise
    except (KeyError, OSError, TypeError, ValueError) as error:
        raise DamagedError(f"{type(error).__name__} while reading it") from error


def list_finished(folder: Path) -> dict[int, Path]:
    """Lists the checkpoints that were written to their end: step -> path, the oldest first."""
    found = [path for path in folder.glob("*") if path.name.isdigit()]
    return {int(path.name): path for path in sorted(found, key=lambda path: int(path.name))}


def compute_checksums(folder: Path) -> dict[str, list[int]]:
    """Computes the size and the CRC-32 of each file of a checkpoint: path -> [bytes, CRC-32].

    Files beside the folders of the state and the run are left out: orbax changes them last.

    CRC-32 finds each single flipped bit and each damage of up to 32 bits in a row. It is no protection
    against intent.
    """
    files = (path for path in sorted(folder.glob("*/**/*")) if path.is_file())
    return {str(path.relative_to(folder)): [path.stat().st_size, _crc32(path)] for path in files}


def _crc32(path: Path) -> int:
    crc = 0
    with path.open("rb") as stream:
        for piece in iter(functools.partial(stream.read, _PIECE_NBYTES), b""):
            crc = zlib.crc32(piece, crc)
    return crc


def find_damage(folder: Path) -> str | None:
    """Compares a checkpoint's files with its checksums.

    Returns:
      The damage, e.g. "state/d/0 has another checksum"; None without damage, or without checksums.
    """
    path = folder / CHECKSUMS
    if not path.exists():
        return None
    try:
        expected = {name: (size, crc) for name, (size, crc) in json.loads(path.read_text()).items()}
    except (AttributeError, TypeError, ValueError):
        return f"{CHECKSUMS} cannot be read"
    for name, (size, crc) in expected.items():
        file = folder / name
        try:
            if file.stat().st_size != size:
                return f"{name} has {file.stat().st_size:,} bytes of {size:,}"
            if _crc32(file) != crc:
                return f"{name} has another checksum"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
    return None


def _free_bytes(folder: Path) -> int:
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def check_disk(
    folder: Path, nbytes: int, *, keep: int, present: int = 0, free_bytes: Callable[[Path], int] = _free_bytes
) -> None:
    """Refuses to start where the checkpoints will not fit.

    Args:
      folder: directory of the checkpoints; need not exist.
      nbytes: bytes of a checkpoint.
      keep: number of checkpoints to keep; while another is written, `keep + 1` are on disk. 0 writes none.
      present: number of checkpoints already in the folder.
      free_bytes: maps a folder to the bytes free on its disk.

    Raises:
      InputError: the disk has too little room.
    """
    need = nbytes * max(1, keep + 1 - present) if keep else 0
    free = free_bytes(Path(folder).resolve())
    if need > free:
        raise InputError(
            f"Checkpoints of {nbytes / 1e6:,.1f} MB, --keep {keep} and one being written, need "
            f"{need / 1e6:,.1f} MB on disk, got {free / 1e6:,.1f} MB free at {folder}. "
            "Choose another --out, a smaller --keep, or --keep 0, which writes none."
        )
