"""Follows the axis of the batch through a program, its calls, loops and conditions."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from jaxoff._budget.row_axes import Axes, find_result_axis
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jaxoff._jaxpr.meshes import list_axes
from jaxoff._jaxpr.primitives import OPAQUE, is_condition, is_shard_map

# Equations whose results have some rows of the batch, or those of several batches, along the same axis.
_SOME_ROWS = frozenset({"concatenate", "dynamic_slice", "pad", "slice"})


class BatchAxes:
    """The axis of the batch in the values of programs.

    A value made of operands whose batches reach it along different axes has none.
    """

    def __init__(self, shards: int = 1):
        """Takes the number of parts of the batch."""
        self._shards = shards
        self._followed: dict[tuple[int, Axes], tuple[Jaxpr, Mapping[Var, int]]] = {}

    def follow(self, program: Jaxpr, given: Axes) -> Mapping[Var, int]:
        """The axes of a program's values, for the axes of its arguments."""
        key = id(program), given
        if key not in self._followed:
            found = {v: axis for v, axis in zip(program.invars, given, strict=True) if axis is not None}
            for eqn in program.eqns:
                results = self._find_results(eqn, find_axes(found, eqn.invars))
                found |= {v: axis for v, axis in zip(eqn.outvars, results, strict=True) if axis is not None}
            self._followed[key] = program, found
        return self._followed[key][1]

    def rewrite(
        self,
        closed: ClosedJaxpr,
        given: Axes,
        write: Callable[[JaxprEqn, Mapping[Var, int]], Iterable[JaxprEqn]] = lambda eqn, _: [eqn],
        write_around: Callable[[JaxprEqn, Axes], JaxprEqn] = lambda eqn, _: eqn,
    ) -> ClosedJaxpr:
        """A program with other equations, also in its calls, loops and conditions.

        Args:
          closed: the program.
          given: the axes of its arguments.
          write: (an equation, the axes of the values around) -> the equations in its place.
          write_around: (an equation with rewritten programs, the axes of their arguments) -> the equation in
            its place.
        """
        written: dict[tuple[int, Axes], Jaxpr] = {}  # a program called twice stays the same object

        def rewrite(program: Jaxpr, given: Axes) -> Jaxpr:
            key = id(program), given
            if key not in written:
                known = self.follow(program, given)
                eqns = [made for eqn in program.eqns for made in rewrite_equation(eqn, known)]
                written[key] = compat.replace_equations(program, eqns)
            return written[key]

        def rewrite_equation(eqn: JaxprEqn, known: Mapping[Var, int]) -> Iterable[JaxprEqn]:
            inner = self.enter(eqn, find_axes(known, eqn.invars))
            if inner is None:
                return write(eqn, known)
            return [write_around(compat.map_programs(eqn, functools.partial(rewrite, given=inner)), inner)]

        return compat.map_open(closed, functools.partial(rewrite, given=given))

    def enter(self, eqn: JaxprEqn, given: Axes) -> Axes | None:
        """The axes of the arguments of the programs in an equation; None where they are not followed.

        Args:
          eqn: the equation.
          given: the axes of its operands.
        """
        if is_shard_map(eqn) or eqn.primitive.name == "while" or all(axis is None for axis in given):
            return None
        if (layout := compat.scan_in(eqn)) is not None:
            consts, end = given[: layout.num_consts], layout.num_consts + layout.num_carry
            rows = tuple(axis - 1 if axis else None for axis in given[end:])
            return self._settle(eqn, consts, given[layout.num_consts : end], rows)
        if is_condition(eqn):
            return given[1:]
        is_call = compat.inlinable_call(eqn) is not None
        return given if is_call and len(compat.sub_jaxprs(eqn)[0].invars) == len(given) else None

    def _settle(self, eqn: JaxprEqn, consts: Axes, carry: Axes, rows: Axes) -> Axes:
        """The axes of a loop's arguments that hold in all of its iterations."""
        (body,) = compat.sub_jaxprs(eqn)
        first, mixed = carry, set[int]()  # carried values whose batch changes its axis
        while True:
            made = self._list_outs(body, (*consts, *carry, *rows))[: len(carry)]
            both = list(zip(carry, made, strict=True))
            changed = {k for k, (a, b) in enumerate(both) if None not in (a, b) and a != b}
            mixed |= changed  # others may have followed these: begin again without
            found = first if changed else (b if a is None else a for a, b in both)
            settled = tuple(None if k in mixed else axis for k, axis in enumerate(found))
            if settled == carry:
                return *consts, *carry, *rows
            carry = settled

    def _list_outs(self, program: Jaxpr, given: Axes) -> Axes:
        return find_axes(self.follow(program, given), program.outvars)

    def _find_results(self, eqn: JaxprEqn, given: Axes) -> Axes:
        """The axes of an equation's results."""
        nothing = (None,) * len(eqn.outvars)
        if is_shard_map(eqn):
            return _follow_divisions(eqn, given)
        inner = self.enter(eqn, given)
        if inner is None:
            is_whole = bool(compat.sub_jaxprs(eqn)) and eqn.primitive.name not in OPAQUE
            return nothing if is_whole or not eqn.outvars else _follow_rule(eqn, given, self._shards)
        first, *others = (self._list_outs(program, inner) for program in compat.sub_jaxprs(eqn))
        if (layout := compat.scan_in(eqn)) is not None:
            stacks = (None if axis is None else axis + 1 for axis in first[layout.num_carry :])
            return *inner[layout.num_consts : layout.num_consts + layout.num_carry], *stacks
        return first if all(found == first for found in others) else nothing


def find_axes(axes: Mapping[Var, int], values: Sequence[Any]) -> Axes:
    """The axes of values; a literal has none."""
    return tuple(axes.get(v) if isinstance(v, Var) else None for v in values)


def _follow_divisions(eqn: JaxprEqn, given: Axes) -> Axes:
    """The axes of the results of a `jax.shard_map`: those divided over devices as the operands' batch is.

    A result of the type of an operand without rows of the batch is taken for the gradient of a weight.
    """
    operands = [*zip(eqn.invars, given, eqn.params["in_specs"], strict=True)]
    of_batch = {list_axes((*spec, *[None] * axis)[axis]) for _, axis, spec in operands if axis is not None}
    weights = {type_of(v) for v, axis, _ in operands if axis is None}
    names = of_batch.pop() if len(of_batch) == 1 else ()

    def find(v: Var, spec: PartitionSpec) -> int | None:
        divided = [i for i, axes in enumerate(spec) if names and list_axes(axes) == names]
        return divided[0] if divided and type_of(v) not in weights else None

    return tuple(map(find, eqn.outvars, eqn.params["out_specs"]))


def type_of(v: Any) -> tuple[tuple[int, ...], Any]:
    """The shape of a variable, and its dtype if it has one."""
    return compat.shape_of(v.aval), getattr(v.aval, "dtype", None)


def _follow_rule(eqn: JaxprEqn, given: Axes, shards: int) -> Axes:
    """The axes of the results of an equation without programs inside."""
    name, nothing = eqn.primitive.name, (None,) * len(eqn.outvars)
    if name == "optimization_barrier":
        return given
    if name == "reshape":
        return (_follow_reshape(eqn, given[0], shards),)
    if name == "conv_general_dilated":
        return (_follow_convolution(eqn, given),)
    if name in _SOME_ROWS:
        kept = {axis for axis in given if axis is not None}
        return (kept.pop() if len(kept) == 1 else None,)
    sizes = {compat.shape_of(v.aval)[i] for v, i in zip(eqn.invars, given, strict=True) if i is not None}
    if len(sizes) != 1:
        return nothing
    if name in OPAQUE:  # whose first axis is the batch of the operands and of the results
        found = {0} if set(given) <= {0, None} else set[int | None]()
    else:
        operands = ((k, axis) for k, axis in enumerate(given) if axis is not None)
        found = {find_result_axis(eqn, k, axis) for k, axis in operands} - {None}
    (size,) = sizes
    axis = found.pop() if len(found) == 1 else None
    return tuple(
        axis if axis is not None and compat.shape_of(v.aval)[axis : axis + 1] == (size,) else None
        for v in eqn.outvars
    )


def _follow_reshape(eqn: JaxprEqn, axis: int | None, shards: int) -> int | None:
    """The axis of the batch after a reshape: rows may become blocks of rows, and rows again.

    Rows that become microbatches are divided within each, unless the devices divide the microbatches.
    """
    if axis is None:
        return None
    before, after = (compat.shape_of(v.aval) for v in (eqn.invars[0], eqn.outvars[0]))
    for i, size in enumerate(after):
        is_of_blocks = max(size, before[axis]) % min(size, before[axis]) == 0
        if size > 1 and is_of_blocks and math.prod(after[:i]) == math.prod(before[:axis]):
            splits = before[axis] > size and size % shards and i + 1 < len(after)
            return i + 1 if splits and before[axis] % (size * after[i + 1]) == 0 else i
    return None


def _follow_convolution(eqn: JaxprEqn, given: Axes) -> int | None:
    """The axis of the batch after a convolution; the gradient of a kernel, or a part of it, has none."""
    numbers, groups = eqn.params["dimension_numbers"], eqn.params["batch_group_count"]
    return numbers.out_spec[0] if given == (numbers.lhs_spec[0], None) and groups == 1 else None
