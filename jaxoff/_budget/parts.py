"""Row-wise regions of a program, run part by part: the cross entropy over a large vocabulary is one.

A head makes the logits of all tokens, the loss, and the loss's gradient with respect to the logits, as large
as the logits. Between the products, a row depends on its own token alone. So a loop over parts of the tokens
makes the same values, with wide intermediate arrays of a single part. Products over all rows, such as the
weights' gradients, stay outside of the loop and read whole arrays: the order of their sums does not change.

Where memory does not suffice for these whole arrays, the loop adds up the sums as well, in float32, and the
layers of a loop run in parts like a head.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxoff._budget.loop_pairs import find_loop_pairs
from jaxoff._budget.pieces import cut_into_pieces, holds_layers
from jaxoff._budget.regions import MOST_PARTS, Region, find_region
from jaxoff._budget.row_axes import resize
from jaxoff._budget.sequences import find_sequences
from jaxoff._jaxpr import compat, meshes
from jaxoff._jaxpr.compat import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jaxoff._jaxpr.dataflow import mark_dependents, variables
from jaxoff._jaxpr.inline import Renamed, inline_program, resolve, trace_call
from jaxoff._jaxpr.own_primitives import allocate
from jaxoff._jaxpr.primitives import is_shard_map


def write_in_parts(
    closed: ClosedJaxpr, least_nbytes: float, *, devices: int = 1, adds_up: bool = False
) -> tuple[ClosedJaxpr, list[Region]]:
    """A program with its widest row-wise region in parts, at each level outside of its loops over layers.

    Args:
      closed: a differentiated program.
      least_nbytes: the size of the values worth a loop over parts.
      devices: the number of devices over which the compiler divides values. The first axis of divided values
        is not divided into parts: it is the one of the batch, and each part would be on some of the devices
        only.
      adds_up: whether the weights' gradients of a region are added up over its parts, in another order.

    Returns:
      The program, and its regions; none where no region with such values was found.
    """
    regions: list[Region] = []

    def write(program: Jaxpr) -> Jaxpr:
        level = inline_program(program)
        loops = find_loop_pairs(level)
        paired = {id(eqn) for pair in loops for eqn in (pair.forward, pair.backward)}
        found = find_sequences(level, loops)
        layers = found.values_ahead_of_head if found else frozenset[Var]()
        eqns = [eqn if id(eqn) in paired else compat.map_programs(eqn, write) for eqn in level.eqns]
        level = level.replace(eqns=eqns)
        region = find_region(level, least_nbytes, devices=devices, excluded=layers, adds_up=adds_up)
        if region is None:
            return level
        regions.append(region)
        return _write_region(level, region, devices)

    written = compat.map_open(closed, write)
    return (written, regions) if regions else (closed, [])


def write_layers_in_parts(
    closed: ClosedJaxpr, least_nbytes: float, *, devices: int = 1
) -> tuple[ClosedJaxpr, list[Region]]:
    """A program with the wide row-wise regions of its loops' bodies in parts: MLPs, norms and projections.

    The weights' gradients of a region are added up over its parts.

    Args:
      closed, least_nbytes, devices: as for `write_in_parts`.
    """
    regions: list[Region] = []

    def write(program: Jaxpr) -> Jaxpr:
        level = inline_program(program)
        written = compat.replace_equations(level, map(write_inside, level.eqns))
        return program if written is level else written

    def write_inside(eqn: JaxprEqn) -> JaxprEqn:
        if compat.control_flow(eqn) is not None:
            return compat.map_programs(eqn, write_body)
        return compat.map_programs(eqn, write_all if is_shard_map(eqn) else write)

    def write_all(program: Jaxpr) -> Jaxpr:
        return write(write_flat(program))

    def write_flat(program: Jaxpr) -> Jaxpr:
        level, before = inline_program(program), len(regions)
        renamed: Renamed = {}
        eqns: list[JaxprEqn] = []
        for piece in cut_into_pieces(level):
            piece = piece.replace(
                eqns=[eqn.replace(invars=[resolve(renamed, v) for v in eqn.invars]) for eqn in piece.eqns]
            )
            written = write_regions(piece)
            eqns += written.eqns
            made: list[Any] = list(piece.outvars)
            renamed.update(zip(made, written.outvars, strict=True))
        if len(regions) == before:
            return program
        return level.replace(eqns=eqns, outvars=[resolve(renamed, v) for v in level.outvars])

    def write_regions(level: Jaxpr) -> Jaxpr:
        while region := find_region(level, least_nbytes, devices=devices, adds_up=True):
            regions.append(region)
            level = _write_region(level, region, devices)
        return level

    def write_body(program: Jaxpr) -> Jaxpr:
        before = len(regions)
        level = inline_program(program)
        level = write_flat(level) if holds_layers(level) else write_regions(level)
        inner = write(level)  # a region of whole sequences may hold another, of tokens
        return inner if inner is not level or len(regions) > before else program

    return compat.map_open(closed, write_all), regions


def _write_region(level: Jaxpr, region: Region, devices: int) -> Jaxpr:
    """A level with the loop over a region's parts in the place of the region's equations."""
    inside = {id(eqn) for eqn in region.moved}
    made = {v for eqn in region.moved for v in eqn.outvars}
    last = max(i for i, eqn in enumerate(level.eqns) if id(eqn) in inside)
    depends = mark_dependents(level.eqns, made)
    before, after = [], []
    for i, eqn in enumerate(level.eqns):
        if id(eqn) not in inside:
            (after if depends[i] or i > last else before).append(eqn)
    operands = list(dict.fromkeys(v for eqn in region.moved for v in variables(eqn) if v not in made))
    loop, results = trace_call(
        lambda *values: _run_parts(region, dict(zip(operands, values, strict=True)), devices),
        operands,
        like=region.eqns[0],
    )
    renamed: Renamed = dict(zip((*region.results, *region.totals), results, strict=True))
    if devices == 1 and not region.sums:
        loop += _read_early(level, region, after, renamed)
    after = [eqn.replace(invars=[resolve(renamed, v) for v in eqn.invars]) for eqn in after]
    outvars = [resolve(renamed, v) for v in level.outvars]
    return level.replace(eqns=[*before, *loop, *after], outvars=outvars)


def _read_early(level: Jaxpr, region: Region, after: list[JaxprEqn], renamed: Renamed) -> list[JaxprEqn]:
    """Takes the readers of the largest result out of `after`, to run right after the loop over parts.

    XLA would make the weights' gradient of a head last, and hold the logits' gradient during the backward
    pass of all layers. A barrier makes all that depends on the region wait for these readers.
    """
    largest = max(region.results, key=lambda v: compat.nbytes(v.aval))
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


def _run_parts(region: Region, operands: dict[Var, Any], devices: int) -> list[Any]:
    """The results of a region, part by part, and its sums."""

    def size(v: Var) -> int:
        return compat.shape_of(v.aval)[region.axes[v]] // region.parts

    def slice_part(v: Var, x: jax.Array, part: Any) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(x, part * size(v), size(v), region.axes[v])

    def run_part(state: tuple[list[Any], list[Any]], part: Any) -> tuple[tuple[list[Any], list[Any]], None]:
        results, sums = state
        values = {v: slice_part(v, x, part) if v in region.axes else x for v, x in operands.items()}
        for eqn in region.eqns:
            params = resize(eqn, region.axes[eqn.outvars[0]], size(eqn.outvars[0]))
            made = _run(eqn, values, params)
            values.update(zip(eqn.outvars, made, strict=True))
        pieces = (
            (w, values[v], part * size(v), region.axes[v])
            for w, v in zip(results, region.results, strict=True)
        )
        results = [jax.lax.dynamic_update_slice_in_dim(*piece) for piece in pieces]
        sums = [total + _sum_rows(eqn, values) for total, eqn in zip(sums, region.sums, strict=True)]
        return (results, sums), None

    # Allocated once the first operand is there: XLA would allocate at the start of the step.
    first = next(v for v in operands if v in region.axes)
    scalars = [compat.empty_scalar(v.aval) for v in region.results]
    scalars, operands[first] = jax.lax.optimization_barrier((scalars, operands[first]))
    empty = [
        _allocate(scalar, v.aval, is_divided=devices > 1)
        for scalar, v in zip(scalars, region.results, strict=True)
    ]
    zeros = [_make_zeros(v) for v in region.totals]
    state = empty, zeros
    if devices > 1 and region.parts <= MOST_PARTS:
        # In a loop the compiler would gather a divided weight once for each part.
        sliced = [v for v in operands if v in region.axes]
        for part in range(region.parts):
            state, _ = run_part(state, part)
            state, rows = jax.lax.optimization_barrier((state, [operands[v] for v in sliced]))
            operands.update(zip(sliced, rows, strict=True))
    else:
        state, _ = jax.lax.scan(run_part, state, jnp.arange(region.parts))
    results, sums = state
    totals = zip(sums, region.totals, strict=True)
    return [*results, *(total.astype(compat.struct_of(v.aval).dtype) for total, v in totals)]


def _run(eqn: JaxprEqn, values: dict[Var, Any], params: dict[str, Any]) -> list[Any]:
    """The results of an equation with other parameters, for the values of its variables."""
    given = [v.val if isinstance(v, Literal) else values[v] for v in eqn.invars]
    with compat.user_context(eqn.source_info.traceback):
        made = eqn.primitive.bind(*given, **params)
    return made if eqn.primitive.multiple_results else [made]


def _make_zeros(v: Var) -> jax.Array:
    zero, shape = jnp.zeros((), _sum_dtype(v)), compat.shape_of(v.aval)
    zeros = jax.lax.broadcast(zero, shape, out_sharding=_sharding_in_type(v.aval))
    return compat.vary_like(zeros, v.aval)


def _sharding_in_type(aval: Any) -> Any:
    """The sharding of a type with Explicit axes; None for another type."""
    return None if meshes.explicit_mesh(aval) is None else aval.sharding


def _sum_dtype(v: Var) -> Any:
    return jnp.promote_types(compat.struct_of(v.aval).dtype, jnp.float32)


def _sum_rows(eqn: JaxprEqn, values: dict[Var, Any]) -> jax.Array:
    """The share of a part's rows in an equation that adds up rows."""
    params, dtype = dict(eqn.params), _sum_dtype(eqn.outvars[0])
    if "preferred_element_type" in params:
        params["preferred_element_type"] = dtype
    (total,) = _run(eqn, values, params)
    return total.astype(dtype)


def _allocate(scalar: jax.Array, aval: Any, *, is_divided: bool) -> jax.Array:
    """An array with arbitrary contents; a fill where the compiler may divide the array over devices."""
    if is_divided:
        return jax.lax.broadcast(scalar, aval.shape, out_sharding=_sharding_in_type(aval))
    return allocate(scalar, aval.shape, aval.sharding)
