"""A loss divided into its parts, which `jax.checkpoint` surrounds, and the rest, as a planner sees them."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxoff._device.profile import Device
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jaxoff._jaxpr.dataflow import variables
from jaxoff._jaxpr.inline import inlined, now
from jaxoff._jaxpr.scopes import find_layer_number, is_layer_loop
from jaxoff._plan.layer import Layer
from jaxoff._plan.layer_profile import LayerPasses, layer_of
from jaxoff._plan.timeline import Call, Point, Timeline
from jaxoff._residuals.traced_function import TracedFunction

_FORWARD, _BACKWARD = "jaxoff.forward.", "jaxoff.backward."


@dataclasses.dataclass(frozen=True)
class Part:
    """A checkpointed layer outside of loops, or a loop over such layers.

    Attributes:
      iteration: what one iteration computes.
      iterations: how many there are; 1 outside of loops.
      carried: by input of an iteration, whether only `jax.checkpoint` keeps it for the backward pass. The
        program's own inputs, weights among them, live anyway.
      differentiated: by input of an iteration, whether its gradient is needed.
      num_rows: how many of the inputs, the last ones, are rows of stacks.
      source: where it is written.
      in_order: whether it is a `jaxoff.scan`.
    """

    iteration: ClosedJaxpr
    iterations: int
    carried: tuple[bool, ...]
    differentiated: tuple[bool, ...]
    num_rows: int
    source: str
    in_order: bool = False


@dataclasses.dataclass(frozen=True)
class Divided:
    """A step divided.

    Attributes:
      layers: parts that differ.
      counts: by layer, how many parts are like it.
      numbers: by layer, those of its parts in their `jaxoff.layers`, in the order of the forward pass; none
        for what is in none.
      runs: by layer, how often they run in a step: more than once in a loop over microbatches.
      points: in order.
      argument_nbytes: of the arguments and constants, which live all the time.
      outside_ms: how long what is in no part takes, estimated.
      devices: over how many the step is; all else is of one.
    """

    layers: tuple[Layer, ...]
    counts: tuple[int, ...]
    numbers: tuple[tuple[int, ...], ...]
    runs: tuple[int, ...]
    points: tuple[Point, ...]
    argument_nbytes: int
    outside_ms: float
    devices: int = 1


def divide(program: TracedFunction, device: Device) -> Divided:
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
    structs = [compat.struct_of(v.aval) for v in primal.jaxpr.invars]
    outside = jax.make_jaxpr(lambda *leaves: evaluated(primal, leaves, opaque))(*structs)
    if not parts:
        raise ValueError(
            "A plan places what is inside of jax.checkpoint; got a function without any, or only inside of "
            "cond, while or shard_map. Wrap each layer in jax.checkpoint(layer, policy=jaxoff.policy()), or "
            "take jaxoff.scan or jaxoff.layers."
        )
    return _Outside(dataclasses.replace(program, primal=outside).value_and_grad, parts, device).divided()


def numbers_of(parts: Iterable[tuple[int, int | None]]) -> tuple[tuple[int, ...], ...]:
    """The numbers of parts in their `jaxoff.layers`, by kind; see `Divided`.

    Args:
      parts: the kind of each and its number, in the order of the forward pass.
    """
    found: dict[int, list[int]] = {}
    for kind, number in parts:
        found.setdefault(kind, []).extend([] if number is None else [number])
    return tuple(tuple(found[kind]) for kind in sorted(found))


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
        return atom.val if isinstance(atom, compat.Literal) else values[atom]

    for eqn in jaxpr.eqns:
        operands = [value(v) for v in eqn.invars]
        out = instead(eqn, operands)
        if out is None:
            inner = compat.jit_in(eqn)
            out = compat.bind(eqn, operands, jaxpr) if inner is None else evaluated(inner, operands, instead)
        values.update(zip(eqn.outvars, out, strict=True))
    return [value(v) for v in jaxpr.outvars]


def _is_part(eqn: JaxprEqn) -> bool:
    if compat.checkpoint_in(eqn) is not None:
        return True
    return compat.scan_in(eqn) is not None and _holds_checkpoint(compat.as_open(eqn.params["jaxpr"]))


def _holds_checkpoint(jaxpr: Jaxpr) -> bool:
    return any(
        compat.checkpoint_in(eqn) is not None
        or (compat.jit_in(eqn) is not None and any(map(_holds_checkpoint, compat.sub_jaxprs(eqn))))
        for eqn in jaxpr.eqns
    )


def _opaque(number: int, eqn: JaxprEqn) -> Callable[..., Any]:
    """A function in a part's place: one equation forward, one backward, which keep its operands."""
    results = [compat.struct_of(v.aval) for v in eqn.outvars]
    floating = [_is_inexact(v.aval) for v in eqn.invars]
    gradients = [compat.struct_of(v.aval) for v in eqn.invars if _is_inexact(v.aval)]

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
        calls = {i: call for i, eqn in enumerate(self._eqns) if (call := self._call(eqn))}
        self._timeline = Timeline(self._eqns, self._inputs, self._outs, calls)

    def divided(self) -> Divided:
        numbers = {part: find_layer_number(eqn) for part, eqn in enumerate(self._parts)}
        keys: dict[Any, int] = {}
        kinds: dict[int, Part] = {}
        kind_of: dict[int, int] = {}
        for i, call in self._timeline.calls.items():
            if call.backward:
                part = self._part(i, self._parts[call.part])
                bare = dataclasses.replace(part, iteration=None)  # pyright: ignore
                key = str(part.iteration), bare, numbers[call.part] is None
                kind_of[call.part] = keys.setdefault(key, len(keys))
                kinds.setdefault(kind_of[call.part], part)
        counts = collections.Counter(kind_of.values())
        return Divided(
            layers=tuple(layer_of(_differentiated(part), self._device) for part in kinds.values()),
            counts=tuple(counts[kind] for kind in kinds),
            numbers=numbers_of((kind_of[part], numbers[part]) for part in sorted(kind_of)),
            runs=(1,) * len(kinds),
            points=tuple(self._timeline.points(kind_of)),
            argument_nbytes=compat.nbytes_of(self._inputs),
            outside_ms=self._timeline.ms(self._device),
        )

    def _call(self, eqn: JaxprEqn) -> Call | None:
        """The pass of a part that an equation stands for."""
        target = str(eqn.params.get("target_name", ""))
        for prefix in (_FORWARD, _BACKWARD):
            if target.startswith(prefix):
                part, backward = int(target.removeprefix(prefix)), prefix == _BACKWARD
                operands, cotangents = variables(eqn), frozenset[Var]()
                if backward:
                    count = len(self._parts[part].invars)
                    operands = [v for v in eqn.invars[:count] if isinstance(v, Var)]
                    cotangents = frozenset(v for v in eqn.invars[count:] if isinstance(v, Var))
                # Operands of loops stay until the backward pass whatever is planned.
                is_loop = compat.scan_in(self._parts[part]) is not None
                kept = frozenset(operands) - cotangents if backward and not is_loop else frozenset()
                return Call(part, backward, kept, cotangents if backward else frozenset(operands))
        return None

    def _part(self, i: int, eqn: JaxprEqn) -> Part:
        used = {v for e in self._eqns for v in e.invars if isinstance(v, Var)} | self._outs
        gradients = iter(v in used for v in self._eqns[i].outvars)
        needed = tuple(_is_inexact(v.aval) and next(gradients) for v in eqn.invars)
        layout, source = compat.scan_in(eqn), compat.source_line(eqn)
        if layout is None:
            kept = [not self._timeline.is_input(v) for v in self._eqns[i].invars[: len(eqn.invars)]]
            checkpoint = compat.checkpoint_in(eqn)
            assert checkpoint is not None
            iteration = ClosedJaxpr(checkpoint.jaxpr, ())
            return Part(iteration, 1, tuple(kept), needed, 0, source)
        carried = range(layout.num_consts, layout.num_consts + layout.num_carry)
        kept = tuple(k in carried for k in range(len(needed)))
        # What goes from iteration to iteration has a gradient there, whether or not the first one's is used.
        floating = (_is_inexact(v.aval) for v in eqn.invars)
        needed = tuple(n or (k and f) for n, k, f in zip(needed, kept, floating, strict=True))
        num_rows = len(eqn.invars) - carried.stop
        iteration: ClosedJaxpr = eqn.params["jaxpr"]
        return Part(iteration, layout.length, kept, needed, num_rows, source, is_layer_loop(eqn))


def _differentiated(part: Part) -> LayerPasses:
    """Differentiates an iteration of a part as if everything were kept."""
    operands = [compat.struct_of(v.aval) for v in part.iteration.jaxpr.invars]
    results = [compat.struct_of(v.aval) for v in part.iteration.jaxpr.outvars]

    def both(operands, cotangents):
        def run(*free):
            rest = iter(free)
            full = [next(rest) if d else x for x, d in zip(operands, part.differentiated, strict=True)]
            out = evaluated(part.iteration, full, _without_checkpoint)
            return [x for x in out if _is_inexact(x)], out

        free = [x for x, d in zip(operands, part.differentiated, strict=True) if d]
        _, pullback, out = jax.vjp(run, *free, has_aux=True)
        return out, pullback(cotangents)

    cotangents = [x for x in results if _is_inexact(x)]
    jaxpr = jax.make_jaxpr(both)(operands, cotangents).jaxpr
    jaxpr, _ = compat.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
    renamed = {}
    eqns = tuple(inlined(jaxpr.eqns, renamed))
    outs = [now(renamed, v) for v in jaxpr.outvars]
    kept = zip(jaxpr.invars[: len(operands)], part.carried, strict=True)
    return LayerPasses(
        iterations=part.iterations,
        eqns=eqns,
        carried=tuple(v for v, carried in kept if carried),
        cotangents=tuple(jaxpr.invars[len(operands) :]),
        results=frozenset(v for v in outs[: len(results)] if isinstance(v, Var)),
        gradients=frozenset(v for v in outs[len(results) :] if isinstance(v, Var)),
        source=part.source,
        rows=tuple(jaxpr.invars[len(operands) - part.num_rows : len(operands)]),
        in_order=part.in_order,
    )


def _without_checkpoint(eqn, operands):
    checkpoint = compat.checkpoint_in(eqn)
    if checkpoint is None:
        return None
    return evaluated(ClosedJaxpr(checkpoint.jaxpr, ()), operands, _without_checkpoint)
