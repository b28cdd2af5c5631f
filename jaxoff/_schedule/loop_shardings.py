"""How the compiler divides the values of a layer loop over devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
from jax.sharding import NamedSharding


@dataclasses.dataclass(frozen=True)
class LoopShardings:
    """The shardings of a layer loop's values; a value without an entry has an unknown one.

    Attributes:
      carry: index of a carried value -> its sharding.
      ys: index of a ys that is sent to the host -> the sharding of a row on the device.
      xs: index of a prefetched xs -> the sharding of a row on the device.
    """

    carry: dict[int, NamedSharding] = dataclasses.field(default_factory=dict)
    ys: dict[int, NamedSharding] = dataclasses.field(default_factory=dict)
    xs: dict[int, NamedSharding] = dataclasses.field(default_factory=dict)


def pin(value: jax.Array, shardings: Mapping[int, NamedSharding], k: int) -> jax.Array:
    """Pins value number `k` to its sharding, if that is known."""
    return jax.lax.with_sharding_constraint(value, shardings[k]) if k in shardings else value
