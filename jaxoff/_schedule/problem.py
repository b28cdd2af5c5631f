"""Straight-line programs, before and after they are put in order."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jaxoff._jaxpr.compat import JaxprEqn, Var
from jaxoff._jaxpr.inline import Renamed


@dataclasses.dataclass(frozen=True)
class Straight:
    """A straight-line program, its calls inlined; see `jaxoff._jaxpr.inline`.

    Attributes:
      eqns: equations in program order.
      outs: the results.
      in_order: by equation, whether it keeps its place in the order. The others, which compute values again,
        come just before their first reader.
      holds_copies: whether the program waits for its copies to the host: without that XLA puts them off to
        where they are read back. In the body of a loop they end with the body.
      iteration: in the body of a loop, its number. XLA has to see how an index depends on it, so no barrier
        may stand in between.
      spare: by stack on the host, an argument, where it may be written to.
      follows: by copy from the host, an argument whose readers all come before it. The copy then takes that
        argument's memory.
      copies: of arguments, that are there to free their memory.
      displaces: by value, the stack on the host that has taken in the argument whose memory the value takes.
    """

    eqns: tuple[JaxprEqn, ...]
    outs: frozenset[Var]
    in_order: tuple[bool, ...]
    holds_copies: bool
    iteration: Var | None = None
    spare: Mapping[Var, Spare] = dataclasses.field(default_factory=dict)
    follows: Mapping[Var, Var] = dataclasses.field(default_factory=dict)
    copies: frozenset[Var] = frozenset()
    displaces: Mapping[Var, Var] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Spare:
    """The row of a stack that nothing reads any more, in the body of a loop: `first + step * iteration`."""

    first: int
    step: int


@dataclasses.dataclass(frozen=True)
class Ordered:
    """A straight-line program in order.

    Attributes:
      eqns: its equations, with barriers between them.
      renamed: by result that is another value now, which one.
      late: the copies from the host that would not end with the program, as their memory is taken too long.
    """

    eqns: list[JaxprEqn]
    renamed: Renamed
    late: frozenset[Var] = frozenset()
