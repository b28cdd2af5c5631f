"""Programs rewritten so that layers need less memory, and copies of residuals overlap with compute."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from jaxoff._device.profile import Device
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jaxoff._jaxpr.dataflow import index_makers, mark_dependents, variables
from jaxoff._jaxpr.inline import Renamed, delay_fills, inline_calls, instantiate, resolve, split_scalars
from jaxoff._jaxpr.scopes import is_differentiated, is_layer_loop, is_plain_loop
from jaxoff._jaxpr.stack_slices import find_shared_stacks, find_split_slices
from jaxoff._schedule.collectives import chain_collectives
from jaxoff._schedule.decide import LARGE_NBYTES, decide
from jaxoff._schedule.emit import emit
from jaxoff._schedule.loops import Loop, find_host_stacks, row_nbytes, write_out
from jaxoff._schedule.problem import OrderProblem


@dataclasses.dataclass(frozen=True)
class Rewritten:
    """A program whose copies overlap.

    Attributes:
      jaxpr: the program.
      loops: how many loops in it are written out.
      scanned: how many loops in it move residuals.
      flat: whether it moves residuals outside of loops.
      spare_nbytes: host memory that it takes beyond what the given program did, for spare rows of stacks.
    """

    jaxpr: ClosedJaxpr
    loops: int
    scanned: int
    flat: bool
    spare_nbytes: int


def rewrite(
    closed: ClosedJaxpr, device: Device, large_nbytes: int = LARGE_NBYTES, *, one_device: bool = True
) -> Rewritten:
    """Orders the bodies of all scans that move residuals or are differentiated `jaxoff.scan`s, and what moves
    residuals outside of them.

    Args:
      closed: a program that nothing differentiates any more.
      device: speeds of what it will run on.
      large_nbytes: from how many bytes on a value has a place in the order.
      one_device: whether nothing in the program is spread over devices by the compiler.

    Returns:
      A program of the same arguments, results and effects.
    """
    rewriter = _Rewriter(device, large_nbytes, one_device)
    jaxpr = compat.rewrite_jaxprs(closed.jaxpr, _with_loops_together)
    jaxpr = compat.rewrite_jaxprs(jaxpr, rewriter.loops)
    flat = "H2D" in _transfers(jaxpr)
    if flat and not compat.has_side_effects(jaxpr):
        jaxpr = rewriter.flat(jaxpr)
    return Rewritten(
        closed.replace(jaxpr=jaxpr), rewriter.written, rewriter.scanned, flat, rewriter.spare_nbytes
    )


class _Rewriter:
    def __init__(self, device: Device, large_nbytes: int, one_device: bool):
        self._device, self._large_nbytes, self._one_device = device, large_nbytes, one_device
        self.written = self.scanned = self.spare_nbytes = 0

    def loops(self, jaxpr: Jaxpr) -> Jaxpr:
        """Writes out the scans of layers; other equations stay as they are."""
        pieces = find_split_slices(jaxpr)
        layers = {
            i: eqn
            for i, eqn in enumerate(jaxpr.eqns)
            if _is_of_layers(eqn) or (is_layer_loop(eqn) and not pieces.isdisjoint(variables(eqn)))
        }
        loops = {i: loop for i, eqn in layers.items() if (loop := Loop.of(eqn))}
        self.written += len(loops)
        self.scanned += sum("H2D" in _transfers(eqn.params["jaxpr"].jaxpr) for eqn in layers.values())
        if not loops:
            return jaxpr
        # Where the compiler divides values between devices, to take one element would need communication.
        whole = {
            i: loop
            for i, loop in loops.items()
            if (self._one_device if (manual := compat.is_manual(loop.eqn)) is None else manual)
        }
        stacks = list(find_host_stacks(whole, jaxpr.eqns, jaxpr.outvars, self._device, self._large_nbytes))
        self.spare_nbytes += sum(row_nbytes(loops[stack.reader], stack.xs) for stack in stacks)
        shared = find_shared_stacks(jaxpr, {i: loop.layout for i, loop in loops.items()})
        renamed: Renamed = {}
        lasts: dict[tuple[int, int], Any] = {}
        eqns, end = [], 0
        for i, eqn in enumerate(jaxpr.eqns):
            if i in shared.removed:
                renamed |= {v: resolve(renamed, result) for v, result in shared.removed[i].items()}
                continue
            operands = [resolve(renamed, v) for v in eqn.invars]
            if i not in loops:
                eqns.append(eqn.replace(invars=operands))
                continue
            sends = {stack.ys: stack for stack in stacks if stack.writer == i}
            takes = {stack.xs: stack for stack in stacks if stack.reader == i}
            firsts = {k: lasts[stack.writer, stack.ys] for k, stack in takes.items() if stack.prefetched}
            pieces, layout = shared.slices[i], loops[i].layout
            for k, whole_one in pieces.stacks.items():
                operands[layout.num_consts + layout.num_carry + k] = resolve(renamed, whole_one)
            begun = {k: resolve(renamed, w.prior) for k, w in pieces.written.items() if w.prior is not None}
            new, results, last = write_out(
                loops[i],
                operands,
                pieces,
                begun,
                sends,
                takes,
                firsts,
                self._device,
                self._large_nbytes,
                is_whole=i in whole,
            )
            eqns += new
            end = len(eqns)
            renamed.update(zip(eqn.outvars, results, strict=True))
            lasts |= {(i, k): value for k, value in last.items()}
        outs = [resolve(renamed, v) for v in jaxpr.outvars]
        return self._up_to_loops(jaxpr.replace(eqns=eqns, outvars=outs), end)

    def _up_to_loops(self, jaxpr: Jaxpr, end: int) -> Jaxpr:
        """Orders what stands before and between the loops of a program, a loop one kernel.

        Otherwise sums start from zeros that XLA makes at the very beginning, the gradient of a model's head
        keeps the logits through the backward loop, which needs none of it, and collectives keep memory of
        their own. After the last loop gradients are added up over devices, in place: each as soon as its
        collective has its iteration. What is filled there, such as the gradient of an embedding, is filled
        after it.

        Args:
          jaxpr: the program.
          end: the number of its equations up to the last loop.
        """
        renamed: Renamed = {}
        eqns, scalars = split_scalars(inline_calls(jaxpr.eqns[:end], renamed))
        rest = chain_collectives(inline_calls(jaxpr.eqns[end:], renamed))
        outs: Any = [resolve(renamed, v) for v in jaxpr.outvars]
        read: Any = [*outs, *(v for eqn in rest for v in eqn.invars)]
        ordered = self._ordered(
            jaxpr.replace(outvars=read), eqns, {}, [True] * len(eqns), waits_for_sends=False
        )
        rest = delay_fills(rest, _result_of_last_loop(ordered), self._large_nbytes)
        return jaxpr.replace(eqns=[*scalars, *ordered.eqns, *rest], outvars=outs)

    def flat(self, jaxpr: Jaxpr) -> Jaxpr:
        """Orders a program whose layers are not in a loop.

        Its backward pass begins where the first differentiated `jax.checkpoint` stands. From there on, what
        does not depend on that checkpoint's newest operand, the cotangent, is computed again.
        """
        calls: Renamed = {}
        outer = list(inline_calls(jaxpr.eqns, calls, checkpoints=False))
        renamed: Renamed = {}
        backward = next((i for i, eqn in enumerate(outer) if compat.is_backward(eqn)), len(outer))
        made = index_makers(outer)
        head = list(inline_calls(outer[:backward], renamed))
        newest: set[Var] = set()
        if backward < len(outer):
            operands = [v for v in outer[backward].invars if isinstance(v, Var)]
            newest = {resolve(renamed, max(operands, key=lambda v: made.get(v, -1)))}
        tail = list(inline_calls(outer[backward:], renamed))
        in_order = [True] * len(head) + mark_dependents(tail, newest)
        # The result of an inner `jax.jit` may be the result of a checkpoint in it.
        jaxpr = jaxpr.replace(outvars=[resolve(calls, v) for v in jaxpr.outvars])
        return self._ordered(jaxpr, head + tail, renamed, in_order, waits_for_sends=True)

    def _ordered(self, jaxpr, eqns, renamed, in_order, *, waits_for_sends) -> Jaxpr:
        outs = [resolve(renamed, v) for v in jaxpr.outvars]
        results = frozenset(v for v in outs if isinstance(v, Var))
        program = OrderProblem(tuple(eqns), results, tuple(in_order), waits_for_sends)
        eqns, _ = emit(decide(program, self._device, self._large_nbytes), program)
        return jaxpr.replace(eqns=eqns, outvars=outs)


def _result_of_last_loop(jaxpr: Jaxpr) -> Var | None:
    """The smallest array of floats on the device that the last loop of a program changes, if one is read."""
    read = {v for v in jaxpr.outvars if isinstance(v, Var)}
    for eqn in reversed(jaxpr.eqns):
        if (changed := compat.find_changed_results(eqn)) is not None:
            found = [v for v in changed if v in read and not compat.is_host(v.aval)]
            floats = [v for v in found if jnp.issubdtype(compat.struct_of(v.aval).dtype, jnp.inexact)]
            return min(floats, key=lambda v: compat.nbytes(v.aval), default=None)
        read.update(variables(eqn))
    return None


def _with_loops_together(jaxpr: Jaxpr) -> Jaxpr:
    """Puts the equations of calls that hold a loop of layers in their place.

    So that a loop which writes a stack and the one which reads it back stand side by side.
    """
    renamed: Renamed = {}
    eqns = []
    for eqn in jaxpr.eqns:
        call = compat.inlinable_call(eqn)
        if call is not None and not call.checkpoint and any(map(_is_of_layers, call.jaxpr.eqns)):
            body, results = instantiate(call.jaxpr, [resolve(renamed, v) for v in eqn.invars], like=eqn)
            eqns += body
            renamed.update(zip(eqn.outvars, results, strict=True))
        else:
            eqns.append(eqn.replace(invars=[resolve(renamed, v) for v in eqn.invars]))
    return jaxpr.replace(eqns=eqns, outvars=[resolve(renamed, v) for v in jaxpr.outvars])


def _is_of_layers(eqn: JaxprEqn) -> bool:
    """Whether an equation is a scan that moves residuals, or that of a differentiated `jaxoff.scan`."""
    if compat.scan_in(eqn) is None or is_plain_loop(eqn):
        return False
    return (is_layer_loop(eqn) and is_differentiated(eqn)) or bool(_transfers(eqn.params["jaxpr"].jaxpr))


def _transfers(jaxpr: Jaxpr) -> set[str]:
    """The ways, "D2H" and "H2D", in which a program copies, in what it calls too but not in its loops."""
    found = set()
    for eqn in jaxpr.eqns:
        if kind := compat.transfer_in(eqn):
            found.add(kind)
        elif call := compat.inlinable_call(eqn):
            found |= _transfers(call.jaxpr)
    return found
