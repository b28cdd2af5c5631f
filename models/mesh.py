"""The mesh of devices: four axes, their sizes from text such as `data=2,expert=2,pipe=2`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from models.errors import InputError, near_miss

# The outermost first: devices next to each other, which have the fastest links, share an expert axis.
AXES = ("pipe", "data", "fsdp", "expert")
# Each device of these axes has sequences of its own.
BATCH = ("data", "fsdp", "expert")


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """How many devices each axis has.

    Attributes:
      data: copies of the parameters, each with sequences of its own.
      fsdp: parts that each parameter is divided into, gathered where it is used; sequences are divided, too.
      expert: parts that the experts are divided into; sequences are divided, too.
      pipe: parts that the layers are divided into.

    Raises:
      InputError: for a size below 1.

    Example:
      >>> from models.mesh import MeshShape
      >>> MeshShape.parse("data=2,pipe=4").size
      8
    """

    data: int = 1
    fsdp: int = 1
    expert: int = 1
    pipe: int = 1

    def __post_init__(self):
        for axis in AXES:
            if getattr(self, axis) < 1:
                raise InputError(
                    f"an axis of --mesh has at least 1 device, got {axis}={getattr(self, axis)}."
                )

    @classmethod
    def parse(cls, text: str) -> MeshShape:
        """Reads axes and their sizes; an axis that is left out has size 1.

        Raises:
          InputError: for an unknown axis, one given twice, or a size that is no whole number above 0.
        """
        sizes: dict[str, int] = {}
        for part in filter(None, map(str.strip, text.split(","))):
            axis, equals, size = (side.strip() for side in part.partition("="))
            if not equals or axis not in AXES or not size.isdecimal():
                raise InputError(
                    f"--mesh takes AXIS=SIZE with an axis out of {', '.join(AXES)} and commas between, "
                    f"such as data=2,pipe=2; got {part!r}.{near_miss(axis, AXES)}"
                )
            if axis in sizes:
                raise InputError(f"--mesh takes each axis once, got {axis!r} twice.")
            sizes[axis] = int(size)
        return cls(**sizes)

    @property
    def size(self) -> int:
        return math.prod(getattr(self, axis) for axis in AXES)

    @property
    def batch(self) -> int:
        """Into how many parts a batch is divided."""
        return math.prod(getattr(self, axis) for axis in BATCH)

    def build(self, devices: Sequence[Any] | None = None) -> Mesh:
        """The mesh, over all devices of all processes by default.

        Raises:
          InputError: if there are not as many devices as the axes need.
        """
        found = len(jax.devices() if devices is None else devices)
        if found != self.size:
            raise InputError(
                f"--mesh takes sizes whose product is the number of devices, {found}, got {self} = "
                f"{self.size}."
            )
        sizes = [getattr(self, axis) for axis in AXES]
        return jax.make_mesh(sizes, AXES, (AxisType.Auto,) * len(AXES), devices=devices)

    def __str__(self) -> str:
        axes = (axis for axis in ("data", "fsdp", "expert", "pipe") if getattr(self, axis) > 1)
        return ",".join(f"{axis}={getattr(self, axis)}" for axis in axes) or "data=1"
