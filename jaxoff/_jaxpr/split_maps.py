"""Splits a `jax.shard_map` in a layer into one for each of its equations.

A layer that calls a `jax.shard_map` keeps what JAX returns of the call for the backward pass, or makes all of
it again. Between the parts each value is an array of the layer, with a placement of its own, and any part may
be made again. `merge_shard_maps` joins the parts of a written program.

A loop in a `jax.shard_map`, such as ring attention, becomes a loop of the layer with the parts in its body.
The stacks of its residuals are divided along the axes of a row: the first axis is that of the iterations.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jaxoff._jaxpr.dataflow import join_unpassed, mark_ancestors, variables
from jaxoff._jaxpr.inline import Renamed, inline_program, resolve, scan_like, trace_call, write_otherwise
from jaxoff._jaxpr.meshes import is_partial_sum, list_axes
from jaxoff._jaxpr.primitives import holds, is_shard_map
from jaxoff._jaxpr.scopes import is_recomputed, is_transposed
from jaxoff._jaxpr.split_conditions import look_inside_part

# Views that cost nothing wherever their result is read.
_FREE = frozenset({"broadcast_in_dim", "pvary", "reshape", "squeeze"})


def split_shard_maps(
    closed: ClosedJaxpr, is_whole: Callable[[Jaxpr], bool], *, joins_backward: bool = True
) -> ClosedJaxpr:
    """Splits the `jax.shard_map`s of a program's forward passes into one for each equation.

    A loop becomes a loop whose body has the `jax.shard_map`s, in backward passes as well.

    Args:
      closed: the program.
      is_whole: whether the `jax.shard_map` of a program, its calls inlined, stays whole.
      joins_backward: whether the parts of a backward pass between loops, and recomputed values, are one.

    Returns:
      The program with the same results; `closed` itself where nothing is split.
    """
    if not holds(closed.jaxpr, is_shard_map):
        return closed

    def split(program: Jaxpr, is_backward: bool = False) -> Jaxpr:
        def write(eqn: JaxprEqn) -> Any:
            # The scopes of a loop are not those in its body.
            backward = (is_backward or is_transposed(eqn)) and not is_recomputed(eqn)
            inside = functools.partial(split, is_backward=backward)
            if not is_shard_map(eqn):
                return compat.map_programs(eqn, inside)
            body = inline_program(eqn.params["jaxpr"], checkpoints=backward)
            if compat.has_side_effects(eqn) or getattr(body, "consts", ()) or is_whole(body):
                return eqn
            parts = _Parts(eqn, body, joins=backward and joins_backward)
            if not parts.are_several:
                return eqn
            eqns, results = parts.write()
            return [e if is_shard_map(e) else compat.map_programs(e, inside) for e in eqns], results

        return _drop_divisions(write_otherwise(program, write))

    return compat.map_open(closed, split)


def invert_division(eqn: JaxprEqn) -> JaxprEqn | None:
    """The equation back, of a `jax.shard_map` with no effect but another division of an array; else None."""
    if not is_shard_map(eqn):
        return None
    body = eqn.params["jaxpr"]
    operands = variables(eqn)
    if body.eqns or len(body.invars) != 1 or body.outvars != body.invars or not operands:
        return None
    divisions = {"in_specs": eqn.params["out_specs"], "out_specs": eqn.params["in_specs"]}
    return eqn.replace(invars=[*eqn.outvars], outvars=operands, params=eqn.params | divisions)


def _drop_divisions(program: Jaxpr) -> Jaxpr:
    """A program with reads of an array in place of reads of the array divided otherwise and back again."""
    divided: dict[Var, JaxprEqn] = {}  # array divided otherwise -> the equation back

    def write(eqn: JaxprEqn) -> Any:
        back = invert_division(eqn)
        if back is None:
            return eqn
        before = divided.get(back.outvars[0])
        if before is not None and before.params["out_specs"] == eqn.params["out_specs"]:
            return [], before.outvars
        divided[eqn.outvars[0]] = back
        return eqn

    written = write_otherwise(program, write)
    if written is program:
        return program
    read = {v for eqn in written.eqns for v in variables(eqn)}
    read.update(v for v in written.outvars if isinstance(v, Var))
    unread = divided.keys() - read
    return written.replace(eqns=[eqn for eqn in written.eqns if unread.isdisjoint(eqn.outvars)])


def look_inside(eqn: JaxprEqn) -> JaxprEqn:
    """The equation in a `jax.shard_map`, and in parts of conditions, as one of the arrays outside."""
    return look_inside_part(open_map(eqn))


def open_map(eqn: JaxprEqn) -> JaxprEqn:
    """The equation of a `jax.shard_map` with a single one besides views, as one of the arrays outside.

    A mere change of an array's division is a reshape. Other equations are returned as they are.
    """
    if not is_shard_map(eqn):
        return eqn
    if invert_division(eqn) is not None:
        params = {"new_sizes": compat.shape_of(eqn.outvars[0].aval), "dimensions": None, "sharding": None}
        return eqn.replace(primitive=jax.lax.reshape_p, params=params)
    body = eqn.params["jaxpr"]
    inside: Renamed = dict(zip(body.invars, eqn.invars, strict=True))
    found = list[JaxprEqn]()
    for inner in body.eqns:
        if inner.primitive.name in _FREE and inner is not body.eqns[-1]:
            inside[inner.outvars[0]] = resolve(inside, inner.invars[0])
        else:
            found.append(inner)
    pairs = zip(body.outvars, eqn.outvars, strict=True)
    outs: Renamed = {v: outer for v, outer in pairs if isinstance(v, Var)}
    if len(found) != 1 or len(outs) < len(eqn.outvars) or not outs.keys() <= {*found[0].outvars}:
        return eqn
    return found[0].replace(
        invars=[resolve(inside, v) for v in found[0].invars],
        outvars=[resolve(outs, v) for v in found[0].outvars],
    )


def _list_stacks(loop: JaxprEqn) -> list[Any]:
    """The stacks read and made by a loop, a row at a time."""
    layout = compat.scan_in(loop)
    assert layout is not None
    return [*loop.invars[layout.num_consts + layout.num_carry :], *loop.outvars[layout.num_carry :]]


class _Result(NamedTuple):
    """A result of a part, its position among the results of the whole, if any, and its division."""

    position: int | None
    value: Any
    division: P


class _Parts:
    """The parts of a `jax.shard_map`: its equations, and the values between parts.

    Attributes:
      are_several: whether there are two parts or more.
    """

    def __init__(self, eqn: JaxprEqn, body: Jaxpr, *, joins: bool):
        self._eqn, self._body = eqn, body
        divided = zip(body.outvars, eqn.params["out_specs"], strict=True)
        self._results = [_Result(i, v, spec) for i, (v, spec) in enumerate(divided)]
        self._views = self._find_views()
        loops = [e for e in body.eqns if compat.scan_in(e) is not None]
        self._stacks = {v for e in loops for v in _list_stacks(e) if isinstance(v, Var)}
        views = set(map(id, self._views))
        self._parts = join_unpassed([e for e in body.eqns if id(e) not in views], self._passes)
        if joins:
            self._parts = self._join_transposed(self._parts)
        self.are_several = len(self._parts) > 1 or any(map(self._is_loop, self._parts))

    def write(self) -> tuple[list[JaxprEqn], list[Any]]:
        """The equations of the parts, and the results of the whole."""
        eqns, results = trace_call(self._run, self._eqn.invars, like=self._eqn)
        return [*map(self._locate, eqns)], results

    def _locate(self, eqn: JaxprEqn) -> JaxprEqn:
        """An equation with the source of the whole, and the equations of a loop's body likewise."""
        if compat.scan_in(eqn) is not None:
            eqn = compat.map_programs(eqn, lambda body: body.replace(eqns=[*map(self._locate, body.eqns)]))
        return eqn.replace(source_info=self._eqn.source_info)

    def _join_transposed(self, parts: Sequence[list[JaxprEqn]]) -> list[list[JaxprEqn]]:
        """The parts of a backward pass, with neighbours joined but for loops and recomputed values."""

        def stays_alone(part: Sequence[JaxprEqn]) -> bool:
            return self._is_loop(part) or all(map(is_recomputed, part))

        found = list[list[JaxprEqn]]()
        for alone, group in itertools.groupby(parts, stays_alone):
            neighbours = [*group]
            found += neighbours if alone else [[eqn for part in neighbours for eqn in part]]
        return found

    def _is_loop(self, part: Sequence[JaxprEqn]) -> bool:
        """Whether a part is a loop, and may stand outside."""
        eqn = part[0]
        if len(part) > 1 or compat.scan_in(eqn) is None or eqn.params["jaxpr"].consts:
            return False
        return not any(is_partial_sum(v.aval) for v in (*eqn.invars, *eqn.outvars))

    def _find_views(self) -> list[JaxprEqn]:
        """The views of arguments. Each part has views of its own."""
        views, known = list[JaxprEqn](), {*self._body.invars}
        for eqn in self._body.eqns:
            if eqn.primitive.name in _FREE and known.issuperset(variables(eqn)):
                views.append(eqn)
                known.update(eqn.outvars)
        return views

    def _is_name(self, part: Sequence[JaxprEqn], outside: Container[Var]) -> bool:
        """Whether a part names an array outside."""
        is_name = len(part) == 1 and compat.name_in(part[0]) is not None
        return is_name and any(v in outside for v in variables(part[0]))

    def _passes(self, v: Any) -> bool:
        """Whether an array outside can hold a value: none can hold parts of a sum."""
        return not is_partial_sum(v.aval)

    def _list_axes(self, v: Any) -> tuple[str, ...]:
        """The axes over which a value differs between devices, among those of the `jax.shard_map`."""
        mesh, manual = self._eqn.params["mesh"], self._eqn.params["newly_manual_axes"]
        varying = compat.varying_axes(v.aval) if self._eqn.params["check_vma"] else manual
        return tuple(axis for axis in mesh.axis_names if axis in manual and axis in varying)

    def _holds(self, v: Any, division: P) -> bool:
        """Whether an array outside, with a division, is read inside as the value written there."""
        axes = {axis for entry in division for axis in list_axes(entry)}
        return isinstance(v, Var) and axes == {*self._list_axes(v)}

    def _divide(self, v: Any) -> P:
        """The division of the array outside of a value: of a loop's stack, the division of the rows."""
        axes = self._list_axes(v)
        if not axes:
            return P()
        return P(None, axes) if isinstance(v, Var) and v in self._stacks else P(axes)

    def _add_views(self, part: Sequence[JaxprEqn], values: Iterable[Any]) -> list[JaxprEqn]:
        """The equations of a part and of the views among their operands, for some values."""
        eqns = [*self._views, *part]
        marks = mark_ancestors(eqns, (v for v in values if isinstance(v, Var)))
        return [eqn for eqn, is_needed in zip(eqns, marks, strict=True) if is_needed]

    def _run(self, *operands: Any) -> list[Any]:
        """Traces the parts for the operands of the whole."""
        divided = zip(operands, self._eqn.params["in_specs"], strict=True)
        outside = dict(zip(self._body.invars, divided, strict=True))
        found: dict[int | None, Any] = {}  # the results of the whole, by position
        last_parts = {v: k for k, part in enumerate(self._parts) for eqn in part for v in variables(eqn)}
        for k, part in enumerate(self._parts):
            if self._is_name(part, outside):
                array, division = outside[variables(part[0])[0]]
                outside[part[0].outvars[0]] = checkpoint_name(array, compat.name_in(part[0])), division
                continue
            if self._is_loop(part):
                outside.update(self._run_loop(part[0], outside))
                continue
            made = dict.fromkeys(v for eqn in part for v in eqn.outvars)
            results = [r for r in self._results if isinstance(r.value, Var) and r.value in made]
            passed = {v for _, v, division in results if self._holds(v, division)}
            between = [v for v in made if last_parts.get(v, -1) > k and v not in passed]
            results += [_Result(None, v, self._divide(v)) for v in between]
            for (i, v, division), array in zip(results, self._run_part(part, results, outside), strict=True):
                found[i] = array
                if self._holds(v, division):
                    outside.setdefault(v, (array, division))
        for i, v, division in self._results:
            if i not in found and isinstance(v, Var) and outside.get(v, (None, None))[1] == division:
                found[i] = outside[v][0]
        for result in self._results:  # arguments, views and names in other divisions
            if result.position not in found:
                (found[result.position],) = self._run_part([], [result], outside)
        return [found[i] for i in range(len(self._results))]

    def _run_part(
        self, part: Sequence[JaxprEqn], results: Sequence[_Result], outside: Mapping[Var, tuple[Any, P]]
    ) -> Sequence[Any]:
        values = [v for _, v, _ in results]
        eqns = self._add_views(part, values)
        made = {v for eqn in eqns for v in eqn.outvars}
        read = [*(v for eqn in eqns for v in variables(eqn)), *(v for v in values if isinstance(v, Var))]
        arguments = [v for v in dict.fromkeys(read) if v not in made]
        debug_info = self._body.debug_info.with_unknown_names()
        jaxpr = self._body.replace(invars=arguments, eqns=eqns, outvars=values, debug_info=debug_info)
        divisions = [outside[v][1] for v in arguments], [division for _, _, division in results]
        return self._map(jaxpr, *divisions)(*(outside[v][0] for v in arguments))

    def _map(
        self, program: Jaxpr, in_specs: Sequence[P], out_specs: Sequence[P]
    ) -> Callable[..., Sequence[Any]]:
        """A `jax.shard_map` of a program. Outside, scalars that differ between devices are rows of one."""
        run = compat.jaxpr_as_fun(ClosedJaxpr(program, ()))

        def run_inside(*arrays: Any) -> list[Any]:
            given = zip(arrays, (compat.shape_of(v.aval) for v in program.invars), strict=True)
            values = run(*(x.reshape(shape) if x.ndim > len(shape) else x for x, shape in given))
            lifted = zip(values, out_specs, strict=True)
            return [jnp.expand_dims(x, range(x.ndim, len(spec))) for x, spec in lifted]

        return jax.shard_map(
            run_inside,
            mesh=self._eqn.params["mesh"],
            in_specs=tuple(in_specs),
            out_specs=[*out_specs],
            axis_names=self._eqn.params["newly_manual_axes"],
            check_vma=self._eqn.params["check_vma"],
        )

    def _find_operand(
        self, v: Any, argument: Var, outside: Mapping[Var, tuple[Any, P]], *, is_row: bool
    ) -> tuple[Any, P]:
        """The array outside for an operand of a loop, with its division.

        Args:
          v: the operand.
          argument: of the loop's body.
          outside: value inside -> the array outside and its division.
          is_row: whether an iteration takes a row of the operand.
        """
        if isinstance(v, Literal):
            return jnp.asarray(v.val, compat.struct_of(v.aval).dtype), P()
        if v in outside:
            division = outside[v][1]
            has_whole_rows = not (is_row and division and division[0])
            if has_whole_rows and self._holds(argument, P(*division[1:]) if is_row else division):
                return outside[v]
        division = self._divide(argument)
        if is_row and division:
            division = P(None, *division)
        (array,) = self._run_part([], [_Result(None, v, division)], outside)
        return array, division

    def _run_loop(self, eqn: JaxprEqn, outside: Mapping[Var, tuple[Any, P]]) -> dict[Var, tuple[Any, P]]:
        """Traces a loop outside; returns value inside -> the loop's result, and its division."""
        layout = compat.scan_in(eqn)
        assert layout is not None
        body = compat.as_open(eqn.params["jaxpr"])
        first, row = layout.num_consts, layout.num_consts + layout.num_carry
        pairs = zip(eqn.invars, body.invars, strict=True)
        operands = [self._find_operand(*pair, outside, is_row=i >= row) for i, pair in enumerate(pairs)]
        arrays = [array for array, _ in operands]
        in_specs = [P(*division[1:]) if i >= row else division for i, (_, division) in enumerate(operands)]
        out_specs = [*in_specs[first:row], *map(self._divide, body.outvars[layout.num_carry :])]
        run = self._map(body, in_specs, out_specs)
        parts = arrays[:first], arrays[first:row], arrays[row:]
        carry, stacks = scan_like(run, *parts, like=eqn, length=layout.length, unroll=layout.unroll)
        divisions = [*out_specs[: layout.num_carry], *(P(None, *s) for s in out_specs[layout.num_carry :])]
        return dict(zip(eqn.outvars, zip([*carry, *stacks], divisions, strict=True), strict=True))
