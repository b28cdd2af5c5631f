"""Row-wise regions of a program, run part by part: the cross entropy over a large vocabulary is one.

A head makes the logits of all tokens, the loss, and the loss's gradient with respect to the logits, as large
as the logits. Between the products, a row depends on its own token alone. So a loop over parts of the tokens
makes the same values, with wide intermediate arrays of a single part. Products over all rows, such as the
weights' gradients, stay outside of the loop and read whole arrays: the order of their sums does not change.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxoff._budget.labels import format_type
from jaxoff._budget.loop_pairs import find_loop_pairs
from jaxoff._budget.row_axes import find_operand_axes, find_result_axis, resize
from jaxoff._budget.sequences import find_sequences
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jaxoff._jaxpr.dataflow import index_makers, index_readers, mark_dependents, variables
from jaxoff._jaxpr.inline import Renamed, inline_program, resolve, trace_call
from jaxoff._jaxpr.primitives import is_compute
from jaxoff._report.tables import format_nbytes

# A part has at least this many rows, if it can: products of fewer rows run below the device's rate.
_PART_ROWS = 2048
_MOST_PARTS = 8
# Makers and readers of values with this part of the seed's bytes join the region.
_LARGE = 1 / 8


@dataclasses.dataclass(frozen=True)
class Region:
    """Equations that run on a part of their rows at a time.

    Attributes:
      eqns: the equations, in program order.
      axes: the axis of the rows, by value; values without an entry are read as a whole.
      rows: the number of rows.
      parts: the number of parts, a divisor of `rows`.
      results: the values that other equations read, or results of the program.
      nbytes: bytes of the largest value that exists only in parts.
    """

    eqns: tuple[JaxprEqn, ...]
    axes: dict[Var, int]
    rows: int
    parts: int
    results: tuple[Var, ...]
    nbytes: int

    @property
    def spared_nbytes(self) -> int:
        """Bytes of the largest value that are no longer needed at once."""
        return self.nbytes - self.nbytes // self.parts

    def __str__(self) -> str:
        largest = max((v for eqn in self.eqns for v in eqn.outvars if v not in self.results), key=_nbytes)
        where = compat.source_line(self.eqns[0])
        return f"{format_type(largest.aval)}, {format_nbytes(self.nbytes)}, in {self.parts} parts: {where}"


def write_in_parts(
    closed: ClosedJaxpr, least_nbytes: float, *, is_divided: bool = False
) -> tuple[ClosedJaxpr, list[Region]]:
    """A program with its widest row-wise region in parts, at each level outside of its loops over layers.

    Args:
      closed: a differentiated program.
      least_nbytes: the size of the values worth a loop over parts.
      is_divided: whether the compiler divides values over devices. Their first axis is then not divided into
        parts: it is the one of the batch, and each part would be on some of the devices only.

    Returns:
      The program, and its regions; none where no region with such values was found.
    """
    regions: list[Region] = []

    def write(program: Jaxpr) -> Jaxpr:
        level = inline_program(program)
        paired = {id(eqn) for pair in find_loop_pairs(level) for eqn in (pair.forward, pair.backward)}
        layers = found.all_values if (found := find_sequences(level)) else frozenset[Var]()
        eqns = [eqn if id(eqn) in paired else compat.map_programs(eqn, write) for eqn in level.eqns]
        level = level.replace(eqns=eqns)
        region = find_region(level, least_nbytes, first_axis=int(is_divided), excluded=layers)
        if region is None:
            return level
        regions.append(region)
        return _write_region(level, region, is_divided=is_divided)

    written = compat.map_open(closed, write)
    return (written, regions) if regions else (closed, [])


def find_region(
    level: Jaxpr, least_nbytes: float, *, first_axis: int = 0, excluded: frozenset[Var] = frozenset()
) -> Region | None:
    """The row-wise region that spares the most memory; None if none spares `least_nbytes`.

    Args:
      level: the equations of a program or of a loop's body, calls inlined.
      least_nbytes: the bytes to be spared at least.
      first_axis: the first of the axes to be divided.
      excluded: values whose equations are in no region.
    """
    graph = _Graph(level, excluded)
    found: list[Region] = []
    for seed in graph.list_seeds(least_nbytes):
        shape = compat.shape_of(seed.aval)
        for axis in sorted(range(first_axis, len(shape)), key=lambda i: -shape[i]):
            region = _Growth(graph, seed, axis).finish(least_nbytes)
            if region is not None:
                found.append(region)
    return max(found, key=lambda region: region.spared_nbytes, default=None)


class _Graph:
    """The equations of a level with their makers and readers."""

    def __init__(self, level: Jaxpr, excluded: frozenset[Var]):
        self.eqns, self.excluded = level.eqns, excluded
        self.outs = {v for v in level.outvars if isinstance(v, Var)}
        self.makers, self.readers = index_makers(level.eqns), index_readers(level.eqns)

    def list_seeds(self, least_nbytes: float) -> list[Var]:
        """The largest products and their like: a value for each shape."""
        by_shape: dict[Any, Var] = {}
        for eqn in self.eqns:
            is_seed = eqn.primitive.name == "dot_general" and self.excluded.isdisjoint(eqn.outvars)
            for v in eqn.outvars if is_seed else ():
                wide = [w for i in self.readers.get(v, ()) for w in self.eqns[i].outvars]
                if max(map(_nbytes, (v, *wide))) >= least_nbytes:
                    by_shape.setdefault(compat.shape_of(v.aval), v)
        return list(by_shape.values())


class _Growth:
    """A region that grows from a value along an axis of its rows."""

    def __init__(self, graph: _Graph, seed: Var, axis: int):
        self._graph, self._seed = graph, seed
        self._axes = {seed: axis}
        self._whole: set[Var] = set()  # values that equations of the region read as a whole
        self._inside: set[int] = set()
        self._large = _LARGE * _nbytes(seed)

    def finish(self, least_nbytes: float) -> Region | None:
        """The grown region; None if it spares too little."""
        self._grow([self._seed])
        while (between := self._find_between()) is not None:
            if not self._add(between):
                self._drop_dependents(between)
        return self._make(least_nbytes)

    def _grow(self, todo: list[Var]) -> None:
        """Adds the makers and the readers of large values, as far as the equations are row-wise."""
        while todo:
            v = todo.pop()
            if _nbytes(v) < self._large:
                continue
            maker = self._graph.makers.get(v)
            for i in (*([] if maker is None else [maker]), *self._graph.readers.get(v, ())):
                if i not in self._inside:
                    before = set(self._axes)
                    if self._add(i):
                        todo += self._axes.keys() - before

    def _add(self, i: int) -> bool:
        """Adds an equation; returns False if it is not row-wise, or at odds with the others."""
        eqn = self._graph.eqns[i]
        axis = self._find_axis(eqn)
        is_left = bool(eqn.effects) or not self._graph.excluded.isdisjoint(eqn.outvars)
        axes = None if axis is None or is_left else find_operand_axes(eqn, axis)
        if axis is None or axes is None:
            return False
        rows = {v: a for v, a in zip(eqn.invars, axes, strict=True) if isinstance(v, Var) and a is not None}
        whole = {v for v, a in zip(eqn.invars, axes, strict=True) if isinstance(v, Var) and a is None}
        rows.update(dict.fromkeys(eqn.outvars, axis))
        made = {v for j in self._inside for v in self._graph.eqns[j].outvars}
        if any(self._axes.get(v, a) != a or v in self._whole for v, a in rows.items()):
            return False
        if whole & (made | rows.keys()) or any(self._size(v, a) != self._rows for v, a in rows.items()):
            return False
        self._inside.add(i)
        self._axes.update(rows)
        self._whole |= whole
        return True

    @property
    def _rows(self) -> int:
        return self._size(self._seed, self._axes[self._seed])

    @staticmethod
    def _size(v: Var, axis: int) -> int:
        shape = compat.shape_of(v.aval)
        return shape[axis] if axis < len(shape) else 0

    def _find_axis(self, eqn: JaxprEqn) -> int | None:
        """The axis of an equation's results, by its results or by an operand whose axis is known."""
        for v in eqn.outvars:
            if v in self._axes:
                return self._axes[v]
        for k, v in enumerate(eqn.invars):
            if isinstance(v, Var) and v in self._axes:
                axis = find_result_axis(eqn, k, self._axes[v])
                if axis is not None:
                    return axis
        return None

    def _find_between(self) -> int | None:
        """The first equation outside that depends on the region and on which the region depends."""
        eqns = self._graph.eqns
        made = {v for i in self._inside for v in eqns[i].outvars}
        depends = mark_dependents(eqns, made)
        needed: set[Var] = {v for i in self._inside for v in variables(eqns[i])}
        between = None
        for i in reversed(range(len(eqns))):
            if needed.intersection(eqns[i].outvars):
                needed.update(variables(eqns[i]))
                if depends[i] and i not in self._inside:
                    between = i
        return between

    def _drop_dependents(self, i: int) -> None:
        """Takes the equations that depend on an equation out of the region."""
        depends = mark_dependents(self._graph.eqns, set(self._graph.eqns[i].outvars))
        self._inside -= {j for j in self._inside if depends[j]}

    def _make(self, least_nbytes: float) -> Region | None:
        graph, inside = self._graph, sorted(self._inside)
        made = [v for i in inside for v in graph.eqns[i].outvars]
        results = tuple(
            v for v in made if v in graph.outs or any(i not in self._inside for i in graph.readers.get(v, ()))
        )
        if not all(self._is_read_by_products(v) for v in results if _nbytes(v) >= self._large):
            return None  # a part of a chain of elementwise equations, which needs little memory as it is
        nbytes = max((_nbytes(v) for v in made if v not in results), default=0)
        width = max(
            (n for i, n in enumerate(compat.shape_of(self._seed.aval)) if i != self._axes[self._seed]),
            default=1,
        )
        parts = _count_parts(self._rows, math.prod(compat.shape_of(self._seed.aval)) // max(1, width))
        region = Region(tuple(graph.eqns[i] for i in inside), self._axes, self._rows, parts, results, nbytes)
        return region if region.spared_nbytes >= least_nbytes else None

    def _is_read_by_products(self, v: Var) -> bool:
        """Whether only products and the like read a value outside of the region."""
        outside = (self._graph.eqns[i] for i in self._graph.readers.get(v, ()) if i not in self._inside)
        return v not in self._graph.outs and all(map(is_compute, outside))


def _nbytes(v: Var) -> int:
    return compat.nbytes(v.aval)


def _count_parts(rows: int, products: int) -> int:
    """The number of parts for rows along an axis; 1 if no small number divides them.

    Args:
      rows: the rows along the axis.
      products: the rows of the region's products, along all axes.
    """
    parts = min(_MOST_PARTS, max(2, products // _PART_ROWS))
    return next((n for n in range(parts, 1, -1) if rows % n == 0), 1)


def _write_region(level: Jaxpr, region: Region, *, is_divided: bool) -> Jaxpr:
    """A level with the loop over a region's parts in the place of the region's equations."""
    inside = {id(eqn) for eqn in region.eqns}
    made = {v for eqn in region.eqns for v in eqn.outvars}
    last = max(i for i, eqn in enumerate(level.eqns) if id(eqn) in inside)
    depends = mark_dependents(level.eqns, made)
    before, after = [], []
    for i, eqn in enumerate(level.eqns):
        if id(eqn) not in inside:
            (after if depends[i] or i > last else before).append(eqn)
    operands = list(dict.fromkeys(v for eqn in region.eqns for v in variables(eqn) if v not in made))
    loop, results = trace_call(
        lambda *values: _run_parts(region, dict(zip(operands, values, strict=True)), is_divided=is_divided),
        operands,
        like=region.eqns[0],
    )
    renamed: Renamed = dict(zip(region.results, results, strict=True))
    if not is_divided:
        loop += _read_early(level, region, after, renamed)
    after = [eqn.replace(invars=[resolve(renamed, v) for v in eqn.invars]) for eqn in after]
    outvars = [resolve(renamed, v) for v in level.outvars]
    return level.replace(eqns=[*before, *loop, *after], outvars=outvars)


def _read_early(level: Jaxpr, region: Region, after: list[JaxprEqn], renamed: Renamed) -> list[JaxprEqn]:
    """Takes the readers of the largest result out of `after`, to run right after the loop over parts.

    XLA would make the weights' gradient of a head last, and hold the logits' gradient during the backward
    pass of all layers. A barrier makes all that depends on the region wait for these readers.
    """
    largest = max(region.results, key=_nbytes)
    late = set(region.results) | {v for eqn in after for v in eqn.outvars}
    ready = [
        eqn for eqn in after if largest in variables(eqn) and late.isdisjoint({*variables(eqn)} - {largest})
    ]
    read_later = {v for eqn in after if eqn not in ready for v in variables(eqn)}
    read_later |= {v for v in level.outvars if isinstance(v, Var)}
    if not ready or largest in read_later:
        return []
    values = [v for eqn in ready for v in eqn.outvars]
    waiting = [v for v in region.results if v in read_later]
    early = [eqn.replace(invars=[resolve(renamed, v) for v in eqn.invars]) for eqn in ready]
    ordered, barrier = compat.make_barrier(
        [*values, *(resolve(renamed, v) for v in waiting)], like=region.eqns[-1]
    )
    renamed.update(zip([*values, *waiting], ordered, strict=True))
    after[:] = [eqn for eqn in after if eqn not in ready]
    return [*early, barrier]


def _run_parts(region: Region, operands: dict[Var, Any], *, is_divided: bool) -> list[Any]:
    """The results of a region, part by part."""
    size = region.rows // region.parts

    def run_part(results: list[Any], part: Any) -> tuple[list[Any], None]:
        values = {
            v: jax.lax.dynamic_slice_in_dim(x, part * size, size, region.axes[v]) if v in region.axes else x
            for v, x in operands.items()
        }
        for eqn in region.eqns:
            params = resize(eqn, region.axes[eqn.outvars[0]], size)
            given = [v.val if isinstance(v, Literal) else values[v] for v in eqn.invars]
            with compat.user_context(eqn.source_info.traceback):
                made = eqn.primitive.bind(*given, **params)
            values.update(zip(eqn.outvars, made if eqn.primitive.multiple_results else [made], strict=True))
        pieces = (
            (whole, values[v], region.axes[v]) for whole, v in zip(results, region.results, strict=True)
        )
        return [jax.lax.dynamic_update_slice_in_dim(w, x, part * size, a) for w, x, a in pieces], None

    # Allocated once the first operand is there: XLA would allocate at the start of the step.
    first = next(v for v in operands if v in region.axes)
    scalars = [compat.empty_scalar(v.aval) for v in region.results]
    scalars, operands[first] = jax.lax.optimization_barrier((scalars, operands[first]))
    empty = [
        _allocate(scalar, v.aval, is_divided=is_divided)
        for scalar, v in zip(scalars, region.results, strict=True)
    ]
    return jax.lax.scan(run_part, empty, jnp.arange(region.parts))[0]


def _allocate(scalar: jax.Array, aval: Any, *, is_divided: bool) -> jax.Array:
    """An array with arbitrary contents; a fill where the compiler may divide the array over devices."""
    if is_divided:
        return jax.lax.broadcast(scalar, aval.shape)
    return compat.allocate(scalar, aval.shape, aval.sharding)
