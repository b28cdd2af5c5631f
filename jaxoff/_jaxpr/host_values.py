"""The values of a program in host memory, each with its copy to the host and all of its variables.

A value has a variable at each level of the program: a row of a stack inside of a loop, the stack around it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import Jaxpr, JaxprEqn, Var
from jaxoff._jaxpr.inline import Renamed, resolve, separate_calls, write_otherwise
from jaxoff._jaxpr.primitives import is_condition


class _Level(enum.Enum):
    """A level of control flow."""

    LOOP = enum.auto()
    CONDITION = enum.auto()

    @staticmethod
    def of(eqn: JaxprEqn) -> list[_Level]:
        """The levels that an equation adds around its programs: one or none."""
        return [_Level.LOOP] if compat.is_loop(eqn) else [_Level.CONDITION] if is_condition(eqn) else []


class _Chosen(NamedTuple):
    """A result in host memory of a condition.

    Attributes:
      result: its variable.
      is_manual: as `jaxoff._jaxpr.compat.is_manual` of the condition.
      is_copied: whether every branch copies it to the host.
    """

    result: Var
    is_manual: bool | None
    is_copied: bool


type _Levels = tuple[_Level, ...]  # around a variable, the outermost first


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
        self._levels: dict[Var, _Levels] = {}
        self._chosen: list[_Chosen] = []
        self._rows: set[Var] = set()  # of a stack in host memory, in the body of a scan
        self._divided: list[Var] = []  # rows that another loop reads
        self._sends: dict[int, JaxprEqn] = {}  # by id, as an equation may belong to several calls
        self._read(self.program, ())

    def _read(self, jaxpr: Jaxpr, levels: _Levels) -> None:
        """Reads a program under some levels of control flow."""
        for v in (*jaxpr.invars, *(v for eqn in jaxpr.eqns for v in eqn.outvars)):
            if compat.is_host(v.aval):
                self._are_shared |= v in self._levels
                self._levels[v] = min(levels, self._levels.get(v, levels), key=len)
                self._parents.setdefault(v, v)
        for eqn in jaxpr.eqns:
            way = compat.transfer_in(eqn)
            if way == "D2H":
                self._sends[id(eqn)] = eqn
            inner = list(_list_programs(eqn))
            added = _Level.of(eqn)
            for program, operands in inner:
                self._rows.update(self._find_rows(eqn, program, operands))
                self._read(program, (*levels, *added))
                self._join_all(zip(operands, program.invars, strict=True))
                self._join_all(zip(eqn.outvars, program.outvars, strict=True))
            if compat.is_loop(eqn):
                self._divided += [v for v in eqn.invars if isinstance(v, Var) and v in self._rows]
            if is_condition(eqn):
                manual, branches = compat.is_manual(eqn), [program for program, _ in inner]
                for k, v in enumerate(eqn.outvars):
                    if compat.is_host(v.aval):
                        self._chosen.append(_Chosen(v, manual, all(_is_copied(b, k) for b in branches)))
            if way is None and not inner:
                host = [v for v in (*eqn.invars, *eqn.outvars) if isinstance(v, Var) and v in self._parents]
                self._join_all((host[0], v) for v in host[1:])

    def _find_rows(self, eqn: JaxprEqn, program: Jaxpr, operands: Sequence[Any]) -> Iterator[Var]:
        """The arguments of a program in an equation that are rows of a stack in host memory."""
        layout = compat.scan_in(eqn)
        first = len(operands) if layout is None else layout.num_consts + layout.num_carry
        for i, (v, operand) in enumerate(zip(program.invars, operands, strict=True)):
            if compat.is_host(v.aval) and (
                i >= first or (isinstance(operand, Var) and operand in self._rows)
            ):
                yield v

    @property
    def sends(self) -> list[JaxprEqn]:
        """The copies to the host."""
        return list(self._sends.values())

    def list_refused(self, *, one_device: bool) -> list[JaxprEqn]:
        """The copies to the host whose results XLA does not compile, or gathers by computing on the host.

        They leave a loop around another level, a condition in which another branch has no such value, or a
        condition whose values the compiler may divide over devices. Of a stack whose rows another loop reads
        row by row, XLA copies each row within host memory first, by a kernel.
        """
        outermost: dict[Var, int] = {}
        for v, levels in self._levels.items():
            group = self._find(v)
            outermost[group] = min(len(levels), outermost.get(group, len(levels)))
        refused = {
            self._find(v)
            for v, is_manual, is_copied in self._chosen
            if not (is_copied and (one_device if is_manual is None else is_manual))
        }
        refused.update(map(self._find, self._divided))

        def is_refused(v: Var) -> bool:
            left = self._levels[v][outermost[self._find(v)] :]
            return self._find(v) in refused or _Level.LOOP in left[:-1]

        return [e for e in self._sends.values() if (v := e.outvars[0]) in self._parents and is_refused(v)]

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


def move_vars_to_device(jaxpr: Jaxpr, moves: Callable[[Var], bool]) -> Jaxpr:
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


def _is_copied(program: Jaxpr, index: int) -> bool:
    """Whether a result of a program is copied to the host in it, or is an argument.

    The fill that JAX takes for a value that only another branch has is neither: for XLA it is on the device.
    """
    v = program.outvars[index]
    for eqn in program.eqns:
        if v in eqn.outvars:
            inner = [program for program, _ in _list_programs(eqn)]
            if not inner:
                return compat.transfer_in(eqn) == "D2H"
            return all(_is_copied(program, eqn.outvars.index(v)) for program in inner)
    return v in program.invars


def _list_programs(eqn: JaxprEqn) -> Iterator[tuple[Jaxpr, Sequence[Any]]]:
    """The programs in an equation with its operands for arguments, and the operands."""
    if eqn.primitive.name == "while":
        yield eqn.params["body_jaxpr"].jaxpr, eqn.invars[eqn.params["cond_nconsts"] :]
        return
    operands = eqn.invars[1:] if is_condition(eqn) else eqn.invars
    for program in compat.sub_jaxprs(eqn):
        if len(program.invars) == len(operands) and len(program.outvars) == len(eqn.outvars):
            yield program, operands
