"""The mesh of devices: five axes, with sizes from text like `data=2,expert=2,pipe=2`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from models.errors import InputError, near_miss

# Outermost first: neighbouring devices, which have the fastest links, share an expert axis.
AXES = ("pipe", "data", "fsdp", "context", "expert")
# Axes that divide the sequences of a batch.
BATCH = ("data", "fsdp", "expert")
# Axes that divide the tokens of a batch.
TOKENS = (*BATCH, "context")


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """The number of devices along each axis.

    Attributes:
      data: copies of the parameters; divides sequences.
      fsdp: parts of each parameter, gathered where used; divides sequences, too.
      context: parts of each sequence.
      expert: groups of experts; divides sequences, too.
      pipe: groups of layers.

    Raises:
      InputError: a size is below 1.

    Example:
      >>> from models.mesh import MeshShape
      >>> MeshShape.parse("data=2,pipe=4").size
      8
    """

    data: int = 1
    fsdp: int = 1
    context: int = 1
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
        """Reads axes and their sizes; a missing axis has size 1.

        Raises:
          InputError: an axis is unknown or given twice, or a size is no whole number above 0.
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
        """Number of parts of a batch."""
        return math.prod(getattr(self, axis) for axis in BATCH)

    @property
    def parts(self) -> int:
        """Number of parts of a batch's tokens."""
        return self.batch * self.context

    def build(self, devices: Sequence[Any] | None = None) -> Mesh:
        """Builds the mesh, by default over all devices of all processes.

        Raises:
          InputError: the product of the sizes is not the number of devices.
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
        axes = (axis for axis in ("data", "fsdp", "context", "expert", "pipe") if getattr(self, axis) > 1)
        return ",".join(f"{axis}={getattr(self, axis)}" for axis in axes) or "data=1"
