"""Reads a `Layer` from the differentiated program of one iteration: kernels, values, durations, memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jaxoff._device.kernel_time import kernel_ms, lower_clock, programs_ms, step_kernel_ms
from jaxoff._device.profile import Device
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import JaxprEqn, Var
from jaxoff._jaxpr.dataflow import find_ancestors, index_makers, mark_dependents, variables
from jaxoff._jaxpr.inline import inline_calls
from jaxoff._jaxpr.kernels import KernelGraph
from jaxoff._jaxpr.primitives import DOTS, is_collective, is_compute, is_pallas
from jaxoff._jaxpr.tag import Tag
from jaxoff._plan.calibrations import LARGE_PART
from jaxoff._plan.layer import UNNAMED_DOTS, KernelUse, Label, Layer, LayerValue, RecomputeFusion
from jaxoff._policy.decision import Placement
from jaxoff._schedule.copy_times import fills_device

# Primitives whose result is the operand in the same buffer, if both have the same size.
_ALIASES = frozenset({"name", "reduce_precision", "reshape", "optimization_barrier", "squeeze"})
# Mark of a value -> the placement by the mark.
_MARKED: dict[Any, Placement] = {"not_offload": "save", "offload": "offload"}


@dataclasses.dataclass(frozen=True)
class LayerPasses:
    """The forward and the backward pass of one iteration of a layer group.

    Attributes:
      iterations: number of iterations; 1 outside of loops.
      eqns: a straight-line program: the required equations of the forward pass, then the
        backward pass.
      carried: inputs that `jax.checkpoint` alone keeps for the backward pass. Inputs of the whole program,
        such as weights, live anyway.
      cotangents: inputs of the backward pass, computed in the backward pass of the next layer.
      results, gradients: results of the forward and of the backward pass, as far as `eqns` compute them.
      source: file and line of the layer.
      rows: inputs from stacks of the program, such as the rows of weights.
      forward: the whole forward pass, where `eqns` lack equations that only its results need.
      is_ordered: whether the layer is the body of a `jaxoff.scan`.
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
    is_ordered: bool = False


def read_layer(passes: LayerPasses, device: Device) -> Layer:
    """Reads the layer of both passes.

    Args:
      passes: both passes of an iteration.
      device: rates of the device.
    """
    return _LayerReader(passes, device).read()


def _find_inner_names(eqns: Iterable[JaxprEqn]) -> Iterator[str]:
    """Yields the names of values in the loops and branches among equations."""
    flows = filter(None, map(compat.control_flow, eqns))
    for program in (program for flow in flows for program in flow.programs):
        inner = list(inline_calls(program.eqns, {}))
        yield from filter(None, (_read_tag(eqn)[0] for eqn in inner))
        yield from _find_inner_names(inner)


def _read_tag(eqn: JaxprEqn) -> tuple[str | None, Placement | None]:
    """Returns the name under which an equation's result is placed, and the placement by a mark."""
    text = compat.name_in(eqn)
    if text is None:
        return (UNNAMED_DOTS if eqn.primitive.name in DOTS else None), None
    tag = Tag.of(text)
    return tag.label or f"({tag.mark})", _MARKED.get(tag.mark)


class _LayerReader:
    """Reads kernels and values from the passes of an iteration.

    Attributes:
      eqns: the program of both passes.
      graph: its kernels.
      forward, backward: kernels of each pass, by equation, in order.
    """

    def __init__(self, passes: LayerPasses, device: Device, loaded: Device | None = None):
        self._passes, self._device, self.eqns = passes, device, passes.eqns
        self._rows = frozenset(passes.rows)
        named = {eqn.outvars[0] for eqn in self.eqns if compat.name_in(eqn) is not None}
        dots = {eqn.outvars[0] for eqn in self.eqns if eqn.primitive.name in DOTS}
        self._is_backward = mark_dependents(self.eqns, set(passes.cotangents))
        maker = index_makers(self.eqns)
        dots = {v for v in dots if not self._is_backward[maker[v]]}
        self.graph = KernelGraph(self.eqns, frozenset(passes.results | passes.gradients | named | dots))
        self.forward = [i for i in self.graph.kernels if not self._is_backward[i]]
        self._gradient_writers = {i for i in self.graph.kernels if self._only_writes_gradients(i)}
        self.backward = sorted((i for i in self.graph.kernels if self._is_backward[i]), key=self._position)

        computed = (v for i in self.forward for v in self.eqns[i].outvars)
        self._number: dict[Var, int] = {}  # variable -> index of its value; filled by `_read_values`
        self._border = max((compat.nbytes(v.aval) for v in computed), default=0) * LARGE_PART
        self._loaded = loaded or lower_clock(self.graph, self.backward, device, self._rows)

    def _position(self, i: int) -> int:
        """Position of a kernel: a writer of gradients directly follows the kernel whose result it reads."""
        makers = (self.graph.maker.get(v, -1) for v in self.graph.reads[i])
        return max(makers, default=i) if i in self._gradient_writers else i

    def _only_writes_gradients(self, i: int) -> bool:
        """Whether an elementwise kernel computes gradients only, which it writes into their stacks."""
        computed = {*self.eqns[i].outvars}
        is_read = not self.graph.readers.keys().isdisjoint(computed)
        return computed <= self._passes.gradients and not (
            self._passes.iterations == 1 or is_read or is_compute(self.eqns[i])
        )

    def read(self) -> Layer:
        """Reads the layer."""
        forward = self._passes.forward
        whole = self if forward is None else _LayerReader(forward, self._device, self._loaded)
        values = tuple(self._read_values(whole.find_named_times()))
        return Layer(
            iterations=self._passes.iterations,
            values=values,
            forward=tuple(whole.read_kernels(whole.forward)),
            backward=tuple(self.read_kernels(self.backward)),
            source=self._passes.source,
            is_ordered=self._passes.is_ordered,
            pass_times_ms=(whole.pass_ms(whole.forward), self.pass_ms(self.backward)),
            inner_names=frozenset(_find_inner_names(self.eqns[i] for i in self.forward)),
        )

    def pass_ms(self, kernels: Iterable[int]) -> float:
        """Duration of the kernels of a pass within a step."""
        return sum(map(self._step_ms, kernels))

    def find_named_times(self) -> dict[str, list[float]]:
        """Returns: name -> times at which the forward pass has computed the values with this name, in ms."""
        times: dict[str, list[float]] = {}
        ends = 0.0
        for i in self.forward:
            ends += self._scheduled_ms(i)
            if (text := compat.name_in(self.eqns[i])) is not None:
                times.setdefault(text, []).append(ends)
        return times

    def _read_values(self, named_times: dict[str, list[float]]) -> Iterator[LayerValue]:
        """Yields carried inputs, then rows with copies, then the results of the forward pass.

        Args:
          named_times: see `find_named_times`.
        """
        times_left = {text: iter(times) for text, times in named_times.items()}
        position = {i: s for s, i in enumerate(self.backward)}
        read: dict[Var, list[int]] = {}
        copied: dict[Var, list[int]] = {}
        for i in self.backward:
            for v in self.graph.reads[i]:
                read.setdefault(v, []).append(position[i])
                # Elementwise and Pallas kernels read rows in the stack.
                if is_compute(self.eqns[i]) and not is_pallas(self.eqns[i]):
                    copied.setdefault(v, []).append(position[i])
        number = self._number
        for v in self._passes.carried:
            number[v] = len(number)
            first, last = _range_of(read.get(v, ())) or (None, None)
            nbytes = compat.nbytes(v.aval)
            yield LayerValue(
                nbytes=nbytes,
                is_large=self._is_large(v),
                recompute_ms=0.0,
                reads=(),
                first_reader=first,
                last_reader=last,
                is_carried=True,
                store_ms=self._store_ms(nbytes),
                row_copy=_range_of(copied.get(v, ())),
            )
        for v in self._passes.rows:
            if sizes := self._find_row_copies(v):
                number[v] = len(number)
                readers = (i for i in self.graph.readers[v] if i in position)
                first, last = _range_of([position[i] for i in readers if is_compute(self.eqns[i])]) or (
                    None,
                    None,
                )
                yield LayerValue(max(sizes), max(sizes) > self._border, 0.0, (), first, last)
        count, needed = len(number), self._find_needed()
        for i in self.forward:
            eqn = self.eqns[i]
            reads = tuple(sorted({number[v] for v in self.graph.reads[i] if v in number}))
            readers = [s for v in eqn.outvars for s in read.get(v, [])]
            text = compat.name_in(eqn)
            for v in eqn.outvars:
                number[v] = count
            count += 1
            name, fixed = _read_tag(eqn)
            first, last = _range_of(readers) or (None, None)
            nbytes = compat.nbytes_of(v for v in eqn.outvars if v in read or v in self.graph.readers)
            is_copied = self._is_from_compute(i) or self._is_read_by_compute(i)
            yield LayerValue(
                nbytes=nbytes,
                is_large=any(map(self._is_large, eqn.outvars)),
                recompute_ms=self._recompute_ms(i, needed),
                reads=reads,
                first_reader=first,
                last_reader=last,
                label=None if name is None else Label(name),
                fixed=fixed,
                shape=_describe_shape(eqn.outvars[0].aval),
                produced_ms=0.0 if text is None else next(times_left[text], 0.0),
                store_ms=self._store_ms(nbytes) if is_copied else 0.0,
                row_copy=_range_of([s for v in eqn.outvars for s in copied.get(v, ())]),
                alias_of=reads[0] if len(reads) == 1 and self._is_alias(i) else None,
            )

    def _scheduled_ms(self, i: int) -> float:
        """Duration of a kernel by the scheduler's estimates."""
        return 0.0 if self._is_alias(i) else kernel_ms(self.graph, i, self._device)

    def _find_needed(self) -> set[Var]:
        """Finds the values of use in the backward pass: its operands, and all operands of their makers."""
        needed = {v for i in self.backward for v in self.graph.reads[i]}
        for i in reversed(self.forward):
            if not needed.isdisjoint(self.eqns[i].outvars):
                needed.update(self.graph.reads[i])
        return needed

    def _recompute_ms(self, i: int, needed: set[Var]) -> float:
        """Duration of recomputing the needed results of a kernel. A loop may skip the other results."""
        eqn = self.eqns[i]
        rest = compat.prune(eqn, needed.__contains__)
        return self._step_ms(i) - programs_ms(eqn, self._loaded) + programs_ms(rest, self._loaded)

    def _step_ms(self, i: int) -> float:
        """Duration of a kernel within a step."""
        return 0.0 if self._is_alias(i) else step_kernel_ms(self.graph, i, self._loaded, self._rows)

    def _store_ms(self, nbytes: int) -> float:
        """Duration of the copy of a value into the stack of a loop."""
        return self._device.pass_ms(nbytes) if self._passes.iterations > 1 else 0.0

    def _is_from_compute(self, i: int) -> bool:
        """Whether a value, under any name, is an input or the result of a compute kernel."""
        while self._is_alias(i):
            if (read := self.graph.reads[i][0]) not in self.graph.maker:
                return True
            i = self.graph.maker[read]
        return is_compute(self.eqns[i])

    def _is_read_by_compute(self, i: int) -> bool:
        """Whether a compute kernel of the forward pass reads a value or an alias of the value."""
        readers = (j for v in self.eqns[i].outvars for j in self.graph.readers.get(v, ()))
        return any(
            is_compute(self.eqns[j]) or (self._is_alias(j) and self._is_read_by_compute(j))
            for j in readers
            if not self._is_backward[j]
        )

    def _is_alias(self, i: int) -> bool:
        """Whether the result of a kernel is its operand under another name, in the same buffer."""
        eqn, reads = self.eqns[i], self.graph.reads[i]
        names = {self.eqns[j].primitive.name for j in (i, *self.graph.fused[i])}
        same_size = len(reads) == 1 and compat.nbytes(reads[0].aval) == compat.nbytes(eqn.outvars[0].aval)
        return same_size and names <= _ALIASES

    def _find_row_copies(self, v: Var) -> list[int]:
        """Returns the bytes of a row as each compute kernel reads the row, perhaps in another type."""
        sizes = []
        for i in self.graph.readers.get(v, ()):
            if is_compute(self.eqns[i]):
                maker = {w: self.eqns[j] for j in self.graph.fused[i] for w in self.eqns[j].outvars}
                for w in variables(self.eqns[i]):
                    if v in find_ancestors(w, maker):
                        sizes.append(compat.nbytes(w.aval))
        return sizes

    def read_kernels(self, order: Sequence[int]) -> list[KernelUse]:
        """Returns the kernels of a pass with the memory of the pass's own values, each until its last reader.

        The cotangents of the pass, and gradients in their buffers, count as memory outside of the
        layer.
        """
        in_cotangent = self._find_in_cotangent()
        kernels = list(self._read_kernels(order, in_cotangent & self._passes.gradients))
        least = self._read_kernels(order, in_cotangent)
        return [
            dataclasses.replace(kernel, in_cotangent_nbytes=kernel.small_nbytes - other.small_nbytes)
            for kernel, other in zip(kernels, least, strict=True)
        ]

    def _read_kernels(self, order: Sequence[int], outside: set[Var]) -> Iterator[KernelUse]:
        """As `read_kernels`, without the memory of some values.

        Args:
          order: kernels of the pass, by equation.
          outside: values whose memory counts elsewhere.
        """
        transfers = self._find_transferred(order)
        own = {v for i in order for v in self.eqns[i].outvars} - outside - transfers
        last: dict[Var, int] = {}
        for s, i in enumerate(order):
            last |= dict.fromkeys((v for v in self.graph.reads[i] if v in own), s)
        last |= dict.fromkeys(self._passes.results & own, len(order))
        gradients = self._passes.gradients & own
        stacked = gradients if self._passes.iterations > 1 else ()
        live, ends = self._sizes(transfers), 0.0
        for s, i in enumerate(order):
            eqn, reads, ms = self.eqns[i], self.graph.reads[i], kernel_ms(self.graph, i, self._device)
            ends += ms
            outs = [] if i in self._gradient_writers else eqn.outvars
            new = self._sizes(v for v in outs if v in last or v in gradients)
            dying = [v for v in reads if last.get(v) == s]
            # An elementwise kernel overwrites operands without later readers, of the forward pass, too.
            ended = [v for v in reads if v not in last and v in self.graph.maker and self._is_over(v, i + 1)]
            over = (0, 0) if is_compute(eqn) else self._sizes((*dying, *ended))
            over = min(over[0], new[0]), min(over[1], new[1])
            small, large = (a + b - c for a, b, c in zip(live, new, over, strict=True))
            written, _ = self._sizes(v for v in outs if v in stacked and v not in last)
            yield KernelUse(
                operation=f"{eqn.primitive.name} {compat.source_line(eqn)}".strip(),
                small_nbytes=small,
                large_nbytes=large,
                stacked_nbytes=min(written, small),
                ends_ms=ends,
                fusions=tuple(self._find_fusions(reads, *over)) if any(over) else (),
                fills_device=fills_device(eqn, ms),
            )
            kept = self._sizes(v for v in outs if v in last)
            live = tuple(a + b - c for a, b, c in zip(live, kept, self._sizes(dying), strict=True))

    def _find_transferred(self, order: Sequence[int]) -> set[Var]:
        """Finds the operands and results of collectives, without results of the iteration.

        `jaxoff.jit` does not order collectives, so each of these values has a buffer for the whole iteration.
        """
        own = {v for i in order for v in self.eqns[i].outvars}
        collectives = [i for i in order if is_collective(self.eqns[i])]
        transferred = {v for i in collectives for v in (*self.graph.reads[i], *self.eqns[i].outvars)}
        return transferred & own - self._passes.results - self._passes.gradients

    def _find_fusions(self, reads: Iterable[Var], small: int, large: int) -> Iterator[RecomputeFusion]:
        """Yields the fusions of a kernel: operands from which elementwise kernels recompute values, too."""
        forward = {*self.forward}
        for v in (v for v in reads if v in self._number):
            others = (j for j in self.graph.readers[v] if j in forward and not is_compute(self.eqns[j]))
            results = (self.eqns[j].outvars[0] for j in others if not self._is_alias(j))
            if recomputed := tuple(self._number[w] for w in results):
                yield RecomputeFusion(self._number[v], recomputed, small, large)

    def _find_in_cotangent(self) -> set[Var]:
        """Finds the values in buffers of cotangents: sums written over a cotangent, and a gradient."""
        found: set[Var] = set()
        live = {*self._passes.cotangents}
        for i in self.backward:
            eqn = self.eqns[i]
            over = [v for v in self.graph.reads[i] if v in live and self._is_over(v, i + 1)]
            for w in eqn.outvars:
                after = (v for v in live if v in over or self._is_over(v, i))
                free = over if not is_compute(eqn) else after if w in self._passes.gradients else ()
                if (v := next((v for v in free if _type_of(v) == _type_of(w)), None)) is not None:
                    found.add(w)
                    live = live - {v} | {w}
        return found

    def _is_over(self, v: Var, i: int) -> bool:
        """Whether no kernel from index `i` on reads a value."""
        return all(j < i for j in self.graph.readers.get(v, ()))

    def _sizes(self, values: Iterable[Var]) -> tuple[int, int]:
        """Bytes of the small and of the large values among some."""
        sizes = [0, 0]
        for v in values:
            sizes[self._is_large(v)] += compat.nbytes(v.aval)
        return sizes[0], sizes[1]

    def _is_large(self, v: Var) -> bool:
        return compat.nbytes(v.aval) > self._border


def _describe_shape(aval: Any) -> str:
    return f"{aval.dtype}{list(aval.shape)}" if hasattr(aval, "dtype") else ""


def _range_of(kernels: Sequence[int]) -> tuple[int, int] | None:
    """Returns the first and the last kernel, or None if there are none."""
    return (min(kernels), max(kernels)) if kernels else None


def _type_of(v: Var) -> Any:
    return compat.shape_of(v.aval), v.aval.dtype  # pyright: ignore
