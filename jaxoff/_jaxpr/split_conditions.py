"""Splits a `jax.lax.cond` or `switch` in a layer into conditions with an equation of a branch each.

A differentiated condition returns the residuals of all its branches. A layer keeps all of these for the
backward pass, or makes all again. Between the parts each value is an array of the layer, with a placement of
its own, and any part may be made again. `join_conditions` joins the parts of a written program.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jaxoff._jaxpr.dataflow import join_unpassed, variables
from jaxoff._jaxpr.inline import (
    Renamed,
    inline_program,
    instantiate,
    make_program,
    resolve,
    write_otherwise,
)
from jaxoff._jaxpr.meshes import explicit_mesh
from jaxoff._jaxpr.primitives import EMPTY, holds, is_condition
from jaxoff._jaxpr.scopes import is_differentiated, is_recomputed, is_transposed


def split_conditions(closed: ClosedJaxpr, is_whole: Callable[[Jaxpr], bool]) -> ClosedJaxpr:
    """Splits the conditions of a program's forward passes into conditions with an equation of a branch each.

    Args:
      closed: the program.
      is_whole: whether a condition stays whole, by a branch with calls inlined.

    Returns:
      The program with the same results; `closed` itself where nothing is split.
    """
    if not holds(closed.jaxpr, is_condition):
        return closed

    def split(program: Jaxpr, is_forward: bool = False, is_backward: bool = False) -> Jaxpr:
        def write(eqn: JaxprEqn) -> Any:
            forward = is_forward or is_differentiated(eqn)  # the scopes of a loop are not those in its body
            backward = is_backward or is_transposed(eqn)
            inside = functools.partial(split, is_forward=forward, is_backward=backward)
            if not is_condition(eqn):
                return compat.map_programs(eqn, inside)
            if not forward or (backward and not is_recomputed(eqn)) or compat.has_side_effects(eqn):
                return eqn
            eqn = compat.map_programs(eqn, inside)  # conditions in branches
            branches = [*map(inline_program, compat.sub_jaxprs(eqn))]
            if any(getattr(branch, "consts", ()) or is_whole(branch) for branch in branches):
                return eqn
            parts = _Parts(eqn, branches)
            return parts.write() if parts.are_several else eqn

        return write_otherwise(program, write)

    return compat.map_open(closed, split)


def list_branches(eqn: JaxprEqn) -> list[tuple[Any, int]]:
    """The branches of which an equation is a part, from the outermost condition in: each index and branch.

    A condition is a part of the only branch that computes.
    """
    return _open_parts(eqn)[0]


def look_inside_part(eqn: JaxprEqn) -> JaxprEqn:
    """The equation in a part of a condition, as one of the arrays outside; another equation itself."""
    return _open_parts(eqn)[1]


def _open_parts(eqn: JaxprEqn) -> tuple[list[tuple[Any, int]], JaxprEqn]:
    """The results of `list_branches` and of `look_inside_part`."""
    found = list[tuple[Any, int]]()
    while (k := _find_branch(eqn)) is not None:
        found.append((eqn.invars[0], k))
        if (inner := _open_part(eqn, k)) is None:
            break
        eqn = inner
    return found, eqn


def _find_branch(eqn: JaxprEqn) -> int | None:
    """The only branch of a condition that computes; None without."""
    if not is_condition(eqn):
        return None
    computing = [k for k, branch in enumerate(compat.sub_jaxprs(eqn)) if _list_computing(branch)]
    return computing[0] if len(computing) == 1 else None


def _open_part(eqn: JaxprEqn, k: int) -> JaxprEqn | None:
    """The only equation in a branch of a condition, as one of the arrays outside; None of several."""
    branch = compat.sub_jaxprs(eqn)[k]
    inner, *others = _list_computing(branch)
    if others:
        return None
    outside = dict(zip(branch.invars, eqn.invars[1:], strict=True))
    outs = {v: out for v, out in zip(branch.outvars, eqn.outvars, strict=True) if isinstance(v, Var)}
    if not outs.keys() <= {*inner.outvars} or len(outs) < len(eqn.outvars):
        return None
    return inner.replace(
        invars=[resolve(outside, v) for v in inner.invars],
        outvars=[outs.get(v) or Var(v.aval) for v in inner.outvars],
    )


def as_selection(eqn: JaxprEqn) -> JaxprEqn:
    """A condition which only chooses among values, as a `jax.lax.select_n`; another equation itself."""
    if not is_condition(eqn) or len(eqn.outvars) != 1 or any(map(_list_computing, compat.sub_jaxprs(eqn))):
        return eqn
    made = [_find_passed(eqn, branch) for branch in compat.sub_jaxprs(eqn)]
    operands = [eqn.invars[0], *(v for v in made if v is not None)]
    return eqn.replace(primitive=jax.lax.select_n_p, invars=operands, params={})


def open_conditions(eqns: Iterable[JaxprEqn]) -> Iterator[JaxprEqn]:
    """Equations with the branches' equations in the place of conditions, as if each branch ran.

    The first branch which computes a result of the condition makes the result.
    """
    for eqn in eqns:
        if not is_condition(eqn):
            yield eqn
            continue
        made = set[Var]()
        for branch in compat.sub_jaxprs(eqn):
            body, values = instantiate(inline_program(branch), eqn.invars[1:], like=eqn)
            pairs = [(v, out) for v, out in zip(values, eqn.outvars, strict=True) if isinstance(v, Var)]
            own = {v for each in body for v in each.outvars}
            results: Renamed = {v: out for v, out in pairs if v in own and out not in made}
            made.update(results.values())
            for each in body:
                operands = [resolve(results, v) for v in each.invars]
                yield each.replace(invars=operands, outvars=[resolve(results, v) for v in each.outvars])


def _find_passed(eqn: JaxprEqn, branch: Jaxpr) -> Any:
    """The operand which a branch of a condition passes on as its only result; None for another result."""
    outside: Renamed = dict(zip(branch.invars, eqn.invars[1:], strict=True))
    (v,) = branch.outvars
    return outside.get(v) if isinstance(v, Var) else v


def _find_empty(branch: Jaxpr) -> set[Var]:
    """The empty values of a branch: residuals of another branch."""
    found = set[Var]()
    for eqn in branch.eqns:
        if is_condition(eqn):
            empty = [(program.outvars, _find_empty(program)) for program in compat.sub_jaxprs(eqn)]
            found.update(
                v
                for i, v in enumerate(eqn.outvars)
                if all(isinstance(outs[i], Var) and outs[i] in none for outs, none in empty)
            )
            continue
        is_wide = eqn.primitive.name in ("broadcast_in_dim", "pvary") and not found.isdisjoint(variables(eqn))
        if eqn.primitive.name in EMPTY or is_wide:
            found.update(eqn.outvars)
    return found


def _list_computing(branch: Jaxpr) -> list[JaxprEqn]:
    """The equations of a branch, but for the empty values."""
    empty = _find_empty(branch)
    return [eqn for eqn in branch.eqns if empty.isdisjoint(eqn.outvars)]


class _Branch(NamedTuple):
    """The equations and results of a branch of a part.

    Attributes:
      eqns: its equations.
      values: its results, in order; None for an empty result.
      outside: value of the whole branch -> the array outside which holds the value.
    """

    eqns: Sequence[JaxprEqn]
    values: Sequence[Any]
    outside: Renamed


class _Parts:
    """The parts of a condition: the equations of its branches, and the values which pass between these.

    Attributes:
      are_several: whether there are two parts or more.
    """

    def __init__(self, eqn: JaxprEqn, branches: Sequence[Jaxpr]):
        self._eqn, self._branches = eqn, branches
        self._parts = [join_unpassed(_list_computing(branch), _can_be_empty) for branch in branches]
        self.are_several = sum(map(len, self._parts)) > 1
        self._eqns = list[JaxprEqn]()
        self._empty = dict[Any, Jaxpr]()

    def write(self) -> tuple[list[JaxprEqn], list[Any]]:
        """The equations of the parts, and the results of the whole."""
        outside = [self._write_branch(k) for k in range(len(self._branches))]
        return self._eqns, self._write_results(outside)

    def _write_branch(self, k: int) -> Renamed:
        """Writes the parts of a branch; returns value -> the array outside which holds the value."""
        branch, parts = self._branches[k], self._parts[k]
        outside: Renamed = dict(zip(branch.invars, self._eqn.invars[1:], strict=True))
        last_parts = {v: i for i, part in enumerate(parts) for eqn in part for v in variables(eqn)}
        last_parts.update((v, len(parts)) for v in branch.outvars if isinstance(v, Var))
        for i, part in enumerate(parts):
            made = [v for eqn in part for v in eqn.outvars if last_parts.get(v, -1) > i]
            if len(part) == 1 and compat.name_in(part[0]) is not None:
                operands = [resolve(outside, v) for v in part[0].invars]
                self._eqns.append(part[0].replace(invars=operands, outvars=[Var(v.aval) for v in made]))
                results = self._eqns[-1].outvars
            else:
                others = _Branch((), [None] * len(made), {})
                whole = [others] * len(self._branches)
                whole[k] = _Branch(part, made, outside)
                results = self._write_part(whole) if made else []
            outside.update(zip(made, results, strict=True))
        return outside

    def _write_results(self, outside: Sequence[Renamed]) -> list[Any]:
        """The results of the whole. Where a single branch computes a result, its value is the result."""
        found = list[Any]()
        empty = [_find_empty(branch) for branch in self._branches]
        for i, out in enumerate(self._eqn.outvars):
            values = [branch.outvars[i] for branch in self._branches]
            values = [
                None if isinstance(v, Var) and v in none else v for v, none in zip(values, empty, strict=True)
            ]
            made = [resolve(held, v) for v, held in zip(values, outside, strict=True) if v is not None]
            if len(made) == 1 and isinstance(made[0], Var) and made[0].aval == out.aval:
                found.append(made[0])
            elif not made:
                fill, (v,) = instantiate(self._make_empty(out.aval), [], self._eqn)
                self._eqns += fill
                found.append(v)
            else:
                found += self._write_part(
                    [_Branch((), [v], held) for v, held in zip(values, outside, strict=True)]
                )
        return found

    def _write_part(self, branches: Sequence[_Branch]) -> list[Var]:
        """Adds the condition of a part; returns its results."""
        arguments: dict[Var, None] = {}
        for eqns, values, outside in branches:
            made = {v for eqn in eqns for v in eqn.outvars}
            read = [*(v for eqn in eqns for v in variables(eqn)), *(v for v in values if isinstance(v, Var))]
            arguments |= dict.fromkeys(
                w for v in read if v not in made and isinstance(w := resolve(outside, v), Var)
            )
        rows = zip(*(branch.values for branch in branches), strict=True)
        avals = [next(v.aval for v in row if v is not None) for row in rows]
        programs = [self._write_program(branch, [*arguments], avals) for branch in branches]
        params = self._eqn.params | {"branches": tuple(ClosedJaxpr(program, ()) for program in programs)}
        results = [Var(aval) for aval in avals]
        effects = frozenset[Any]().union(*(program.effects for program in programs))
        operands = [self._eqn.invars[0], *arguments]
        self._eqns.append(self._eqn.replace(invars=operands, outvars=results, params=params, effects=effects))
        return results

    def _write_program(self, branch: _Branch, arguments: Sequence[Var], avals: Sequence[Any]) -> Jaxpr:
        """The program of a part's branch, for arrays outside, with results of given types."""
        invars = {v: Var(v.aval) for v in arguments}
        made = {v: v for eqn in branch.eqns for v in eqn.outvars}
        read: Renamed = {v: resolve(invars, w) for v, w in branch.outside.items()} | made
        eqns = [eqn.replace(invars=[resolve(read, v) for v in eqn.invars]) for eqn in branch.eqns]
        outs = []
        for v, aval in zip(branch.values, avals, strict=True):
            if v is None:
                fill, (v,) = instantiate(self._make_empty(aval), [], self._eqn)
                eqns += [eqn.replace(source_info=self._eqn.source_info) for eqn in fill]
            outs.append(resolve(read, v))
        return make_program(self._branches[0], [*invars.values()], eqns, outs)

    def _make_empty(self, aval: Any) -> Jaxpr:
        """A program that makes an empty array."""
        if aval not in self._empty:
            sharding = aval.sharding if explicit_mesh(aval) is not None else None

            def make(_: Any) -> jax.Array:
                scalar = compat.empty_scalar(aval)
                return jax.lax.broadcast(scalar, compat.shape_of(aval), out_sharding=sharding)

            traced = compat.trace_like(self._eqn, make, [aval]).jaxpr  # by the type: of a checked `shard_map`
            self._empty[aval] = traced.replace(invars=[])
        return self._empty[aval]


def _can_be_empty(v: Var) -> bool:
    is_array = hasattr(v.aval, "shape") and not compat.is_host(v.aval)
    return is_array and not jnp.issubdtype(compat.struct_of(v.aval).dtype, jax.dtypes.extended)
