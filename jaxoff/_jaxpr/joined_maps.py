"""Loops that compute rows for one other loop, joined with that loop.

The backward pass of a checkpoint around a scan over layers is two loops: one computes the values of all
layers again from the residuals, and the next one, in the other direction, reads them layer by layer. Where
the first has no carry it is a map, and an iteration of the second can compute the row that it reads. No row
is stored then, and a copy from host memory stands in the loop that waits for it.
"""

from __future__ import annotations

from typing import Any

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jaxoff._jaxpr.dataflow import index_readers
from jaxoff._jaxpr.inline import Renamed, resolve, trace_scan
from jaxoff._jaxpr.primitives import holds, plain_scan_in


def join_maps(closed: ClosedJaxpr) -> ClosedJaxpr:
    """A program with each map that reloads values from host memory in the only scan that reads its rows.

    Returns:
      The program with the same results; `closed` itself where nothing is joined.
    """
    return compat.rewrite_jaxprs(closed, _join_level) if holds(closed.jaxpr, _is_map) else closed


def _join_level(program: Jaxpr) -> Jaxpr:
    """A program with the maps among its own equations joined, and what they join, where it is a map, too."""
    renamed: Renamed = {}
    eqns: list[JaxprEqn] = []
    readers = index_readers(program.eqns)
    outs = {v for v in program.outvars if isinstance(v, Var)}
    waiting: dict[int, JaxprEqn] = {}  # index of a scan -> the map that it takes in
    for i, given in enumerate(program.eqns):
        eqn = given.replace(invars=[resolve(renamed, v) for v in given.invars]) if renamed else given
        reading = {j for v in given.outvars for j in readers.get(v, ())}
        if i in waiting:
            made, results = _join(waiting[i], eqn)
            eqns += made
            renamed.update(zip(given.outvars, results, strict=True))
            continue
        if len(reading) == 1 and outs.isdisjoint(given.outvars) and _is_map(given):
            (j,) = reading
            if j not in waiting and _takes(program.eqns[j], given):
                waiting[j] = eqn
                continue
        eqns.append(eqn)
    if not waiting:
        return program
    return _join_level(program.replace(eqns=eqns, outvars=[resolve(renamed, v) for v in program.outvars]))


def _is_map(eqn: JaxprEqn) -> bool:
    """Whether an equation is a scan without a carry that reloads values, and sends none."""
    layout = plain_scan_in(eqn)
    if layout is None or layout.num_carry:
        return False
    body = compat.as_open(eqn.params["jaxpr"])
    sends = holds(body, lambda inner: compat.transfer_in(inner) == "D2H")
    return not sends and holds(body, lambda inner: compat.transfer_in(inner) == "H2D")


def _takes(reader: JaxprEqn, rows: JaxprEqn) -> bool:
    """Whether a scan reads the results of a map as rows alone, one in each iteration."""
    layout = plain_scan_in(reader)
    if layout is None or layout.length != rows.params["length"]:
        return False
    first = layout.num_consts + layout.num_carry
    return not {v for v in reader.invars[:first] if isinstance(v, Var)}.intersection(rows.outvars)


def _join(rows: JaxprEqn, reader: JaxprEqn) -> tuple[list[JaxprEqn], list[Any]]:
    """The equations of a scan with the body of a map in its own, and the results of the scan."""
    layout, own = compat.scan_in(reader), compat.scan_in(rows)
    assert layout is not None
    assert own is not None
    first = layout.num_consts + layout.num_carry
    made: dict[Any, int] = {v: i for i, v in enumerate(rows.outvars)}
    stacks = reader.invars[first:]
    kept = [v for v in stacks if v not in made]
    make, read = (compat.jaxpr_as_fun(eqn.params["jaxpr"]) for eqn in (rows, reader))

    def run(*operands: Any) -> list[Any]:
        given = iter(operands)
        of_rows, before = [[next(given) for _ in range(n)] for n in (own.num_consts, first)]
        beside = [next(given) for _ in kept]
        computed, left = make(*of_rows, *given), iter(beside)
        return read(*before, *(computed[made[v]] if v in made else next(left) for v in stacks))

    consts = [*rows.invars[: own.num_consts], *reader.invars[: layout.num_consts]]
    carry = reader.invars[layout.num_consts : first]
    operands = consts, carry, [*kept, *rows.invars[own.num_consts :]]
    return trace_scan(run, operands, like=reader, length=layout.length)
