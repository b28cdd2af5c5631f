"""A program's layers, the program with other placements, and what a fault leaves whole, for tests."""

from collections.abc import Callable
from typing import Any

from jaxoff._budget.joint_graph import JointGraph, Placements
from jaxoff._budget.placements import LayeredProgram
from jaxoff._jaxpr.compat import ClosedJaxpr


def write_placed(
    closed: ClosedJaxpr, decide: Callable[[JointGraph], Placements | None], **options: bool
) -> ClosedJaxpr:
    """A program with other placements of its values; as `LayeredProgram.write`."""
    return LayeredProgram(closed).write(decide, **options)


def check_placed_whole(closed: ClosedJaxpr, split: str, what: str, monkeypatch: Any, caplog: Any) -> None:
    """Checks that a fault of a function that splits a program's parts leaves these whole, and is said.

    Args:
      closed: a program with layers, which is split without the fault.
      split: the name of the function in `placements.py`.
      what: the parts, as the message names them.
      monkeypatch, caplog: of pytest.
    """

    def fail(*_: Any) -> None:
        raise NotImplementedError("of JAX")

    with caplog.at_level("INFO", "jaxoff"):
        parts = LayeredProgram.of(closed)
        monkeypatch.setattr(f"jaxoff._budget.placements.{split}", fail)
        whole = LayeredProgram.of(closed)
    assert len(parts.list_joint_graphs()[0].eqns) > len(whole.list_joint_graphs()[0].eqns)
    assert whole.closed is closed
    assert [record.message.split(";")[0] for record in caplog.records] == [
        f"no value in {what} is placed (NotImplementedError: of JAX)"
    ]


def list_joint_graphs(closed: ClosedJaxpr) -> list[JointGraph]:
    """The layers of a program; as `LayeredProgram.list_joint_graphs`."""
    return LayeredProgram(closed).list_joint_graphs()
