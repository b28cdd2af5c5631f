"""Checkpoints, written under a temporary name, then renamed: a killed run leaves the last good one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from models.errors import InputError


class Checkpoints:
    """The checkpoints of a run, each with the state after a step and the run's description.

    A save copies the state to host memory and returns. A thread writes the copy under a temporary name, which
    becomes the step's name once everything is on disk. Opening removes the temporary files of a killed
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
            max_to_keep=keep, cleanup_tmp_directories=True, step_prefix=None
        )
        self._manager = ocp.CheckpointManager(self.folder, options=options, item_names=("state", "run"))
        self._newest = self._manager.latest_step()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *exception: object) -> None:
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
        """
        self._manager.save(
            step, args=ocp.args.Composite(state=ocp.args.StandardSave(state), run=ocp.args.JsonSave(run))
        )
        self._newest = step

    def wait(self) -> None:
        """Waits until all checkpoints are on disk; raises the errors of writing them."""
        self._manager.wait_until_finished()

    def run(self, step: int) -> dict[str, Any]:
        """The description of the run, as given to `save`."""
        return self._manager.restore(step, args=ocp.args.Composite(run=ocp.args.JsonRestore()))["run"]

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
