"""A program with other placements of the values of its layers in a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from jaxoff._budget.joint_graph import Placements
from jaxoff._budget.sequenced import LayerSequence, Sequenced
from jaxoff._budget.sequences import is_pure_backward
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import Jaxpr, JaxprEqn, Literal, Var
from jaxoff._jaxpr.dataflow import drop_dead, variables
from jaxoff._jaxpr.inline import Renamed, resolve, trace_call
from jaxoff._jaxpr.primitives import KernelClass, classify_kernel, is_widening

type _Decided = Sequence[tuple[LayerSequence, Placements]]


def write_sequences(jaxpr: Jaxpr, found: Sequenced, decided: _Decided, *, waits_for_sums: bool) -> Jaxpr:
    """A program in which the backward pass reads kept values of layers, and makes the others again.

    Args:
      jaxpr: the program of `found`.
      found: its layers in a row.
      decided: the placements of each group of layers, from `LayerSequence.split`.
      waits_for_sums: whether what is made again waits for the latest cotangent itself, which XLA then stores,
        also where a kernel would compute it: a sum of two, say. Without, it waits for the latest cotangent
        stored in any case. That takes less time, and more memory where two make a sum.
    """
    writer = _Writer(found, decided, waits_for_sums=waits_for_sums)
    for i, eqn in enumerate(found.eqns):
        if i not in found.repeated:
            writer.add(i, eqn)
    outs = [writer.read(v, len(found.eqns), None) if writer.is_late(v) else v for v in found.outvars]
    return drop_dead(jaxpr.replace(eqns=writer.eqns, outvars=outs))


class _Writer:
    """Writes the equations of a program in their order.

    Attributes:
      eqns: the equations written.
    """

    def __init__(self, found: Sequenced, decided: _Decided, *, waits_for_sums: bool):
        self._waits_for_sums = waits_for_sums
        self.eqns: list[JaxprEqn] = []
        self._sequence: dict[Var, LayerSequence] = {}  # value of a layer -> its layers
        self._maker: dict[Var, int] = {}
        self._layer_eqns: list[JaxprEqn] = []
        self._late: set[Var] = set()
        self._saved: set[Var] = set()
        self._offloaded: set[Var] = set()
        self._on_host: Renamed = {}
        self._reloaded: Renamed = {}
        self._made: dict[tuple[int, int | None], Renamed] = {}  # values made again, by sequence and layer
        self._delayed: dict[tuple[int, int | None], Renamed] = {}  # kept values behind a barrier, likewise
        # Of the values outside of layers, but for constants, in the order of writing.
        self._position: dict[Var, int] = {}
        self._constants: set[Var] = set()
        self._computed_from: Renamed = {}  # value that XLA fuses into its readers -> the latest one stored
        for group, placed in decided:
            for layer in group.layers:
                for places, kept in ((placed.saved, self._saved), (placed.offloaded, self._offloaded)):
                    kept.update(v for k in places if isinstance(v := layer.values[k], Var))
                for eqn in (*layer.eqns, *layer.only_backward):
                    self._sequence.update(dict.fromkeys(eqn.outvars, group))
                    self._maker.update(dict.fromkeys(eqn.outvars, len(self._layer_eqns)))
                    self._layer_eqns.append(eqn)
                self._late.update(v for eqn in layer.only_backward for v in eqn.outvars)
        for sequence in found.sequences:
            self._saved.update(v for v in sequence.list_passed() if isinstance(v, Var))
        self._offloaded -= self._saved
        self._kept = self._saved | self._offloaded

    def is_late(self, v: Any) -> bool:
        """Whether only the backward pass makes a value."""
        return isinstance(v, Var) and v in self._late

    def add(self, i: int, eqn: JaxprEqn) -> None:
        """Writes equation `i`."""
        if any(v in self._maker for v in eqn.outvars):
            for v in variables(eqn):
                self._send(v, eqn)  # the first layer's arguments
            self.eqns.append(eqn)
            for v in eqn.outvars:
                self._send(v, eqn)
            return
        backward = is_pure_backward(eqn)
        others = [v for v in variables(eqn) if v not in self._maker and v in self._position]
        latest = max(others, key=lambda v: self._position[v], default=None)
        if latest is not None:
            latest = self._computed_from.get(latest, latest)
        operands = [self.read(v, i, latest) if backward or self.is_late(v) else v for v in eqn.invars]
        self.eqns.append(eqn.replace(invars=operands))
        if self._constants.issuperset(variables(eqn)):  # nothing could wait for it
            self._constants.update(eqn.outvars)
        else:
            self._position.update(dict.fromkeys(eqn.outvars, len(self.eqns)))
            is_sum = self._waits_for_sums and (len(eqn.invars) > 1 or not is_widening(eqn))
            if latest is not None and classify_kernel(eqn) is KernelClass.FUSED and not is_sum:
                self._computed_from.update(dict.fromkeys(eqn.outvars, latest))

    def _send(self, v: Var, like: JaxprEqn) -> None:
        """Copies a value to the host, if it is to be there and is not yet."""
        if v in self._offloaded and v not in self._on_host:
            eqns, (self._on_host[v],) = trace_call(
                lambda x: jax.device_put(x, jax.memory.Space.Host), [v], like=like
            )
            self.eqns += eqns

    def read(self, v: Any, i: int, cotangent: Var | None) -> Any:
        """The value to read in the place of a value of a layer, in equation `i` of the backward pass.

        Args:
          v: the value.
          i: the number of the equation.
          cotangent: for which values made again wait, and XLA neither makes the values early nor finds them
            equal to the values of the forward pass.
        """
        if isinstance(v, Literal) or v in self._saved:
            return v
        if v in self._offloaded:
            return self._reload(v, cotangent)
        if v not in self._sequence:
            return v
        sequence = self._sequence[v]
        key = id(sequence), sequence.find_layer(i)
        made = self._made.setdefault(key, {})
        todo, found = [v], set()
        while todo:
            w = todo.pop()
            if w in self._maker and w not in self._kept and w not in made and self._maker[w] not in found:
                found.add(self._maker[w])
                todo += variables(self._layer_eqns[self._maker[w]])
        for k in sorted(found):
            self._make(self._layer_eqns[k], made, self._delayed.setdefault(key, {}), cotangent)
        return made[v]

    def _make(self, eqn: JaxprEqn, made: Renamed, delayed: Renamed, cotangent: Var | None) -> None:
        """Writes an equation of a layer once more."""

        def find(v: Any) -> Any:
            is_offloaded = isinstance(v, Var) and v in self._offloaded
            return self._reload(v, cotangent) if is_offloaded else resolve(made, v)

        operands = [find(v) for v in eqn.invars]
        is_free = all(a is b for a, b in zip(operands, eqn.invars, strict=True))  # XLA would find it made
        for k, v in enumerate(operands):
            if isinstance(v, Var) and (v in self._saved or is_free):
                if v not in delayed:
                    delayed[v] = self._delay(v, cotangent, eqn)
                operands[k] = delayed[v]
        outs = [Var(v.aval) for v in eqn.outvars]
        self.eqns.append(eqn.replace(invars=operands, outvars=outs))
        made.update(zip(eqn.outvars, outs, strict=True))

    def _reload(self, v: Var, cotangent: Var | None) -> Any:
        """Copies a value back, behind a barrier: XLA would take a copy there and back away."""
        if v not in self._reloaded:
            host = self._delay(self._on_host[v], cotangent, self.eqns[-1])
            eqns, (self._reloaded[v],) = trace_call(
                lambda x: jax.device_put(x, jax.memory.Space.Device), [host], like=self.eqns[-1]
            )
            self.eqns += eqns
        return self._reloaded[v]

    def _delay(self, v: Var, cotangent: Var | None, like: JaxprEqn) -> Var:
        """A value behind a barrier, which waits for a cotangent if there is one."""
        (delayed, *_), barrier = compat.make_barrier([v] if cotangent is None else [v, cotangent], like=like)
        self.eqns.append(barrier)
        return delayed
