"""Finds the arguments of a training step with no reader but its update."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.sharding import NamedSharding, Sharding

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import Jaxpr, JaxprEqn, Literal, Var
from jaxoff._jaxpr.dataflow import index_readers, map_makers, mark_dependents, variables
from jaxoff._jaxpr.primitives import ELEMENTWISE
from jaxoff._jaxpr.shares import nbytes_on_device

# Smaller arguments stay on the device: a copy has a latency of some 10 us.
LEAST_NBYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class Update:
    """The update of arrays of a shape, an elementwise computation.

    Attributes:
      shape: of all arrays.
      states: the arguments to rest on the host, each with the result in its place.
      replaced: arguments on the device, each with the result in its place: the parameters. The update need
        not read such an argument: parameters in bfloat16 are made of masters. Without such an argument the
        loop of an update makes an array for a result.
      read: other operands of the shape: gradients, and parameters without a result.
      scalars: other operands.
      eqns: the equations, in order. Other equations may read their results `late`, and no others.
      outs: the results of the program among the results of `eqns`.
      late: results of `outs` read by other equations, e.g. for a norm of the new parameters. They are on the
        device, and their readers run after the update.
      sharding: of the states over a mesh, whose devices update their own parts; None on a single device.
    """

    shape: tuple[int, ...]
    states: tuple[tuple[Var, Var], ...]
    replaced: tuple[tuple[Var, Var], ...]
    read: tuple[Var, ...]
    scalars: tuple[Var, ...]
    eqns: tuple[JaxprEqn, ...]
    outs: tuple[Var, ...]
    late: frozenset[Var] = frozenset()
    sharding: NamedSharding | None = None

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of a device's part of an array."""
        return self.sharding.shard_shape(self.shape) if self.sharding else self.shape

    @property
    def local_nbytes(self) -> int:
        """Bytes of a device's parts of the arguments to rest on the host."""
        return sum(nbytes_on_device(state.aval, self.sharding) for state, _ in self.states)

    def list_results(self) -> list[Var]:
        """The results: of the states, of the replaced arguments, others."""
        own = [out for _, out in (*self.states, *self.replaced)]
        return own + [out for out in self.outs if out not in own]

    def compute(self, given: Mapping[Any, Any], shape: tuple[int, ...]) -> list[Any]:
        """The results, in the order of `list_results`, of the operands' parts of a shape."""
        values = dict(given)
        for eqn in self.eqns:
            operands = [v.val if isinstance(v, Literal) else values[v] for v in eqn.invars]
            if eqn.primitive.name == "broadcast_in_dim":
                dtype = compat.struct_of(eqn.outvars[0].aval).dtype
                made = [jnp.broadcast_to(jnp.asarray(operands[0], dtype), shape)]
            else:
                made = eqn.primitive.bind(*operands, **eqn.params)
                made = made if eqn.primitive.multiple_results else [made]
            values.update(zip(eqn.outvars, made, strict=True))
        return [values[v] for v in self.list_results()]

    def has_mesh_of(self, other: Update) -> bool:
        """Whether the states of two divided updates are over the same mesh."""
        assert self.sharding is not None and other.sharding is not None
        return self.sharding.mesh == other.sharding.mesh

    def divide(self, shardings: Mapping[Var, Sharding]) -> Update | None:
        """The update with the shardings of arguments; None unless a mesh divides its states alike."""
        found = [shardings.get(state) for state, _ in self.states]
        named = [sharding for sharding in found if isinstance(sharding, NamedSharding)]
        if len(named) < len(found) or not all(s.is_equivalent_to(named[0], len(self.shape)) for s in named):
            return None
        return dataclasses.replace(self, sharding=named[0])


def find_updates(program: Jaxpr, donated: Sequence[bool]) -> list[Update]:
    """Finds the updates of a program whose arguments may rest on the host, in program order.

    An argument may rest if it is donated, if a chain of elementwise equations alone reads it, up to results
    of the program, and if one of these results gets its memory (`pair_donated`). A chain with a reduction or
    a product (a norm of the update, factored moments) keeps its arguments on the device, as does a loop.
    Other equations may read results of the program that stay on the device, if no update needs what they
    compute.

    Args:
      program: a program with its calls inlined.
      donated: for each argument, whether the program may reuse its memory.
    """
    level = _Level(program, donated)
    groups: list[_Chain] = []
    for state in level.arguments:
        chain = level.follow(state)
        if chain is None:
            continue
        joined = [group for group in groups if not group.eqns.isdisjoint(chain.eqns)]
        groups = [group for group in groups if group not in joined]
        for group in joined:
            chain = _Chain([*group.states, *chain.states], chain.eqns | group.eqns, chain.late | group.late)
        groups.append(chain)
    found = [update for chain in groups if (update := level.describe(chain)) is not None]
    return level.drop_needed(found)


def pair_donated(program: Jaxpr, donated: Sequence[bool]) -> dict[Var, Any]:
    """For each donated argument the result in its memory: `jax.jit` pairs those of a type in order.

    Args:
      program: the program.
      donated: for each argument, whether the program may reuse its memory.
    """
    arguments: dict[Any, list[Var]] = {}
    for v, may in zip(program.invars, donated, strict=True):
        if may:
            arguments.setdefault(_type_of(v), []).append(v)
    pairs: dict[Var, Any] = {}
    for out in program.outvars:
        if left := arguments.get(_type_of(out)):
            pairs[left.pop(0)] = out
    return pairs


@dataclasses.dataclass(eq=False)
class _Chain:
    """Arguments with the indices of their dependent equations, up to results with other readers."""

    states: list[Var]
    eqns: set[int]
    late: set[Var]


class _Level:
    def __init__(self, program: Jaxpr, donated: Sequence[bool]):
        self._eqns = program.eqns
        self._readers, self._makers = index_readers(program.eqns), map_makers(program.eqns)
        self._index = {id(eqn): i for i, eqn in enumerate(program.eqns)}
        counts = collections.Counter(v for v in program.outvars if isinstance(v, Var))
        self._all_outs, self._outs = set(counts), {v for v, count in counts.items() if count == 1}
        self._pairs = pair_donated(program, donated)
        self._argument_of = {out: v for v, out in self._pairs.items() if isinstance(out, Var)}
        self.arguments = [
            v
            for v in program.invars
            if v in self._pairs
            and getattr(v.aval, "ndim", 0)
            and not compat.is_host(v.aval)
            and compat.nbytes(v.aval) >= LEAST_NBYTES
            and v not in self._all_outs
        ]

    def follow(self, state: Var) -> _Chain | None:
        """The dependent equations of an argument; None unless all are elementwise over its shape."""
        chain = _Chain([state], set(), set())
        return chain if self._follow(state, compat.shape_of(state.aval), chain) and chain.eqns else None

    def _follow(self, v: Var, shape: tuple[int, ...], chain: _Chain) -> bool:
        """Adds the dependent equations of a variable; False if there are others, unless it is a result."""
        for i in self._readers.get(v, ()):
            if i in chain.eqns:
                continue
            trial = _Chain([], {*chain.eqns, i}, {*chain.late})
            if _is_elementwise(self._eqns[i], shape) and all(
                self._follow(out, shape, trial) for out in self._eqns[i].outvars
            ):
                chain.eqns |= trial.eqns
                chain.late |= trial.late
            elif v in self._outs:
                chain.late.add(v)
            else:
                return False
        return True

    def describe(self, chain: _Chain) -> Update | None:
        """The update of a chain; None without results for its arguments' places."""
        shape = compat.shape_of(chain.states[0].aval)
        eqns, operands = self._add_makers(chain.eqns, shape)
        body = [self._eqns[i] for i in sorted(eqns)]
        dependent = {v for i in chain.eqns for v in self._eqns[i].outvars}
        outs = [v for v in dependent if v in self._all_outs]
        if not outs or not self._outs.issuperset(outs):
            return None
        arrays = [v for v in operands if compat.shape_of(v.aval) == shape]
        given = [(v, out) for v in arrays if (out := self._pairs.get(v)) in outs]
        if not all(_depends(out, v, body) for v, out in given):  # results in another order than arguments
            return None
        # Without a result of its own, as moments whose norm is taken, a state stays on the device.
        place = {v: out for v, out in given if v in chain.states and out not in chain.late}
        if not place:
            return None
        order = {v: i for i, eqn in enumerate(body) for v in eqn.outvars}
        outs = sorted(outs, key=lambda v: order[v])
        others = ((self._argument_of.get(out), out) for out in outs if out not in place.values())
        replaced = [(v, out) for v, out in others if v is not None and v not in self._all_outs]
        own = {*place, *(v for v, _ in replaced)}
        return Update(
            shape,
            tuple(place.items()),
            tuple(replaced),
            tuple(v for v in arrays if v not in own),
            tuple(v for v in operands if compat.shape_of(v.aval) != shape),
            tuple(body),
            tuple(outs),
            frozenset(chain.late),
        )

    def drop_needed(self, updates: Sequence[Update]) -> list[Update]:
        """The updates without late readers awaited by another update."""
        late = {v for update in updates for v in update.late}
        inside = {id(eqn) for update in updates for eqn in update.eqns}
        others = [eqn for eqn in self._eqns if id(eqn) not in inside]
        needed = {v for update in updates for v in (*update.read, *update.scalars)}
        made = {
            v
            for eqn, does in zip(others, mark_dependents(others, late), strict=True)
            if does
            for v in eqn.outvars
        }
        return [update for update in updates if not update.late] if made & needed else list(updates)

    def _add_makers(self, chain: set[int], shape: tuple[int, ...]) -> tuple[set[int], list[Var]]:
        """Adds the elementwise equations before a chain with a single array among their operands.

        Returns:
          Indices of the equations, and the operands of all.
        """
        eqns, operands = set(chain), []
        made = {v for i in chain for v in self._eqns[i].outvars}
        todo = [v for i in sorted(chain) for v in variables(self._eqns[i])]
        while todo:
            v = todo.pop(0)
            if v in made or v in operands:
                continue
            if (added := self._find_makers(v, shape)) is None:
                operands.append(v)
                continue
            eqns |= added
            made.update(w for i in added for w in self._eqns[i].outvars)
            todo += [w for i in sorted(added) for w in variables(self._eqns[i])]
        return eqns, operands

    def _find_makers(self, v: Var, shape: tuple[int, ...]) -> set[int] | None:
        """The fewest elementwise equations from at most one array to a variable; else None.

        A gradient that is clipped is an operand of two equations: of its scaling, and of the choice between
        the scaled and the given gradient.
        """
        eqns: set[int] = set()
        arrays = {v}
        while not eqns or len(arrays) > 1:
            indices = {w: self._index[id(eqn)] for w in arrays if (eqn := self._makers.get(w))}
            last = max(indices, key=lambda w: indices[w], default=None)
            if last is None:
                return None
            eqn = self._eqns[indices[last]]
            fills = eqn.primitive.name == "broadcast_in_dim" and _is_fill(eqn, shape)
            if not fills and not _is_elementwise(eqn, shape):
                return None
            eqns.add(indices[last])
            arrays -= {*eqn.outvars}
            arrays |= {w for w in variables(eqn) if compat.shape_of(w.aval) == shape}
        return eqns


def _depends(out: Any, v: Var, eqns: Sequence[JaxprEqn]) -> bool:
    """Whether a result of equations is computed from a variable."""
    found = mark_dependents(eqns, {v})
    return any(out in eqn.outvars for eqn, does in zip(eqns, found, strict=True) if does)


def _type_of(v: Any) -> Any:
    """The shape and dtype of a variable or literal; None for another than an array."""
    is_array = hasattr(v.aval, "shape")
    return (compat.shape_of(v.aval), compat.struct_of(v.aval).dtype) if is_array else None


def _is_elementwise(eqn: JaxprEqn, shape: tuple[int, ...]) -> bool:
    """Whether an equation computes arrays of a shape elementwise, of arrays of the shape and scalars."""
    if eqn.primitive.name not in ELEMENTWISE or eqn.effects:
        return False
    operands = (compat.shape_of(v.aval) for v in eqn.invars)
    return all(s in (shape, ()) for s in operands) and all(
        compat.shape_of(v.aval) == shape for v in eqn.outvars
    )


def _is_fill(eqn: JaxprEqn, shape: tuple[int, ...]) -> bool:
    """Whether a broadcast fills an array of a shape with a scalar."""
    return compat.shape_of(eqn.outvars[0].aval) == shape and not compat.shape_of(eqn.invars[0].aval)
