"""A loss divided into its parts, which `jax.checkpoint` surrounds, and the rest, as a planner sees them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxoff import _compat
from jaxoff._compat import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jaxoff._cost import Device
from jaxoff._inline import inlined, now
from jaxoff._program import Program
from jaxoff._units import Units, is_heavy

_FORWARD, _BACKWARD = "jaxoff.forward.", "jaxoff.backward."


@dataclasses.dataclass(frozen=True)
class Part:
    """A checkpointed layer outside of loops, or a loop over such layers.

    Attributes:
      turn: what one turn computes.
      turns: how many there are; 1 outside of loops.
      carried: by input of a turn, whether only `jax.checkpoint` keeps it for the backward pass. The program's
        own inputs, weights among them, live anyway.
      differentiated: by input of a turn, whether its gradient is needed.
      source: where it is written.
    """

    turn: ClosedJaxpr
    turns: int
    carried: tuple[bool, ...]
    differentiated: tuple[bool, ...]
    source: str


@dataclasses.dataclass(frozen=True)
class Point:
    """A moment of a step outside of parts, or while one of them runs.

    Attributes:
      what: the operation, for people.
      nbytes: what is alive, without the residuals and the working set of parts.
      holds: by number of the kind of part, how many of them hold their residuals.
      kind: of the part that runs, or None.
      backward: whether its backward pass runs.
    """

    what: str
    nbytes: int
    holds: tuple[int, ...]
    kind: int | None = None
    backward: bool = False


@dataclasses.dataclass(frozen=True)
class Divided:
    """A step divided.

    Attributes:
      kinds: parts that differ.
      counts: by kind, how many parts are of it.
      points: in order.
      argument_nbytes: of the arguments and constants, which live all the time.
      outside_ms: how long what is in no part takes, estimated.
    """

    kinds: tuple[Part, ...]
    counts: tuple[int, ...]
    points: tuple[Point, ...]
    argument_nbytes: int
    outside_ms: float


def divide(program: Program, device: Device) -> Divided:
    """Divides the step of a function, itself and its gradients, into parts and the rest.

    Raises:
      ValueError: if nothing in it is checkpointed.
    """
    parts: list[JaxprEqn] = []

    def opaque(eqn: JaxprEqn, values: Sequence[Any]) -> Sequence[Any] | None:
        if not _is_part(eqn):
            return None
        parts.append(eqn)
        return _opaque(len(parts) - 1, eqn)(*values)

    primal = program.primal
    structs = [_compat.struct_of(v.aval) for v in primal.jaxpr.invars]
    outside = jax.make_jaxpr(lambda *leaves: evaluated(primal, leaves, opaque))(*structs)
    if not parts:
        raise ValueError(
            "A plan places what is inside of jax.checkpoint; got a function without any, or only inside of "
            "cond, while or shard_map. Wrap each layer in jax.checkpoint(layer, policy=jaxoff.policy()), or "
            "take jaxoff.scan or jaxoff.layers."
        )
    return _Outside(dataclasses.replace(program, primal=outside).value_and_grad, parts, device).divided()


def evaluated(
    closed: ClosedJaxpr,
    args: Sequence[Any],
    instead: Callable[[JaxprEqn, Sequence[Any]], Sequence[Any] | None],
) -> list[Any]:
    """A program's results, where some equations, in calls of `jax.jit` too, are computed otherwise.

    Args:
      closed: the program.
      args: its arguments.
      instead: the results of an equation for values, or None to compute it as it is.
    """
    jaxpr = closed.jaxpr
    values: dict[Var, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    values.update(zip(jaxpr.invars, args, strict=True))

    def value(atom):
        return atom.val if isinstance(atom, _compat.Literal) else values[atom]

    for eqn in jaxpr.eqns:
        operands = [value(v) for v in eqn.invars]
        out = instead(eqn, operands)
        if out is None:
            inner = _compat.jit_in(eqn)
            out = _compat.bind(eqn, operands, jaxpr) if inner is None else evaluated(inner, operands, instead)
        values.update(zip(eqn.outvars, out, strict=True))
    return [value(v) for v in jaxpr.outvars]


def _is_part(eqn: JaxprEqn) -> bool:
    if _compat.checkpoint_in(eqn) is not None:
        return True
    return _compat.scan_in(eqn) is not None and _holds_checkpoint(_compat.as_open(eqn.params["jaxpr"]))


def _holds_checkpoint(jaxpr: Jaxpr) -> bool:
    return any(
        _compat.checkpoint_in(eqn) is not None
        or (_compat.jit_in(eqn) is not None and any(map(_holds_checkpoint, _compat.sub_jaxprs(eqn))))
        for eqn in jaxpr.eqns
    )


def _opaque(number: int, eqn: JaxprEqn) -> Callable[..., Any]:
    """A function in a part's place: one equation forward, one backward, which keep its operands."""
    results = [_compat.struct_of(v.aval) for v in eqn.outvars]
    floating = [_is_inexact(v.aval) for v in eqn.invars]
    gradients = [_compat.struct_of(v.aval) for v in eqn.invars if _is_inexact(v.aval)]

    @jax.custom_vjp
    def part(*operands):
        return jax.ffi.ffi_call(f"{_FORWARD}{number}", results)(*operands)

    def backward(operands, cotangents):
        given = [c for c, struct in zip(cotangents, results, strict=True) if _is_inexact(struct)]
        made = iter(jax.ffi.ffi_call(f"{_BACKWARD}{number}", gradients)(*operands, *given))
        return tuple(next(made) if needed else None for needed in floating)

    part.defvjp(lambda *operands: (part(*operands), operands), backward)
    return part


def _is_inexact(aval) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.inexact)


class _Outside:
    """A step whose parts are one equation forward and one backward."""

    def __init__(self, step: Jaxpr, parts: Sequence[JaxprEqn], device: Device):
        renamed = {}
        self._eqns = list(inlined(step.eqns, renamed))
        self._outs = frozenset(v for v in (now(renamed, v) for v in step.outvars) if isinstance(v, Var))
        self._inputs = {*step.invars, *step.constvars}
        self._parts, self._device = parts, device
        self._units = Units(self._eqns, self._outs)
        self._kinds: list[Part] = []
        self._kind_of: dict[int, int] = {}

    def divided(self) -> Divided:
        calls = {i: call for i in self._units.all if (call := _call(self._eqns[i]))}
        known: dict[Any, int] = {}
        for i, (number, backward) in calls.items():
            if backward:
                part = self._part(i, self._parts[number])
                key = str(part.turn), dataclasses.replace(part, turn=None)  # pyright: ignore
                if key not in known:
                    known[key] = len(self._kinds)
                    self._kinds.append(part)
                self._kind_of[number] = known[key]
        counts = [list(self._kind_of.values()).count(k) for k in range(len(self._kinds))]
        ms = sum(self._units.ms(i, self._device) for i in self._units.all if i not in calls)
        nbytes = sum(_compat.nbytes(v.aval) for v in self._inputs)
        return Divided(tuple(self._kinds), tuple(counts), tuple(self._points(calls)), nbytes, ms)

    def _part(self, i: int, eqn: JaxprEqn) -> Part:
        used = {v for e in self._eqns for v in e.invars if isinstance(v, Var)} | self._outs
        gradients = iter(v in used for v in self._eqns[i].outvars)
        needed = tuple(_is_inexact(v.aval) and next(gradients) for v in eqn.invars)
        layout, source = _compat.scan_in(eqn), _compat.source_line(eqn)
        if layout is None:
            kept = [not self._is_input(v) for v in self._eqns[i].invars[: len(eqn.invars)]]
            checkpoint = _compat.checkpoint_in(eqn)
            assert checkpoint is not None
            turn = ClosedJaxpr(checkpoint.jaxpr, ())
            return Part(turn, 1, tuple(kept), needed, source)
        carried = range(layout.num_consts, layout.num_consts + layout.num_carry)
        kept = tuple(k in carried for k in range(len(needed)))
        return Part(eqn.params["jaxpr"], layout.length, kept, needed, source)

    def _is_input(self, atom: Any) -> bool:
        """Whether a value is an argument, or a view of one."""
        todo = [atom]
        while todo:
            v = todo.pop()
            if isinstance(v, Var) and v not in self._inputs:
                i = self._units.maker[v]
                if i in self._units.reads:
                    return False
                todo += self._eqns[i].invars
        return True

    def _points(self, calls: dict[int, tuple[int, bool]]):
        order = self._units.all
        when = {call: t for t, i in enumerate(order) if (call := calls.get(i))}
        last: dict[Var, int] = {}
        for t, i in enumerate(order):
            number, backward = calls.get(i, (0, False))
            # What a part outside of loops keeps is counted as its residuals.
            kept = len(self._parts[number].invars) if backward else 0
            for v in self._units.reads[i]:
                operands = self._eqns[i].invars
                if not (v in operands[:kept] and v not in operands[kept:] and not self._stays(number)):
                    last[v] = t
        last |= dict.fromkeys(self._outs, len(order))
        live = 0
        for t, i in enumerate(order):
            made = sum(_compat.nbytes(v.aval) for v in self._eqns[i].outvars if v in last)
            dying = [v for v in self._units.reads[i] if last.get(v) == t and v not in self._inputs]
            freed = sum(_compat.nbytes(v.aval) for v in dying)
            in_place = i in calls or not is_heavy(self._eqns[i])
            reused = min(freed, made) if in_place else 0
            holds = [0] * len(self._kinds)
            for number, kind in self._kind_of.items():
                holds[kind] += when[number, False] <= t <= when[number, True]
            number, backward = calls.get(i, (None, False))
            kind = None if number is None else self._kind_of.get(number)
            what = f"{self._eqns[i].primitive.name} {_compat.source_line(self._eqns[i])}".strip()
            yield Point(what, live + made - reused, tuple(holds), kind, backward)
            live += made - freed

    def _stays(self, number: int) -> bool:
        """Whether what a part reads lives until its backward pass whatever is planned: operands of loops."""
        return _compat.scan_in(self._parts[number]) is not None


def _call(eqn: JaxprEqn) -> tuple[int, bool] | None:
    """The number of the part that an equation stands for, and whether backward."""
    target = str(eqn.params.get("target_name", ""))
    for prefix in (_FORWARD, _BACKWARD):
        if target.startswith(prefix):
            return int(target.removeprefix(prefix)), prefix == _BACKWARD
    return None
