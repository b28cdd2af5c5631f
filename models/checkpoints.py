"""Checkpoints: written aside and renamed when whole, so that a killed run leaves the last good one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from models.errors import InputError


class Checkpoints:
    """The checkpoints of one run, each a step's state and what the run was.

    A save copies the state to host memory and returns; a thread writes it under a temporary name, which
    becomes the step's name once everything is on disk. Opening removes what a killed process left under
    temporary names.

    Args:
      folder: where they are; made if it is missing.
      keep: how many to keep, the newest ones.

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
        """The newest checkpoint's step, one being written included; None if there is none."""
        return self._newest

    @property
    def count(self) -> int:
        return len(self._manager.all_steps())

    def path(self, step: int) -> Path:
        return self.folder / str(step)

    def save(self, step: int, state: Any, run: dict[str, Any]) -> None:
        """Starts to save a step that has no checkpoint yet.

        Args:
          step: its name.
          state: a pytree of arrays, which may be donated once this returns.
          run: JSON-ready; what `restore` is asked to compare.
        """
        self._manager.save(
            step, args=ocp.args.Composite(state=ocp.args.StandardSave(state), run=ocp.args.JsonSave(run))
        )
        self._newest = step

    def wait(self) -> None:
        """Returns once what was saved is on disk; raises what went wrong there."""
        self._manager.wait_until_finished()

    def run(self, step: int) -> dict[str, Any]:
        """What was said of the run when the step was saved."""
        return self._manager.restore(step, args=ocp.args.Composite(run=ocp.args.JsonRestore()))["run"]

    def restore(self, step: int, shapes: Any) -> Any:
        """A step's state, bit for bit, in the structure of `shapes`.

        It is on the devices of their shardings, whatever those were that saved it, or on the default device.
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
      folder: where they go; it need not exist.
      nbytes: of one.
      keep: how many are kept. One more is on disk while it is written. 0: none is ever written.
      present: how many are there already.
      free_bytes: (folder) to the bytes free there.

    Raises:
      InputError: if they do not fit.
    """
    need = nbytes * max(1, keep + 1 - present) if keep else 0
    free = free_bytes(Path(folder).resolve())
    if need > free:
        raise InputError(
            f"Checkpoints of {nbytes / 1e6:,.1f} MB, --keep {keep} and one being written, need "
            f"{need / 1e6:,.1f} MB on disk, got {free / 1e6:,.1f} MB free at {folder}. "
            "Choose another --out, a smaller --keep, or --keep 0, which writes none."
        )
