"""The kernels of a program: the equations whose results XLA stores, and the equations fused into them."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import JaxprEqn, Var
from jaxoff._jaxpr.dataflow import index_makers, index_readers, list_results, map_makers, variables
from jaxoff._jaxpr.primitives import (
    ARGUMENT_VIEWS,
    ROUNDING,
    VIEWS,
    KernelClass,
    classify_kernel,
    is_compute,
    is_fused,
    is_narrowing,
)


class KernelGraph:
    """The kernels of a program, and the dataflow between them.

    A kernel is an equation whose result XLA stores. XLA fuses every other equation into each kernel that
    depends on its result. A kernel is known by the index of its equation.

    Attributes:
      eqns: the equations of the program.
      kernels: indices of the kernels, in program order.
      maker: variable -> index of the equation with this result.
      reads: kernel -> the stored variables and arguments read by the kernel and by its fused equations.
      fused: kernel -> indices of the equations fused into the kernel, in program order.
      readers: stored variable or argument -> the kernels with this variable in `reads`.
    """

    def __init__(self, eqns: Sequence[JaxprEqn], outs: frozenset[Var]):
        self.eqns = eqns
        self.kernels = sorted(_find_kernels(eqns, outs))
        self.maker = index_makers(eqns)
        self.reads: dict[int, list[Var]] = {}
        self.fused: dict[int, list[int]] = {}
        self.readers: dict[Var, list[int]] = {}
        stored = set(self.kernels)
        for i in self.kernels:
            self._trace_back(i, stored)
            for v in self.reads[i]:
                self.readers.setdefault(v, []).append(i)

    def _trace_back(self, i: int, stored: set[int]) -> None:
        """Fills `reads` and `fused` of kernel `i`."""
        reads: dict[Var, None] = {}
        fused, todo = set(), list(variables(self.eqns[i]))
        while todo:
            v = todo.pop()
            j = self.maker.get(v)
            if j is None or j in stored:
                reads[v] = None
            elif j not in fused:
                fused.add(j)
                todo += variables(self.eqns[j])
        self.reads[i], self.fused[i] = list(reads), sorted(fused)

    def find_loads(self, i: int) -> tuple[list[Var], list[JaxprEqn]]:
        """Finds the variables of `reads` with bytes that kernel `i` loads, and the equations between.

        Kernel `i` runs after all operands of a barrier before it, and loads that of the value it takes.
        """
        if not any(self.eqns[j].primitive.name == "optimization_barrier" for j in self.fused[i]):
            return self.reads[i], [self.eqns[j] for j in self.fused[i]]
        around, loads = frozenset(self.fused[i]), dict[Var, None]()
        between, seen, todo = set[int](), set[Var](), list(variables(self.eqns[i]))
        while todo:
            v = todo.pop()
            j = self.maker.get(v)
            if j is None or j not in around:
                loads[v] = None
            elif v not in seen:
                seen.add(v)
                between.add(j)
                todo += dict(list_results(self.eqns[j]))[v]
        return list(loads), [self.eqns[j] for j in sorted(between)]

    def find_makers(self, v: Var) -> Iterator[int]:
        """Finds the kernels on the path of `trace_to_kernel`, from the last kernel to the first."""
        return (i for _, i in trace_to_kernel(v, self.maker, self.eqns) if i in self.reads)

    def find_ancestors(self, i: int, first: int = 0) -> set[int]:
        """Finds the kernels, at or after kernel `first`, from which kernel `i` is computed."""
        found: set[int] = set()
        todo = [i]
        while todo:
            reads = self.reads[todo.pop()]
            makers = {self.maker[v] for v in reads if self.maker.get(v, -1) >= first} - found
            found |= makers
            todo += makers
        return found

    def find_ready_ms(self, i: int, placed: Container[int], arrives: Mapping[Var, float]) -> float:
        """Finds the time when all inputs of kernel `i` and of its unplaced ancestors have arrived.

        Args:
          i: the kernel.
          placed: kernels that already have a position in the order.
          arrives: result of a copy or a collective -> time of arrival, in ms.
        """
        time, todo, seen = 0.0, [i], set()
        while todo:
            for v in self.reads[todo.pop()]:
                time = max(time, arrives.get(v, 0.0))
                j = self.maker.get(v)
                if j is not None and j not in placed and j not in seen:
                    seen.add(j)
                    todo.append(j)
        return time


def trace_to_kernel(v: Var, maker: Mapping[Var, int], eqns: Sequence[JaxprEqn]) -> Iterator[tuple[Var, int]]:
    """Follows a variable back to the COMPUTE kernel from which it is derived.

    The path goes through equations with a single variable as operand. It ends at a COMPUTE equation, at an
    equation with no or several variables, or at an argument.

    Yields:
      Each variable on the path, with the index of its equation.
    """
    made: Var | None = v
    while made is not None and (i := maker.get(made)) is not None:
        yield made, i
        operands = variables(eqns[i])
        made = operands[0] if len(operands) == 1 and not is_compute(eqns[i]) else None


def _find_kernels(eqns: Sequence[JaxprEqn], outs: frozenset[Var]) -> set[int]:
    """Finds the equations whose results XLA stores.

    Kernels are the COMPUTE and MOVE equations, and the FUSED equations whose results are read by a COMPUTE
    equation, by a copy, or by the caller, or lie between strides. A COMPUTE equation widens its operand
    itself: of a widened operand, the narrow variable is stored. It also scales its operand itself, if the
    variable before the scale is stored anyway: XLA multiplies by a scalar where it loads the operand, or
    multiplies the smaller one of operand and result. A view of an argument is no kernel, unless the caller
    reads the view.
    """
    stored, maker, scaled = set(outs), map_makers(eqns), dict[Var, Var]()
    for eqn in eqns:
        if compat.transfer_in(eqn):
            stored.update(variables(eqn))
        elif is_compute(eqn):
            operands = variables(eqn)
            scaled |= {v: whole for v in operands if (whole := _find_unscaled(v, maker)) is not None}
            stored.update(_find_narrow_source(v, maker) for v in operands if v not in scaled)
    for v, whole in scaled.items():
        if whole not in stored and whole in maker and is_fused(maker[whole]):
            stored.add(v)
    found, made = set(), set()
    for i, eqn in enumerate(eqns):
        is_view = eqn.primitive.name in ARGUMENT_VIEWS and made.isdisjoint(variables(eqn))
        if is_view and outs.isdisjoint(eqn.outvars):
            continue
        # A scalar does not count: a slice from a computed start is still a view of an argument.
        made.update(v for v in eqn.outvars if compat.shape_of(v.aval))
        if classify_kernel(eqn) is not KernelClass.FUSED or not stored.isdisjoint(eqn.outvars):
            found.add(i)
    # A narrowing takes the place of a MOVE kernel. A COMPUTE kernel stays in the graph.
    for wide, narrow in _find_narrowings(eqns, found, outs):
        found = (found if is_compute(eqns[wide]) else found - {wide}) | {narrow}
    found |= {i for i in index_between_strides(eqns) if not made.isdisjoint(eqns[i].outvars)}
    return found | _find_fused_to_store(eqns, found, made)


def _find_narrow_source(v: Var, maker: Mapping[Var, JaxprEqn]) -> Var:
    """Finds the narrower variable behind a widening conversion. Returns `v` without a widening."""
    found = v
    while (eqn := maker.get(found)) is not None and eqn.primitive.name in ARGUMENT_VIEWS and variables(eqn):
        found = variables(eqn)[0]
        if eqn.primitive.name == "convert_element_type" and compat.nbytes_of([found]) < compat.nbytes_of(
            eqn.outvars
        ):
            return found
    return v


def _find_unscaled(v: Var, maker: Mapping[Var, JaxprEqn]) -> Var | None:
    """The array that is multiplied or divided by a scalar for `v`; None of another variable."""
    eqn = maker.get(v)
    if eqn is None or eqn.primitive.name not in ("mul", "div") or not compat.shape_of(v.aval):
        return None
    arrays = [operand for operand in eqn.invars if compat.shape_of(operand.aval)]
    is_scale = len(arrays) == 1 and (eqn.primitive.name == "mul" or arrays[0] is eqn.invars[0])
    return arrays[0] if is_scale and isinstance(arrays[0], Var) else None


def _find_narrowings(
    eqns: Sequence[JaxprEqn], kernels: set[int], outs: frozenset[Var]
) -> Iterator[tuple[int, int]]:
    """Finds kernels with a single reader, which rounds the result to a narrower dtype.

    XLA fuses the narrowing into the kernel, and stores the narrow form only.

    Yields:
      Index of the kernel, and index of the narrowing equation.
    """
    readers = index_readers(eqns)
    for i in sorted(kernels):
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


def _find_fused_to_store(eqns: Sequence[JaxprEqn], kernels: set[int], made: set[Var]) -> set[int]:
    """Finds fused equations for XLA to store, because several kernels read them.

    A result is stored if the computed variables behind it take more memory. An example is a sum of gradients:
    without a stored sum, all gradients live until the last kernel has read them. At equal memory, a result is
    stored if all variables behind it, arguments included, take at least twice its bytes. A widened result is
    never stored, only its narrow operand. Behind what is stored, nothing counts.

    Args:
      eqns: the program.
      kernels: indices of the kernels found so far.
      made: the computed variables: no scalars and no views of arguments.
    """
    sources: dict[Var, frozenset[Var]] = {}  # fused variable -> the stored variables and arguments behind it

    def trace_sources(eqn: JaxprEqn) -> None:
        for v, operands in list_results(eqn):
            sources[v] = frozenset().union(*(sources.get(operand, {operand}) for operand in operands))

    def takes_less(eqn: JaxprEqn) -> bool:
        terms = frozenset().union(*(sources[v] for v in eqn.outvars))
        kept, nbytes = compat.nbytes_of(terms & made), compat.nbytes_of(eqn.outvars)
        return kept > nbytes or (kept == nbytes and compat.nbytes_of(terms) >= 2 * nbytes)

    fused = {i: eqn for i, eqn in enumerate(eqns) if i not in kernels}
    for eqn in fused.values():
        trace_sources(eqn)
    more: set[int] = set()
    needed_by: dict[Var, set[int]] = {}
    for i, eqn in reversed(list(enumerate(eqns))):
        needs = set().union(*(needed_by.get(v, ()) for v in eqn.outvars))
        widens = compat.nbytes_of(variables(eqn)) < compat.nbytes_of(eqn.outvars)
        can_be_stored = i in fused and not widens and not made.isdisjoint(eqn.outvars)
        if can_be_stored and len(needs) > 1 and takes_less(eqn):
            more.add(i)
        for v in variables(eqn):
            needed_by.setdefault(v, set()).update({i} if i in kernels or i in more else needs)
    sources.clear()
    for i, eqn in fused.items():
        trace_sources(eqn)
        if i in more and takes_less(eqn):
            for v in eqn.outvars:
                del sources[v]
        else:
            more.discard(i)
    return more


def index_between_strides(eqns: Sequence[JaxprEqn]) -> set[int]:
    """Indices of the FUSED equations whose results XLA stores between two moves of elements by strides.

    `jax.lax.associative_scan` halves its operands by strided slices, level by level, and interleaves the
    results by interior padding. One such move is done in the kernels that read the result. A kernel with
    several moves would compute an element once for each path to it, so XLA ends a kernel where several
    equations read a result behind a move and one of these equations is a move.
    """
    readers = index_readers(eqns)
    found: set[int] = set()
    moved: set[Var] = set()  # results behind a move, without a stored result between
    for i, eqn in enumerate(eqns):
        for v, operands in list_results(eqn) if is_fused(eqn) else ():
            reading = set(readers.get(v, ()))
            if _moves_by_strides(eqn):
                moved.add(v)
            elif moved.isdisjoint(operands):
                continue
            elif len(reading) > 1 and any(_moves_by_strides(eqns[j]) for j in reading):
                found.add(i)
            else:
                moved.add(v)
    return found


def _moves_by_strides(eqn: JaxprEqn) -> bool:
    if eqn.primitive.name == "slice":
        return any(stride > 1 for stride in eqn.params["strides"] or ())
    return eqn.primitive.name == "pad" and any(inner > 0 for _, _, inner in eqn.params["padding_config"])


def find_compute_operands(eqns: Sequence[JaxprEqn]) -> set[Var]:
    """The operands of products, attention and the like, and the values of which the operands are views."""
    found, makers = set(), map_makers(eqns)
    todo = [v for eqn in eqns if is_compute(eqn) for v in variables(eqn)]
    while todo:
        v = todo.pop()
        found.add(v)
        if v in makers and makers[v].primitive.name in VIEWS:
            todo += variables(makers[v])
    return found


def find_stored(values: Iterable[Var], eqns: Sequence[JaxprEqn]) -> set[Var]:
    """The values in memory that are read for `values`: themselves, or what elementwise kernels make them of.

    Args:
      values: values of the equations, and arguments.
      eqns: the equations.
    """
    makers, operands = map_makers(eqns), find_compute_operands(eqns)
    operands.update(v for i in index_between_strides(eqns) for v in eqns[i].outvars)
    found, seen, todo = set(), set(), list(values)
    while todo:
        v = todo.pop()
        if v in seen:
            continue
        seen.add(v)
        if v in makers and v not in operands and is_fused(makers[v]):
            todo += dict(list_results(makers[v]))[v]
        else:
            found.add(v)
    return found


def converts_all_slices(eqns: Iterable[JaxprEqn], large_nbytes: int) -> bool:
    """Whether equations take large slices, and convert all large slices to another dtype."""
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
    """Bytes of new memory for the results of an equation. An update in place takes none."""
    in_place = eqn.primitive.name == "dynamic_update_slice"
    return 0 if in_place else compat.nbytes_of(eqn.outvars)
