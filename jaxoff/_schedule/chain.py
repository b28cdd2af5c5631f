"""The chain: the large kernels of a program in an order, each behind the previous kernel.

Under CUDA graphs scheduled CONCURRENT, XLA lets two values share memory only where dependencies prove the
first value dead before the second is made. Gradients of weights and recomputed values depend on little in a
backward pass, so XLA would let nearly all these values live at once. Optimization barriers from each large
kernel to the next add the missing dependencies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import JaxprEqn, Var
from jaxoff._jaxpr.kernels import KernelGraph, converts_all_slices
from jaxoff._jaxpr.primitives import is_collective, is_compute, is_narrowing
from jaxoff._schedule.copy_waits import CopyWaits
from jaxoff._schedule.problem import OrderProblem
from jaxoff._schedule.schedule import Action, Added, Barrier, DelayIteration, DelayReload, Substitutes, Value
from jaxoff._schedule.summed_products import SummedProducts


def is_chained(eqn: JaxprEqn, large_nbytes: int) -> bool:
    """Whether a kernel has a position in the chain: a compute kernel, or a maker of a large value.

    Copies between device and host, and collectives, run beside the chain.
    """
    if compat.transfer_in(eqn) or is_collective(eqn):
        return False
    made = [compat.nbytes(v.aval) for v in eqn.outvars if not compat.is_host(v.aval)]
    largest = max(made, default=0)
    return largest > 0 and (is_compute(eqn) or largest >= large_nbytes)


class Chain:
    """The chain as far as it is decided, and the actions which tie kernels to the chain.

    Attributes:
      actions: the actions so far, of the chain and of the draft which extends the chain.
      length: the number of kernels in the chain.
      last_large: the latest large value made by a kernel in the chain.
      unread: value -> number of its readers not placed yet.
      small_results: small values computed from large values; the next compute kernel waits for each.
      substitutes: result of a copy or collective -> value to read in its place, once a kernel has waited.
      renamed: host stack -> the stack after an element was written into its spare row.
      elements: operand of a collective -> its first element, known before the whole operand.
    """

    def __init__(
        self,
        problem: OrderProblem,
        graph: KernelGraph,
        large_nbytes: int,
        pairs: Mapping[int, int],
        summed: SummedProducts,
        waits: CopyWaits,
    ):
        self._problem, self._graph, self._eqns = problem, graph, problem.eqns
        self._large_nbytes, self._pairs, self._summed, self._waits = large_nbytes, pairs, summed, waits
        self._first_sent = {
            i: stack for made, stack in problem.overwrites_after_send.items() for i in graph.find_makers(made)
        }
        self.actions: list[Action] = []
        self.length = 0
        self.last_large: Var | None = None
        self._before_compute: Var | None = None  # the latest large value before the last compute kernel
        self.unread = {v: len(readers) for v, readers in graph.readers.items()}
        self.small_results: list[Var] = []
        self.substitutes: Substitutes = {}
        self.renamed: dict[Var, Added] = {}
        self.elements: Substitutes = {}
        self._delayed: dict[frozenset[int], Substitutes] = {}  # equations of slices -> what they read instead
        self._last: Var | None = None
        self._behind_last: Substitutes = {}  # the substitutes for operands of the last kernel
        # The result of the kernel before the last kernel and before all kernels fused with the last kernel.
        self._before_last: Var | None = None
        # Where products share operands: operand -> what the products read in its place.
        self._read_as: Substitutes = {}
        self._read_last: frozenset[Var] = frozenset()  # the operands of the last product
        self._floating: set[int] = set()  # the products beside the chain: all they read, the last one read
        # Value -> position of the last kernel in the chain which surely runs before the value is made.
        self._level: dict[Value, int] = {}

    def required_by(self, i: int) -> list[Var]:
        """Lists the operands of kernel `i`, and the host stack to which its buffer must be sent before."""
        return [*self._graph.reads[i], *([self._first_sent[i]] if i in self._first_sent else ())]

    def append(self, i: int, behind: Substitutes, *, chained: bool) -> None:
        """Records kernel `i`, which reads `behind` in place of operands; `chained`: as the chain's end."""
        eqn = self._eqns[i]
        level = max((self._level.get(behind.get(v, v), 0) for v in self._graph.reads[i]), default=0)
        if chained and i not in self._floating:
            self.length += 1
            level = self.length
            if is_compute(eqn):
                self._before_compute = self.last_large
            if not self._can_fuse_with_last(i):
                self._before_last = self._last
            self._behind_last = behind
            self._last = max(eqn.outvars, key=lambda v: compat.nbytes(v.aval))
            if compat.nbytes(self._last.aval) >= self._large_nbytes:
                self.last_large = self._last
        self._level |= dict.fromkeys(eqn.outvars, level)

    def tie_to_last(self, i: int, time: float) -> Substitutes:
        """Adds barriers so that kernel `i` starts after the kernel at the end of the chain.

        The kernel also waits for the copies due by `time`, in ms, and for small results.

        Returns:
          Operand of the kernel -> the barrier's output to read in its place.
        """
        # A barrier over a host stack would be a copy of the stack.
        reads = [v for v in self._graph.reads[i] if not compat.is_host(v.aval)]
        first_sent = self._first_sent.get(i)
        if i in self._summed.readers:
            reads = [v for v in reads if self._graph.maker.get(v) not in self._summed.last]
        if not reads or (self._last is None and first_sent is None):
            return {}
        if self._is_paired_with_last(i):
            if not self._behind_last.keys().isdisjoint(reads):
                return self._behind_last
            shared = self._graph.reads[self._graph.maker[self._last]] if self._last else ()
            reads = [v for v in reads if v not in shared] or reads
        loose = [v for v in reads if self._level.get(v, 0) < self.length]
        tied = [v for v in loose if self._is_large(v)]
        awaited = self._find_awaited(i, time)
        others = [v for v in reads if v is not self._problem.iteration]
        if not tied and (len(loose) == len(reads) or first_sent is not None):
            tied = sorted(others, key=lambda v: compat.nbytes(v.aval))[:1]
        last = self._before_last if self._can_fuse_with_last(i) else self._last
        tied, read_before = self._part_shared(i, tied)
        behind = self._wait_for_gathers(i) | read_before
        behind |= self.tie([v for v in tied if v not in behind], i, (first_sent, last))
        if awaited and others:
            # The operand tied to the end of the chain; XLA drops a wait through any other operand.
            latest = max(others, key=lambda v: (self._level.get(behind.get(v, v), 0), v not in behind))
            for v in awaited:
                operand = self.substitutes.get(latest) or behind.get(latest, latest)
                behind[latest], self.substitutes[v] = self.add_barrier(operand, self.substitutes.get(v, v), i)
                self._waits.mark_awaited(v)
        if self._problem.options.shares_operands and is_compute(self._eqns[i]):
            self._read_as |= {v: behind.get(v, self.substitutes.get(v, v)) for v in reads}
            self._read_last = frozenset(reads)
        return self._delay_iteration(i) | behind

    def _part_shared(self, i: int, tied: list[Var]) -> tuple[list[Var], Substitutes]:
        """Parts the operands to tie: those behind a barrier, and those that a product before has read.

        Over several devices the compiler may gather an operand, once for all products that read one value: a
        barrier for each product makes each a value of its own. Where all operands have been read, the one of
        the fewest readers gets a barrier; a product with a single operand, which the last product read, too,
        gets none and stands beside the chain.
        """
        shared = [v for v in tied if v in self._read_as]
        if not (shared and is_compute(self._eqns[i])):
            return tied, {}
        if len(shared) == len(tied) == 1 and tied[0] in self._read_last:
            self._floating.add(i)
        elif len(shared) == len(tied):
            shared.remove(min(shared, key=lambda v: len(self._graph.readers[v])))
        return [v for v in tied if v not in shared], {v: self._read_as[v] for v in shared}

    def _find_awaited(self, i: int, time: float) -> list[Var]:
        """Finds the copies and small results for which kernel `i` has to wait at a time."""
        awaited = self._waits.list_due(time)
        if is_compute(self._eqns[i]):
            pending = [v for v in self.small_results if v not in self.substitutes]
            # The kernel waits in any case for the values from which it is computed.
            before = self._graph.find_ancestors(i, min((self._graph.maker[v] for v in pending), default=i))
            self.small_results = [v for v in pending if self._graph.maker[v] not in before]
            awaited += self.small_results
        return awaited

    def _wait_for_gathers(self, i: int) -> Substitutes:
        """Makes the last reader of a large value wait for the gathers that take small results from the value.

        Otherwise XLA may run such a gather, of the logits of the labels for example, after kernel `i`: the
        large value lives on while the kernel's result is made. Other small results, sums for example, XLA may
        compute in the same kernel.
        """
        tied: Substitutes = {}
        if is_compute(self._eqns[i]):  # it waits for all small results
            return tied
        outs = self._problem.outs
        ended = [
            v
            for v in self._graph.reads[i]
            if self._is_large(v) and self.unread[v] == 1 and v not in self.substitutes and v not in outs
        ]
        for small in self.small_results:
            maker = self._graph.maker[small]
            if self._eqns[maker].primitive.name != "gather" or small in self.substitutes:
                continue
            for v in (v for v in ended if v in self._graph.reads[maker]):
                tied[v], self.substitutes[small] = self.add_barrier(tied.get(v, v), small, i)
        return tied

    def _is_large(self, v: Var) -> bool:
        """Whether a kernel makes a large value."""
        return v in self._graph.maker and compat.nbytes(v.aval) >= self._large_nbytes

    def _can_fuse_with_last(self, i: int) -> bool:
        """Whether XLA can fuse kernel `i` with the last kernel of the chain: then no barrier parts the two.

        Nor does one part the products of a sum over devices. The other operands of kernel `i` are tied to the
        kernel before the last kernel: behind the last kernel XLA would have to store the last result. If the
        last result has further readers, the fused kernel writes two results, which must have the same shape.
        """
        last, eqn = self._last, self._eqns[i]
        if self._is_paired_with_last(i) or self._is_summed_with_last(i):
            return True
        if last is None or is_compute(eqn) or last not in self._graph.reads[i] or last in self._problem.outs:
            return False
        if is_compute(self._eqns[self._graph.maker[last]]):  # fusible if kernel `i` rounds its result
            return is_narrowing(eqn) and self.unread[last] == 1
        return self.unread[last] == 1 or last.aval == eqn.outvars[0].aval

    def _is_paired_with_last(self, i: int) -> bool:
        """Whether kernel `i` and the last kernel of the chain are a pair of `liveness.find_fusion_pairs`."""
        return self._last is not None and self._pairs.get(self._graph.maker[self._last]) == i

    def _is_summed_with_last(self, i: int) -> bool:
        """Whether kernel `i` and the last kernel of the chain belong to one sum of products."""
        last = None if self._last is None else self._summed.find_sum(self._graph.maker[self._last])
        return last is not None and last == self._summed.find_sum(i)

    def _delay_iteration(self, i: int) -> Substitutes:
        """Makes the loop counter wait, for a kernel whose large slices of arguments all change dtype.

        XLA copies slices which change dtype, and would do so at any time. Kernels read other slices in place,
        if XLA sees how the start of the slice depends on the counter.
        """
        iteration = self._problem.iteration
        if iteration is None or iteration not in self._graph.reads[i]:
            return {}
        if not converts_all_slices((self._eqns[j] for j in self._graph.fused[i]), self._large_nbytes):
            return {}
        # Over several devices such a slice may be gathered: once, beside the product before its first reader.
        shares = self._problem.shares_fused
        after = self._before_compute if shares else self.last_large
        slices = frozenset(j for j in self._graph.fused[i] if self._eqns[j].primitive.name == "dynamic_slice")
        if not shares or slices not in self._delayed:
            self._delayed[slices] = {}
            if after is not None:
                self._delayed[slices] = {iteration: (counter := Added(iteration))}
                self.actions.append(DelayIteration(i, self.elements.get(after, after), counter))
        return self._delayed[slices]

    def delay_reload(self, i: int) -> None:
        """Makes reload `i` start after the latest large value, if its host stack has a spare row."""
        stack = self.find_stack(i)
        if stack is None or self.last_large is None:
            return
        result = Added(stack)
        after = self.elements.get(self.last_large, self.last_large)
        row = self._problem.spare_rows[stack]
        self.actions.append(DelayReload(i, self.renamed.get(stack, stack), row, after, result))
        self.renamed[stack] = result

    def find_stack(self, i: int) -> Var | None:
        """Finds the host stack with a spare row from which reload `i` reads."""
        return next((v for v in self._graph.reads[i] if v in self._problem.spare_rows), None)

    def tie_reload(self, i: int) -> Substitutes:
        """Adds barriers which delay reload `i` to the end of the chain, unless a spare row does so."""
        if self.find_stack(i):
            return {}
        reads = self._graph.reads[i]
        # A barrier over a stack, or over the loop counter, would hide which row is read: XLA would reload the
        # row by a kernel.
        return {} if self._problem.iteration in reads else self.tie(reads, i, (self._last,))

    def tie(self, values: Iterable[Var], i: int, waits: Sequence[Var | None]) -> Substitutes:
        """Makes operands of kernel `i` wait for `waits`; returns operand -> value to read in its place."""
        tied: Substitutes = {}
        for v in values:
            tied[v] = self.substitutes.get(v, v)
            for wait in waits:
                if wait is not None:
                    tied[v], awaited = self.add_barrier(tied[v], self.elements.get(wait, wait), i)
                    if self._may_lose_barrier(wait):
                        self.substitutes[wait] = awaited
        return tied

    def _may_lose_barrier(self, v: Var) -> bool:
        """Whether a value is the result of a convolution, or a small product that no product reads.

        Such are gradients of weights. XLA transposes the result for each reader on its own, and drops a
        barrier's operand that is read there alone. So readers of the result read the barrier's output.
        """
        maker = self._graph.maker.get(v)
        name = None if maker is None else self._eqns[maker].primitive.name
        in_loop = not self._problem.waits_for_sends  # whose stack takes a gradient at once
        if name != "dot_general" or in_loop or self._is_large(v):
            return name == "conv_general_dilated"
        return not any(is_compute(self._eqns[j]) for j in self._graph.readers.get(v, ()))

    def add_barrier(self, value: Value, other: Value, i: int) -> tuple[Added, Added]:
        """Adds a barrier over two values; of more values, XLA would drop the operands with unread outputs."""
        results = _stand_in(value), _stand_in(other)
        self.actions.append(Barrier(i, (value, other), results))
        self._level |= dict.fromkeys(results, self.length)
        return results


def _stand_in(value: Value) -> Added:
    return Added(value.of if isinstance(value, Added) else value)
