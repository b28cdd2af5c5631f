"""The memory and the time of a program in which some equations stand for the passes of parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxoff._device.kernel_time import step_kernel_ms
from jaxoff._device.profile import Device
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import JaxprEqn, Var
from jaxoff._jaxpr.dataflow import map_makers, variables
from jaxoff._jaxpr.kernels import KernelGraph
from jaxoff._jaxpr.primitives import VIEWS, is_compute


@dataclasses.dataclass(frozen=True)
class Point:
    """A moment of a step outside of parts, or while one of them runs.

    Attributes:
      what: the operation, for people.
      nbytes: what is alive, without the residuals and the working set of parts.
      holds: by number of the kind of part, how many of them hold their residuals.
      kind: of the part that runs, or None.
      backward: whether its backward pass runs.
      results_nbytes: what of `nbytes` is results of the program, such as gradients.
      to_come: results that are not made yet, their bytes.
    """

    what: str
    nbytes: int
    holds: tuple[int, ...]
    kind: int | None = None
    backward: bool = False
    results_nbytes: int = 0
    to_come: tuple[int, ...] = ()

    @property
    def waiting(self) -> tuple[int, ...]:
        """By number of the kind of part, how many hold their residuals and do not run."""
        return tuple(max(0, n - (kind == self.kind)) for kind, n in enumerate(self.holds))


@dataclasses.dataclass(frozen=True)
class Call:
    """What an equation stands for.

    Attributes:
      part: the number of the part.
      backward: whether it is its backward pass.
      kept: operands that are counted as the part's residuals.
      handed_on: operands whose memory its results may take: what goes from layer to layer.
    """

    part: int
    backward: bool
    kept: frozenset[Any] = frozenset()
    handed_on: frozenset[Any] = frozenset()


class Timeline:
    """A straight-line program with parts.

    Attributes:
      calls: by equation, the pass of a part that it stands for.
    """

    def __init__(
        self,
        eqns: Sequence[JaxprEqn],
        inputs: set[Var],
        outs: frozenset[Var],
        calls: Mapping[int, Call],
        *,
        in_place: frozenset[Var] = frozenset(),
        loops: Mapping[int, Loop] | None = None,
    ):
        """Looks at every kernel.

        Args:
          eqns: the program.
          inputs: its arguments, which live all the time and are not counted.
          outs: its results.
          calls: as above.
          in_place: results that take the memory of an argument.
          loops: by equation, a loop with parts in its body.
        """
        self._eqns, self._inputs, self._outs = eqns, inputs, outs
        self.calls, self._in_place, self._loops = calls, in_place, loops or {}
        self._graph = KernelGraph(eqns, outs | self._converted())

    def ms(self, device: Device) -> float:
        """How long what is in no part takes, about."""
        outside = (i for i in self._graph.kernels if i not in self.calls and i not in self._loops)
        loops = sum(loop.iterations * loop.body.ms(device) for loop in self._loops.values())
        return loops + sum(step_kernel_ms(self._graph, i, device) for i in outside)

    def _converted(self) -> frozenset[Var]:
        """What parts and loops read as another type, such as all weights: they take it whole."""
        maker = map_makers(self._eqns)
        found = set()
        for v in (v for i in (*self.calls, *self._loops) for v in variables(self._eqns[i])):
            while v in maker and maker[v].primitive.name in VIEWS and variables(maker[v]):
                v = variables(maker[v])[0]
            if v in maker and maker[v].primitive.name == "convert_element_type":
                found.add(v)
        return frozenset(found)

    def is_input(self, atom: Any) -> bool:
        """Whether a value is an argument, or a view of one."""
        return not self._makers(atom)

    def _makers(self, atom: Any) -> set[int]:
        """The kernels that make a value; none for arguments."""
        found, todo = set(), [atom]
        while todo:
            v = todo.pop()
            if isinstance(v, Var) and v not in self._inputs:
                i = self._graph.maker[v]
                if i in self._graph.reads:
                    found.add(i)
                else:
                    todo += self._eqns[i].invars
        return found

    def points(self, kinds: Mapping[int, int]) -> Iterator[Point]:
        """Its moments in order.

        Args:
          kinds: by part that has a backward pass, the number of its kind.
        """
        order = self._graph.kernels
        held, last = self._held(), self._last_readers()
        live, results, num_kinds = 0, 0, len(set(kinds.values()))
        to_come = tuple(compat.nbytes(v.aval) for i in order for v in self._new(i, last) if v in self._outs)
        for t, i in enumerate(order):
            new = self._new(i, last)
            made = compat.nbytes_of(new)
            done = [v for v in new if v in self._outs]
            results += compat.nbytes_of(done)
            to_come = to_come[len(done) :]  # itself, where nothing is done
            dying = [v for v in self._graph.reads[i] if last.get(v) == t and v not in self._inputs]
            freed = compat.nbytes_of(dying)
            reused = min(compat.nbytes_of(v for v in dying if self._may_be_taken(v, i)), made)
            holds = [0] * num_kinds
            for part, (first, until) in held.items():
                holds[kinds[part]] += first <= t <= until
            call = self.calls.get(i)
            kind = None if call is None else kinds.get(call.part)
            what = f"{self._eqns[i].primitive.name} {compat.source_line(self._eqns[i])}".strip()
            now = live + made - reused
            known = min(now, results)
            if i in self._loops:
                for point in self._loops[i].points(kinds):
                    nbytes = now + point.nbytes
                    yield dataclasses.replace(point, nbytes=nbytes, results_nbytes=known, to_come=to_come)
            else:
                backward = call is not None and call.backward
                yield Point(what, now, tuple(holds), kind, backward, known, to_come)
            live += made - freed

    def _new(self, i: int, last: Mapping[Var, int]) -> list[Var]:
        """What an equation makes that takes memory of its own."""
        return [v for v in self._eqns[i].outvars if v in last and v not in self._in_place]

    def _may_be_taken(self, v: Var, i: int) -> bool:
        """Whether results of an equation may take the memory of an operand that nothing else reads."""
        if (passing := self.calls.get(i) or self._loops.get(i)) is not None:
            return v in passing.handed_on
        return not is_compute(self._eqns[i])

    def _last_readers(self) -> dict[Var, int]:
        """By value that takes memory, the time of its last reader, but for parts that keep it."""
        last: dict[Var, int] = {}
        for t, i in enumerate(self._graph.kernels):
            kept = self.calls[i].kept if i in self.calls else frozenset()
            last |= dict.fromkeys((v for v in self._graph.reads[i] if v not in kept), t)
        return last | dict.fromkeys(self._outs, len(self._graph.kernels))

    def _held(self) -> dict[int, tuple[int, int]]:
        """By part, from when until when it holds its residuals.

        Where no equation stands for its forward pass, from when on there is all that it keeps.
        """
        when = {i: t for t, i in enumerate(self._graph.kernels)}
        forward = {call.part: when[i] for i, call in self.calls.items() if not call.backward}
        held: dict[int, tuple[int, int]] = {}
        for i, call in self.calls.items():
            if call.backward:
                made = (when[j] for v in call.kept for j in self._makers(v))
                first = forward[call.part] if call.part in forward else max(made, default=0)
                held[call.part] = first, when[i]
        return held


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop with parts in its body.

    Attributes:
      iterations: how many.
      body: one of them.
      slices_nbytes: what an iteration reads out of stacks.
      handed_on: operands that go from iteration to iteration.
    """

    iterations: int
    body: Timeline
    slices_nbytes: int
    handed_on: frozenset[Any]

    def points(self, kinds: Mapping[int, int]) -> Iterator[Point]:
        """The moments of an iteration."""
        for point in self.body.points(kinds):
            yield dataclasses.replace(point, nbytes=point.nbytes + self.slices_nbytes)
