"""Rewrites a program so that layers need less memory and copies of residuals overlap with compute."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any

from jaxoff._device.flops import product_flops
from jaxoff._device.profile import Device
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jaxoff._jaxpr.dataflow import index_makers, map_makers, mark_dependents, variables
from jaxoff._jaxpr.divided_products import divide_products
from jaxoff._jaxpr.host_values import passes_host_values
from jaxoff._jaxpr.inline import (
    Renamed,
    inline_calls,
    inline_calls_with,
    inline_program,
    make_masks_inside,
    resolve,
    round_operands,
    split_scalars,
)
from jaxoff._jaxpr.meshes import is_partly_manual
from jaxoff._jaxpr.one_hot import compare_labels
from jaxoff._jaxpr.primitives import is_compute, is_shard_map
from jaxoff._jaxpr.scopes import is_differentiated, is_layer_loop, is_plain_loop
from jaxoff._jaxpr.stack_slices import find_shared_stacks, find_split_slices
from jaxoff._runtime.garbage import collector_paused
from jaxoff._schedule.collectives import chain_collectives
from jaxoff._schedule.decide import LARGE_NBYTES, decide
from jaxoff._schedule.emit import emit
from jaxoff._schedule.fills import delay_fills, find_last_loop_result
from jaxoff._schedule.host_stack import HostStack
from jaxoff._schedule.host_stacks_between import find_host_stacks
from jaxoff._schedule.loop_shardings import LoopShardings
from jaxoff._schedule.loops import Loop, write_out
from jaxoff._schedule.problem import DEFAULT_ORDER, OrderOptions, OrderProblem


@dataclasses.dataclass(frozen=True)
class Rewritten:
    """A rewritten program.

    Attributes:
      jaxpr: the program.
      loops: number of loops written out.
      scanned: number of loops with offloaded residuals.
      flat: whether the program offloads residuals outside of loops over layers, or updates arguments in host
        memory and computes mostly outside of loops.
      spare_nbytes: bytes of host memory for the spare rows of host stacks, which the given program lacks.
      streamed: whether arguments in host memory are updated in a loop.
      breaks_graphs: whether a loop with offloaded residuals holds another loop or a Fourier transform, which
        no CUDA graph does.
      hold_by_barriers: makes the program whose reloads wait by barriers, for XLA's own schedule; None where
        no reload of a loop waits.
    """

    jaxpr: ClosedJaxpr
    loops: int
    scanned: int
    flat: bool
    spare_nbytes: int
    streamed: bool = False
    breaks_graphs: bool = False
    hold_by_barriers: Callable[[], Rewritten] | None = None

    @staticmethod
    def as_given(closed: ClosedJaxpr) -> Rewritten:
        """A program that is not rewritten."""
        return Rewritten(closed, loops=0, scanned=0, flat=False, spare_nbytes=0)


@collector_paused()
def rewrite(
    closed: ClosedJaxpr,
    device: Device,
    large_nbytes: int = LARGE_NBYTES,
    *,
    one_device: bool = True,
    shardings: Mapping[int, LoopShardings] | None = None,
    on_gpus: bool = True,
    in_order: bool = False,
    options: OrderOptions = DEFAULT_ORDER,
) -> Rewritten:
    """Orders a program: the bodies of its layer loops, and the equations outside of loops.

    Layer loops are scans which offload residuals, and differentiated `jaxoff.scan`s. The equations outside
    are ordered up to the last layer loop, or all of them in a program that is `Rewritten.flat`.

    Args:
      closed: a program which is not differentiated any more.
      device: rates of the target device.
      large_nbytes: least bytes of a value whose kernel has a position in the chain.
      one_device: whether the compiler leaves all values of the program unsharded.
      shardings: number of a layer loop -> how the compiler divides its values, from `find_loop_shardings`.
      on_gpus: whether the program runs on GPUs, whose products round operands as their algorithm says.
      in_order: whether the equations outside of loops are ordered in any case.
      options: how bodies of loops, and equations outside of loops, are ordered.

    Returns:
      A program with the same arguments, results and effects.
    """
    rewriter = _Rewriter(device, large_nbytes, one_device, shardings or {}, on_gpus, options)
    closed = compare_labels(closed)
    jaxpr = compat.rewrite_jaxprs(closed.jaxpr, _inline_loop_calls)
    jaxpr = compat.rewrite_jaxprs(jaxpr, rewriter.write_out_loops)
    streamed = any(compat.is_host(v.aval) for v in closed.jaxpr.invars)
    # XLA's scheduler would start the loops of updates early: it keeps the operands of all weights' gradients.
    flat = in_order or "H2D" in _find_transfers(jaxpr) or (streamed and _computes_outside_loops(jaxpr))
    if flat and not compat.has_side_effects(jaxpr):
        jaxpr = rewriter.order_flat(rewriter.order_map(inline_calls_with(is_shard_map, jaxpr)))
    again = functools.partial(
        rewrite,
        closed,
        device,
        large_nbytes,
        one_device=one_device,
        shardings=shardings,
        on_gpus=on_gpus,
        in_order=in_order,
        options=dataclasses.replace(options, by_barriers=True),
    )
    return Rewritten(
        closed.replace(jaxpr=jaxpr),
        rewriter.written_out,
        rewriter.scanned,
        flat or rewriter.ordered_control_flow,
        rewriter.spare_nbytes,
        streamed=streamed,
        breaks_graphs=rewriter.breaks_graphs,
        hold_by_barriers=again if rewriter.spare_nbytes else None,
    )


def replace_layer_loops(closed: ClosedJaxpr, replace: Callable[[Loop, int], JaxprEqn]) -> ClosedJaxpr:
    """Replaces each layer loop of a program, given with its number, by another equation.

    `rewrite` numbers the loops in the same way.
    """
    numbers = itertools.count()

    def replace_loops(jaxpr: Jaxpr) -> Jaxpr:
        layers, eqns = _find_layer_loops(jaxpr), []
        for i, eqn in enumerate(jaxpr.eqns):
            loop = Loop.find(eqn) if i in layers else None
            number = next(numbers) if i in layers else 0
            eqns.append(replace(loop, number) if loop else eqn)
        return jaxpr.replace(eqns=eqns)

    jaxpr = compat.rewrite_jaxprs(closed.jaxpr, _inline_loop_calls)
    return closed.replace(jaxpr=compat.rewrite_jaxprs(jaxpr, replace_loops))


class _Rewriter:
    def __init__(
        self,
        device: Device,
        large_nbytes: int,
        one_device: bool,
        shardings: Mapping[int, LoopShardings],
        on_gpus: bool,
        options: OrderOptions,
    ):
        self._options = options
        self._device, self._large_nbytes, self._one_device = device, large_nbytes, one_device
        self._on_gpus = on_gpus
        self._shardings, self._numbers = shardings, itertools.count()
        self.written_out = self.scanned = self.spare_nbytes = 0
        self.breaks_graphs = self.ordered_control_flow = False

    def write_out_loops(self, jaxpr: Jaxpr) -> Jaxpr:
        """Writes out the layer loops, and orders the equations up to the last loop.

        The user's conditions and other loops in the program are ordered, too.
        """
        layers = _find_layer_loops(jaxpr)
        jaxpr = self._order_control_flow(jaxpr, layers)
        shardings = {i: self._shardings.get(number) for i, number in zip(layers, self._numbers, strict=False)}
        loops = {i: loop for i, eqn in layers.items() if (loop := Loop.find(eqn))}
        loops = self._write_bodies(jaxpr, loops)
        self.written_out += len(loops)
        offloading = [eqn for eqn in layers.values() if "H2D" in _find_transfers(eqn.params["jaxpr"].jaxpr)]
        self.scanned += len(offloading)
        self.breaks_graphs |= any(_breaks_graphs(eqn.params["jaxpr"].jaxpr) for eqn in offloading)
        if not loops:
            return jaxpr
        known = {i: loop for i, loop in loops.items() if shardings[i] or not self._may_divide(loop)}
        stacks = list(find_host_stacks(known, jaxpr.eqns, jaxpr.outvars, self._device, self._large_nbytes))
        self.spare_nbytes += sum(_count_row_nbytes(loops[stack.reader], stack.xs) for stack in stacks)
        shared = find_shared_stacks(jaxpr, {i: loop.layout for i, loop in loops.items()})
        renamed: Renamed = {}
        last_rows: dict[tuple[int, int], Any] = {}  # (loop, index of a ys) -> value of the last iteration
        eqns, end = [], 0
        for i, eqn in enumerate(jaxpr.eqns):
            if i in shared.removed:
                renamed |= {v: resolve(renamed, result) for v, result in shared.removed[i].items()}
                continue
            operands = [resolve(renamed, v) for v in eqn.invars]
            if i not in loops:
                eqns.append(eqn.replace(invars=operands))
                continue
            sent_stacks = {stack.ys: stack for stack in stacks if stack.writer == i}
            reloaded_stacks = {stack.xs: stack for stack in stacks if stack.reader == i}
            prefetched = [stack for stack in reloaded_stacks.values() if stack.prefetched]
            first_rows = {stack.xs: last_rows[stack.writer, stack.ys] for stack in prefetched}
            pieces, layout = shared.slices[i], loops[i].layout
            for k, whole in pieces.stacks.items():
                operands[layout.num_consts + layout.num_carry + k] = resolve(renamed, whole)
            initial_stacks = {
                k: resolve(renamed, written.prior)
                for k, written in pieces.written.items()
                if written.prior is not None
            }
            new, results, last = write_out(
                loops[i],
                operands,
                pieces,
                initial_stacks,
                sent_stacks,
                reloaded_stacks,
                first_rows,
                self._device,
                self._large_nbytes,
                _add_xs(shardings, i, reloaded_stacks) if self._may_divide(loops[i]) else None,
                self._options,
            )
            eqns += new
            end = len(eqns)
            renamed.update(zip(eqn.outvars, results, strict=True))
            last_rows |= {(i, k): value for k, value in last.items()}
        outs = [resolve(renamed, v) for v in jaxpr.outvars]
        return self._order_up_to_last_loop(jaxpr.replace(eqns=eqns, outvars=outs), end)

    def _write_bodies(self, jaxpr: Jaxpr, loops: Mapping[int, Loop]) -> dict[int, Loop]:
        """Loops that round operands once, and make the large masks and fills among their constants."""
        renamed: Renamed = {}
        makers = map_makers(list(inline_calls(jaxpr.eqns, renamed, checkpoints=False)) if loops else ())
        found = {}
        for i, loop in loops.items():
            operands, arguments = (loop.split(list(part))[0] for part in (loop.eqn.invars, loop.body.invars))
            pairs = zip((resolve(renamed, v) for v in operands), arguments, strict=True)
            body = make_masks_inside(loop.body, pairs, makers, self._large_nbytes)
            body = body.replace(eqns=self._prepare(body.eqns, body.outvars))
            found[i] = dataclasses.replace(loop, body=body)
        return found

    def _prepare(self, eqns: Iterable[JaxprEqn], read: Iterable[Any]) -> list[JaxprEqn]:
        """Equations to order: operands rounded once, and products divided; `read` is read afterwards."""
        rounded = list(round_operands(eqns) if self._on_gpus else eqns)
        return rounded if self._one_device else divide_products(rounded, read)

    def _may_divide(self, loop: Loop) -> bool:
        """Whether the compiler may divide the values of a loop over devices."""
        manual = compat.is_manual(loop.eqn)
        return not (self._one_device if manual is None else manual)

    def _order_up_to_last_loop(self, jaxpr: Jaxpr, end: int) -> Jaxpr:
        """Orders the equations before and between the loops of a program; each loop counts as a kernel.

        Otherwise XLA would make the zeros for sums at the very beginning, keep the logits alive through the
        backward loop for the gradient of a model's head, and give collectives memory of their own.

        After the last loop, only collectives wait, each for the previous collective: they add up gradients
        over devices, in place. Arrays which are filled after the last loop, for example the zeros for the
        gradient of an embedding, wait for a result of the last loop.

        The equations stay as they are where they change a mutable array, whose reads depend on their order.

        Args:
          jaxpr: the program.
          end: number of equations up to the last loop, inclusive.
        """
        if any(compat.is_ref(v.aval) for eqn in jaxpr.eqns for v in eqn.invars):
            return jaxpr
        renamed: Renamed = {}
        eqns = list(inline_calls(jaxpr.eqns[:end], renamed))
        rest = chain_collectives(inline_calls(jaxpr.eqns[end:], renamed))
        outs: Any = [resolve(renamed, v) for v in jaxpr.outvars]
        read: Any = [*outs, *(v for eqn in rest for v in eqn.invars)]
        eqns, scalars = split_scalars(self._prepare(eqns, read))
        in_order = [True] * len(eqns)
        ordered = self._order(jaxpr.replace(outvars=read), eqns, in_order, waits_for_sends=False)
        rest = delay_fills(rest, find_last_loop_result(ordered), self._large_nbytes)
        return jaxpr.replace(eqns=[*scalars, *ordered.eqns, *rest], outvars=outs)

    def _order_control_flow(self, jaxpr: Jaxpr, layers: Container[int]) -> Jaxpr:
        """Orders the branches of conditions, and the bodies of loops over whole steps, that offload.

        `layers` are the indices of the layer loops, which stay.
        """

        def order(body: Jaxpr) -> Jaxpr:
            is_whole = "H2D" in _find_transfers(body) and not passes_host_values(body)
            if not is_whole or compat.has_side_effects(body):
                return body
            self.ordered_control_flow = True
            return self.order_flat(body)

        def order_inside(i: int, eqn: JaxprEqn) -> JaxprEqn:
            stays = i in layers or compat.control_flow(eqn) is None or is_plain_loop(eqn)
            return eqn if stays else compat.map_programs(eqn, order)

        return compat.replace_equations(jaxpr, itertools.starmap(order_inside, enumerate(jaxpr.eqns)))

    def order_map(self, jaxpr: Jaxpr) -> Jaxpr:
        """Orders the layers in a `jax.shard_map` around a step, where most of the step's kernels are."""
        kernels = [sum(map(is_compute, _list_equations([eqn]))) for eqn in jaxpr.eqns]

        def order(eqn: JaxprEqn, number: int) -> JaxprEqn:
            is_step = is_shard_map(eqn) and not is_partly_manual(eqn) and 2 * number > sum(kernels)
            return compat.map_programs(eqn, self.order_flat) if is_step else eqn

        return compat.replace_equations(jaxpr, map(order, jaxpr.eqns, kernels))

    def order_flat(self, jaxpr: Jaxpr) -> Jaxpr:
        """Orders a program with layers outside of loops.

        The backward pass begins at the first differentiated `jax.checkpoint`, whose newest operand is the
        cotangent. From there on, equations without a dependency on the cotangent recompute values.
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
        # The result of an inner `jax.jit` may be the result of a checkpoint in it.
        outs = [resolve(renamed, resolve(calls, v)) for v in jaxpr.outvars]
        head = self._prepare(head, [*outs, *(v for eqn in tail for v in eqn.invars)])
        tail = self._prepare(tail, [*outs, *newest])
        in_order = [True] * len(head) + mark_dependents(tail, newest)
        return self._order(jaxpr.replace(outvars=outs), head + tail, in_order, waits_for_sends=True)

    def _order(self, jaxpr, eqns, in_order, *, waits_for_sends) -> Jaxpr:
        results = frozenset(v for v in jaxpr.outvars if isinstance(v, Var))
        may_gather = not self._one_device and not any(map(compat.is_manual, eqns))
        problem = OrderProblem(
            tuple(eqns),
            results,
            tuple(in_order),
            waits_for_sends,
            shares_fused=may_gather,
            options=self._options,
            donates=any(
                compat.is_host(v.aval) for v in jaxpr.invars
            ),  # state on the host, and what it updates
        )
        eqns, _ = emit(decide(problem, self._device, self._large_nbytes), problem)
        return jaxpr.replace(eqns=eqns)


def _count_row_nbytes(loop: Loop, xs: int) -> int:
    """Counts the bytes of one row of a stack among a loop's xs, on all devices."""
    mesh = loop.eqn.ctx.cur_abstract_mesh
    row = loop.split(loop.body.invars)[2][xs].aval
    return compat.nbytes(row) * (1 if mesh.empty else mesh.size)


def _add_xs(
    shardings: Mapping[int, LoopShardings | None], reader: int, reloaded_stacks: Mapping[int, HostStack]
) -> LoopShardings:
    """Adds the shardings of the rows that a loop reloads, which are the writers'."""
    xs = {
        k: writer.ys[stack.ys]
        for k, stack in reloaded_stacks.items()
        if (writer := shardings[stack.writer]) and stack.ys in writer.ys
    }
    return dataclasses.replace(shardings[reader] or LoopShardings(), xs=xs)


def _inline_loop_calls(jaxpr: Jaxpr) -> Jaxpr:
    """Inlines calls with a layer loop, so that the writer and the reader of a host stack are in one jaxpr."""
    return inline_calls_with(_is_layer_scan, jaxpr)


def _find_layer_loops(jaxpr: Jaxpr) -> dict[int, JaxprEqn]:
    """Finds the layer loops among the equations of a program: index -> equation."""
    pieces = find_split_slices(jaxpr)
    return {
        i: eqn
        for i, eqn in enumerate(jaxpr.eqns)
        if _is_layer_scan(eqn) or (is_layer_loop(eqn) and not pieces.isdisjoint(variables(eqn)))
    }


def _is_layer_scan(eqn: JaxprEqn) -> bool:
    """Whether an equation is a scan which offloads residuals, or a differentiated `jaxoff.scan`.

    No residual leaves an iteration of a scan over whole steps. In a partly manual `jax.shard_map` the
    compiler names shardings without the mesh's axes, which `apply_to_shares` needs.
    """
    if compat.scan_in(eqn) is None or is_plain_loop(eqn) or is_partly_manual(eqn):
        return False
    body = eqn.params["jaxpr"].jaxpr
    offloads = bool(_find_transfers(body)) and passes_host_values(body)
    return offloads or (is_layer_loop(eqn) and is_differentiated(eqn))


def _find_transfers(jaxpr: Jaxpr) -> set[str]:
    """Finds the directions of copies, "D2H" and "H2D", in a program and its calls, without its loops."""
    return {kind for eqn in _list_equations(jaxpr.eqns) if (kind := compat.transfer_in(eqn))}


def _breaks_graphs(jaxpr: Jaxpr) -> bool:
    """Whether a program or one of its calls holds a loop or a Fourier transform."""
    return any(eqn.primitive.name in ("scan", "while", "fft") for eqn in _list_equations(jaxpr.eqns))


def _list_equations(eqns: Iterable[JaxprEqn]) -> Iterator[JaxprEqn]:
    """Lists equations, with those of calls and of `jax.shard_map`s in the place of these."""
    for eqn in eqns:
        if call := compat.inlinable_call(eqn):
            yield from _list_equations(call.jaxpr.eqns)
        elif is_shard_map(eqn):
            yield from _list_equations(eqn.params["jaxpr"].eqns)
        else:
            yield eqn


def _computes_outside_loops(jaxpr: Jaxpr) -> bool:
    """Whether most of a program's products are outside of loops."""
    inside = outside = 0.0
    for eqn in inline_program(jaxpr).eqns:
        if compat.control_flow(eqn) is None:
            outside += product_flops(eqn)
        else:
            inside += product_flops(eqn)
    return outside > inside
