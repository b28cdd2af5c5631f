"""A plan: a step within a budget of memory, with a row for each kept or recomputed value."""

from __future__ import annotations

import dataclasses
import glob
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jaxoff._budget.joint_graph import JointGraph, Placements, list_recomputed
from jaxoff._budget.labels import find_name, find_origin, format_type, label, map_makers_inside
from jaxoff._budget.limits import Budget
from jaxoff._device.kernel_time import program_ms
from jaxoff._device.profile import Device
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import JaxprEqn, Var
from jaxoff._jaxpr.dataflow import map_makers
from jaxoff._jaxpr.float8 import compressed_nbytes
from jaxoff._jaxpr.primitives import is_compute
from jaxoff._jaxpr.split_maps import look_inside
from jaxoff._policy.decision import Placement
from jaxoff._policy.policy import Policy
from jaxoff._report.tables import format_ms, format_nbytes, render_text

# Part of the largest value below which values share a row of the table, and are left out of a policy.
_SMALL = 1e-3

# Part of the budget below which a plan says why it leaves the rest.
_UNUSED = 0.9


@dataclasses.dataclass(frozen=True)
class PlacedValue:
    """A value of a layer.

    Attributes:
      value: the name of a named value, else `path:operation`, or "carry" for an input of the layer.
      shape: dtype and shape in a layer.
      count: the number of such arrays, one or several of each layer.
      nbytes: bytes of all of them.
      placement: "save", "offload" or "recompute".
      source: `file:line (function)` of the code behind the value; for an input of the layer, of its first
        reader.
      is_named: whether `value` is a name.
    """

    value: str
    shape: str
    count: int
    nbytes: int
    placement: Placement
    source: str
    is_named: bool = False


def describe_kept(values: Sequence[PlacedValue]) -> str:
    """The kept values, in bytes of all iterations."""
    saved, offloaded = (
        sum(v.nbytes for v in values if v.placement == placement) for placement in ("save", "offload")
    )
    return f"{format_nbytes(saved)} saved and {format_nbytes(offloaded)} offloaded"


@dataclasses.dataclass(frozen=True)
class Plan:
    """A step within a budget of memory: where each value waits for the backward pass. Prints as a table.

    Attributes:
      device_bytes: the budget of a device.
      peak_bytes: device memory of the step: compiled, or estimated.
      host_bytes: bytes of offloaded values, and of state on the host.
      step_ms: duration of a step, by the model of time.
      device: name of the profile behind `step_ms`.
      is_compiled: whether `peak_bytes` is the compiler's. An estimate keeps a fifth of the budget free.
      programs: the number of placements tried; 0 for the step as the user wrote it.
      values: a row for each array of state on the host, for each kept value, and for each recomputed product
        and the like.
      in_parts: values in memory a part at a time, e.g. the logits of a head.
      is_fastest: whether no other placements are faster in any memory, by the model of time.
      step: the step, to be called or lowered.
      in_shardings: a pytree like the step's positional arguments: the sharding of each array, with the memory
        where it rests between steps. None for an estimate.
    """

    device_bytes: float
    peak_bytes: float
    host_bytes: int
    step_ms: float
    device: str
    is_compiled: bool
    programs: int
    values: tuple[PlacedValue, ...]
    in_parts: tuple[str, ...] = ()
    is_fastest: bool = False
    step: Any = dataclasses.field(default=None, repr=False, compare=False)
    in_shardings: Any = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def policy(self) -> Policy | None:
        """The placements as a policy for `jax.checkpoint`; None where names cannot say them.

        They can if each kept value has a name, or is the saved input of a layer, and no name has two
        placements. Values of a thousandth of the largest do not count.
        """
        large = list(self._list_large())
        placements = {(v.value, v.placement) for v in large if v.is_named}
        names = [name for name, _ in placements]
        unsaid = [v for v in large if not v.is_named and v.placement != "recompute"]
        if len(set(names)) < len(names) or any((v.value, v.placement) != ("carry", "save") for v in unsaid):
            return None

        def list_names(placement: Placement) -> tuple[str, ...]:
            return tuple(glob.escape(name) for name, given in placements if given == placement)

        return Policy(list_names("offload"), list_names("save"), list_names("recompute"))

    def _list_large(self) -> Iterator[PlacedValue]:
        least = _SMALL * max((v.nbytes for v in self.values), default=0)
        return (v for v in self.values if v.nbytes >= least)

    def to_dict(self) -> dict[str, Any]:
        """The fields but for the step and its shardings, as JSON-ready values."""
        left_out = ("step", "in_shardings")
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in left_out}
        return fields | {"values": [dataclasses.asdict(v) for v in self.values]}

    def to_json(self) -> str:
        """`to_dict` as text."""
        return json.dumps(self.to_dict(), indent=1)

    def __str__(self) -> str:
        from rich.table import Table

        table = Table(box=None, pad_edge=False)
        for heading in ("value", "shape", "count", "bytes", "placement", "source"):
            right = heading in ("count", "bytes")
            table.add_column(heading, justify="right" if right else "left", overflow="fold")
        large = list(self._list_large())
        for v in large:
            cells = (v.value, v.shape, str(v.count), format_nbytes(v.nbytes), v.placement)
            table.add_row(*cells, shorten(v.source))
        rows = [render_text(table)] if large else []
        if small := [v for v in self.values if v not in large]:
            nbytes = format_nbytes(sum(v.nbytes for v in small))
            rows.append(f"{len(small)} smaller value{'s' * (len(small) > 1)}: {nbytes}")
        rows += ["", *(f"in parts: {shorten(text)}" for text in self.in_parts)]
        peak, budget = format_nbytes(int(self.peak_bytes)), format_nbytes(int(self.device_bytes))
        tried = (
            f"{self.programs} program{'s' * (self.programs > 1)} tried"
            if self.programs
            else "as it is written"
        )
        how = f"compiled peak {peak}" if self.is_compiled else f"estimated peak {peak}, not compiled,"
        rows.append(f"{how} of {budget}; {tried}; host {format_nbytes(self.host_bytes)}")
        rows.append(f"step about {format_ms(self.step_ms)} on {self.device}")
        is_left = self.peak_bytes < _UNUSED * self.device_bytes and self.values
        if is_left and (self.is_fastest or self.is_compiled):  # an estimate leaves a part free
            why = "no placements are faster, by the model of time"
            why = why if self.is_fastest else "no faster placements were found that fit"
            rows.append(f"The rest of the budget is left: {why}.")
        if self.programs and not self.values:
            rows.append(
                "No value is placed: no layers with a backward pass were found. A loss is planned as "
                "jax.value_and_grad(loss). A jax.shard_map returns scalars for the loss, not arrays."
            )
        return "\n".join(rows)


def make_plan_as_written(
    closed: compat.ClosedJaxpr, sizes: tuple[float, int], budget: Budget, device: Device, step: Any
) -> Plan:
    """The plan of a step which fits as the user wrote the step, and under no other placements.

    Args:
      closed: the program.
      sizes: its bytes on a device and on the host.
      budget, device, step: of the plan.
    """
    nbytes, host_nbytes = sizes
    return Plan(
        device_bytes=budget.device_nbytes,
        peak_bytes=nbytes,
        host_bytes=host_nbytes,
        step_ms=program_ms(closed.jaxpr, device),
        device=device.name,
        is_compiled=True,
        programs=0,
        values=(),
        step=step,
    )


def shorten(source: str) -> str:
    """A source line with the path from the current folder, or from that of installed packages."""
    return re.sub(r"\S*/site-packages/", "", source).replace(f"{os.getcwd()}{os.sep}", "")


def merge_rows(groups: Iterable[Iterable[PlacedValue]]) -> tuple[PlacedValue, ...]:
    """The rows of groups of layers; those of the same value, shape, placement and source are one row."""
    rows: dict[Any, PlacedValue] = {}
    for v in itertools.chain.from_iterable(groups):
        key = v.value, v.shape, v.placement, v.source
        if key in rows:
            count, nbytes = rows[key].count + v.count, rows[key].nbytes + v.nbytes
            v = dataclasses.replace(v, count=count, nbytes=nbytes)
        rows[key] = v
    return tuple(rows.values())


def list_values(pair: JointGraph, placements: Placements) -> Iterator[PlacedValue]:
    """The rows of a layer: saved, offloaded, then recomputed values, each in program order.

    Of recomputed values, results of products, attention, loops and the like have a row.
    """
    own, loops = _Rows(pair), [_Rows(inner.graph, pair.count) for inner in pair.nested]
    of_iterations = {
        stack: (rows, v)
        for rows, inner in zip(loops, pair.nested, strict=True)
        for v, stack in inner.stacks.items()
    }
    compressed = {pair.values[i] for i in placements.compressed}
    kept: tuple[tuple[Placement, list[Var]], ...] = (
        ("save", [pair.values[i] for i in placements.saved]),
        ("offload", [pair.values[i] for i in placements.offloaded]),
    )
    for placement, values in kept:
        for v in values:
            rows, value = of_iterations.get(v, (own, v))
            yield rows.describe(value, placement, is_compressed=v in compressed)
    again = list_recomputed(pair, placements)
    repeated, nested = {id(eqn) for eqn in again}, {id(inner.forward) for inner in pair.nested}
    yield from own.describe_recomputed(eqn for eqn in again if id(eqn) not in nested)
    for rows, inner, places in zip(loops, pair.nested, placements.nested, strict=True):
        of_iteration = list_recomputed(inner.graph, Placements(places))
        yield from rows.describe_recomputed(
            inner.graph.eqns if id(inner.forward) in repeated else of_iteration
        )


class _Rows:
    """Rows for the values of a layer; `times`: how often the layers run, each in a layer around."""

    def __init__(self, graph: JointGraph, times: int = 1):
        self._graph, self._count = graph, times * graph.count
        self._pure = [look_inside(eqn) for eqn in graph.pure]
        self._makers, self._inside = map_makers(self._pure), map_makers_inside(self._pure)

    def describe(self, v: Var, placement: Placement, *, is_compressed: bool = False) -> PlacedValue:
        """The row of a value."""
        origin = find_origin(v, self._makers)
        eqn = self._makers.get(origin)
        # Of an input, its first reader.
        shown = eqn or next((reader for reader in self._pure if v in reader.invars), None)
        inner = self._inside.get(origin)
        source = compat.source_line(inner) if inner else ""
        nbytes = compressed_nbytes(v.aval) if is_compressed else compat.nbytes(v.aval)
        return PlacedValue(
            label(self._graph, v, self._makers, self._inside),
            format_type(v.aval, "float8_e4m3fn" if is_compressed else None),
            self._count,
            self._count * nbytes,
            placement,
            source or ("" if shown is None else compat.source_line(shown)),
            is_named=bool(find_name(self._graph, v)),
        )

    def describe_recomputed(self, eqns: Iterable[JaxprEqn]) -> Iterator[PlacedValue]:
        """The rows of recomputed values, of the equations which compute."""
        computing = (eqn for eqn in map(look_inside, eqns) if is_compute(eqn))
        return (self.describe(v, "recompute") for eqn in computing for v in eqn.outvars)
