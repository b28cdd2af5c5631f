"""Row-wise regions of a program: equations between which a row depends on its own token alone.

A region can run part by part, so that its wide values exist a part at a time. A region of a layer may also
add up the weights' gradients, a part's share at a time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from jaxoff._budget.labels import format_type
from jaxoff._budget.row_axes import find_operand_axes, find_result_axis, find_summed_axes
from jaxoff._jaxpr import compat, meshes
from jaxoff._jaxpr.compat import Jaxpr, JaxprEqn, Var
from jaxoff._jaxpr.dataflow import index_makers, index_readers, mark_ancestors, mark_dependents, variables
from jaxoff._jaxpr.primitives import is_compute
from jaxoff._report.tables import format_nbytes

# A part has at least this many rows, if it can: products of fewer rows run below the device's rate.
_PART_ROWS = 2048
MOST_PARTS = 8
# The rows of a part on a device where a region adds up gradients. Wider values have more parts.
_TILE_ROWS = 8192
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
      all_nbytes: bytes of all such values.
      sums: equations that add up all rows, such as weights' gradients: a part's share at a time, in float32.
    """

    eqns: tuple[JaxprEqn, ...]
    axes: dict[Var, int]
    rows: int
    parts: int
    results: tuple[Var, ...]
    nbytes: int
    all_nbytes: int
    sums: tuple[JaxprEqn, ...] = ()

    @property
    def moved(self) -> tuple[JaxprEqn, ...]:
        """The equations that run in the loop over parts."""
        return *self.eqns, *self.sums

    @property
    def totals(self) -> tuple[Var, ...]:
        """The results of the sums."""
        return tuple(v for eqn in self.sums for v in eqn.outvars)

    @property
    def spared_nbytes(self) -> int:
        """Bytes of the largest value that are no longer needed at once, less those of sums in float32."""
        sums = sum(4 * math.prod(compat.shape_of(v.aval)) for v in self.totals)
        return self.nbytes - self.nbytes // self.parts - sums

    def __str__(self) -> str:
        made = [(v, eqn) for eqn in self.eqns for v in eqn.outvars if v not in self.results]
        largest, eqn = max(made, key=lambda pair: _nbytes(pair[0]))
        where = compat.source_line(eqn)
        return f"{format_type(largest.aval)}, {format_nbytes(self.nbytes)}, in {self.parts} parts: {where}"


def find_region(
    level: Jaxpr,
    least_nbytes: float,
    *,
    devices: int = 1,
    excluded: frozenset[Var] = frozenset(),
    adds_up: bool = False,
) -> Region | None:
    """The row-wise region that spares the most memory; None if none spares `least_nbytes`.

    Args:
      level: the equations of a program or of a loop's body, calls inlined.
      least_nbytes: the bytes to be spared at least.
      devices: the number of devices over which the compiler divides values: along their first axes, unless a
        sharding constraint says otherwise.
      excluded: values whose equations are in no region.
      adds_up: whether the parts may add up weights' gradients, in another order of the sums.
    """
    graph = _Graph(level, excluded)
    found: list[Region] = []
    for seed in graph.list_seeds(least_nbytes):
        shape = compat.shape_of(seed.aval)
        whole = [i for i in range(int(devices > 1), len(shape)) if not meshes.divides_axis(seed.aval, i)]
        for axis in sorted(whole, key=lambda i: -shape[i]):
            region = _Growth(graph, seed, axis, least_nbytes, devices, adds_up=adds_up).finish()
            if region is not None:
                found.append(region)
    return max(found, key=lambda region: region.all_nbytes if adds_up else region.spared_nbytes, default=None)


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

    def __init__(
        self, graph: _Graph, seed: Var, axis: int, least_nbytes: float, devices: int, *, adds_up: bool
    ):
        self._graph, self._seed, self._devices, self._adds_up = graph, seed, devices, adds_up
        self._axes = {seed: axis}
        self._whole: set[Var] = set()  # values that equations of the region read as a whole
        self._inside: set[int] = set()
        self._sums: set[int] = set()
        self._least_nbytes = least_nbytes
        # Where a region may add up gradients, it also takes in the narrower work around.
        self._large = _LARGE * (min(_nbytes(seed), least_nbytes) if adds_up else _nbytes(seed))

    def finish(self) -> Region | None:
        """The grown region; None if it spares too little."""
        self._grow([self._seed])
        while between := self._list_between():
            for i in between:
                if i not in self._inside and not self._add(i):
                    self._drop(i)
                    break
        if self._adds_up:
            self._add_sums()
        return self._make()

    def _grow(self, todo: list[Var]) -> None:
        """Adds the makers and the readers of large values, as far as the equations are row-wise."""
        while todo:
            v = todo.pop()
            if _nbytes(v) < self._large:
                continue
            maker = self._graph.makers.get(v)
            for i in (*([] if maker is None else [maker]), *self._graph.readers.get(v, ())):
                if i not in self._inside:
                    known = len(self._axes)
                    if self._add(i):
                        todo += [*self._axes][known:]  # in order, as the region depends on it

    def _add(self, i: int) -> bool:
        """Adds an equation; returns False if it is not row-wise, or at odds with the others."""
        eqn = self._graph.eqns[i]
        axis = self._find_axis(eqn)
        is_left = bool(eqn.effects) or not self._graph.excluded.isdisjoint(eqn.outvars)
        is_left = is_left or any(compat.is_host(v.aval) for v in (*eqn.invars, *eqn.outvars))
        is_left = is_left or (axis is not None and meshes.constrains_axis(eqn, axis))
        axes = None if axis is None or is_left else find_operand_axes(eqn, axis, merges=True)
        if axis is None or axes is None:
            return False
        whole = {v for v, a in zip(eqn.invars, axes, strict=True) if isinstance(v, Var) and a is None}
        rows = [(v, a) for v, a in zip(eqn.invars, axes, strict=True) if isinstance(v, Var) and a is not None]
        rows += [(v, axis) for v in eqn.outvars]
        if whole & (self._axes.keys() | dict(rows).keys()) or not self._agree(rows):
            return False
        self._inside.add(i)
        self._axes.update(rows)
        self._whole |= whole
        return True

    def _agree(self, rows: Sequence[tuple[Var, int]]) -> bool:
        """Whether values have whole axes of rows, at odds neither with the region nor with another."""
        return all(
            (v not in self._axes or self._axes[v] == a)
            and v not in self._whole
            and not meshes.divides_axis(v.aval, a)
            and self._size(v, a) > 0
            and self._size(v, a) % self._rows == 0  # of a merged axis a row is a block
            for v, a in rows
        ) and len(set(rows)) == len(dict(rows))

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
                axis = find_result_axis(eqn, k, self._axes[v], merges=True)
                if axis is not None:
                    return axis
        return None

    def _list_between(self) -> list[int]:
        """The equations outside that depend on the region and on which the region depends, in order."""
        if not self._inside:
            return []
        inside, first = self._inside, min(self._inside)
        eqns = self._graph.eqns[first : max(inside) + 1]
        depends = mark_dependents(eqns, {v for i in inside for v in self._graph.eqns[i].outvars})
        if not any(does and first + i not in inside for i, does in enumerate(depends)):
            return []
        needed = mark_ancestors(eqns, (v for i in inside for v in variables(self._graph.eqns[i])))
        both = (first + i for i, marks in enumerate(zip(depends, needed, strict=True)) if all(marks))
        return [i for i in both if i not in inside]

    def _drop(self, i: int) -> None:
        """Takes the equations on the far side of an equation, seen from the seed, out of the region."""
        eqns = self._graph.eqns
        far = mark_dependents(eqns, set(eqns[i].outvars))
        seed = self._graph.makers.get(self._seed)
        if seed in self._inside and far[seed]:
            far = mark_ancestors(eqns, variables(eqns[i]))
        self._inside -= {j for j in self._inside if far[j]}

    def _add_sums(self) -> None:
        """Adds the equations outside that add up rows of the region, and whose results it does not need."""
        eqns = self._graph.eqns
        made = {v for i in self._inside for v in eqns[i].outvars}
        depends = mark_dependents(eqns, made)
        outer = {v for i, eqn in enumerate(eqns) if depends[i] and i not in self._inside for v in eqn.outvars}
        for i in sorted({i for v in made for i in self._graph.readers.get(v, ())} - self._inside):
            axes = find_summed_axes(eqns[i], self._axes, made)
            if axes is None or not outer.isdisjoint(variables(eqns[i])):
                continue
            rows = [(v, a) for v, a in zip(eqns[i].invars, axes, strict=True) if isinstance(v, Var)]
            if self._agree(rows):
                self._sums.add(i)
                self._axes.update(rows)

    def _make(self) -> Region | None:
        graph = self._graph
        if self._adds_up:
            self._drop_edges()
        inside, results = sorted(self._inside), self._list_results()
        if self._adds_up and graph.makers.get(self._seed) not in self._inside:
            return None  # another seed's
        if not (results or self._sums):
            return None  # nothing reads what its equations make
        if not inside or any(map(self._is_unwanted, results)):
            return None  # a part of a chain of elementwise equations, which needs little memory as it is
        made = [v for i in inside for v in graph.eqns[i].outvars]
        in_parts = [_nbytes(v) for v in made if v not in results]
        width = max(
            (n for i, n in enumerate(compat.shape_of(self._seed.aval)) if i != self._axes[self._seed]),
            default=1,
        )
        products = math.prod(compat.shape_of(self._seed.aval)) // max(1, width)
        sizes = max(in_parts, default=0), sum(in_parts)
        wanted = MOST_PARTS
        if self._adds_up:
            wanted = max(
                wanted, products // (_TILE_ROWS * self._devices), math.ceil(sizes[0] / self._least_nbytes)
            )
        parts = _count_parts(self._rows, products, wanted, or_more=self._adds_up)
        eqns, sums = ([graph.eqns[i] for i in sorted(found)] for found in (inside, self._sums))
        region = Region(tuple(eqns), self._axes, self._rows, parts, tuple(results), *sizes, tuple(sums))
        return region if region.spared_nbytes >= self._least_nbytes else None

    def _list_results(self) -> list[Var]:
        """The values of the region that other equations read, or results of the program."""
        graph, read_inside = self._graph, self._inside | self._sums
        made = (v for i in sorted(self._inside) for v in graph.eqns[i].outvars)
        return [
            v
            for v in made
            if v in graph.outs or not read_inside.issuperset(graph.readers.get(v, read_inside))
        ]

    def _is_unwanted(self, v: Var) -> bool:
        """Whether a result is large, and more than products read it."""
        large = _nbytes(self._seed) / 2 if self._adds_up else self._large  # a layer's results are narrower
        return _nbytes(v) >= large and not self._is_read_by_products(v)

    def _drop_edges(self) -> None:
        """Takes equations that make nothing but unwanted results out of the region."""
        while True:
            unwanted = set(filter(self._is_unwanted, self._list_results()))
            read = {v for i in self._inside | self._sums for v in variables(self._graph.eqns[i])}
            edges = {
                i for i in self._inside if unwanted.difference(read).issuperset(self._graph.eqns[i].outvars)
            }
            if not edges:
                return
            self._inside -= edges

    def _is_read_by_products(self, v: Var) -> bool:
        """Whether outside of the region nothing reads a value, or products do, beside sums as a bias has."""
        inside = self._inside | self._sums
        outside = [self._graph.eqns[i] for i in self._graph.readers.get(v, ()) if i not in inside]
        are_known = all(is_compute(eqn) or eqn.primitive.name == "reduce_sum" for eqn in outside)
        has_product = any(map(is_compute, outside))
        return v not in self._graph.outs and are_known and (has_product or not outside)


def _nbytes(v: Var) -> int:
    return compat.nbytes(v.aval)


def _count_parts(rows: int, products: int, wanted: int, *, or_more: bool) -> int:
    """The number of parts for rows along an axis; 1 if no small number divides them.

    Args:
      rows: the rows along the axis.
      products: the rows of the region's products, along all axes.
      wanted: the number of parts, if products of a part have `_PART_ROWS` rows then, else 2 or more.
      or_more: whether rather more parts than wanted than fewer.
    """
    most = max(2, products // _PART_ROWS)
    fewer, more = range(min(wanted, most), 1, -1), range(wanted, most + 1 if or_more else wanted)
    return next((n for n in (*more, *fewer) if rows % n == 0), 1)
