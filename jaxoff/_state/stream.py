"""Writes a program whose state rests in host memory, updated in blocks on the device."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import ClosedJaxpr, JaxprEqn, Var
from jaxoff._jaxpr.dataflow import drop_dead, mark_dependents
from jaxoff._jaxpr.inline import resolve, trace_call
from jaxoff._state.backward import EarlyUpdates, write_early
from jaxoff._state.updates import Update

# Bytes of all states of a loop in a block. Several blocks are on the device at a time; smaller ones make
# copies too short for the link's full rate.
_BLOCK_NBYTES = 192 << 20
_FEWEST_BLOCKS, _MOST_BLOCKS = 16, 512


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Arrays of a shape, divided into blocks of neighbouring elements.

    Attributes:
      shape: of a block.
      lead: the sizes of the axes ahead of the divided one. A block has one index of each.
      parts: the number of blocks along the divided axis.
      first: index of the first block's first element along this axis.
      left: elements along this axis behind the last block.
    """

    shape: tuple[int, ...]
    lead: tuple[int, ...]
    parts: int
    first: int = 0
    left: int = 0

    @staticmethod
    def of(shape: tuple[int, ...], count: int) -> Blocks | None:
        """Divides arrays of a shape into `count` blocks and a rest no larger than a block, if it can.

        Axes ahead of the divided one are divided into single indices, and leave no rest.
        """
        for axis, size in enumerate(shape):
            lead, behind = shape[:axis], shape[axis + 1 :]
            parts, remainder = divmod(count, math.prod(lead))
            if remainder or not parts:
                return None
            each, left = divmod(size, parts)
            if each and (not left or (left <= each and math.prod(lead) == 1)):
                return Blocks((*(1 for _ in lead), each, *behind), lead, parts, left=left)
        return None

    def get_rest(self) -> Blocks | None:
        """The rest of the arrays as a single block, or None."""
        axis = len(self.lead)
        shape = (*self.shape[:axis], self.left, *self.shape[axis + 1 :])
        return Blocks(shape, self.lead, 1, self.parts * self.shape[axis]) if self.left else None

    def _start(self, i: Any) -> list[Any]:
        axis, part, of = len(self.lead), i, getattr(i, "dtype", None)
        indices: list[Any] = []
        if math.prod(self.lead) > 1:
            part, i = i % self.parts, i // self.parts
            for size in reversed(self.lead):
                indices.insert(0, i % size)
                i = i // size
        indices = indices or [0] * axis
        start = [*indices, self.first + part * self.shape[axis], *(0 for _ in self.shape[axis + 1 :])]
        # Of one type with x64, too: that of the index, where it is one of a loop.
        return [np.array(k, of) if of is not None and isinstance(k, int) else k for k in start]

    def read(self, array: jax.Array, i: Any) -> jax.Array:
        """Block `i` of an array."""
        return lax.dynamic_slice(array, self._start(i), self.shape)

    def write(self, array: jax.Array, block: jax.Array, i: Any) -> jax.Array:
        """The array with another block `i`."""
        return lax.dynamic_update_slice(array, block, self._start(i))


def list_streamable(updates: Iterable[Update]) -> list[Update]:
    """The updates whose arrays can be divided into blocks."""
    return [update for loop in plan_loops(updates) for update, _ in loop.updates]


@dataclasses.dataclass(frozen=True)
class UpdateLoop:
    """Updates of a loop, a block of each in an iteration.

    Attributes:
      count: the number of blocks.
      updates: the updates with the division of their arrays.
    """

    count: int
    updates: tuple[tuple[Update, Blocks], ...]

    @property
    def buffer_nbytes(self) -> int:
        """Bytes of states on the device at a time: the next block, this one, and its results."""
        return 3 * sum(update.local_nbytes for update, _ in self.updates) // self.count


def plan_loops(updates: Iterable[Update]) -> list[UpdateLoop]:
    """Divides updates among loops: as few loops as the shapes allow, with blocks of some `_BLOCK_NBYTES`.

    No loop has fewer than half of the wanted blocks where the shapes allow more: a number that divides the
    arrays of all shapes may be as small as two, and several blocks are on the device at a time.
    """
    left, loops = list(updates), []
    while left:
        wanted = max(_FEWEST_BLOCKS, min(_MOST_BLOCKS, sum(u.local_nbytes for u in left) // _BLOCK_NBYTES))
        found = _divide_into(left, wanted, wanted // 2) or _divide_into(left, wanted, 2)
        if found is None:
            break
        loops.append(found)
        left = [u for u in left if not any(u is other for other, _ in found.updates)]
    return loops


def _divide_into(updates: Sequence[Update], wanted: int, least: int) -> UpdateLoop | None:
    """The loop of the most bytes with at least a number of blocks, the wanted number if possible."""
    sizes: collections.Counter[tuple[int, ...]] = (
        collections.Counter()
    )  # by shape: layers in a list are alike
    for update in updates:
        sizes[update.local_shape] += update.local_nbytes

    def rank(count: int) -> tuple[int, int, float]:
        """The bytes that a number of blocks divides, those without a rest, and how near the number is."""
        found = [(nbytes, b) for shape, nbytes in sizes.items() if (b := Blocks.of(shape, count))]
        whole = sum(nbytes for nbytes, blocks in found if not blocks.left)
        return sum(nbytes for nbytes, _ in found), whole, -abs(math.log(count / wanted))

    count = max(range(least, _MOST_BLOCKS + 1), key=rank)
    found = tuple((u, blocks) for u in updates if (blocks := Blocks.of(u.local_shape, count)))
    return UpdateLoop(count, found) if found else None


def stream_updates(
    closed: ClosedJaxpr, updates: Sequence[Update], *, early: Sequence[EarlyUpdates] = ()
) -> ClosedJaxpr:
    """The program with the states of updates among its arguments and results in host memory.

    Args:
      closed: a program for one device or divided by the compiler, with its calls inlined.
      updates: from `find_updates` of this program.
      early: those of `updates` that run in the loops of backward passes, from `find_early`.
    """
    program = closed.jaxpr
    renamed: dict[Var, Any] = {
        state: Var(state.aval.update(memory_space=jax.memory.Space.Host))
        for update in updates
        for state, _ in update.states
    }
    invars = [resolve(renamed, v) for v in program.invars]
    late = mark_dependents(program.eqns, {v for update in updates for v in update.late})
    in_loops = {id(found.loop): found for found in early}
    eqns: list[JaxprEqn] = []
    placed: set[int] = set()

    def place(eqn: JaxprEqn) -> None:
        if id(eqn) not in placed:
            placed.add(id(eqn))
            eqns.append(eqn.replace(invars=[resolve(renamed, v) for v in eqn.invars]))

    for eqn, is_late in zip(program.eqns, late, strict=True):
        if id(eqn) in in_loops:
            for other in in_loops[id(eqn)].before:
                place(other)
            made, results = write_early(in_loops[id(eqn)], renamed)
            eqns += made
            renamed |= results
        elif not is_late:
            place(eqn)
    done = {id(update) for found in early for update in found.updates}
    for loop in plan_loops(update for update in updates if id(update) not in done):
        made, results = _write_loop(loop, renamed)
        eqns += made
        renamed |= results
    for eqn, is_late in zip(program.eqns, late, strict=True):
        if is_late and not set(eqn.outvars) & renamed.keys():
            place(eqn)
    outs = [resolve(renamed, v) for v in program.outvars]
    return closed.replace(jaxpr=drop_dead(program.replace(eqns=eqns, outvars=outs, invars=invars)))


def _write_loop(loop: UpdateLoop, renamed: dict[Var, Any]) -> tuple[list[JaxprEqn], dict[Var, Any]]:
    """The equations of a loop, and the program's results among theirs."""
    like = loop.updates[0][0].eqns[0]
    operands = [_Operands.of(update, renamed) for update, _ in loop.updates]
    made, results = trace_call(_divide(loop), operands, like)
    places = [out for update, _ in loop.updates for out in update.list_results()]
    return made, dict(zip(places, results, strict=True))


def _divide(loop: UpdateLoop) -> Callable[..., list[jax.Array]]:
    """The function of a loop: operands -> results. Each device of a mesh runs the loop on its own parts."""

    def run(*given: _Operands) -> list[jax.Array]:
        return _run(loop, given)

    updates = [update for update, _ in loop.updates]
    shardings = [update.sharding for update in updates if update.sharding is not None]
    if not shardings:
        return run
    outs = [
        sharding.spec
        for update, sharding in zip(updates, shardings, strict=True)
        for _ in update.list_results()
    ]
    specs = tuple(map(_list_specs, updates, shardings))
    return jax.shard_map(run, mesh=shardings[0].mesh, in_specs=specs, out_specs=outs, check_vma=False)


def _list_specs(update: Update, sharding: NamedSharding) -> _Operands:
    states, replaced, read = ([sharding.spec] * len(v) for v in (update.states, update.replaced, update.read))
    return _Operands(states, replaced, read, [PartitionSpec()] * len(update.scalars))


class _Operands(NamedTuple):
    """The operands of an update, as variables or as arrays."""

    states: list[Any]
    replaced: list[Any]
    read: list[Any]
    scalars: list[Any]

    @staticmethod
    def of(update: Update, renamed: dict[Var, Any]) -> _Operands:
        states, replaced = ([v for v, _ in pairs] for pairs in (update.states, update.replaced))
        parts = (states, replaced, update.read, update.scalars)
        return _Operands(*([resolve(renamed, v) for v in part] for part in parts))


def _run(loop: UpdateLoop, given: Sequence[_Operands]) -> list[jax.Array]:
    """Runs the updates of a loop: their states on the host, two blocks of each on the device.

    An iteration reads the next block of a state before it writes this block: XLA keeps the state in place.
    A state's write runs beside the reads of the states after it.
    """
    updates = [update for update, _ in loop.updates]
    blocks = [blocks for _, blocks in loop.updates]

    def compute(stacks, current, i, blocks=blocks):
        """The results of block i: a list for each update, in the order of `Update.list_results`."""
        found = []
        for update, b, stack, states, arrays in zip(updates, blocks, stacks, current, given, strict=True):
            if b is None:
                found.append([])
                continue
            values = dict(zip((v for v, _ in update.states), states, strict=True))
            first = len(update.states)
            values |= {v: b.read(x, i) for (v, _), x in zip(update.replaced, stack[first:], strict=False)}
            values |= {v: b.read(x, i) for v, x in zip(update.read, arrays.read, strict=True)}
            values |= dict(zip(update.scalars, arrays.scalars, strict=True))
            found.append(update.compute(values, b.shape))
        return found

    def fetch(stacks, i, blocks=blocks):
        return [
            [_to_device(b.read(x, i)) for x in stack[: len(update.states)]] if b else []
            for update, b, stack in zip(updates, blocks, stacks, strict=True)
        ]

    def store(stacks, results, i, blocks=blocks):
        return [
            [b.write(x, _to_memory_of(x, block), i) for x, block in zip(stack, values, strict=True)]
            if b
            else stack
            for b, stack, values in zip(blocks, stacks, results, strict=True)
        ]

    def iterate(state):
        i, stacks, current = state
        results = compute(stacks, current, i)
        following = fetch(stacks, i + 1)
        for k, update in enumerate(updates):
            for j in range(len(update.states)):
                results[k][j], following[k][j] = lax.optimization_barrier((results[k][j], following[k][j]))
        return i + 1, store(stacks, results, i), following

    stacks = [_make_stacks(u, arrays) for u, arrays in zip(updates, given, strict=True)]
    empty = [
        [_fill_like(x, b.shape, x.dtype) for x in arrays.states]
        for b, arrays in zip(blocks, given, strict=True)
    ]
    # Loops of a single iteration: the scheduler takes copies outside of loops for copies of residuals. XLA
    # dissolves the first loop, and reads the first block by a kernel, beside the forward pass.
    _, first = lax.while_loop(
        lambda state: state[0] < 1,
        lambda state: (state[0] + 1, fetch(stacks, state[0])),
        (jnp.int32(0), empty),
    )
    last = loop.count - 1
    i, stacks, current = lax.while_loop(lambda state: state[0] < last, iterate, (jnp.int32(0), stacks, first))
    i, stacks = lax.while_loop(
        lambda state: state[0] < loop.count,
        lambda state: (state[0] + 1, store(state[1], compute(state[1], current, state[0]), state[0])),
        (i, stacks),
    )
    rests = [b.get_rest() for b in blocks]

    def finish(state):
        i, stacks = state
        results = compute(stacks, fetch(stacks, 0, rests), 0, rests)
        return i + 1, store(stacks, results, 0, rests)

    if any(rests):
        _, stacks = lax.while_loop(lambda state: state[0] <= loop.count, finish, (i, stacks))
    return [x for stack in stacks for x in stack]


def _make_stacks(update: Update, given: _Operands) -> list[Any]:
    """The arrays for the results of an update, in the order of `Update.list_results`."""
    own = [*given.states, *given.replaced]
    others = update.list_results()[len(own) :]
    return own + [_fill_like(own[0], update.local_shape, compat.struct_of(v.aval).dtype) for v in others]


def _fill_like(x: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return compat.vary_like(jnp.zeros(shape, dtype), jax.typeof(x))


def _to_device(x: jax.Array) -> jax.Array:
    return jax.device_put(x, jax.memory.Space.Device)


def _to_memory_of(array: jax.Array, block: jax.Array) -> jax.Array:
    return jax.device_put(block, jax.memory.Space.Host) if compat.is_host(jax.typeof(array)) else block
