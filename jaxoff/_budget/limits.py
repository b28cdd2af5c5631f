"""A budget of memory, as a caller gives it and in numbers."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable
from typing import Any

import jax


class UnmatchedError(ValueError):
    """A pattern of values to compress matches none."""


@dataclasses.dataclass(frozen=True)
class Budget:
    """The most memory of a step, on each device and for each device on the host; None on the host for any.

    `compress` has patterns of the values to keep in float8, by their names in the plan's table.

    An infinite `device_nbytes` stands for the limit of the device's allocator; see `resolve`.
    """

    device_nbytes: float
    host_nbytes: float | None = None
    compress: tuple[str, ...] = ()

    def times(self, devices: int) -> Budget:
        """The budget of several devices together."""
        host = None if self.host_nbytes is None else devices * self.host_nbytes
        return dataclasses.replace(self, device_nbytes=devices * self.device_nbytes, host_nbytes=host)

    def resolve(self, arguments: Any) -> Budget:
        """The budget of a call, in numbers.

        Args:
          arguments: of the call, a pytree; their bytes count as the step's, bytes of other arrays do not.

        Raises:
          ValueError: for an allocator without a limit, and in several processes.
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
    def of(
        device_bytes: float | str | None,
        host_bytes: float | str | None,
        compress: Iterable[str] | None = None,
    ) -> Budget | None:
        """The budget of a caller's arguments; None without a budget.

        Raises:
          ValueError: for anything but a number of bytes and a list of patterns, and for either without
            `device_bytes`.
        """
        host = None if host_bytes is None else parse_nbytes(host_bytes, "host_bytes")
        if device_bytes is None:
            for name, given in (("host_bytes", host_bytes), ("compress", compress)):
                if given is not None:
                    raise ValueError(f"{name} goes with device_bytes; got {name}={given!r} alone.")
            return None
        device = math.inf if device_bytes == "fit" else parse_nbytes(device_bytes, "device_bytes")
        return Budget(device, host, _parse_patterns(compress))


def _parse_patterns(compress: Iterable[str] | None) -> tuple[str, ...]:
    patterns = () if compress is None else compress if isinstance(compress, str) else tuple(compress)
    if isinstance(patterns, str) or not all(isinstance(pattern, str) for pattern in patterns):
        raise ValueError(f'compress is a list of names or patterns, such as ["mlp.*"]; got {compress!r}.')
    return patterns


def parse_nbytes(value: float | str, name: str) -> float:
    """A number of bytes, given as a number or as text such as "60GB" or "56 GiB".

    Args:
      value: the number or text.
      name: of the argument, for the error.

    Raises:
      ValueError: for text of another form, for numbers below 0, and for 0 bytes of device memory.
    """
    if isinstance(value, str):
        found = re.fullmatch(r"([0-9]+\.?[0-9]*|\.[0-9]+)\s*([kKMGT]i?)?B", value.strip())
        unit = (found.group(2) or "") if found else ""
        scale = (1024 if unit.endswith("i") else 1000) ** " KMGT".index(unit[:1].upper() or " ")
        nbytes = float(found.group(1)) * scale if found else math.nan
    else:
        try:
            nbytes = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            nbytes = math.nan
    is_zero = name == "host_bytes" and nbytes == 0  # nothing on the host
    if not (0 < nbytes < math.inf or is_zero):
        above = "" if name == "host_bytes" else " above 0"
        raise ValueError(
            f'{name} is a number of bytes{above}, or text such as "60GB" (B, kB, MB, GB, TB, KiB, MiB, '
            f"GiB, TiB); got {value!r}."
        )
    return nbytes
