"""Layers read out of programs, for a planner."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jaxoff._device.kernel_time import kernel_ms, lower_clock, programs_ms, step_kernel_ms
from jaxoff._device.profile import Device
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import JaxprEqn, Var
from jaxoff._jaxpr.dataflow import find_ancestors, index_makers, mark_dependents, variables
from jaxoff._jaxpr.inline import inlined
from jaxoff._jaxpr.kernels import KernelGraph
from jaxoff._jaxpr.primitives import DOTS, is_collective, is_compute, is_pallas
from jaxoff._jaxpr.tag import Tag
from jaxoff._plan.layer import UNNAMED_DOTS, Layer, Shared, Step, Value
from jaxoff._policy.decision import Placement
from jaxoff._schedule.copy_times import fills_device

_NAMES = frozenset({"name", "reduce_precision", "reshape", "optimization_barrier", "squeeze"})


@dataclasses.dataclass(frozen=True)
class LayerPasses:
    """An iteration of a part, differentiated.

    Attributes:
      iterations: how many there are; 1 outside of loops.
      eqns: what its backward pass needs of the forward pass, then the backward pass: a straight-line program.
      carried: inputs that only `jax.checkpoint` keeps for the backward pass. The program's own inputs,
        weights among them, live anyway.
      cotangents: what the backward pass takes from that of the layer behind.
      results, gradients: of the two passes, as far as `eqns` make them.
      source: where it is written.
      rows: inputs that a loop takes out of stacks of the program's, such as weights.
      forward: the forward pass, where `eqns` lack what only its results need.
      in_order: whether it is one of a `jaxoff.scan`.
    """

    iterations: int
    eqns: tuple[JaxprEqn, ...]
    carried: tuple[Var, ...]
    cotangents: tuple[Var, ...]
    results: frozenset[Var]
    gradients: frozenset[Var]
    source: str
    rows: tuple[Var, ...] = ()
    forward: LayerPasses | None = None
    in_order: bool = False


def layer_of(iteration: LayerPasses, device: Device) -> Layer:
    """Looks at every kernel of an iteration.

    Args:
      iteration: the iteration.
      device: speeds of what runs it.
    """
    return _Traced(iteration, device).layer()


def _labels_within(eqns: Iterable[JaxprEqn]) -> Iterator[str]:
    """The labels of what loops and branches among equations make."""
    flows = filter(None, map(compat.control_flow, eqns))
    for program in (program for flow in flows for program in flow.programs):
        inner = list(inlined(program.eqns, {}))
        yield from filter(None, (_label_of(eqn)[0] for eqn in inner))
        yield from _labels_within(inner)


def _label_of(eqn: JaxprEqn) -> tuple[str | None, Placement | None]:
    """What decides where the result of an equation lives, and where a mark puts it."""
    text = compat.name_in(eqn)
    if text is None:
        return (UNNAMED_DOTS if eqn.primitive.name in DOTS else None), None
    tag = Tag.of(text)
    placed: dict[Any, Placement] = {"not_offload": "save", "offload": "offload"}
    return tag.label or f"({tag.mark})", placed.get(tag.mark)


class _Traced:
    def __init__(self, iteration: LayerPasses, device: Device, loaded: Device | None = None):
        self._iteration, self._device, self.eqns = iteration, device, iteration.eqns
        self._rows = frozenset(iteration.rows)
        named = {eqn.outvars[0] for eqn in self.eqns if compat.name_in(eqn) is not None}
        dots = {eqn.outvars[0] for eqn in self.eqns if eqn.primitive.name in DOTS}
        self._is_backward = mark_dependents(self.eqns, set(iteration.cotangents))
        made = index_makers(self.eqns)
        dots = {v for v in dots if not self._is_backward[made[v]]}
        self.graph = KernelGraph(self.eqns, frozenset(iteration.results | iteration.gradients | named | dots))
        self.forward = [i for i in self.graph.kernels if not self._is_backward[i]]
        self._writes = {i for i in self.graph.kernels if self._only_writes(i)}
        self.backward = sorted((i for i in self.graph.kernels if self._is_backward[i]), key=self._place)

        made = (v for i in self.forward for v in self.eqns[i].outvars)
        self._number: dict[Var, int] = {}  # of the values
        self._half = max((compat.nbytes(v.aval) for v in made), default=0) / 2
        self._loaded = loaded or lower_clock(self.graph, self.backward, device, self._rows)

    def _place(self, i: int) -> int:
        """Where a kernel stands: behind the last one whose result it reads, if it only writes gradients."""
        made = (self.graph.maker.get(v, -1) for v in self.graph.reads[i])
        return max(made, default=i) if i in self._writes else i

    def _only_writes(self, i: int) -> bool:
        """Whether an elementwise kernel makes gradients alone: it writes them into their stacks."""
        made = {*self.eqns[i].outvars}
        is_read = not self.graph.readers.keys().isdisjoint(made)
        return made <= self._iteration.gradients and not (
            self._iteration.iterations == 1 or is_read or is_compute(self.eqns[i])
        )

    def layer(self) -> Layer:
        forward = self._iteration.forward
        whole = self if forward is None else _Traced(forward, self._device, self._loaded)
        values = tuple(self._values(whole.made_ms()))
        return Layer(
            iterations=self._iteration.iterations,
            values=values,
            forward=tuple(whole.steps(whole.forward)),
            backward=tuple(self.steps(self.backward)),
            source=self._iteration.source,
            in_order=self._iteration.in_order,
            paced_ms=(whole.paced_ms(whole.forward), self.paced_ms(self.backward)),
            within=frozenset(_labels_within(self.eqns[i] for i in self.forward)),
        )

    def paced_ms(self, pass_: Iterable[int]) -> float:
        """How long the kernels of a pass take within a step."""
        return sum(map(self._paced_ms, pass_))

    def made_ms(self) -> dict[str, list[float]]:
        """By name, when the forward pass makes the values that have it."""
        made: dict[str, list[float]] = {}
        ends = 0.0
        for i in self.forward:
            ends += self._ms(i)
            if (text := compat.name_in(self.eqns[i])) is not None:
                made.setdefault(text, []).append(ends)
        return made

    def _values(self, made_ms: dict[str, list[float]]):
        """Inputs that the layer before makes, then what the layer makes."""
        made_at = {text: iter(times) for text, times in made_ms.items()}
        step = {i: s for s, i in enumerate(self.backward)}
        read: dict[Var, list[int]] = {}
        copied: dict[Var, list[int]] = {}
        for i in self.backward:
            for v in self.graph.reads[i]:
                read.setdefault(v, []).append(step[i])
                if is_compute(self.eqns[i]) and not is_pallas(self.eqns[i]):  # others read it in the stack
                    copied.setdefault(v, []).append(step[i])
        number = self._number
        for v in self._iteration.carried:
            number[v] = len(number)
            first, last = _ends(read.get(v, ())) or (None, None)
            nbytes, is_large = compat.nbytes(v.aval), self._is_large(v)
            kept = {"stored_ms": self._stored_ms(nbytes), "copied": _ends(copied.get(v, ()))}
            yield Value(nbytes, is_large, 0.0, (), first, last, carried=True, **kept)
        for v in self._iteration.rows:
            if sizes := self._copied(v):
                number[v] = len(number)
                readers = (i for i in self.graph.readers[v] if i in step)
                heavy = [step[i] for i in readers if is_compute(self.eqns[i])]
                first, last = _ends(heavy) or (None, None)
                yield Value(max(sizes), max(sizes) > self._half, 0.0, (), first, last)
        count, needed = len(number), self._needed()
        for i in self.forward:
            eqn = self.eqns[i]
            reads = tuple(sorted({number[v] for v in self.graph.reads[i] if v in number}))
            when = [s for v in eqn.outvars for s in read.get(v, [])]
            text = compat.name_in(eqn)
            for v in eqn.outvars:
                number[v] = count
            count += 1
            label, fixed = _label_of(eqn)
            same_as = reads[0] if len(reads) == 1 and self._is_another_name(i) else None
            first, last = _ends(when) or (None, None)
            nbytes = compat.nbytes_of(v for v in eqn.outvars if v in read or v in self.graph.readers)
            yield Value(
                nbytes=nbytes,
                is_large=any(map(self._is_large, eqn.outvars)),
                ms=self._again_ms(i, needed),
                reads=reads,
                first=first,
                last=last,
                label=label,
                fixed=fixed,
                shape=_shape_of(eqn.outvars[0].aval),
                source=compat.source_line(eqn),
                made_ms=0.0 if text is None else next(made_at[text], 0.0),
                stored_ms=self._stored_ms(nbytes) if self._is_of_heavy(i) or self._is_read(i) else 0.0,
                copied=_ends([s for v in eqn.outvars for s in copied.get(v, ())]),
                same_as=same_as,
            )

    def _ms(self, i: int) -> float:
        return 0.0 if self._is_another_name(i) else kernel_ms(self.graph, i, self._device)

    def _needed(self) -> set[Var]:
        """What the backward pass reads, or other values that it needs are made from."""
        needed = {v for i in self.backward for v in self.graph.reads[i]}
        for i in reversed(self.forward):
            if not needed.isdisjoint(self.eqns[i].outvars):
                needed.update(self.graph.reads[i])
        return needed

    def _again_ms(self, i: int, needed: set[Var]) -> float:
        """The time to recompute the needed results of a kernel; a loop may leave some of them out."""
        eqn = self.eqns[i]
        left = compat.pruned(eqn, needed.__contains__)
        return self._paced_ms(i) - programs_ms(eqn, self._loaded) + programs_ms(left, self._loaded)

    def _paced_ms(self, i: int) -> float:
        """How long a kernel takes within a step."""
        return 0.0 if self._is_another_name(i) else step_kernel_ms(self.graph, i, self._loaded, self._rows)

    def _stored_ms(self, nbytes: int) -> float:
        return self._device.pass_ms(nbytes) if self._iteration.iterations > 1 else 0.0

    def _is_of_heavy(self, i: int) -> bool:
        """Whether a value, under whatever name, is an input or made by a kernel that is not elementwise."""
        while self._is_another_name(i):
            if (read := self.graph.reads[i][0]) not in self.graph.maker:
                return True
            i = self.graph.maker[read]
        return is_compute(self.eqns[i])

    def _is_read(self, i: int) -> bool:
        """Whether a kernel of the pass forward that is not elementwise reads a value, under whatever name."""
        readers = (j for v in self.eqns[i].outvars for j in self.graph.readers.get(v, ()))
        return any(
            is_compute(self.eqns[j]) or (self._is_another_name(j) and self._is_read(j))
            for j in readers
            if not self._is_backward[j]
        )

    def _is_another_name(self, i: int) -> bool:
        """Whether a value is another one of the same size under a name."""
        eqn, reads = self.eqns[i], self.graph.reads[i]
        names = {self.eqns[j].primitive.name for j in (i, *self.graph.between[i])}
        same_size = len(reads) == 1 and compat.nbytes(reads[0].aval) == compat.nbytes(eqn.outvars[0].aval)
        return same_size and names <= _NAMES

    def _copied(self, v: Var) -> list[int]:
        """The bytes of a row, as each kernel takes it that reads it whole, perhaps as another type."""
        sizes = []
        for i in self.graph.readers.get(v, ()):
            if is_compute(self.eqns[i]):
                made = {w: self.eqns[j] for j in self.graph.between[i] for w in self.eqns[j].outvars}
                for w in variables(self.eqns[i]):
                    if v in find_ancestors(w, made):
                        sizes.append(compat.nbytes(w.aval))
        return sizes

    def steps(self, order: Sequence[int]) -> list[Step]:
        """The memory of a pass: what it makes itself, from being made to the last reader.

        The cotangent that it is given, and the one that it hands on in that memory, are the caller's.
        """
        handed_on = self._handed_on()
        steps = list(self._steps(order, handed_on & self._iteration.gradients))
        least = self._steps(order, handed_on)
        return [
            dataclasses.replace(step, handed_on=step.small - other.small)
            for step, other in zip(steps, least, strict=True)
        ]

    def _steps(self, order: Sequence[int], elsewhere: set[Var]) -> Iterator[Step]:
        """As `steps`, but for what has its memory elsewhere."""
        apart = self._apart(order)
        made = {v for i in order for v in self.eqns[i].outvars} - elsewhere - apart
        last: dict[Var, int] = {}
        for s, i in enumerate(order):
            last |= dict.fromkeys((v for v in self.graph.reads[i] if v in made), s)
        last |= dict.fromkeys(self._iteration.results & made, len(order))
        gradients = self._iteration.gradients & made
        rows = gradients if self._iteration.iterations > 1 else ()
        live, ends = self._sizes(apart), 0.0
        for s, i in enumerate(order):
            eqn, reads, ms = self.eqns[i], self.graph.reads[i], kernel_ms(self.graph, i, self._device)
            ends += ms
            made_here = [] if i in self._writes else eqn.outvars
            new = self._sizes(v for v in made_here if v in last or v in gradients)
            dying = [v for v in reads if last.get(v) == s]
            # An elementwise kernel writes over what nothing reads after it, of the forward pass, too.
            ended = [v for v in reads if v not in last and v in self.graph.maker and self._is_over(v, i + 1)]
            over = (0, 0) if is_compute(eqn) else self._sizes((*dying, *ended))
            over = min(over[0], new[0]), min(over[1], new[1])
            small, large = (a + b - c for a, b, c in zip(live, new, over, strict=True))
            written, _ = self._sizes(v for v in made_here if v in rows and v not in last)
            what = f"{eqn.primitive.name} {compat.source_line(eqn)}".strip()
            shared = tuple(self._shared(reads, *over)) if any(over) else ()
            yield Step(
                what, small, large, min(written, small), ends, shared=shared, fills=fills_device(eqn, ms)
            )
            stays = self._sizes(v for v in made_here if v in last)
            live = tuple(a + b - c for a, b, c in zip(live, stays, self._sizes(dying), strict=True))

    def _apart(self, order: Sequence[int]) -> set[Var]:
        """What collectives with other devices send and bring, but for what leaves the iteration.

        They are no links of `jaxoff.jit`'s chain: each has a place for the whole iteration.
        """
        made = {v for i in order for v in self.eqns[i].outvars}
        collectives = [i for i in order if is_collective(self.eqns[i])]
        sent = {v for i in collectives for v in (*self.graph.reads[i], *self.eqns[i].outvars)}
        return sent & made - self._iteration.results - self._iteration.gradients

    def _shared(self, reads: Iterable[Var], small: int, large: int) -> Iterator[Shared]:
        """What a kernel reads that others read, too, to make values of the forward pass."""
        forward = {*self.forward}
        for v in (v for v in reads if v in self._number):
            others = (j for j in self.graph.readers[v] if j in forward and not is_compute(self.eqns[j]))
            made = (self.eqns[j].outvars[0] for j in others if not self._is_another_name(j))
            if again := tuple(self._number[w] for w in made):
                yield Shared(self._number[v], again, small, large)

    def _handed_on(self) -> set[Var]:
        """What takes the memory of a cotangent: sums of it that kernels write over it, and a gradient."""
        found: set[Var] = set()
        there = {*self._iteration.cotangents}
        for i in self.backward:
            eqn = self.eqns[i]
            over = [v for v in self.graph.reads[i] if v in there and self._is_over(v, i + 1)]
            for w in eqn.outvars:
                after = (v for v in there if v in over or self._is_over(v, i))
                given = over if not is_compute(eqn) else after if w in self._iteration.gradients else ()
                if (v := next((v for v in given if _kind(v) == _kind(w)), None)) is not None:
                    found.add(w)
                    there = there - {v} | {w}
        return found

    def _is_over(self, v: Var, i: int) -> bool:
        """Whether nothing reads a value from a kernel on."""
        return all(j < i for j in self.graph.readers.get(v, ()))

    def _sizes(self, values) -> tuple[int, int]:
        """Bytes of the small and of the large among values."""
        sizes = [0, 0]
        for v in values:
            sizes[self._is_large(v)] += compat.nbytes(v.aval)
        return sizes[0], sizes[1]

    def _is_large(self, v: Var) -> bool:
        return compat.nbytes(v.aval) > self._half


def _shape_of(aval: Any) -> str:
    return f"{aval.dtype}{list(aval.shape)}" if hasattr(aval, "dtype") else ""


def _ends(steps: Sequence[int]) -> tuple[int, int] | None:
    """The first and the last, if there are any."""
    return (min(steps), max(steps)) if steps else None


def _kind(v: Var) -> Any:
    return compat.shape_of(v.aval), v.aval.dtype  # pyright: ignore
