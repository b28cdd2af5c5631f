"""Offloads refused by XLA's GPU compiler, saved on the device instead.

XLA compiles copies to the host in a loop, whose stacks stay on the host until a later loop reads the rows.
XLA refuses a stack in host memory leaving two levels of control flow (a loop inside of a loop), an unrolled
loop, or a condition.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jaxoff._jaxpr.inline import separate_calls
from jaxoff._jaxpr.saved_twin import CopiesTogetherError, move_to_device

# Levels of control flow that a value in host memory may not leave.
_REFUSED_LEVELS = 2


def save_refused(closed: ClosedJaxpr) -> tuple[ClosedJaxpr, list[JaxprEqn]]:
    """A program without the offloads refused by XLA, and the removed copies to the host.

    A program with copies of several values at a time is returned unchanged.
    """
    program, values = closed.jaxpr, _HostValues()
    values.read(program, 0)
    if values.are_shared:
        program, values = separate_calls(program), _HostValues()
        values.read(program, 0)
    refused = values.list_refused()
    if not refused:
        return closed, []
    moves = values.collect(eqn.outvars[0] for eqn in refused)
    try:
        jaxpr = compat.rewrite_jaxprs(program, lambda jaxpr: move_to_device(jaxpr, moves.__contains__))
    except CopiesTogetherError:
        return closed, []
    return closed.replace(jaxpr=jaxpr), refused


class _HostValues:
    """The variables in host memory of a program, grouped by value: a stack around a loop, a row inside.

    Attributes:
      are_shared: whether a program with such variables is called more than once: JAX traces it once.
    """

    def __init__(self):
        self.are_shared = False
        self._parents: dict[Var, Var] = {}
        self._levels: dict[Var, int] = {}  # variable -> levels of control flow around
        self._sends: dict[int, JaxprEqn] = {}  # by id, as an equation may belong to several calls

    def read(self, jaxpr: Jaxpr, level: int) -> None:
        """Reads a program under some levels of control flow."""
        for v in (*jaxpr.invars, *(v for eqn in jaxpr.eqns for v in eqn.outvars)):
            if compat.is_host(v.aval):
                self.are_shared |= v in self._levels
                self._levels[v] = min(level, self._levels.get(v, level))
                self._parents.setdefault(v, v)
        for eqn in jaxpr.eqns:
            way = compat.transfer_in(eqn)
            if way == "D2H":
                self._sends[id(eqn)] = eqn
            inner = list(_list_programs(eqn))
            for program, operands, levels in inner:
                self.read(program, level + levels)
                self._join_all(zip(operands, program.invars, strict=True))
                self._join_all(zip(eqn.outvars, program.outvars, strict=True))
            if way is None and not inner:
                host = [v for v in (*eqn.invars, *eqn.outvars) if isinstance(v, Var) and v in self._parents]
                self._join_all((host[0], v) for v in host[1:])

    def list_refused(self) -> list[JaxprEqn]:
        """The copies to the host whose results leave too many levels of control flow."""
        outermost: dict[Var, int] = {}
        for v, level in self._levels.items():
            group = self._find(v)
            outermost[group] = min(level, outermost.get(group, level))
        return [
            eqn
            for eqn in self._sends.values()
            if (v := eqn.outvars[0]) in self._parents
            and self._levels[v] - outermost[self._find(v)] >= _REFUSED_LEVELS
        ]

    def collect(self, values: Iterable[Var]) -> set[Var]:
        """All variables of some values."""
        groups = {self._find(v) for v in values}
        return {v for v in self._parents if self._find(v) in groups}

    def _find(self, v: Var) -> Var:
        while self._parents[v] is not v:
            v = self._parents[v]
        return v

    def _join_all(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        for a, b in pairs:
            if isinstance(a, Var) and isinstance(b, Var) and a in self._parents and b in self._parents:
                self._parents[self._find(a)] = self._find(b)


def _list_programs(eqn: JaxprEqn) -> Iterator[tuple[Jaxpr, Sequence[Any], int]]:
    """The programs in an equation with its operands for arguments; the operands, and the levels added."""
    if eqn.primitive.name == "while":
        return
    layout, is_condition = compat.scan_in(eqn), eqn.primitive.name == "cond"
    levels = 0 if layout is None else 1
    if is_condition or (layout is not None and layout.unroll not in (1, False)):
        levels = _REFUSED_LEVELS
    operands = eqn.invars[1:] if is_condition else eqn.invars
    for program in compat.sub_jaxprs(eqn):
        if len(program.invars) == len(operands) and len(program.outvars) == len(eqn.outvars):
            yield program, operands, levels
