"""How the compiler divides the values of a layer loop over devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxoff._jaxpr.meshes import explicit_mesh, list_axes


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
    """Pins value number `k` to its sharding, if that is known.

    Of a mesh with Explicit and Auto axes the type has the division over the first; the others are pinned.
    """
    if k not in shardings:
        return value
    sharding, mesh = shardings[k], explicit_mesh(jax.typeof(value))
    if mesh is not None and AxisType.Auto in mesh.axis_types:
        sharding = NamedSharding(mesh, P(*(_keep_auto(mesh, axes) for axes in sharding.spec)))
    return jax.lax.with_sharding_constraint(value, sharding)


def _keep_auto(mesh: AbstractMesh, axes: str | tuple[str, ...] | None) -> tuple[str, ...] | None:
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return tuple(name for name in list_axes(axes) if types[name] == AxisType.Auto) or None
