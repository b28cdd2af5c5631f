"""Which equations of a program are kernels, and which XLA computes within those that read them."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import JaxprEqn, Var
from jaxoff._jaxpr.dataflow import index_makers, index_readers, map_makers, variables
from jaxoff._jaxpr.primitives import (
    ARGUMENT_VIEWS,
    ROUNDING,
    KernelClass,
    is_compute,
    is_narrowing,
    kernel_class,
)


class KernelGraph:
    """The kernels of a program: the equations whose results are stored.

    The rest is cheap, and is computed in the kernels that read it.

    Attributes:
      eqns: the program.
      kernels: by number of the equation, in program order.
      maker: by value, the equation that makes it.
      reads: by kernel, the stored values that it reads.
      between: by kernel, the cheap equations between those and itself.
      readers: by stored value, the kernels that read it.
    """

    def __init__(self, eqns: Sequence[JaxprEqn], outs: frozenset[Var]):
        self.eqns = eqns
        self.kernels = sorted(_graph(eqns, outs))
        self.maker = index_makers(eqns)
        self.reads: dict[int, list[Var]] = {}
        self.between: dict[int, list[int]] = {}
        self.readers: dict[Var, list[int]] = {}
        stored = set(self.kernels)
        for i in self.kernels:
            self._trace_back(i, stored)
            for v in self.reads[i]:
                self.readers.setdefault(v, []).append(i)

    def _trace_back(self, i: int, stored: set[int]) -> None:
        reads: dict[Var, None] = {}
        between, todo = set(), list(variables(self.eqns[i]))
        while todo:
            v = todo.pop()
            j = self.maker.get(v)
            if j is None or j in stored:
                reads[v] = None
            elif j not in between:
                between.add(j)
                todo += variables(self.eqns[j])
        self.reads[i], self.between[i] = list(reads), sorted(between)

    def making(self, v: Var) -> Iterator[int]:
        """The kernels that make a value, from the last one back to the kernel."""
        return (i for _, i in back_to_the_kernel(v, self.maker, self.eqns) if i in self.reads)

    def before(self, i: int, first: int = 0) -> set[int]:
        """The kernels from which kernel `i` is computed, as far as they stand at or after kernel `first`."""
        found: set[int] = set()
        todo = [i]
        while todo:
            reads = self.reads[todo.pop()]
            makers = {self.maker[v] for v in reads if self.maker.get(v, -1) >= first} - found
            found |= makers
            todo += makers
        return found

    def ready_at(self, i: int, placed: Container[int], arrives: Mapping[Var, float]) -> float:
        """When what a kernel, or one that it still needs, waits for has arrived."""
        time, todo, seen = 0.0, [i], set()
        while todo:
            for v in self.reads[todo.pop()]:
                time = max(time, arrives.get(v, 0.0))
                j = self.maker.get(v)
                if j is not None and j not in placed and j not in seen:
                    seen.add(j)
                    todo.append(j)
        return time


def back_to_the_kernel(
    v: Var, maker: Mapping[Var, int], eqns: Sequence[JaxprEqn]
) -> Iterator[tuple[Var, int]]:
    """A value and what it is made from, while that is one value; each with the equation that makes it."""
    made: Var | None = v
    while made is not None and (i := maker.get(made)) is not None:
        yield made, i
        operands = variables(eqns[i])
        made = operands[0] if len(operands) == 1 and not is_compute(eqns[i]) else None


def _graph(eqns: Sequence[JaxprEqn], outs: frozenset[Var]) -> set[int]:
    """The equations whose results are stored: those that are not cheap, and what they and the caller read.

    Of a value that a heavy one reads widened, it is the narrow one: the kernel widens it.
    """
    stored, maker = set(outs), map_makers(eqns)
    for eqn in eqns:
        if compat.transfer_in(eqn):
            stored.update(variables(eqn))
        elif is_compute(eqn):
            stored.update(_before_widening(v, maker) for v in variables(eqn))
    found, made = set(), set()
    for i, eqn in enumerate(eqns):
        is_view = eqn.primitive.name in ARGUMENT_VIEWS and made.isdisjoint(variables(eqn))
        if is_view and outs.isdisjoint(eqn.outvars):
            continue
        # What a slice starts at, a scalar, does not count.
        made.update(v for v in eqn.outvars if compat.shape_of(v.aval))
        if kernel_class(eqn) is not KernelClass.FUSED or not stored.isdisjoint(eqn.outvars):
            found.add(i)
    for wide, narrow in _narrowed(eqns, found, outs):
        found = (found if is_compute(eqns[wide]) else found - {wide}) | {narrow}
    return found | _better_stored(eqns, found, made)


def _before_widening(v: Var, maker: Mapping[Var, JaxprEqn]) -> Var:
    """What a value is the wider form of, or itself."""
    found = v
    while (eqn := maker.get(found)) is not None and eqn.primitive.name in ARGUMENT_VIEWS and variables(eqn):
        found = variables(eqn)[0]
        if eqn.primitive.name == "convert_element_type" and compat.nbytes_of([found]) < compat.nbytes_of(
            eqn.outvars
        ):
            return found
    return v


def _narrowed(eqns: Sequence[JaxprEqn], found: set[int], outs: frozenset[Var]) -> Iterator[tuple[int, int]]:
    """The kernels of which only a narrower form is read, each with that form.

    The kernel then stores the narrower one.
    """
    readers = index_readers(eqns)
    for i in sorted(found):
        eqn = eqns[i]
        if compat.transfer_in(eqn) or not outs.isdisjoint(eqn.outvars):
            continue
        reading, made = {j for v in eqn.outvars for j in readers.get(v, ())}, eqn.outvars
        while len(reading) == 1 and eqns[max(reading)].primitive.name in ROUNDING:
            (j,) = reading
            made = eqns[j].outvars
            if is_narrowing(eqns[j]):
                yield i, j
                break
            reading = set() if not outs.isdisjoint(made) else {k for v in made for k in readers.get(v, ())}


def _better_stored(eqns: Sequence[JaxprEqn], found: set[int], made: set[Var]) -> set[int]:
    """The cheap equations that several kernels need, and that would keep more memory alive than they take.

    Such as the sum of several gradients, which otherwise all live until the last kernel has read them. Where
    it is rounded and widened again, the narrow value is stored.
    """
    of: dict[Var, frozenset[Var]] = {}  # the stored values, or arguments, that a cheap one is computed from
    for i, eqn in enumerate(eqns):
        reads = frozenset().union(*(of.get(v, {v}) for v in variables(eqn)))
        if i not in found:
            of |= dict.fromkeys(eqn.outvars, reads)
    more: set[int] = set()
    needed_by: dict[Var, set[int]] = {}
    for i, eqn in reversed(list(enumerate(eqns))):
        needs = set().union(*(needed_by.get(v, ()) for v in eqn.outvars))
        widens = compat.nbytes_of(variables(eqn)) < compat.nbytes_of(eqn.outvars)
        if i not in found and len(needs) > 1 and not widens and not made.isdisjoint(eqn.outvars):
            terms = set().union(*(of[v] for v in eqn.outvars))
            kept, nbytes = compat.nbytes_of(terms & made), compat.nbytes_of(eqn.outvars)
            if kept > nbytes or (kept == nbytes and compat.nbytes_of(terms) >= 2 * nbytes):
                more.add(i)
        for v in variables(eqn):
            needed_by.setdefault(v, set()).update({i} if i in found or i in more else needs)
    return more


def all_slices_converted(eqns: Iterable[JaxprEqn], large_nbytes: int) -> bool:
    """Whether equations take large slices, and give all of them another dtype."""
    slices, converted = 0, 0
    sliced: set[Var] = set()
    for eqn in eqns:
        is_slice = eqn.primitive.name == "dynamic_slice"
        if is_slice or not sliced.isdisjoint(variables(eqn)):
            sliced.update(eqn.outvars)
            if compat.nbytes(eqn.outvars[0].aval) >= large_nbytes:
                slices += is_slice
                converted += eqn.primitive.name == "convert_element_type"
    return 0 < slices <= converted


def new_nbytes(eqn: JaxprEqn) -> int:
    """Bytes of new memory for the results of a light equation; an update in place takes none."""
    in_place = eqn.primitive.name == "dynamic_update_slice"
    return 0 if in_place else compat.nbytes_of(eqn.outvars)
