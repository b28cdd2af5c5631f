"""Pairs of loops written with other placements of the values of their layers."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxoff._budget.joint_graph import Placements, list_recomputed
from jaxoff._budget.loop_pairs import LoopPair
from jaxoff._jaxpr import compat, meshes
from jaxoff._jaxpr.compat import ClosedJaxpr, JaxprEqn, Var
from jaxoff._jaxpr.dataflow import drop_dead, index_last_readers, variables
from jaxoff._jaxpr.float8 import pack, unpack
from jaxoff._jaxpr.inline import Renamed, resolve, trace_call
from jaxoff._jaxpr.own_primitives import allocate


class LoopWriter:
    """Writes equations in program order, the loops of pairs with placements of their own.

    Attributes:
      renamed: result of a loop -> that of the loop written in its place.
      stacks: id of a pair -> the stacks of its kept values, as of `Placements.list_kept`; two of a compressed
        value.
    """

    def __init__(
        self,
        placed: Iterable[tuple[LoopPair, Placements]],
        *,
        fills: bool = True,
        sends_apart: bool = False,
    ):
        """See `LayeredProgram` and its `write` for the options."""
        self._placed: Mapping[int, tuple[LoopPair, Placements]] = {
            id(eqn): (pair, placements)
            for pair, placements in placed
            for eqn in (pair.forward, pair.backward)
        }
        self._fills, self._sends_apart = fills, sends_apart
        self.renamed: Renamed = {}
        self.stacks: dict[int, list[Any]] = {}

    def write(self, eqns: Iterable[JaxprEqn]) -> list[JaxprEqn]:
        """The equations, written."""
        return [written for eqn in eqns for written in self._write(eqn)]

    def _write(self, eqn: JaxprEqn) -> list[JaxprEqn]:
        operands = [resolve(self.renamed, v) for v in eqn.invars]
        if id(eqn) not in self._placed:
            return [eqn.replace(invars=operands)]
        pair, placements = self._placed[id(eqn)]
        fills = self._fills or bool(placements.offloaded)  # loops with copies are scheduled as scans
        if eqn is pair.forward:
            written, results = _write_forward(
                pair, placements, operands, fills=fills, sends_apart=self._sends_apart
            )
            whole = [v for i, v in enumerate(eqn.outvars) if i not in pair.residuals]
            self.stacks[id(pair)] = results[len(whole) :]
        else:
            free = {v: resolve(self.renamed, operand) for v, operand in pair.free.items()}
            stacks, whole = self.stacks[id(pair)], eqn.outvars
            written, results = _write_backward(pair, placements, operands, free, stacks, fills=fills)
        self.renamed.update(zip(whole, results[: len(whole)], strict=True))
        return written


def _write_forward(
    pair: LoopPair, placements: Placements, operands: Sequence[Any], *, fills: bool, sends_apart: bool
) -> tuple[list[JaxprEqn], list[Any]]:
    """The forward loop: its results without the old residuals, then the stacks of kept values.

    A compressed value has two stacks.
    """
    layout = pair.layout
    outs = [v for i, v in enumerate(pair.body.outvars) if i not in pair.residuals]
    body = drop_dead(pair.body.replace(outvars=[*outs, *placements.list_kept(pair)]))
    run = compat.jaxpr_as_fun(ClosedJaxpr(body, ()))
    compressed, saved = placements.list_compressed(), len(placements.saved)

    def step(consts, carry, rows):
        values = run(*consts, *carry, *rows)
        kept = values[len(outs) :]
        on_device = pack(kept[:saved], compressed[:saved])
        moved = pack(kept[saved:], compressed[saved:])
        moved = jax.lax.optimization_barrier(moved) if sends_apart and moved else moved
        host = [jax.device_put(v, jax.memory.Space.Host) for v in moved]
        values = [*values[: len(outs)], *on_device, *host]
        return tuple(values[: layout.num_carry]), tuple(values[layout.num_carry :])

    first, row = layout.num_consts, layout.num_consts + layout.num_carry
    parts = operands[:first], operands[first:row], operands[row:]
    return _trace_scan(step, *parts, pair.forward, fills=fills)


def _write_backward(
    pair: LoopPair,
    placements: Placements,
    operands: Sequence[Any],
    free: dict[Var, Any],
    stacks: Sequence[Any],
    *,
    fills: bool,
) -> tuple[list[JaxprEqn], list[Any]]:
    """The backward loop: reads the stacks of kept values and recomputes other values."""
    own, theirs = pair.backward_layout, compat.as_open(pair.backward.params["jaxpr"])
    recomputed, all_kept = list_recomputed(pair, placements), placements.list_kept(pair)
    read = {v for e in (*recomputed, *pair.rest) for v in variables(e)}
    read.update(v for v in pair.outs if isinstance(v, Var))
    forward_consts = pair.body.invars[: pair.layout.num_consts]
    used = [v for v in free if v in read and v not in all_kept]
    free_consts = [v for v in used if v in forward_consts]
    free_rows = [v for v in used if v not in forward_consts]
    operand_of = dict(zip(theirs.invars, operands, strict=True)) | free
    carry = list(theirs.invars[own.num_consts : own.num_consts + own.num_carry])
    given = [v for v in pair.given if v not in carry]
    own_consts = [v for v in given if v in theirs.invars[: own.num_consts]]
    consts, rows = [*own_consts, *free_consts], [*(v for v in given if v not in own_consts), *free_rows]
    flags = dict(zip(all_kept, placements.list_compressed(), strict=True))
    kept = [v for v in all_kept if v in read]
    compressed, num_rows = [flags[v] for v in kept], len(rows)

    arguments = [*consts, *carry, *rows, *kept]
    eqns, outs = _Backward(pair, recomputed, kept).write()
    body = theirs.replace(constvars=[], invars=arguments, eqns=eqns, outvars=outs)
    run = compat.jaxpr_as_fun(ClosedJaxpr(body, ()))

    def step(consts, carry, rows):
        of_kept = rows[num_rows:]
        arrived = [
            jax.device_put(v, jax.memory.Space.Device) if compat.is_host(v.aval) else v for v in of_kept
        ]
        values = run(*consts, *carry, *rows[:num_rows], *unpack(arrived, kept, compressed))
        return tuple(values[: own.num_carry]), tuple(values[own.num_carry :])

    left = iter(stacks)
    stacks_of = {v: [next(left) for _ in range(1 + is_compressed)] for v, is_compressed in flags.items()}
    all_rows = [*(operand_of[v] for v in rows), *(stack for v in kept for stack in stacks_of[v])]
    initial = [operand_of[v] for v in carry]
    fills = fills or any(compat.is_host(v.aval) for v in all_rows)  # state updated in the loop
    return _trace_scan(step, [operand_of[v] for v in consts], initial, all_rows, pair.backward, fills=fills)


class _Backward:
    """Writes the equations of a backward body: each recomputed value as late as its first reader allows.

    The values of a segment are made again when those of the segment behind are no longer needed: its kept
    operands wait for what the backward pass has made so far, or XLA would make several segments at once.
    """

    def __init__(self, pair: LoopPair, recomputed: Sequence[JaxprEqn], kept: Sequence[Var]):
        self._pair, self._recomputed, self._kept = pair, recomputed, frozenset(kept)
        self._makers = {v: i for i, eqn in enumerate(recomputed) for v in eqn.outvars}
        self._segments = _number_segments(pair, recomputed)
        self._segment = max(self._segments, default=0)  # the earliest of those begun
        self._eqns: list[JaxprEqn] = []
        self._done: set[int] = set()  # of the recomputed equations
        self._made: list[Var] = []  # by the equations with cotangents among their ancestors
        self._delayed: Renamed = {}
        results = {v: len(pair.rest) for v in pair.outs if isinstance(v, Var)}
        self._last_readers = index_last_readers(pair.rest) | results

    def write(self) -> tuple[list[JaxprEqn], list[Any]]:
        """The equations, and the results."""
        rest, outs = self._pair.rest, self._pair.outs
        for i, eqn in enumerate(rest):
            self._make_again(variables(eqn), i, eqn)
            self._add(eqn)
            self._made += eqn.outvars
        self._make_again([v for v in outs if isinstance(v, Var)], len(rest), self._pair.backward)
        return self._eqns, [resolve(self._delayed, v) for v in outs]

    def _add(self, eqn: JaxprEqn) -> None:
        self._eqns.append(eqn.replace(invars=[resolve(self._delayed, v) for v in eqn.invars]))

    def _make_again(self, values: Sequence[Var], reader: int, like: JaxprEqn) -> None:
        """Writes the equations that make values again, for equation `reader` of `JointGraph.rest`."""
        todo, found = [v for v in values if v in self._makers], set()
        while todo:
            i = self._makers[todo.pop()]
            if i not in self._done:
                self._done.add(i)
                found.add(i)
                todo += [v for v in variables(self._recomputed[i]) if v in self._makers]
        segment = min((self._segments[i] for i in found), default=self._segment)
        if segment < self._segment:
            begun = [i for i, number in enumerate(self._segments) if segment <= number < self._segment]
            self._segment = segment
            self._wait([v for i in begun for v in variables(self._recomputed[i])], reader, like)
        for i in sorted(found):
            self._add(self._recomputed[i])

    def _wait(self, operands: Sequence[Var], reader: int, like: JaxprEqn) -> None:
        """Writes a barrier for the kept values among operands, and for what was made and is still read."""
        kept = [v for v in dict.fromkeys(operands) if v in self._kept and _is_array(v)]
        made = [v for v in self._made if self._last_readers.get(v, -1) >= reader and _is_array(v)]
        if kept and made:
            each = [*kept, *made]
            outs, barrier = compat.make_barrier([resolve(self._delayed, v) for v in each], like=like)
            self._eqns.append(barrier)
            self._delayed.update(zip(each, outs, strict=True))


def _is_array(v: Var) -> bool:
    """Whether a value is an array of numbers, which random keys are not."""
    return hasattr(v.aval, "dtype") and not jnp.issubdtype(
        compat.struct_of(v.aval).dtype, jax.dtypes.extended
    )


def _number_segments(pair: LoopPair, recomputed: Sequence[JaxprEqn]) -> list[int]:
    """The number of each recomputed equation's segment.

    An equation that the backward pass alone has belongs to the last segment of its operands.
    """
    segments: dict[Var, int] = {}
    own = {id(eqn): bisect.bisect_right(pair.cuts, i) for i, eqn in enumerate(pair.eqns)}
    for eqn in pair.pure:
        number = own.get(id(eqn), max((segments.get(v, 0) for v in variables(eqn)), default=0))
        segments.update(dict.fromkeys(eqn.outvars, number))
    return [segments[eqn.outvars[0]] for eqn in recomputed]


def _trace_scan(
    step: Callable[..., Any],
    consts: Sequence[Any],
    initial: Sequence[Any],
    rows: Sequence[Any],
    loop: JaxprEqn,
    *,
    fills: bool,
) -> tuple[list[JaxprEqn], list[Any]]:
    """The equations of a scan like `loop`, of a function (constants, carry, rows) -> (carry, rows).

    `jax.lax.scan` fills the stacks of its results before it writes them. Without `fills`, the loop is a
    `jax.lax.while_loop` with stacks that are only allocated.
    """
    layout = compat.scan_in(loop)
    assert layout is not None
    length, reverse = layout.length, loop.params["reverse"]

    def scan(consts, initial, rows):
        return jax.lax.scan(
            lambda carry, row: step(consts, carry, row),
            tuple(initial),
            tuple(rows),
            length=length,
            reverse=reverse,
        )

    def run(consts, initial, rows):
        first_rows = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in rows]
        _, made = jax.eval_shape(lambda *state: step(consts, *state), tuple(initial), first_rows)
        if any(jnp.issubdtype(x.dtype, jax.dtypes.extended) for x in made):  # random keys
            return scan(consts, initial, rows)
        # The allocation waits for the carry: XLA would allocate at the start of the step.
        scalars = [compat.empty_scalar(jax.typeof(jnp.zeros((), x.dtype))) for x in made]
        scalars, initial = jax.lax.optimization_barrier((scalars, tuple(initial)))

        def iterate(state):
            i, carry, stacks = state
            k = length - 1 - i if reverse else i
            row = [jax.lax.dynamic_index_in_dim(x, k, keepdims=False) for x in rows]
            carry, values = step(consts, carry, row)
            pairs = zip(stacks, values, strict=True)
            return i + 1, carry, [jax.lax.dynamic_update_index_in_dim(s, v, k, 0) for s, v in pairs]

        stacks = [
            allocate(
                scalar,
                (length, *x.shape),
                jax.typeof(scalar).sharding.update(spec=jax.P(*[None] * (1 + len(x.shape)))),
            )
            for scalar, x in zip(scalars, made, strict=True)
        ]
        state = jax.lax.while_loop(lambda state: state[0] < length, iterate, (jnp.int32(0), initial, stacks))
        return state[1], tuple(state[2])

    avals = [v.aval for v in (*consts, *initial, *rows)]
    fills = fills or not length or any(compat.varying_axes(v) or meshes.explicit_mesh(v) for v in avals)
    return trace_call(scan if fills else run, [list(consts), list(initial), list(rows)], like=loop)
