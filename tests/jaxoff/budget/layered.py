"""A program's layers, and the program with other placements, for tests that need one of the two."""

from collections.abc import Callable

from jaxoff._budget.joint_graph import JointGraph, Placements
from jaxoff._budget.placements import LayeredProgram
from jaxoff._jaxpr.compat import ClosedJaxpr


def write_placed(
    closed: ClosedJaxpr, decide: Callable[[JointGraph], Placements | None], **options: bool
) -> ClosedJaxpr:
    """A program with other placements of its values; as `LayeredProgram.write`."""
    return LayeredProgram(closed).write(decide, **options)


def list_joint_graphs(closed: ClosedJaxpr) -> list[JointGraph]:
    """The layers of a program; as `LayeredProgram.list_joint_graphs`."""
    return LayeredProgram(closed).list_joint_graphs()
