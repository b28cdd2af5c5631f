"""Merges the forward and the backward `jax.shard_map` of a gradient taken outside.

`jax.grad` of a loss in a `jax.shard_map` traces two equations: the results of the forward `jax.shard_map` are
residuals, operands of the backward `jax.shard_map`. In a merged equation the residuals are values of a single
program. Only values of a single program have placements by a budget and start times of their copies.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec as P

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jaxoff._jaxpr.dataflow import variables
from jaxoff._jaxpr.inline import (
    Renamed,
    inline_calls_with,
    instantiate,
    resolve,
    share_scalars,
    trace_call,
)
from jaxoff._jaxpr.primitives import holds, is_shard_map

# Primitives of scalars: the results are equal on all devices if the operands are.
_OF_SCALARS = frozenset(
    {"add", "convert_element_type", "div", "exp", "integer_pow", "log", "max", "min", "mul", "neg", "pow",
     "rsqrt", "select_n", "sqrt", "square", "sub"}
)  # fmt: skip


class _Inside(NamedTuple):
    """A value inside of a `jax.shard_map`, and the division of the array outside over the devices."""

    value: Any
    spec: P

    def differs(self) -> bool:
        """Whether the devices have different parts."""
        return any(axes is not None for axes in self.spec)


def merge_shard_maps(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Merges each `jax.shard_map` of a program with the readers of its results, at all levels.

    A reader is merged if it is a `jax.shard_map` over the same mesh, and if both divide the results in the
    same way. Scalars between the two move inside if they are equal on all devices: a loss over a number of
    tokens. A reader of arrays computed between the two is not merged.

    Returns:
      The merged program; `closed` itself without a merged equation.
    """
    if not holds(closed.jaxpr, is_shard_map):
        return closed
    merges = False

    def merge(program: Jaxpr) -> Jaxpr:
        nonlocal merges
        eqns = (eqn if is_shard_map(eqn) else compat.map_programs(eqn, merge) for eqn in program.eqns)
        level = compat.replace_equations(program, eqns)
        merged = _merge_level(level)
        merges |= merged is not level
        return merged

    inlined = compat.rewrite_jaxprs(closed, functools.partial(inline_calls_with, is_shard_map))
    merged = compat.map_open(inlined, merge)
    return merged if merges else closed


def are_alike(first: JaxprEqn, eqn: JaxprEqn) -> bool:
    """Whether two `jax.shard_map`s are over the same axes of the same mesh."""
    own, others = first.params, eqn.params
    return all(own[key] == others.get(key) for key in own if key not in ("in_specs", "out_specs", "jaxpr"))


def _merge_level(program: Jaxpr) -> Jaxpr:
    """Merges the `jax.shard_map`s among a program's own equations; the same object without a merge."""
    eqns, rest, merges = list[JaxprEqn](), list(program.eqns), False
    # Found once: a long program has many groups.
    reads = {id(eqn): frozenset(variables(eqn)) for eqn in rest}
    walls = {id(eqn) for eqn in rest if _has_effects(eqn)}
    while rest:
        first = rest.pop(0)
        group = _Group(first) if is_shard_map(first) and id(first) not in walls else None
        before, behind = group.take(rest, reads, walls) if group else ([], [])
        if group is None or not group.is_merged:
            eqns.append(first)
            continue
        read = {v for v in program.outvars if isinstance(v, Var)}.union(*(reads[id(e)] for e in behind))
        whole = group.emit(read)
        reads[id(whole)] = frozenset(variables(whole))
        rest, merges = [*before, whole, *behind], True
    return program.replace(eqns=eqns) if merges else program


def _has_effects(eqn: JaxprEqn) -> bool:
    return bool(eqn.effects) or any(map(compat.has_side_effects, compat.sub_jaxprs(eqn)))


class _Before:
    """The equations before a group, none of which reads its results."""

    def __init__(self):
        self._eqns: dict[int, JaxprEqn] = {}  # by id, in order
        self._makers: dict[Var, JaxprEqn] = {}  # each a `jax.shard_map`
        self._reads = collections.Counter[Var]()

    def add(self, eqn: JaxprEqn, reads: Iterable[Var]) -> None:
        """Adds the next equation with its operands."""
        self._eqns[id(eqn)] = eqn
        self._makers.update(dict.fromkeys(eqn.outvars, eqn) if is_shard_map(eqn) else {})
        self._reads.update(reads)

    def remove(self, eqn: JaxprEqn, reads: Iterable[Var]) -> None:
        """Removes an equation with its operands."""
        del self._eqns[id(eqn)]
        self._reads.subtract(reads)

    def list_all(self) -> list[JaxprEqn]:
        """The equations."""
        return [*self._eqns.values()]

    def list_makers(self, values: Iterable[Var]) -> list[JaxprEqn]:
        """The `jax.shard_map`s among the equations that make any of the values."""
        found = {id(self._makers[v]): self._makers[v] for v in values if v in self._makers}
        return [eqn for key, eqn in found.items() if key in self._eqns]

    def reads_any(self, values: Iterable[Var]) -> bool:
        """Whether an equation reads any of the values."""
        return any(self._reads[v] > 0 for v in values)


def _list_results(eqn: JaxprEqn, values: Sequence[Any] | None = None) -> dict[Var, _Inside]:
    """The results of a `jax.shard_map`, with the values of its body or with given values."""
    inside = eqn.params["jaxpr"].outvars if values is None else values
    return dict(zip(eqn.outvars, map(_Inside, inside, eqn.params["out_specs"]), strict=True))


class _Group:
    """A `jax.shard_map` with the readers merged so far.

    Attributes:
      is_merged: whether a reader is merged.
    """

    def __init__(self, first: JaxprEqn):
        self._first, self._eqns, self.is_merged = first, list[JaxprEqn](), False
        self._effects = first.params["jaxpr"].effects
        self._arguments: dict[Any, _Inside] = {}  # (operand, its division) -> the argument
        self._results: dict[Var, _Inside] = {}
        self._add(first)

    def take(
        self, eqns: Sequence[JaxprEqn], reads: Mapping[int, frozenset[Var]], walls: Container[int]
    ) -> tuple[list[JaxprEqn], list[JaxprEqn]]:
        """Merges readers among the equations behind the group.

        Args:
          eqns: the equations.
          reads: id of an equation -> its operands.
          walls: ids of the equations with effects, behind which nothing is merged.

        Returns:
          The equations before the merged equation, and the equations behind.
        """
        before, behind, late = _Before(), list[JaxprEqn](), set[Var]()
        for i, eqn in enumerate(eqns):
            if id(eqn) in walls:
                return before.list_all(), [*behind, *eqns[i:]]
            is_late = not late.isdisjoint(reads[id(eqn)])
            if not is_late and self._results.keys().isdisjoint(reads[id(eqn)]):
                before.add(eqn, reads[id(eqn)])
            elif is_late or not self._takes_over(eqn, before, reads):
                behind.append(eqn)
                late.update(eqn.outvars)
        return before.list_all(), behind

    def emit(self, read: Container[Var]) -> JaxprEqn:
        """The merged equation, with its results among the variables `read`."""
        arguments, body = self._arguments.values(), self._first.params["jaxpr"]
        outs = {v: inside for v, inside in self._results.items() if v in read}
        renamed: Renamed = {}
        eqns = share_scalars(self._eqns, renamed)
        jaxpr = body.replace(
            invars=[argument.value for argument in arguments],
            eqns=eqns,
            outvars=[resolve(renamed, inside.value) for inside in outs.values()],
            effects=self._effects,
            debug_info=body.debug_info.with_unknown_names(),
        )
        divisions = {
            "in_specs": tuple(argument.spec for argument in arguments),
            "out_specs": tuple(inside.spec for inside in outs.values()),
        }
        return self._first.replace(
            invars=[operand for operand, _ in self._arguments],
            outvars=[*outs],
            params=self._first.params | divisions | {"jaxpr": jaxpr},
        )

    def _takes_over(self, eqn: JaxprEqn, before: _Before, reads: Mapping[int, frozenset[Var]]) -> bool:
        """Merges a reader of the group's results, if possible; returns whether the reader is merged.

        So are the equations of `before` whose results the reader alone reads; they leave `before`.
        """
        if not is_shard_map(eqn):
            return self._compute_inside(eqn)
        if not self._joins(eqn, self._results):
            return False
        operands = frozenset(v for v, _ in self._arguments if isinstance(v, Var))
        joined, todo = [eqn], [eqn]
        while todo:
            for maker in before.list_makers(reads[id(todo.pop())]):
                made = _list_results(maker)
                readers = [e for e in joined if not reads[id(e)].isdisjoint(made)]
                is_read = before.reads_any(made) or not operands.isdisjoint(made)
                if not is_read and all(self._joins(e, made) for e in (maker, *readers)):
                    before.remove(maker, reads[id(maker)])
                    joined.append(maker)
                    todo.append(maker)
        for each in reversed(joined):
            self._add(each)
        self.is_merged = True
        return True

    def _joins(self, eqn: JaxprEqn, made: Mapping[Var, _Inside]) -> bool:
        """Whether a `jax.shard_map` is like the first, and reads the values `made` as they are divided."""
        places = zip(eqn.invars, eqn.params["in_specs"], strict=True)
        as_made = all(made[v].spec == spec for v, spec in places if isinstance(v, Var) and v in made)
        return as_made and are_alike(self._first, eqn)

    def _add(self, eqn: JaxprEqn) -> None:
        body = eqn.params["jaxpr"]
        places = zip(eqn.invars, eqn.params["in_specs"], body.invars, strict=True)
        made, values = instantiate(body, [self._find(v, spec, like.aval) for v, spec, like in places], eqn)
        self._eqns += made
        self._effects |= body.effects
        self._results |= _list_results(eqn, values)

    def _find(self, operand: Any, spec: Any, aval: Any) -> Any:
        """The value of an operand inside: of a result, or an argument of type `aval`."""
        if not isinstance(operand, Var):
            return operand
        if operand in self._results:
            return self._results[operand].value
        key = operand, spec
        if key not in self._arguments:
            self._arguments[key] = _Inside(Var(aval), spec)
        return self._arguments[key].value

    def _compute_inside(self, eqn: JaxprEqn) -> bool:
        """Moves an equation of scalars inside, if they are equal on all devices; returns whether it moved."""
        atoms = (*eqn.invars, *eqn.outvars)
        is_scalar = not any(compat.shape_of(v.aval) for v in atoms) and not compat.sub_jaxprs(eqn)
        read = [self._results[v] for v in variables(eqn) if v in self._results]
        if not (is_scalar and eqn.primitive.name in _OF_SCALARS) or any(map(_Inside.differs, read)):
            return False
        inside = read[0].value.aval  # a type of Explicit axes names the mesh, which is another inside

        def find(v: Any) -> Any:
            like = compat.struct_of(v.aval)
            return self._find(v, P(), inside.update(dtype=like.dtype, weak_type=like.weak_type))

        operands = [v if isinstance(v, Literal) else find(v) for v in eqn.invars]
        made, values = trace_call(
            lambda *xs: eqn.primitive.bind(*xs, **eqn.params), operands, like=self._eqns[0]
        )
        self._eqns += made
        self._results |= {v: _Inside(value, P()) for v, value in zip(eqn.outvars, values, strict=True)}
        return True
