"""The values of a program in host memory, each with its copy to the host and all of its variables.

A value has a variable at each level of the program: a row of a stack inside of a loop, the stack around it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import Jaxpr, JaxprEqn, Var
from jaxoff._jaxpr.inline import Renamed, resolve, separate_calls, write_otherwise

# Levels of control flow that no value in host memory leaves in a program that XLA compiles.
_REFUSED_LEVELS = 2


class HostValues:
    """The variables in host memory of a program, grouped by value.

    Attributes:
      program: the program; a program called more than once, with such variables, is a program for each call.
    """

    def __init__(self, program: Jaxpr):
        self.program = program
        self._read_all()
        if self._are_shared:
            self.program = separate_calls(program)
            self._read_all()

    def _read_all(self) -> None:
        self._are_shared = False  # JAX traces a program of several calls once
        self._parents: dict[Var, Var] = {}
        self._levels: dict[Var, int] = {}  # variable -> levels of control flow around
        self._sends: dict[int, JaxprEqn] = {}  # by id, as an equation may belong to several calls
        self._read(self.program, 0)

    def _read(self, jaxpr: Jaxpr, level: int) -> None:
        """Reads a program under some levels of control flow."""
        for v in (*jaxpr.invars, *(v for eqn in jaxpr.eqns for v in eqn.outvars)):
            if compat.is_host(v.aval):
                self._are_shared |= v in self._levels
                self._levels[v] = min(level, self._levels.get(v, level))
                self._parents.setdefault(v, v)
        for eqn in jaxpr.eqns:
            way = compat.transfer_in(eqn)
            if way == "D2H":
                self._sends[id(eqn)] = eqn
            inner = list(_list_programs(eqn))
            for program, operands, levels in inner:
                self._read(program, level + levels)
                self._join_all(zip(operands, program.invars, strict=True))
                self._join_all(zip(eqn.outvars, program.outvars, strict=True))
            if way is None and not inner:
                host = [v for v in (*eqn.invars, *eqn.outvars) if isinstance(v, Var) and v in self._parents]
                self._join_all((host[0], v) for v in host[1:])

    @property
    def sends(self) -> list[JaxprEqn]:
        """The copies to the host."""
        return list(self._sends.values())

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


def passes_host_values(program: Jaxpr) -> bool:
    """Whether a program takes or returns values in host memory."""
    return any(compat.is_host(v.aval) for v in (*program.invars, *program.outvars))


def is_copied_by_policy(eqn: JaxprEqn) -> bool:
    """Whether a copy to the host is as JAX traces those of policies, or the transpose of some copy.

    Such a copy is always made. The user's `jax.device_put` may reuse its operand, but with `may_alias=False`.
    """
    return eqn.params["copy_semantics"][0].name == "ALWAYS_COPY"


def split_copies(jaxpr: Jaxpr) -> Jaxpr:
    """A program in which each `jax.device_put`, at all levels, copies a single value."""

    def split(jaxpr: Jaxpr) -> Jaxpr:
        eqns: list[JaxprEqn] = []
        for eqn in jaxpr.eqns:
            if eqn.primitive.name != "device_put" or len(eqn.invars) == 1:
                eqns.append(eqn)
                continue
            for i, (v, out) in enumerate(zip(eqn.invars, eqn.outvars, strict=True)):
                # A policy gives one entry for all results of an equation.
                params = {key: (each[min(i, len(each) - 1)],) for key, each in eqn.params.items()}
                eqns.append(eqn.replace(invars=[v], outvars=[out], params=params))
        return compat.replace_equations(jaxpr, eqns)

    return compat.rewrite_jaxprs(jaxpr, split)


def move_to_device(jaxpr: Jaxpr, moves: Callable[[Var], bool]) -> Jaxpr:
    """A program with some variables of host memory on the device; the programs inside are done already."""
    values = (*jaxpr.invars, *(v for eqn in jaxpr.eqns for v in eqn.outvars))
    if not any(map(moves, values)):
        return jaxpr
    renamed: Renamed = {}

    def move(v: Var) -> Var:
        if moves(v):
            renamed[v] = Var(v.aval.update(memory_space=jax.memory.Space.Device))
        return renamed.get(v, v)

    invars = [move(v) for v in jaxpr.invars]
    eqns = []
    for eqn in jaxpr.eqns:
        touched = [v for v in (*eqn.invars, *eqn.outvars) if isinstance(v, Var) and moves(v)]
        if touched and compat.transfer_in(eqn):
            renamed[eqn.outvars[0]] = resolve(renamed, eqn.invars[0])
            continue
        operands = [resolve(renamed, v) for v in eqn.invars]
        eqns.append(eqn.replace(invars=operands, outvars=[move(v) for v in eqn.outvars]))
    outs = [resolve(renamed, v) for v in jaxpr.outvars]
    return _forward_rows(jaxpr.replace(invars=invars, eqns=eqns, outvars=outs))


def _forward_rows(jaxpr: Jaxpr) -> Jaxpr:
    """A program whose scans return no copy of a stack that they take; the program itself where none does.

    A scan that copied the rows of a stack returns them as they are when the copies are gone: a second stack
    in memory.
    """

    def forward(eqn: JaxprEqn) -> JaxprEqn | tuple[list[JaxprEqn], list[Any]]:
        layout = compat.scan_in(eqn)
        if layout is None:
            return eqn
        body, xs_start = compat.as_open(eqn.params["jaxpr"]), layout.num_consts + layout.num_carry
        stacks = dict(zip(body.invars[xs_start:], eqn.invars[xs_start:], strict=True))
        outs: list[Any] = list(eqn.outvars)
        for k in range(layout.num_carry, len(outs)):
            y = body.outvars[k]
            if isinstance(y, Var) and y in stacks and stacks[y].aval == outs[k].aval:
                outs[k] = stacks[y]
        return eqn if outs == eqn.outvars else ([eqn], outs)

    return write_otherwise(jaxpr, forward)


def _list_programs(eqn: JaxprEqn) -> Iterator[tuple[Jaxpr, Sequence[Any], int]]:
    """The programs in an equation with its operands for arguments; the operands, and the levels added."""
    if eqn.primitive.name == "while":
        yield eqn.params["body_jaxpr"].jaxpr, eqn.invars[eqn.params["cond_nconsts"] :], 1
        return
    layout, is_condition = compat.scan_in(eqn), eqn.primitive.name == "cond"
    levels = _REFUSED_LEVELS if is_condition else 0 if layout is None else 1
    operands = eqn.invars[1:] if is_condition else eqn.invars
    for program in compat.sub_jaxprs(eqn):
        if len(program.invars) == len(operands) and len(program.outvars) == len(eqn.outvars):
            yield program, operands, levels
