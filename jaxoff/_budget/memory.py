"""Device memory of a program by its liveness, where there is no compiler to ask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxoff._budget.labels import format_type
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jaxoff._jaxpr.dataflow import drop_dead, map_makers
from jaxoff._jaxpr.inline import inline_program
from jaxoff._jaxpr.kernels import KernelGraph, new_nbytes
from jaxoff._jaxpr.primitives import is_compute, is_condition, num_shards
from jaxoff._report.warn import OWN_FILES

# Part of a budget that stays free where memory is estimated.
ESTIMATE_MARGIN = 0.2


def estimate_nbytes(closed: ClosedJaxpr, donated: Sequence[bool]) -> int:
    """The most device memory held at once by the kernels of a program in their order.

    XLA orders kernels otherwise, keeps buffers of its own, and leaves holes between buffers: its programs
    have taken from 0.9 to 1.4 times as much (bench/LOG.md, "2026-11-26: plans by the compiler alone").

    Args:
      closed: a program.
      donated: for each argument, whether the program may reuse the argument's memory.
    """
    reusable = {v for v, is_donated in zip(closed.jaxpr.invars, donated, strict=True) if is_donated}
    held = argument_nbytes(closed) + compat.nbytes_of(closed.jaxpr.constvars)
    return held + _find_peak(closed.jaxpr, reusable)[0]


def argument_nbytes(closed: ClosedJaxpr) -> int:
    """The device memory of a program's arguments."""
    return compat.nbytes_of(v for v in closed.jaxpr.invars if not compat.is_host(v.aval))


def list_peak_values(closed: ClosedJaxpr) -> dict[tuple[str, str], tuple[int, int]]:
    """The values held at a program's peak, by the model of `estimate_nbytes`, beside its arguments.

    Returns:
      (dtype and shape, source line in the user's code) -> the number of such values, and their bytes.
    """
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for eqn, v in _find_peak(closed.jaxpr, set())[1]:
        if source := _find_user_line(eqn, v):
            key = format_type(v.aval), source
            count, nbytes = found.get(key, (0, 0))
            found[key] = count + 1, nbytes + _nbytes(v)
    return found


def _find_user_line(eqn: JaxprEqn, v: Var) -> str:
    """The line of the user's that makes a result of an equation; "" for a value of jaxoff's own.

    For a loop that jaxoff wrote: the line of the nearest equation from which its body makes the result.
    """
    source = compat.source_line(eqn)
    if not source.startswith(OWN_FILES):
        return source
    flow = compat.control_flow(eqn)
    if flow is None or not compat.is_loop(eqn):
        return ""
    (body,) = flow.programs
    makers = map_makers(body.eqns)
    ahead, seen = [body.outvars[eqn.outvars.index(v)]], set[Var]()
    for w in ahead:  # which grows: operands, nearest first
        if isinstance(w, Var) and w in makers and w not in seen:
            seen.add(w)
            if source := _find_user_line(makers[w], w):
                return source
            ahead += makers[w].invars
    return ""


def _find_peak(program: Jaxpr, reusable: set[Var]) -> tuple[int, list[tuple[JaxprEqn, Var]]]:
    """The most bytes held by the values of a program, beside its arguments, and these values' makers.

    Args:
      program: the program.
      reusable: arguments whose memory is free after their last reader.
    """
    level = drop_dead(inline_program(program))
    outs = {v for v in level.outvars if isinstance(v, Var)}
    graph = KernelGraph(level.eqns, frozenset(outs))
    last = {v: max(readers) for v, readers in graph.readers.items()}
    held = peak = 0
    at, inner_values = 0, []
    for i in graph.kernels:
        eqn = level.eqns[i]
        ending = [v for v in graph.reads[i] if last[v] == i and v not in outs]
        freed = {v: _nbytes(v) for v in ending if v in graph.maker or v in reusable}
        made = _count_made(eqn, freed)
        inner_nbytes, within = _find_inner_peak(eqn)
        if is_condition(eqn):  # its results are those of a branch
            inner_nbytes, within = (inner_nbytes - made, within) if inner_nbytes >= made else (0, [])
        if held + made + inner_nbytes > peak:
            peak, at, inner_values = held + made + inner_nbytes, i, within
        unread = (v for v in eqn.outvars if v not in last and v not in outs)
        held += made - sum(freed.values()) - sum(map(_nbytes, unread))
    until = at if inner_values and is_condition(level.eqns[at]) else at + 1
    made = [(i, v) for i in graph.kernels if i < until for v in level.eqns[i].outvars]
    live = [(level.eqns[i], v) for i, v in made if (last.get(v, i) >= at or v in outs) and _nbytes(v)]
    return peak, live + inner_values


def _count_made(eqn: JaxprEqn, freed: dict[Var, int]) -> int:
    """Bytes of new memory for a kernel's results. What the results reuse in place is taken out of `freed`."""
    if not new_nbytes(eqn):
        return 0
    made = 0
    for v in eqn.outvars:
        nbytes = _nbytes(v)
        # A loop carries values in place; so does an elementwise kernel write over an operand.
        in_place = compat.control_flow(eqn) is not None or not is_compute(eqn)
        same = next((w for w in freed if freed[w] == nbytes), None) if in_place else None
        if same is None:
            made += nbytes
        else:
            del freed[same]
    return made


def _find_inner_peak(eqn: JaxprEqn) -> tuple[int, list[tuple[JaxprEqn, Var]]]:
    """As `_find_peak`, of the largest program in an equation. A kernel's values are on its chip."""
    if eqn.primitive.name in compat.KERNELS:
        return 0, []
    found = (_find_peak(inner, set()) for inner in compat.sub_jaxprs(eqn))
    nbytes, values = max(found, key=lambda peak: peak[0], default=(0, []))
    return nbytes * num_shards(eqn), values


def _nbytes(v: Any) -> int:
    return 0 if compat.is_host(v.aval) else compat.nbytes(v.aval)
