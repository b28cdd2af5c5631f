"""The start of a run in one process or many, by `jax.distributed`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from models.errors import InputError

# Seconds after which a killed process is missed; the other processes then end with an error.
HEARTBEAT_TIMEOUT_S = 30
_TIMEOUTS: dict[str, Any] = {
    "heartbeat_timeout_seconds": HEARTBEAT_TIMEOUT_S,
    "shutdown_timeout_seconds": HEARTBEAT_TIMEOUT_S,
}
# Variables in which the launchers known to `jax.distributed` give the number of processes.
_COUNTS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")


@dataclasses.dataclass(frozen=True)
class Processes:
    """The processes of a run.

    Attributes:
      coordinator: `HOST:PORT` of the first process; None lets `jax.distributed` detect all three.
      count: number of processes, or None.
      index: index of this process, from 0, or None.

    Raises:
      InputError: the address has no port, the index is out of range, or only some of the three are given.
    """

    coordinator: str | None = None
    count: int | None = None
    index: int | None = None

    def __post_init__(self):
        given = (self.coordinator, self.count, self.index)
        if all(value is None for value in given):
            return
        if self.coordinator is None or self.count is None or self.index is None:
            raise InputError(
                "--coordinator, --processes and --process go together; got "
                f"{self.coordinator!r}, {self.count} and {self.index}. Leave all three out under SLURM, "
                "Open MPI or Kubernetes."
            )
        host, _, port = self.coordinator.rpartition(":")
        if not host or not port.isdecimal():
            raise InputError(f"--coordinator takes HOST:PORT, got {self.coordinator!r}.")
        if not 0 <= self.index < self.count:
            raise InputError(f"--process is from 0 to --processes - 1 = {self.count - 1}, got {self.index}.")

    def start(self, environment: Mapping[str, str]) -> None:
        """Joins the other processes, if any; call before JAX looks for devices.

        Args:
          environment: environment of this process, where a launcher leaves the number of processes.
        """
        if self.coordinator is not None:
            jax.distributed.initialize(self.coordinator, self.count, self.index, **_TIMEOUTS)
        elif _has_peers(environment):
            jax.distributed.initialize(**_TIMEOUTS)


def _has_peers(environment: Mapping[str, str]) -> bool:
    """Tells whether a launcher started other processes."""
    counts = [environment[name] for name in _COUNTS if name in environment]
    indexed_job = "JOB_COMPLETION_INDEX" in environment and "KUBERNETES_SERVICE_HOST" in environment
    return indexed_job or any(count.isdecimal() and int(count) > 1 for count in counts)


def is_first() -> bool:
    """Tells whether this process writes the run's files and prints; the other processes stay silent."""
    return jax.process_index() == 0


def wait_for_all(where: str) -> None:
    """Waits until all processes have called with the same `where`."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(where)


def tell_all(value: bool) -> bool:
    """Returns the first process's value, in every process."""
    return value if jax.process_count() == 1 else bool(multihost_utils.broadcast_one_to_all(np.bool_(value)))
