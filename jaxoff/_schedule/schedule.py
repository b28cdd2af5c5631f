"""The output of a decision: actions on the equations of a program, as data that prints and compares.

An action names equations by index and values by variable. An action makes `Added` values in place of
variables of the program; `jaxoff._schedule.emit` turns each `Added` value into a variable.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import JaxprEqn, Var
from jaxoff._schedule.problem import OrderProblem, SpareRow


@dataclasses.dataclass(frozen=True, eq=False)
class Added:
    """A value made by an action. Its consumers read it in place of `of`, or to wait for `of`."""

    of: Var


type Value = Var | Added
type Substitutes = dict[Var, Value]


@dataclasses.dataclass(frozen=True)
class Run:
    """Runs a kernel.

    Attributes:
      equations: indices of the fused equations inside the kernel, and of the kernel's own equation, the last.
      operands: variable -> value to read in its place.
      waits_for: for a collective, bits of the results of earlier collectives; the collective starts once the
        bits are known.
      elements: for a waiting collective, operand -> its first element, which is written back once the bits
        are known. A later kernel waits for the element rather than for the whole operand.
    """

    equations: tuple[int, ...]
    operands: Mapping[Var, Value] = dataclasses.field(default_factory=dict)
    waits_for: tuple[Value, ...] = ()
    elements: Mapping[Var, Value] = dataclasses.field(default_factory=dict)

    @property
    def kernel(self) -> int:
        """The index of the kernel's own equation."""
        return self.equations[-1]


@dataclasses.dataclass(frozen=True)
class Barrier:
    """Makes kernel `kernel` wait: `results` are the two operands, available once both operands are made."""

    kernel: int
    operands: tuple[Value, Value]
    results: tuple[Added, Added]


@dataclasses.dataclass(frozen=True)
class DelayReload:
    """Makes reload `kernel` wait for `after`: writes an element of `after` into the stack's spare row."""

    kernel: int
    stack: Value
    row: SpareRow
    after: Value
    result: Added


@dataclasses.dataclass(frozen=True)
class DelayIteration:
    """Makes the slices among the operands of kernel `kernel` wait for `after`, by the loop counter."""

    kernel: int
    after: Value
    result: Added


@dataclasses.dataclass(frozen=True)
class ReadBit:
    """Reads one bit of the result of collective `kernel`, for later collectives to wait for."""

    kernel: int
    result: Added


type Action = Run | Barrier | DelayReload | DelayIteration | ReadBit


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The order of the kernels and copies of a program.

    Attributes:
      actions: the actions in program order.
      renamed: host stack with a spare row -> value with its contents at the end of the program.
      late: results of the reloads which would outlive the iteration, because the argument in their buffer is
        read too long; see `OrderProblem.reuses_buffer_of`.
    """

    actions: tuple[Action, ...]
    renamed: Mapping[Var, Added]
    late: frozenset[Var]

    @property
    def kernels(self) -> tuple[int, ...]:
        """The indices of the kernels' equations, in order."""
        return tuple(action.kernel for action in self.actions if isinstance(action, Run))

    def describe(self, problem: OrderProblem) -> str:
        """Describes each kernel in a line: its result, and the kernels for which it waits by an action."""
        return "\n".join(_describe(self.actions, problem.eqns))


def _describe(actions: Sequence[Action], eqns: Sequence[JaxprEqn]) -> Iterator[str]:
    makers = {v: i for i, eqn in enumerate(eqns) for v in eqn.outvars}
    origins: dict[Value, str] = {}

    def name(value: Value) -> str:
        variable = value.of if isinstance(value, Added) else value
        return origins.get(value, f"%{makers[variable]}" if variable in makers else "argument")

    waits: dict[int, list[str]] = {}
    for action in actions:
        if isinstance(action, Barrier):
            origins |= {result: name(v) for result, v in zip(action.results, action.operands, strict=True)}
            waits.setdefault(action.kernel, []).append(name(action.operands[1]))
        elif isinstance(action, (DelayReload, DelayIteration)):
            waits.setdefault(action.kernel, []).append(name(action.after))
        elif isinstance(action, Run):
            eqn = eqns[action.kernel]
            kind = compat.transfer_in(eqn) or eqn.primitive.name
            result = getattr(eqn.outvars[0].aval, "str_short", lambda: "")()
            after = [*waits.pop(action.kernel, ()), *map(name, action.waits_for)]
            yield f"%{action.kernel} {kind} {result}" + (f" after {', '.join(after)}" if after else "")
