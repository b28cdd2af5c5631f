"""The memory and the duration of a program in which opaque equations stand for the passes of layer groups."""

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
    """The memory of a step while a kernel outside of layer groups runs, or while a pass of a layer group
    runs.

    Attributes:
      what: primitive and source line, for messages.
      nbytes: bytes alive, without residuals and working sets of layer groups.
      holds: kind of layer group -> number of groups with residuals in memory.
      kind: kind of the running layer group, or None.
      is_backward: whether the backward pass of the group runs.
      results_nbytes: part of `nbytes`: results of the program, such as gradients.
      pending_nbytes: bytes of each pending result.
    """

    what: str
    nbytes: int
    holds: tuple[int, ...]
    kind: int | None = None
    is_backward: bool = False
    results_nbytes: int = 0
    pending_nbytes: tuple[int, ...] = ()

    @property
    def waiting(self) -> tuple[int, ...]:
        """Kind of layer group -> number of groups with residuals in memory, without the running group."""
        return tuple(max(0, n - (kind == self.kind)) for kind, n in enumerate(self.holds))


@dataclasses.dataclass(frozen=True)
class PassCall:
    """The pass of a layer group for which an opaque equation stands.

    Attributes:
      group: number of the layer group.
      is_backward: whether the pass is the backward pass.
      residuals: operands among the residuals of the group.
      reusable: operands whose buffers the results may reuse: values carried from layer to layer.
    """

    group: int
    is_backward: bool
    residuals: frozenset[Any] = frozenset()
    reusable: frozenset[Any] = frozenset()


class Timeline:
    """A straight-line program with opaque passes of layer groups.

    Attributes:
      calls: index of an equation -> pass for which the equation stands.
    """

    def __init__(
        self,
        eqns: Sequence[JaxprEqn],
        inputs: set[Var],
        outs: frozenset[Var],
        calls: Mapping[int, PassCall],
        *,
        in_place: frozenset[Var] = frozenset(),
        loops: Mapping[int, GroupLoop] | None = None,
    ):
        """Finds the kernels of the program.

        Args:
          eqns: the program.
          inputs: arguments of the program, which live for the whole step and are not counted.
          outs: results of the program.
          calls: index of an equation -> pass for which the equation stands.
          in_place: results written into the buffer of an argument.
          loops: index of an equation -> loop with layer groups in its body.
        """
        self._eqns, self._inputs, self._outs = eqns, inputs, outs
        self.calls, self._in_place, self._loops = calls, in_place, loops or {}
        self._graph = KernelGraph(eqns, outs | self._find_converted())

    def outside_ms(self, device: Device) -> float:
        """Estimated duration of all kernels outside of layer groups, in ms."""
        outside = (i for i in self._graph.kernels if i not in self.calls and i not in self._loops)
        loops = sum(loop.iterations * loop.body.outside_ms(device) for loop in self._loops.values())
        return loops + sum(step_kernel_ms(self._graph, i, device) for i in outside)

    def _find_converted(self) -> frozenset[Var]:
        """Finds operands of groups and loops in another type, such as cast weights: XLA stores them whole."""
        maker = map_makers(self._eqns)
        found = set()
        for v in (v for i in (*self.calls, *self._loops) for v in variables(self._eqns[i])):
            while v in maker and maker[v].primitive.name in VIEWS and variables(maker[v]):
                v = variables(maker[v])[0]
            if v in maker and maker[v].primitive.name == "convert_element_type":
                found.add(v)
        return frozenset(found)

    def is_input(self, atom: Any) -> bool:
        """Whether a value is an argument, or a view of an argument."""
        return not self._find_makers(atom)

    def _find_makers(self, atom: Any) -> set[int]:
        """Finds the makers of a value; none for arguments."""
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
        """Yields the points of the program in order.

        Args:
          kinds: number of a layer group with a backward pass -> kind of the group.
        """
        order = self._graph.kernels
        spans, last = self._find_residual_spans(), self._find_last_readers()
        live, results, num_kinds = 0, 0, len(set(kinds.values()))
        pending = tuple(
            compat.nbytes(v.aval) for i in order for v in self._find_allocated(i, last) if v in self._outs
        )
        for t, i in enumerate(order):
            new = self._find_allocated(i, last)
            made = compat.nbytes_of(new)
            done = [v for v in new if v in self._outs]
            results += compat.nbytes_of(done)
            pending = pending[len(done) :]  # the same tuple where no result is computed
            dying = [v for v in self._graph.reads[i] if last.get(v) == t and v not in self._inputs]
            freed = compat.nbytes_of(dying)
            reused = min(compat.nbytes_of(v for v in dying if self._is_reusable(v, i)), made)
            holds = [0] * num_kinds
            for group, (first, until) in spans.items():
                holds[kinds[group]] += first <= t <= until
            call = self.calls.get(i)
            kind = None if call is None else kinds.get(call.group)
            what = f"{self._eqns[i].primitive.name} {compat.source_line(self._eqns[i])}".strip()
            alive = live + made - reused
            known = min(alive, results)
            if i in self._loops:
                for point in self._loops[i].points(kinds):
                    nbytes = alive + point.nbytes
                    yield dataclasses.replace(
                        point, nbytes=nbytes, results_nbytes=known, pending_nbytes=pending
                    )
            else:
                is_backward = call is not None and call.is_backward
                yield Point(what, alive, tuple(holds), kind, is_backward, known, pending)
            live += made - freed

    def _find_allocated(self, i: int, last: Mapping[Var, int]) -> list[Var]:
        """Finds the results of an equation with a buffer of their own."""
        return [v for v in self._eqns[i].outvars if v in last and v not in self._in_place]

    def _is_reusable(self, v: Var, i: int) -> bool:
        """Whether results of an equation may reuse the buffer of an operand without later readers."""
        if (passing := self.calls.get(i) or self._loops.get(i)) is not None:
            return v in passing.reusable
        return not is_compute(self._eqns[i])

    def _find_last_readers(self) -> dict[Var, int]:
        """Returns: value with memory -> position of its last reader, other than as a residual."""
        last: dict[Var, int] = {}
        for t, i in enumerate(self._graph.kernels):
            residuals = self.calls[i].residuals if i in self.calls else frozenset()
            last |= dict.fromkeys((v for v in self._graph.reads[i] if v not in residuals), t)
        return last | dict.fromkeys(self._outs, len(self._graph.kernels))

    def _find_residual_spans(self) -> dict[int, tuple[int, int]]:
        """Returns: layer group -> positions between which the group holds its residuals.

        Without an opaque forward pass, a group holds residuals from the position at which the last residual
        is computed.
        """
        position = {i: t for t, i in enumerate(self._graph.kernels)}
        forward = {call.group: position[i] for i, call in self.calls.items() if not call.is_backward}
        spans: dict[int, tuple[int, int]] = {}
        for i, call in self.calls.items():
            if call.is_backward:
                made = (position[j] for v in call.residuals for j in self._find_makers(v))
                first = forward[call.group] if call.group in forward else max(made, default=0)
                spans[call.group] = first, position[i]
        return spans


@dataclasses.dataclass(frozen=True)
class GroupLoop:
    """A loop whose body contains layer groups, such as a loop over microbatches.

    Attributes:
      iterations: number of iterations.
      body: the timeline of one iteration.
      slices_nbytes: bytes of the rows of stacks in an iteration.
      reusable: operands carried from iteration to iteration, whose buffers the results reuse.
    """

    iterations: int
    body: Timeline
    slices_nbytes: int
    reusable: frozenset[Any]

    def points(self, kinds: Mapping[int, int]) -> Iterator[Point]:
        """Yields the points of an iteration; see `Timeline.points`."""
        for point in self.body.points(kinds):
            yield dataclasses.replace(point, nbytes=point.nbytes + self.slices_nbytes)
