"""Divides a loss and its gradients into layer groups, which `jax.checkpoint` surrounds, and the rest."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxoff._device.profile import Device
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jaxoff._jaxpr.dataflow import drop_dead, variables
from jaxoff._jaxpr.inline import inline_program
from jaxoff._jaxpr.scopes import find_layer_number, is_layer_loop
from jaxoff._plan.divided import DividedStep, ProgramKey, collect_numbers
from jaxoff._plan.layer_profile import LayerPasses, read_layer
from jaxoff._plan.timeline import PassCall, Timeline
from jaxoff._residuals.traced_function import TracedFunction


@dataclasses.dataclass(frozen=True)
class LayerGroup:
    """A checkpointed layer outside of loops, or a loop over such layers.

    Attributes:
      iteration: the program of one iteration.
      iterations: number of iterations; 1 outside of loops.
      carried: for each input of an iteration, whether `jax.checkpoint` alone keeps the input for the backward
        pass. Inputs of the whole program, such as weights, live anyway.
      differentiated: for each input of an iteration, whether the step needs the input's gradient.
      num_rows: number of rows of stacks, the last inputs.
      source: file and line of the group.
      is_ordered: whether the group is a `jaxoff.scan`.
    """

    iteration: ClosedJaxpr
    iterations: int
    carried: tuple[bool, ...]
    differentiated: tuple[bool, ...]
    num_rows: int
    source: str
    is_ordered: bool = False


@dataclasses.dataclass(frozen=True)
class _PassTarget:
    """The target of the FFI call in place of a pass of a layer group.

    Attributes:
      group: number of the layer group.
      is_backward: whether the pass is the backward pass.
    """

    group: int
    is_backward: bool

    @property
    def name(self) -> str:
        """The target's name in an FFI call."""
        return f"jaxoff.{'backward' if self.is_backward else 'forward'}.{self.group}"


def divide_loss(program: TracedFunction, device: Device) -> DividedStep:
    """Divides the step of a function, its value and its gradients, into layer groups and the rest.

    Raises:
      ValueError: for a function without checkpointed layers.
    """
    groups: list[JaxprEqn] = []

    def replace(eqn: JaxprEqn, values: Sequence[Any]) -> Sequence[Any] | None:
        if not _is_group(eqn):
            return None
        groups.append(eqn)
        return _build_opaque(len(groups) - 1, eqn)(*values)

    primal = program.primal
    structs = [compat.struct_of(v.aval) for v in primal.jaxpr.invars]
    outside = jax.make_jaxpr(lambda *leaves: _evaluate(primal, leaves, replace))(*structs)
    if not groups:
        raise ValueError(
            "A plan places what is inside of jax.checkpoint; got a function without any, or only inside of "
            "cond, while or shard_map. Wrap each layer in jax.checkpoint(layer, policy=jaxoff.policy()), or "
            "take jaxoff.scan or jaxoff.layers."
        )
    return _OpaqueStep(dataclasses.replace(program, primal=outside).value_and_grad, groups, device).divide()


def _evaluate(
    closed: ClosedJaxpr,
    args: Sequence[Any],
    replace: Callable[[JaxprEqn, Sequence[Any]], Sequence[Any] | None],
) -> list[Any]:
    """Evaluates a program, with its calls of `jax.jit`, with replacements for some equations.

    Args:
      closed: the program.
      args: arguments of the program.
      replace: returns the results of an equation for its operands, or None to evaluate the equation
        unchanged.
    """
    jaxpr = closed.jaxpr
    values: dict[Var, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    values.update(zip(jaxpr.invars, args, strict=True))

    def read(atom):
        return atom.val if isinstance(atom, compat.Literal) else values[atom]

    for eqn in jaxpr.eqns:
        operands = [read(v) for v in eqn.invars]
        out = replace(eqn, operands)
        if out is None:
            inner = compat.jit_in(eqn)
            out = compat.bind(eqn, operands, jaxpr) if inner is None else _evaluate(inner, operands, replace)
        values.update(zip(eqn.outvars, out, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _is_group(eqn: JaxprEqn) -> bool:
    if compat.checkpoint_in(eqn) is not None:
        return True
    return compat.scan_in(eqn) is not None and _has_checkpoint(compat.as_open(eqn.params["jaxpr"]))


def _has_checkpoint(jaxpr: Jaxpr) -> bool:
    return any(
        compat.checkpoint_in(eqn) is not None
        or (compat.jit_in(eqn) is not None and any(map(_has_checkpoint, compat.sub_jaxprs(eqn))))
        for eqn in jaxpr.eqns
    )


def _build_opaque(number: int, eqn: JaxprEqn) -> Callable[..., Any]:
    """Builds the replacement of a layer group: an opaque equation for each pass. Operands are residuals."""
    results = [compat.struct_of(v.aval) for v in eqn.outvars]
    floating = [_is_inexact(v.aval) for v in eqn.invars]
    gradients = [compat.struct_of(v.aval) for v in eqn.invars if _is_inexact(v.aval)]

    @jax.custom_vjp
    def run_opaque(*operands):
        return jax.ffi.ffi_call(_PassTarget(number, False).name, results)(*operands)

    def run_backward(operands, cotangents):
        given = [c for c, struct in zip(cotangents, results, strict=True) if _is_inexact(struct)]
        made = iter(jax.ffi.ffi_call(_PassTarget(number, True).name, gradients)(*operands, *given))
        return tuple(next(made) if needed else None for needed in floating)

    run_opaque.defvjp(lambda *operands: (run_opaque(*operands), operands), run_backward)
    return run_opaque


def _is_inexact(aval) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.inexact)


class _OpaqueStep:
    """A step with an opaque equation for each pass of each layer group."""

    def __init__(self, step: Jaxpr, groups: Sequence[JaxprEqn], device: Device):
        step = inline_program(step)
        self._eqns = list(step.eqns)
        self._outs = frozenset(v for v in step.outvars if isinstance(v, Var))
        self._inputs = {*step.invars, *step.constvars}
        self._groups, self._device = groups, device
        targets = (_PassTarget(group, back) for group in range(len(groups)) for back in (False, True))
        self._targets = {target.name: target for target in targets}
        calls = {i: call for i, eqn in enumerate(self._eqns) if (call := self._find_call(eqn))}
        self._timeline = Timeline(self._eqns, self._inputs, self._outs, calls)

    def divide(self) -> DividedStep:
        """Sorts the groups into kinds, and looks at each kind."""
        numbers = {group: find_layer_number(eqn) for group, eqn in enumerate(self._groups)}
        keys: dict[Any, int] = {}
        kinds: dict[int, LayerGroup] = {}
        kind_of: dict[int, int] = {}
        for i, call in self._timeline.calls.items():
            if call.is_backward:
                group = self._build_group(i, self._groups[call.group])
                bare = dataclasses.replace(group, iteration=None)  # pyright: ignore
                key = ProgramKey.of(group.iteration), bare, numbers[call.group] is None
                kind_of[call.group] = keys.setdefault(key, len(keys))
                kinds.setdefault(kind_of[call.group], group)
        counts = collections.Counter(kind_of.values())
        return DividedStep(
            layers=tuple(read_layer(_differentiate(group), self._device) for group in kinds.values()),
            counts=tuple(counts[kind] for kind in kinds),
            numbers=collect_numbers((kind_of[group], numbers[group]) for group in sorted(kind_of)),
            runs=(1,) * len(kinds),
            points=tuple(self._timeline.points(kind_of)),
            argument_nbytes=compat.nbytes_of(self._inputs),
            outside_ms=self._timeline.outside_ms(self._device),
        )

    def _find_call(self, eqn: JaxprEqn) -> PassCall | None:
        """Returns the pass for which an equation stands, or None."""
        target = self._targets.get(eqn.params.get("target_name", ""))
        if target is None:
            return None
        if not target.is_backward:
            return PassCall(target.group, False, reusable=frozenset(variables(eqn)))
        group = self._groups[target.group]
        count = len(group.invars)
        operands = frozenset(v for v in eqn.invars[:count] if isinstance(v, Var))
        cotangents = frozenset(v for v in eqn.invars[count:] if isinstance(v, Var))
        # Operands of a loop live until its backward pass under every placement.
        is_loop = compat.scan_in(group) is not None
        return PassCall(target.group, True, frozenset() if is_loop else operands - cotangents, cotangents)

    def _build_group(self, i: int, eqn: JaxprEqn) -> LayerGroup:
        """Builds the group of an equation of the loss.

        Args:
          i: index of the opaque equation of the group's backward pass.
          eqn: the equation of the loss.
        """
        used = {v for e in self._eqns for v in e.invars if isinstance(v, Var)} | self._outs
        gradients = iter(v in used for v in self._eqns[i].outvars)
        needed = tuple(_is_inexact(v.aval) and next(gradients) for v in eqn.invars)
        layout, source = compat.scan_in(eqn), compat.source_line(eqn)
        if layout is None:
            carried = [not self._timeline.is_input(v) for v in self._eqns[i].invars[: len(eqn.invars)]]
            checkpoint = compat.checkpoint_in(eqn)
            assert checkpoint is not None
            iteration = ClosedJaxpr(checkpoint.jaxpr, ())
            return LayerGroup(iteration, 1, tuple(carried), needed, 0, source)
        carry = range(layout.num_consts, layout.num_consts + layout.num_carry)
        carried = tuple(k in carry for k in range(len(needed)))
        # The carry has a gradient in each iteration, even if no equation reads the gradient of the first
        # carry.
        floating = (_is_inexact(v.aval) for v in eqn.invars)
        needed = tuple(n or (k and f) for n, k, f in zip(needed, carried, floating, strict=True))
        num_rows = len(eqn.invars) - carry.stop
        iteration: ClosedJaxpr = eqn.params["jaxpr"]
        return LayerGroup(iteration, layout.length, carried, needed, num_rows, source, is_layer_loop(eqn))


def _differentiate(group: LayerGroup) -> LayerPasses:
    """Differentiates an iteration of a group with all residuals saved."""
    operands = [compat.struct_of(v.aval) for v in group.iteration.jaxpr.invars]
    results = [compat.struct_of(v.aval) for v in group.iteration.jaxpr.outvars]

    def run_both(operands, cotangents):
        def run(*free):
            rest = iter(free)
            full = [next(rest) if d else x for x, d in zip(operands, group.differentiated, strict=True)]
            out = _evaluate(group.iteration, full, _open_checkpoint)
            return [x for x in out if _is_inexact(x)], out

        free = [x for x, d in zip(operands, group.differentiated, strict=True) if d]
        _, pullback, out = jax.vjp(run, *free, has_aux=True)
        return out, pullback(cotangents)

    cotangents = [x for x in results if _is_inexact(x)]
    jaxpr = jax.make_jaxpr(run_both)(operands, cotangents).jaxpr
    jaxpr = inline_program(drop_dead(jaxpr))
    eqns, outs = tuple(jaxpr.eqns), list(jaxpr.outvars)
    inputs = zip(jaxpr.invars[: len(operands)], group.carried, strict=True)
    return LayerPasses(
        iterations=group.iterations,
        eqns=eqns,
        carried=tuple(v for v, is_carried in inputs if is_carried),
        cotangents=tuple(jaxpr.invars[len(operands) :]),
        results=frozenset(v for v in outs[: len(results)] if isinstance(v, Var)),
        gradients=frozenset(v for v in outs[len(results) :] if isinstance(v, Var)),
        source=group.source,
        rows=tuple(jaxpr.invars[len(operands) - group.num_rows : len(operands)]),
        is_ordered=group.is_ordered,
    )


def _open_checkpoint(eqn, operands):
    """Evaluates the layer inside of a `jax.checkpoint`, and returns None for all other equations."""
    checkpoint = compat.checkpoint_in(eqn)
    if checkpoint is None:
        return None
    return _evaluate(ClosedJaxpr(checkpoint.jaxpr, ()), operands, _open_checkpoint)
