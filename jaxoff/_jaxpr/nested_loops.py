"""Loops over groups of layers, merged with the loops over the layers of a group.

A scan whose body is another scan runs the inner body once for each layer of each group. A single scan over
all layers computes the same values. Its stacks are views of the stacks by group. XLA's GPU compiler (jaxlib
0.11.2) refuses copies to host memory in a scan within a scan; in the single scan they compile. Of two nested
scans, one with a single iteration is no loop: its body takes its place.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jaxoff._jaxpr.dataflow import drop_dead
from jaxoff._jaxpr.inline import (
    Renamed,
    inline_program,
    instantiate,
    resolve,
    trace_call,
    trace_scan,
    write_otherwise,
)
from jaxoff._jaxpr.primitives import holds, holds_copies, plain_scan_in


def merge_nested_loops(closed: ClosedJaxpr, *, with_copies: bool = False) -> ClosedJaxpr:
    """A program with its perfectly nested scans merged, at each level of its loops.

    A scan is perfectly nested in another if it is all of the body: its carry is that of the outer scan, its
    rows are rows of the outer scan's rows, and its constants are constants of the outer scan.

    Args:
      closed: the program.
      with_copies: whether to merge only scans with copies between device and host in them.
    """

    def merge(program: Jaxpr) -> Jaxpr:
        if with_copies and not holds_copies(program):
            return program
        return _merge_level(program, merge, with_copies=with_copies)

    if not holds(closed.jaxpr, _is_nest):
        return closed
    return compat.map_open(_write_out_single(closed, with_copies=with_copies), merge)


def _write_out_single(closed: ClosedJaxpr, *, with_copies: bool) -> ClosedJaxpr:
    """A program with the bodies of its scans of one iteration that are in a scan, or have a scan inside."""

    def write_out(program: Jaxpr, *, in_scan: bool) -> Jaxpr:
        if with_copies and not holds_copies(program):
            return program
        rows: dict[Any, Any] = {}  # stack of one row -> the row

        def write(eqn: JaxprEqn) -> JaxprEqn | tuple[list[JaxprEqn], list[Any]]:
            layout = compat.scan_in(eqn)
            inside = functools.partial(write_out, in_scan=in_scan or layout is not None)
            eqn = compat.map_programs(eqn, inside)
            if layout is None or layout.length != 1 or any(compat.is_ref(v.aval) for v in eqn.invars):
                return eqn
            body = eqn.params["jaxpr"]
            is_nested = in_scan or _holds_scans(body.jaxpr)
            return _write_out_iteration(eqn, body.jaxpr, rows) if is_nested and not body.consts else eqn

        written = write_otherwise(program, write)
        return program if written is program else drop_dead(written)

    return compat.map_open(closed, functools.partial(write_out, in_scan=False))


def _holds_scans(program: Jaxpr) -> bool:
    return holds(program, lambda eqn: compat.scan_in(eqn) is not None)


def _is_nest(eqn: JaxprEqn) -> bool:
    """Whether an equation is a scan with a scan inside, at any depth."""
    return compat.scan_in(eqn) is not None and any(map(_holds_scans, compat.sub_jaxprs(eqn)))


def _write_out_iteration(
    eqn: JaxprEqn, body: Jaxpr, rows: dict[Any, Any]
) -> tuple[list[JaxprEqn], list[Any]]:
    """The equations of a scan's only iteration, and the results of the scan; adds stacks to `rows`."""
    layout = compat.scan_in(eqn)
    assert layout is not None
    first, eqns = layout.num_consts + layout.num_carry, list[JaxprEqn]()
    for v in eqn.invars[first:]:
        if v not in rows:
            views, (rows[v],) = trace_call(lambda x: x.reshape(x.shape[1:]), [v], like=eqn)
            eqns += views
    made, results = instantiate(body, [*eqn.invars[:first], *(rows[v] for v in eqn.invars[first:])], eqn)
    eqns += made
    for i, row in enumerate(results[layout.num_carry :], layout.num_carry):
        views, (stack,) = trace_call(lambda x: x.reshape(1, *x.shape), [row], like=eqn)
        eqns += views
        results[i], rows[stack] = stack, row
    return eqns, results


@dataclasses.dataclass(frozen=True)
class _Nest:
    """A scan with a scan as its body.

    Attributes:
      outer, inner: the equations.
      consts: the inner scan's constants: operands of the outer scan, or literals.
      carry: the operands of the outer scan that start the carry.
      rows: the inner scan's rows: operands of the outer scan.
      stacks: for each stack of the outer scan's results, the position among the inner scan's stacks.
    """

    outer: JaxprEqn
    inner: JaxprEqn
    consts: tuple[Any, ...]
    carry: tuple[Any, ...]
    rows: tuple[Any, ...]
    stacks: tuple[int, ...]

    @staticmethod
    def find(eqn: JaxprEqn) -> _Nest | None:
        """The nest of an equation, if the equation is the outer scan of a nest."""
        layout = plain_scan_in(eqn)
        if layout is None:
            return None
        body = _drop_barriers(inline_program(eqn.params["jaxpr"].jaxpr))
        own = plain_scan_in(body.eqns[0]) if len(body.eqns) == 1 else None
        if own is None:
            return None
        (inner,) = body.eqns
        first = layout.num_consts + layout.num_carry
        operands: dict[Any, Any] = dict(zip(body.invars, eqn.invars, strict=True))
        consts, carried = body.invars[: layout.num_consts], body.invars[layout.num_consts : first]
        own_first = own.num_consts + own.num_carry
        own_consts, rows = inner.invars[: own.num_consts], inner.invars[own_first:]
        results: dict[Any, int] = {v: i for i, v in enumerate(inner.outvars[own.num_carry :])}
        stacks = body.outvars[layout.num_carry :]
        is_perfect = (
            eqn.params["reverse"] == inner.params["reverse"]
            and list(inner.invars[own.num_consts : own_first]) == list(carried)
            and list(body.outvars[: layout.num_carry]) == list(inner.outvars[: own.num_carry])
            and all(isinstance(v, Literal) or v in consts for v in own_consts)
            and all(isinstance(v, Var) and v in body.invars[first:] for v in rows)
            and all(isinstance(v, Var) and v in results for v in stacks)
        )
        if not is_perfect:
            return None
        return _Nest(
            eqn,
            inner,
            tuple(v if isinstance(v, Literal) else operands[v] for v in own_consts),
            tuple(operands[v] for v in carried),
            tuple(operands[v] for v in rows),
            tuple(results[v] for v in stacks),
        )


def _drop_barriers(body: Jaxpr) -> Jaxpr:
    """A program without the barriers over its arguments alone, as a `jax.checkpoint` has for its operands.

    Around all that a body computes, they keep nothing apart.
    """

    def drop(eqn: JaxprEqn) -> JaxprEqn | tuple[list[JaxprEqn], list[Any]]:
        is_outer = eqn.primitive.name == "optimization_barrier" and all(v in body.invars for v in eqn.invars)
        return ([], list(eqn.invars)) if is_outer else eqn

    return write_otherwise(body, drop)


def _merge_level(program: Jaxpr, merge: Callable[[Jaxpr], Jaxpr], *, with_copies: bool) -> Jaxpr:
    level = inline_program(program)
    renamed: Renamed = {}
    flat: dict[Any, Var] = {}  # rows in groups -> the same rows without groups
    eqns: list[JaxprEqn] = []
    for given in level.eqns:
        eqn = given.replace(invars=[resolve(renamed, v) for v in given.invars])
        nest = _Nest.find(eqn)
        if nest is None or (with_copies and not holds_copies(compat.as_open(eqn.params["jaxpr"]))):
            eqns.append(compat.map_programs(eqn, merge))
            continue
        merged, results = _merge(nest, flat)
        eqns += merged
        renamed.update(zip(eqn.outvars, results, strict=True))
    if not renamed:
        same = all(a.params == b.params for a, b in zip(eqns, level.eqns, strict=True))
        return program if same else level.replace(eqns=eqns)
    merged = level.replace(eqns=eqns, outvars=[resolve(renamed, v) for v in level.outvars])
    return merge(drop_dead(merged))


def _merge(nest: _Nest, flat: dict[Any, Var]) -> tuple[list[JaxprEqn], list[Any]]:
    """The equations of a merged nest, and the results of the outer scan; adds to `flat`."""
    outer, inner = compat.scan_in(nest.outer), compat.scan_in(nest.inner)
    assert outer is not None
    assert inner is not None
    length = outer.length * inner.length
    eqns: list[JaxprEqn] = []
    for v in nest.rows:
        if v not in flat:
            views, (flat[v],) = trace_call(lambda x: x.reshape(length, *x.shape[2:]), [v], like=nest.outer)
            eqns += views
    run = compat.jaxpr_as_fun(nest.inner.params["jaxpr"])
    known = [v.val if isinstance(v, Literal) else None for v in nest.consts]
    consts = [v for v in nest.consts if not isinstance(v, Literal)]

    def fill(*operands: Any):
        given = iter(operands)
        filled = [next(given) if value is None else value for value in known]
        return run(*filled, *given)

    rows = [flat[v] for v in nest.rows]
    loop, results = trace_scan(fill, (consts, nest.carry, rows), like=nest.outer, length=length)
    carry, stacks = results[: inner.num_carry], results[inner.num_carry :]
    found = list(carry)
    for i in nest.stacks:
        groups = (outer.length, inner.length)
        views, (grouped,) = trace_call(
            lambda x, groups=groups: x.reshape(*groups, *x.shape[1:]), [stacks[i]], like=nest.outer
        )
        loop += views
        flat[grouped] = stacks[i]
        found.append(grouped)
    return [*eqns, *loop], found
