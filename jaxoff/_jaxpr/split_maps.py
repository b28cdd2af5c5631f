"""Splits a `jax.shard_map` in a layer into one for each of its equations.

A layer that calls a `jax.shard_map` keeps what JAX returns of the call for the backward pass, or makes all of
it again. Between the parts each value is an array of the layer, with a placement of its own, and any part may
be made again. `merge_shard_maps` joins the parts of a written program.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jaxoff._jaxpr.dataflow import join_unpassed, mark_ancestors, variables
from jaxoff._jaxpr.inline import Renamed, inline_program, resolve, trace_call, write_otherwise
from jaxoff._jaxpr.meshes import is_partial_sum, list_axes
from jaxoff._jaxpr.primitives import holds, is_shard_map
from jaxoff._jaxpr.scopes import is_recomputed, is_transposed
from jaxoff._jaxpr.split_conditions import look_inside_part

# Views that cost nothing wherever their result is read.
_FREE = frozenset({"broadcast_in_dim", "pvary", "reshape", "squeeze"})


def split_shard_maps(closed: ClosedJaxpr, is_whole: Callable[[Jaxpr], bool]) -> ClosedJaxpr:
    """Splits the `jax.shard_map`s of a program's forward passes into one for each equation.

    Args:
      closed: the program.
      is_whole: whether the `jax.shard_map` of a program, its calls inlined, stays whole.

    Returns:
      The program with the same results; `closed` itself where nothing is split.
    """
    if not holds(closed.jaxpr, is_shard_map):
        return closed

    def split(program: Jaxpr, is_backward: bool = False) -> Jaxpr:
        def write(eqn: JaxprEqn) -> Any:
            transposed = is_backward or is_transposed(eqn)  # the scopes of a loop are not those in its body
            if not is_shard_map(eqn):
                return compat.map_programs(eqn, functools.partial(split, is_backward=transposed))
            body = inline_program(eqn.params["jaxpr"], checkpoints=False)
            stays = transposed and not is_recomputed(eqn)
            if stays or compat.has_side_effects(eqn) or getattr(body, "consts", ()) or is_whole(body):
                return eqn
            parts = _Parts(eqn, body)
            return parts.write() if parts.are_several else eqn

        return write_otherwise(program, write)

    return compat.map_open(closed, split)


def look_inside(eqn: JaxprEqn) -> JaxprEqn:
    """The equation of a `jax.shard_map` with a single one besides views, as one of the arrays outside.

    Of a part of a condition, likewise. Other equations are returned themselves.
    """
    if not is_shard_map(eqn):
        return look_inside_part(eqn)
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


class _Result(NamedTuple):
    """A value that a part returns, its position among the results of the whole, if any, and its division."""

    position: int | None
    value: Any
    division: P


class _Parts:
    """The parts of a `jax.shard_map`: its equations, and what passes between them.

    Attributes:
      are_several: whether there are two parts or more.
    """

    def __init__(self, eqn: JaxprEqn, body: Jaxpr):
        self._eqn, self._body = eqn, body
        divided = zip(body.outvars, eqn.params["out_specs"], strict=True)
        self._results = [_Result(i, v, spec) for i, (v, spec) in enumerate(divided)]
        self._views = self._find_views()
        views = set(map(id, self._views))
        self._parts = join_unpassed([e for e in body.eqns if id(e) not in views], self._passes)
        self.are_several = len(self._parts) > 1

    def write(self) -> tuple[list[JaxprEqn], list[Any]]:
        """The equations of the parts, and the results of the whole."""
        eqns, results = trace_call(self._run, self._eqn.invars, like=self._eqn)
        return [eqn.replace(source_info=self._eqn.source_info) for eqn in eqns], results

    def _find_views(self) -> list[JaxprEqn]:
        """The views of arguments. Each part that reads one has its own."""
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
        """Whether an array outside can hold a value.

        None can hold a scalar that differs between devices, nor parts of a sum.
        """
        return not is_partial_sum(v.aval) and bool(compat.shape_of(v.aval) or not self._list_axes(v))

    def _list_axes(self, v: Any) -> tuple[str, ...]:
        """The axes over which a value differs between devices, among those of the `jax.shard_map`."""
        mesh, manual = self._eqn.params["mesh"], self._eqn.params["newly_manual_axes"]
        varying = compat.varying_axes(v.aval) if self._eqn.params["check_vma"] else manual
        return tuple(axis for axis in mesh.axis_names if axis in manual and axis in varying)

    def _holds(self, v: Any, division: P) -> bool:
        """Whether an array outside, with a division, is read inside as the value that was written."""
        axes = {axis for entry in division for axis in list_axes(entry)}
        return isinstance(v, Var) and axes == {*self._list_axes(v)}

    def _divide(self, v: Var) -> P:
        """The division of the array outside that holds a value."""
        axes = self._list_axes(v)
        return P(axes) if axes else P()

    def _add_views(self, part: Sequence[JaxprEqn], values: Iterable[Any]) -> list[JaxprEqn]:
        """The equations of a part and of the views that they need, for some values."""
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
        params, values = self._eqn.params, [v for _, v, _ in results]
        eqns = self._add_views(part, values)
        made = {v for eqn in eqns for v in eqn.outvars}
        read = [*(v for eqn in eqns for v in variables(eqn)), *(v for v in values if isinstance(v, Var))]
        arguments = [v for v in dict.fromkeys(read) if v not in made]
        debug_info = self._body.debug_info.with_unknown_names()
        jaxpr = self._body.replace(invars=arguments, eqns=eqns, outvars=values, debug_info=debug_info)
        run = jax.shard_map(
            compat.jaxpr_as_fun(ClosedJaxpr(jaxpr, ())),
            mesh=params["mesh"],
            in_specs=tuple(outside[v][1] for v in arguments),
            out_specs=[division for _, _, division in results],
            axis_names=params["newly_manual_axes"],
            check_vma=params["check_vma"],
        )
        return run(*(outside[v][0] for v in arguments))
