"""Loops over pieces of the same stacks, which read and write their rows where those are.

A `jaxoff.scan` with two policies is two loops, whose xs are pieces of one array. Differentiated, the
gradients of the pieces are put together. As they stand, XLA copies all of the rows for both.
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
class Written:
    """The rows of a longer stack that a loop writes.

    Attributes:
      offset: the first one.
      rows: of the stack.
      before: what another loop has made of the stack, if one has.
    """

    offset: int
    rows: int
    before: Var | None


@dataclasses.dataclass(frozen=True)
class Pieces:
    """What a loop reads and writes in the stacks of others.

    Attributes:
      whole: by number of the xs, the array that it is a piece of.
      offsets: by number of the xs, the first row.
      written: by number of the ys.
    """

    whole: dict[int, Any] = dataclasses.field(default_factory=dict)
    offsets: dict[int, int] = dataclasses.field(default_factory=dict)
    written: dict[int, Written] = dataclasses.field(default_factory=dict)

    @property
    def most(self) -> int:
        """The largest offset."""
        return max((*self.offsets.values(), *(w.offset for w in self.written.values())), default=0)


@dataclasses.dataclass(frozen=True)
class Shared:
    """What the loops of a program share.

    Attributes:
      pieces: by loop.
      gone: by equation that is not needed any more, its result and what that is now.
    """

    pieces: dict[int, Pieces]
    gone: dict[int, dict[Var, Var]]


def pieces_in(jaxpr: Jaxpr) -> set[Var]:
    """The pieces into which a program splits stacks."""
    return {v for eqn in jaxpr.eqns if splits(eqn) for v in eqn.outvars}


def shared_by(jaxpr: Jaxpr, layouts: Mapping[int, ScanLayout]) -> Shared:
    """Finds arrays that are split for loops, and those that are put together from what loops have stacked.

    Args:
      jaxpr: the program.
      layouts: of the loops, by number of the equation.
    """
    pieces = {i: Pieces() for i in layouts}
    xs: dict[Any, list[tuple[int, int]]] = {}
    ys: dict[Any, tuple[int, int]] = {}
    for i, layout in layouts.items():
        eqn = jaxpr.eqns[i]
        for k, v in enumerate(eqn.invars[layout.num_consts + layout.num_carry :]):
            if isinstance(v, Var):
                xs.setdefault(v, []).append((i, k))
        ys |= {v: (i, k) for k, v in enumerate(eqn.outvars[layout.num_carry :])}
    reads = count_reads(jaxpr.eqns, jaxpr.outvars)
    gone: dict[int, dict[Var, Var]] = {}
    for number, eqn in enumerate(jaxpr.eqns):
        if splits(eqn):
            starts = itertools.accumulate(eqn.params["sizes"], initial=0)
            for v, start in zip(eqn.outvars, starts, strict=False):
                for i, k in xs.get(v, ()):
                    pieces[i].whole[k], pieces[i].offsets[k] = eqn.invars[0], start
            if all(reads[v] == len(xs.get(v, ())) for v in eqn.outvars):
                gone[number] = {}
        elif _puts_together(eqn, ys, reads):
            starts = itertools.accumulate((_rows(v) for v in eqn.invars), initial=0)
            start_of: dict[Any, int] = dict(zip(eqn.invars, starts, strict=False))
            before: Var | None = None
            for v in sorted(start_of, key=lambda v: ys[v][0]):
                i, k = ys[v]
                pieces[i].written[k] = Written(start_of[v], _rows(eqn.outvars[0]), before)
                before = v
            assert before is not None  # there is an operand
            gone[number] = {eqn.outvars[0]: before}
    return Shared(pieces, gone)


def splits(eqn: JaxprEqn) -> bool:
    """Whether an equation splits a stack into pieces."""
    return eqn.primitive.name == "split" and eqn.params["axis"] == 0


def _puts_together(eqn: JaxprEqn, ys: Mapping[Any, Any], reads: Mapping[Any, int]) -> bool:
    """Whether an equation puts together stacks, each of a loop of its own, that nothing else reads."""
    if eqn.primitive.name != "concatenate" or eqn.params["dimension"] != 0:
        return False
    if not all(v in ys and reads[v] == 1 and not compat.is_host(v.aval) for v in eqn.invars):
        return False
    return len({ys[v][0] for v in eqn.invars}) == len(eqn.invars)


def _rows(v: Any) -> int:
    return compat.shape_of(v.aval)[0]
