"""The input of the scheduler: a straight-line program with constraints on its buffers and host stacks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jaxoff._jaxpr.compat import JaxprEqn, Var


@dataclasses.dataclass(frozen=True)
class SpareRow:
    """The row of a host stack without further readers in a loop's body: `first + step * iteration`."""

    first: int
    step: int


@dataclasses.dataclass(frozen=True)
class OrderOptions:
    """How a program is ordered, where no way is the best for all programs.

    Attributes:
      by_barriers: whether a reload waits for a value by a barrier on its host stack, for XLA's schedule, and
        not by a write into the spare row, which a CUDA graph with edges by the use of data needs.
      shares_operands: whether products of a divided program read the same value of an operand. Otherwise each
        waits for the kernel before it through a barrier over the operand, which proves more memory free; but
        an operand that the compiler gathers is then gathered for each product.
      keeps_pace: whether kernels outside of loops keep pace with the link: a send is waited for when the next
        one starts, and a reload starts at most two reloads ahead. Otherwise kernels wait where that costs
        little, and XLA leaves out a send that has not ended when its value is read again.
    """

    by_barriers: bool = False
    shares_operands: bool = False
    keeps_pace: bool = False


DEFAULT_ORDER = OrderOptions()


@dataclasses.dataclass(frozen=True)
class OrderProblem:
    """A straight-line program to be put in order, its calls inlined (see `jaxoff._jaxpr.inline`).

    Attributes:
      eqns: equations in program order.
      outs: the results.
      in_order: for each equation, whether the equation keeps its position among the equations in order. The
        other equations recompute values, and come just before their first reader.
      waits_for_sends: whether the program itself waits for its copies to the host. Outside of loops XLA
        otherwise delays a send until the value is read back. In the body of a loop, sends end with the body.
      iteration: in the body of a loop, the loop counter. XLA derives the starts of slices from the counter,
        so no barrier may stand between the counter and an index.
      spare_rows: host stack, an argument -> its spare row, which may be written.
      reuses_buffer_of: reloaded value -> argument. The reload takes the argument's buffer, and starts after
        the argument's last reader.
      moved_aside: device-to-device copies of arguments, made so that the original buffer can be reused early.
      overwrites_after_send: new value -> host stack. The value is written into the buffer of an argument,
        after the argument was sent to the stack.
      is_divided: whether the compiler may divide values over devices.
      shares_fused: whether kernels share an equation fused into them, where its operands are the same. Over
        several devices the compiler may gather a weight for each.
      options: how the program is ordered.
      donates: whether a result may take the memory of an argument of its type whose last reader makes it.
    """

    eqns: tuple[JaxprEqn, ...]
    outs: frozenset[Var]
    in_order: tuple[bool, ...]
    waits_for_sends: bool
    iteration: Var | None = None
    spare_rows: Mapping[Var, SpareRow] = dataclasses.field(default_factory=dict)
    reuses_buffer_of: Mapping[Var, Var] = dataclasses.field(default_factory=dict)
    moved_aside: frozenset[Var] = frozenset()
    overwrites_after_send: Mapping[Var, Var] = dataclasses.field(default_factory=dict)
    is_divided: bool = False
    shares_fused: bool = False
    options: OrderOptions = DEFAULT_ORDER
    donates: bool = False
