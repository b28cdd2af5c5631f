"""Loops over slices of a shared stack, which can read and write the rows of the stack in place.

A `jaxoff.scan` with two policies is two loops. The program splits a stack into the xs of both loops, and
the backward pass concatenates their gradients. XLA copies all rows for the split and for the concatenation.
With an offset into the stack, a loop needs neither.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import Jaxpr, JaxprEqn, ScanLayout, Var
from jaxoff._jaxpr.dataflow import count_reads


@dataclasses.dataclass(frozen=True)
class WrittenRows:
    """The rows of a shared stack for the ys of a loop.

    Attributes:
      offset: first row of the ys in the stack.
      rows: number of rows of the stack.
      prior: variable for the stack as written by the preceding loop; None for the first loop.
    """

    offset: int
    rows: int
    prior: Var | None


@dataclasses.dataclass(frozen=True)
class StackSlices:
    """The slices of shared stacks read and written by a loop.

    Attributes:
      stacks: index of the xs -> the stack behind the slice.
      offsets: index of the xs -> first row of the slice in the stack.
      written: index of the ys -> rows of the ys in a stack.
    """

    stacks: dict[int, Any] = dataclasses.field(default_factory=dict)
    offsets: dict[int, int] = dataclasses.field(default_factory=dict)
    written: dict[int, WrittenRows] = dataclasses.field(default_factory=dict)

    @property
    def largest_offset(self) -> int:
        """The largest offset of xs and ys; 0 without slices."""
        return max((*self.offsets.values(), *(w.offset for w in self.written.values())), default=0)


@dataclasses.dataclass(frozen=True)
class SharedStacks:
    """The stacks shared by loops of a program.

    Attributes:
      slices: index of a loop's equation -> its slices.
      removed: index of an unneeded equation -> result -> variable to read instead. The inner map is empty for
        a split: the loops read the stack itself.
    """

    slices: dict[int, StackSlices]
    removed: dict[int, dict[Var, Var]]


def find_split_slices(jaxpr: Jaxpr) -> set[Var]:
    """Finds the slices into which a program splits stacks."""
    return {v for eqn in jaxpr.eqns if splits_stack(eqn) for v in eqn.outvars}


def find_shared_stacks(jaxpr: Jaxpr, layouts: Mapping[int, ScanLayout]) -> SharedStacks:
    """Finds stacks split into the xs of loops, and stacks concatenated from the ys of loops.

    Args:
      jaxpr: the program.
      layouts: index of a loop's equation -> layout of the scan.
    """
    slices = {i: StackSlices() for i in layouts}
    xs: dict[Any, list[tuple[int, int]]] = {}
    ys: dict[Any, tuple[int, int]] = {}
    for i, layout in layouts.items():
        eqn = jaxpr.eqns[i]
        for k, v in enumerate(eqn.invars[layout.num_consts + layout.num_carry :]):
            if isinstance(v, Var):
                xs.setdefault(v, []).append((i, k))
        ys |= {v: (i, k) for k, v in enumerate(eqn.outvars[layout.num_carry :])}
    reads = count_reads(jaxpr.eqns, jaxpr.outvars)
    removed: dict[int, dict[Var, Var]] = {}
    for number, eqn in enumerate(jaxpr.eqns):
        if splits_stack(eqn):
            starts = itertools.accumulate(eqn.params["sizes"], initial=0)
            for v, start in zip(eqn.outvars, starts, strict=False):
                for i, k in xs.get(v, ()):
                    slices[i].stacks[k], slices[i].offsets[k] = eqn.invars[0], start
            if all(reads[v] == len(xs.get(v, ())) for v in eqn.outvars):
                removed[number] = {}
        elif _concatenates_ys(eqn, ys, reads):
            starts = itertools.accumulate((_count_rows(v) for v in eqn.invars), initial=0)
            start_of: dict[Any, int] = dict(zip(eqn.invars, starts, strict=False))
            prior: Var | None = None
            for v in sorted(start_of, key=lambda v: ys[v][0]):
                i, k = ys[v]
                slices[i].written[k] = WrittenRows(start_of[v], _count_rows(eqn.outvars[0]), prior)
                prior = v
            assert prior is not None  # a concatenation has operands
            removed[number] = {eqn.outvars[0]: prior}
    return SharedStacks(slices, removed)


def splits_stack(eqn: JaxprEqn) -> bool:
    """Whether an equation splits a stack into slices of rows."""
    return eqn.primitive.name == "split" and eqn.params["axis"] == 0


def _concatenates_ys(eqn: JaxprEqn, ys: Mapping[Any, Any], reads: Mapping[Any, int]) -> bool:
    """Whether an equation concatenates ys of different loops, and is the only reader of each."""
    if eqn.primitive.name != "concatenate" or eqn.params["dimension"] != 0:
        return False
    if not all(v in ys and reads[v] == 1 and not compat.is_host(v.aval) for v in eqn.invars):
        return False
    return len({ys[v][0] for v in eqn.invars}) == len(eqn.invars)


def _count_rows(v: Any) -> int:
    return compat.shape_of(v.aval)[0]
