"""A layer as a planner sees it: what it makes, what that costs, and who needs it when."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxoff import _compat
from jaxoff._compat import JaxprEqn, Var
from jaxoff._cost import Device
from jaxoff._marks import Tag
from jaxoff._policy import DOTS, Placement
from jaxoff._units import Units, dependents, is_heavy

# Stands for the outputs of dots and convolutions that have no name.
UNNAMED_DOTS = "(dots)"
# All that stands for values without a name.
UNNAMED = (UNNAMED_DOTS, "(offload)", "(not_offload)")
_NAMES = frozenset({"name", "reduce_precision", "reshape", "optimization_barrier", "squeeze"})


@dataclasses.dataclass(frozen=True)
class Value:
    """What the forward pass of a layer makes, or takes from the layer before.

    Attributes:
      nbytes: of one turn.
      is_large: whether it is more than half as large as the layer's largest.
      ms: how long making it again takes.
      reads: numbers of the values that it is made from, smaller than its own.
      first, last: the first and the last step of the backward pass that reads it; None if none does.
      label: what decides where it lives, if something does.
      fixed: where a mark puts it.
      carried: whether the layer takes it from the layer before.
      shape, source: for people.
      made_ms: when the forward pass has made it.
    """

    nbytes: int
    is_large: bool
    ms: float
    reads: tuple[int, ...]
    first: int | None = None
    last: int | None = None
    label: str | None = None
    fixed: Placement | None = None
    carried: bool = False
    shape: str = ""
    source: str = ""
    made_ms: float = 0.0


@dataclasses.dataclass(frozen=True)
class Step:
    """A kernel, and the memory that is in use while it runs but for values of the forward pass that wait.

    Attributes:
      what: the operation.
      small, large: bytes in use, of values up to half as large as the layer's largest and of others.
      written: of that, results of the part, which can be written to their place at once.
      ends_ms: when it is done.
    """

    what: str
    small: int
    large: int
    written: int
    ends_ms: float


@dataclasses.dataclass(frozen=True)
class Layer:
    """A turn of a part.

    Attributes:
      turns: how many.
      values: of the forward pass.
      forward, backward: the steps of the two passes; the backward pass if nothing is made again.
      source: where it is written.
    """

    turns: int
    values: tuple[Value, ...]
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    source: str

    @property
    def forward_ms(self) -> float:
        return self.forward[-1].ends_ms if self.forward else 0.0

    @property
    def backward_ms(self) -> float:
        return self.backward[-1].ends_ms if self.backward else 0.0

    def labels(self) -> dict[str, None]:
        """What decides, in the order in which it is made."""
        return {value.label: None for value in self.values if value.label is not None and not value.fixed}


@dataclasses.dataclass(frozen=True)
class Turn:
    """A turn of a part, differentiated.

    Attributes:
      turns: how many there are; 1 outside of loops.
      eqns: what its backward pass needs of the forward pass, then the backward pass: a straight-line program.
      carried: inputs that only `jax.checkpoint` keeps for the backward pass. The program's own inputs,
        weights among them, live anyway.
      cotangents: what the backward pass takes from that of the layer behind.
      results, gradients: of the two passes, as far as `eqns` make them.
      source: where it is written.
      sums: of the cotangents, gradients so far, which a turn adds to in place.
      forward: the forward pass, where `eqns` lack what only its results need.
    """

    turns: int
    eqns: tuple[JaxprEqn, ...]
    carried: tuple[Var, ...]
    cotangents: tuple[Var, ...]
    results: frozenset[Var]
    gradients: frozenset[Var]
    source: str
    sums: frozenset[Var] = frozenset()
    forward: Turn | None = None


def layer_of(turn: Turn, device: Device) -> Layer:
    """Looks at every kernel of a turn.

    Args:
      turn: the turn.
      device: speeds of what runs it.
    """
    return _Traced(turn, device).layer()


class _Traced:
    def __init__(self, turn: Turn, device: Device):
        self._turn, self._device, self.eqns = turn, device, turn.eqns
        named = {eqn.outvars[0] for eqn in self.eqns if _compat.name_in(eqn) is not None}
        dots = {eqn.outvars[0] for eqn in self.eqns if eqn.primitive.name in DOTS}
        is_backward = dependents(self.eqns, set(turn.cotangents))
        made = {v: i for i, eqn in enumerate(self.eqns) for v in eqn.outvars}
        dots = {v for v in dots if not is_backward[made[v]]}
        self.units = Units(self.eqns, frozenset(turn.results | turn.gradients | named | dots))
        self.forward = [i for i in self.units.all if not is_backward[i]]
        self.backward = [i for i in self.units.all if is_backward[i]]

        made = (v for i in self.forward for v in self.eqns[i].outvars)
        self._half = max((_compat.nbytes(v.aval) for v in made), default=0) / 2

    def layer(self) -> Layer:
        whole = self if self._turn.forward is None else _Traced(self._turn.forward, self._device)
        return Layer(
            turns=self._turn.turns,
            values=tuple(self._values(whole.made_ms())),
            forward=tuple(whole.steps(whole.forward, set())),
            backward=tuple(self.steps(self.backward, {*self._turn.cotangents} - self._turn.sums)),
            source=self._turn.source,
        )

    def made_ms(self) -> dict[str, list[float]]:
        """By name, when the forward pass makes the values that have it."""
        made: dict[str, list[float]] = {}
        ends = 0.0
        for i in self.forward:
            ends += self._ms(i)
            if (text := _compat.name_in(self.eqns[i])) is not None:
                made.setdefault(text, []).append(ends)
        return made

    def _values(self, made_ms: dict[str, list[float]]):
        """Inputs that the layer before makes, then what the layer makes."""
        made_at = {text: iter(times) for text, times in made_ms.items()}
        step = {i: s for s, i in enumerate(self.backward)}
        read: dict[Var, list[int]] = {}
        for i in self.backward:
            for v in self.units.reads[i]:
                read.setdefault(v, []).append(step[i])
        number: dict[Var, int] = {}
        for v in self._turn.carried:
            number[v] = len(number)
            when = read.get(v, [])
            first, last = (min(when), max(when)) if when else (None, None)
            yield Value(_compat.nbytes(v.aval), self._is_large(v), 0.0, (), first, last, carried=True)
        count = len(number)
        for i in self.forward:
            eqn = self.eqns[i]
            reads = tuple(sorted({number[v] for v in self.units.reads[i] if v in number}))
            when = [s for v in eqn.outvars for s in read.get(v, [])]
            text = _compat.name_in(eqn)
            for v in eqn.outvars:
                number[v] = count
            count += 1
            label, fixed = self._label(i)
            yield Value(
                nbytes=sum(
                    _compat.nbytes(v.aval) for v in eqn.outvars if v in read or v in self.units.readers
                ),
                is_large=any(map(self._is_large, eqn.outvars)),
                ms=self._ms(i),
                reads=reads,
                first=min(when, default=None),
                last=max(when, default=None),
                label=label,
                fixed=fixed,
                shape=_shape_of(eqn.outvars[0].aval),
                source=_compat.source_line(eqn),
                made_ms=0.0 if text is None else next(made_at[text], 0.0),
            )

    def _label(self, i: int) -> tuple[str | None, Placement | None]:
        eqn = self.eqns[i]
        text = _compat.name_in(eqn)
        if text is None:
            return (UNNAMED_DOTS if eqn.primitive.name in DOTS else None), None
        tag = Tag.of(text)
        placed: dict[Any, Placement] = {"not_offload": "device", "offload": "host"}
        return tag.label or f"({tag.mark})", placed.get(tag.mark)

    def _ms(self, i: int) -> float:
        return 0.0 if self._is_another_name(i) else self.units.ms(i, self._device)

    def _is_another_name(self, i: int) -> bool:
        """Whether a value is another one of the same size under a name."""
        eqn, reads = self.eqns[i], self.units.reads[i]
        names = {self.eqns[j].primitive.name for j in (i, *self.units.between[i])}
        same_size = len(reads) == 1 and _compat.nbytes(reads[0].aval) == _compat.nbytes(eqn.outvars[0].aval)
        return same_size and names <= _NAMES

    def steps(self, order: Sequence[int], given: set[Var]):
        """The memory of a pass: what it makes itself, from being made to the last reader."""
        made = given | {v for i in order for v in self.eqns[i].outvars}
        last: dict[Var, int] = {}
        for s, i in enumerate(order):
            last |= dict.fromkeys((v for v in self.units.reads[i] if v in made), s)
        last |= dict.fromkeys(self._turn.results & made, len(order))
        live, ends = self._sizes(v for v in given if v in last), 0.0
        for s, i in enumerate(order):
            eqn, reads = self.eqns[i], self.units.reads[i]
            ends += self.units.ms(i, self._device)
            new = self._sizes(v for v in eqn.outvars if v in last or v in self._turn.gradients)
            dying = [v for v in reads if last.get(v) == s]
            # An elementwise kernel writes over what nothing reads after it, of the forward pass, too.
            ended = [
                v for v in reads if v not in last and v in self.units.maker and self._last_reader(v) == i
            ]
            over = (0, 0) if is_heavy(eqn) else self._sizes((*dying, *ended))
            small, large = (a + max(0, b - c) for a, b, c in zip(live, new, over, strict=True))
            only = [
                v for v in eqn.outvars if v in self._turn.gradients and v not in last and self._turn.turns > 1
            ]
            written = sum(_compat.nbytes(v.aval) for v in only if not self._is_large(v))
            what = f"{eqn.primitive.name} {_compat.source_line(eqn)}".strip()
            yield Step(what, small, large, min(written, small), ends)
            stays = self._sizes(v for v in eqn.outvars if v in last)
            live = tuple(a + b - c for a, b, c in zip(live, stays, self._sizes(dying), strict=True))

    def _sizes(self, values) -> tuple[int, int]:
        """Bytes of the small and of the large among values."""
        sizes = [0, 0]
        for v in values:
            sizes[self._is_large(v)] += _compat.nbytes(v.aval)
        return sizes[0], sizes[1]

    def _is_large(self, v: Var) -> bool:
        return _compat.nbytes(v.aval) > self._half

    def _last_reader(self, v: Var) -> int:
        return max(self.units.readers[v])


def _shape_of(aval: Any) -> str:
    return f"{aval.dtype}{list(aval.shape)}" if hasattr(aval, "dtype") else ""
