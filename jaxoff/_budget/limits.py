"""A budget of memory, as a caller gives it and in numbers."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Budget:
    """The most memory of a step, on each device and for it on the host; None on the host for any.

    An infinite `device_nbytes` stands for the limit of the device's allocator; see `resolve`.
    """

    device_nbytes: float
    host_nbytes: float | None = None

    def resolve(self, arguments: Any) -> Budget:
        """The budget of a call, in numbers.

        Args:
          arguments: of the call, a pytree; their bytes count as the step's, those of other arrays do not.

        Raises:
          ValueError: for the limit of an allocator that has none, and in one of several processes.
        """
        if math.isfinite(self.device_nbytes):
            return self
        device = jax.local_devices()[0]
        stats = device.memory_stats() or {}
        if "bytes_limit" not in stats or jax.process_count() > 1:
            where = f"{device.platform!r}, {jax.process_count()} process{'es' * (jax.process_count() > 1)}"
            raise ValueError(
                "device_bytes='fit' takes the limit of a GPU's allocator, in a single process; got "
                f"{where}. Give a number of bytes."
            )
        shards = [
            shard
            for leaf in jax.tree.leaves(arguments)
            if isinstance(leaf, jax.Array)
            for shard in leaf.addressable_shards
        ]
        own = sum(shard.data.nbytes for shard in shards if shard.device == device)
        others = max(0, stats["bytes_in_use"] - own)
        return dataclasses.replace(self, device_nbytes=stats["bytes_limit"] - others)

    @staticmethod
    def of(device_bytes: float | str | None, host_bytes: float | str | None) -> Budget | None:
        """The budget of a caller's arguments; None without a budget.

        Raises:
          ValueError: for anything but a number of bytes, and for a budget of host memory alone.
        """
        host = None if host_bytes is None else parse_nbytes(host_bytes, "host_bytes")
        if device_bytes is None:
            if host is not None:
                raise ValueError(f"host_bytes goes with device_bytes; got host_bytes={host_bytes!r} alone.")
            return None
        return Budget(math.inf if device_bytes == "fit" else parse_nbytes(device_bytes, "device_bytes"), host)


def parse_nbytes(value: float | str, name: str) -> float:
    """A number of bytes, given as a number or as text such as "60GB" or "56 GiB".

    Args:
      value: the number or text.
      name: of the argument, for the error.

    Raises:
      ValueError: for text of another form, and for numbers that are not above 0.
    """
    if isinstance(value, str):
        found = re.fullmatch(r"([0-9.]+)\s*([kMGT]i?)?B", value.strip())
        unit = (found.group(2) or "") if found else ""
        scale = (1024 if unit.endswith("i") else 1000) ** " kMGT".index(unit[:1] or " ")
        nbytes = float(found.group(1)) * scale if found else math.nan
    else:
        nbytes = float(value)
    if not 0 < nbytes < math.inf:
        raise ValueError(f'{name} is a number of bytes above 0, or text such as "60GB"; got {value!r}.')
    return nbytes
