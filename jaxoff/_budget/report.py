"""The table of a step within a budget: a row for each kept or recomputed value."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

from jaxoff._budget.joint_graph import JointGraph, Placements, list_recomputed
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.dataflow import map_makers
from jaxoff._jaxpr.primitives import is_compute
from jaxoff._policy.decision import Placement
from jaxoff._report.tables import format_nbytes, render_text

# Words of JAX's transformations in scopes.
_TRANSFORMS = re.compile(r"\b(jvp|transpose|vmap|checkpoint|rematted_computation|closed_call|while|body)\b")


@dataclasses.dataclass(frozen=True)
class PlacedValue:
    """A value of a loop over layers.

    Attributes:
      value: the name of a named value, else `path:operation`, or "carry" for an input of the layer.
      shape: dtype and shape in an iteration.
      count: the number of iterations.
      nbytes: bytes of all iterations.
      placement: "save", "offload" or "recompute".
      source: `file:line (function)` of the code behind the value.
    """

    value: str
    shape: str
    count: int
    nbytes: int
    placement: Placement
    source: str


@dataclasses.dataclass(frozen=True)
class BudgetReport:
    """A step within a budget; prints as a table.

    Attributes:
      device_bytes: the budget of a device.
      peak_bytes: the compiled program's device memory.
      programs: the number of placements compiled in the search.
      values: a row for each kept value, and for each recomputed product and the like.
      in_parts: values that exist one part at a time, such as the logits of a head.
    """

    device_bytes: float
    peak_bytes: float
    programs: int
    values: tuple[PlacedValue, ...]
    in_parts: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as JSON-ready values."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        from rich.table import Table

        table = Table(box=None, pad_edge=False)
        for heading in ("value", "shape", "count", "bytes", "placement", "source"):
            right = heading in ("count", "bytes")
            table.add_column(heading, justify="right" if right else "left", overflow="fold")
        for v in self.values:
            cells = (v.value, v.shape, str(v.count), format_nbytes(v.nbytes), v.placement, v.source)
            table.add_row(*cells)
        peak, budget = format_nbytes(int(self.peak_bytes)), format_nbytes(int(self.device_bytes))
        programs = f"{self.programs} program{'s' * (self.programs > 1)} compiled"
        parts = "".join(f"\n{text}" for text in self.in_parts)
        return f"{render_text(table)}\n{parts}\ncompiled peak {peak} of {budget}; {programs}"


def list_values(pair: JointGraph, placements: Placements) -> Iterator[PlacedValue]:
    """The rows of a pair of loops: saved, offloaded, then recomputed values, each in program order.

    Of recomputed values, results of products, attention, loops and the like have a row.
    """
    makers = map_makers(pair.pure)
    recomputed = [v for eqn in list_recomputed(pair, placements) if is_compute(eqn) for v in eqn.outvars]
    groups: tuple[tuple[Placement, list[Any]], ...] = (
        ("save", [pair.values[i] for i in placements.saved]),
        ("offload", [pair.values[i] for i in placements.offloaded]),
        ("recompute", recomputed),
    )
    for placement, values in groups:
        for v in values:
            eqn = makers.get(v)
            value = pair.names.get(v) or ("carry" if eqn is None else _describe(eqn))
            yield PlacedValue(
                value,
                f"{compat.struct_of(v.aval).dtype}{list(compat.shape_of(v.aval))}",
                pair.count,
                pair.count * compat.nbytes(v.aval),
                placement,
                "" if eqn is None else compat.source_line(eqn),
            )


def _describe(eqn: compat.JaxprEqn) -> str:
    """A value without a name: its path in the user's scopes, and its operation."""
    scopes = _TRANSFORMS.sub("", str(eqn.source_info.name_stack)).replace("(", "").replace(")", "")
    path = "/".join(part for part in scopes.split("/") if part)
    return f"{path}:{eqn.primitive.name}" if path else eqn.primitive.name
