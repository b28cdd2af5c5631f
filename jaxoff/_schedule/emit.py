"""A schedule turned into the equations of a program."""

from __future__ import annotations

import functools

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import JaxprEqn, Var
from jaxoff._jaxpr.inline import Renamed, resolve, trace_call
from jaxoff._schedule.collectives import wait_for_bits
from jaxoff._schedule.dependency_kernels import delay_iteration, read_bit, write_element
from jaxoff._schedule.problem import OrderProblem
from jaxoff._schedule.schedule import (
    Action,
    Added,
    Barrier,
    DelayIteration,
    DelayReload,
    ReadBit,
    Run,
    Schedule,
    Value,
)


def emit(schedule: Schedule, problem: OrderProblem) -> tuple[list[JaxprEqn], Renamed]:
    """Emits the equations of a scheduled program.

    Args:
      schedule: the schedule of the problem, from `jaxoff._schedule.decide.decide`.
      problem: the program.

    Returns:
      The equations in their new order, with barriers and dependency kernels in between; and renamed host
      stack -> variable with its final contents.
    """
    emitter = _Emitter(problem)
    for action in schedule.actions:
        emitter.add(action)
    return emitter.eqns, {v: emitter.variables[value] for v, value in schedule.renamed.items()}


class _Emitter:
    """The equations emitted so far.

    Attributes:
      eqns: the equations.
      variables: value added by an action -> variable.
    """

    def __init__(self, problem: OrderProblem):
        self._problem = problem
        self.eqns: list[JaxprEqn] = []
        self.variables: dict[Value, Var] = {}
        # The compiler divides a write as it divides the stack. How it divides a barrier was not tried.
        self._holds = problem.options.by_barriers and not problem.is_divided
        self._fused: dict[tuple[int, ...], list[Var]] = {}  # (equation, ids of operands) -> its results

    def add(self, action: Action) -> None:
        like = self._problem.eqns[action.kernel]
        match action:
            case Run():
                self._run_kernel(action)
            case Barrier(operands=operands, results=results):
                outs, barrier = compat.make_barrier([self._find(v) for v in operands], like=like)
                self.eqns.append(barrier)
                self.variables |= dict(zip(results, outs, strict=True))
            case DelayReload(stack=stack, after=after, result=result) if self._holds:
                (held, _), barrier = compat.make_barrier([self._find(stack), self._find(after)], like=like)
                self.eqns.append(barrier)
                self.variables[result] = held
            case DelayReload(stack=stack, row=row, after=after, result=result):
                write = functools.partial(
                    write_element, row.first, row.step, is_divided=self._problem.is_divided
                )
                operands = [self._find(stack), self._find(after), self._problem.iteration]
                self._call(write, operands, result, like)
            case DelayIteration(after=after, result=result):
                delay = functools.partial(delay_iteration, is_divided=self._problem.is_divided)
                self._call(delay, [self._problem.iteration, self._find(after)], result, like)
            case ReadBit(result=result):
                self._call(read_bit, [like.outvars[0]], result, like)

    def _find(self, value: Value) -> Var:
        return self.variables[value] if isinstance(value, Added) else value

    def _call(self, function, operands: list, result: Added, like: JaxprEqn) -> None:
        eqns, (self.variables[result],) = trace_call(function, operands, like=like)
        self.eqns += eqns

    def _run_kernel(self, action: Run) -> None:
        renamed: Renamed = {v: self._find(value) for v, value in action.operands.items()}
        # Each kernel computes the fused equations among its operands anew, unless kernels share them.
        for i in action.equations[:-1]:
            eqn = self._problem.eqns[i]
            operands = [resolve(renamed, v) for v in eqn.invars]
            key = i, *map(id, operands)
            outs = self._fused.get(key) if self._problem.shares_fused else None
            if outs is None:
                outs = self._fused[key] = [Var(v.aval) for v in eqn.outvars]
                self.eqns.append(eqn.replace(invars=operands, outvars=outs))
            renamed.update(zip(eqn.outvars, outs, strict=True))
        eqn = self._problem.eqns[action.kernel]
        operands = [resolve(renamed, v) for v in eqn.invars]
        if action.waits_for:
            bits = [self._find(v) for v in action.waits_for]
            waits, operands, elements = wait_for_bits(eqn, operands, bits)
            self.eqns += waits
            self.variables |= {added: elements[v] for v, added in action.elements.items()}
        self.eqns.append(eqn.replace(invars=operands))
