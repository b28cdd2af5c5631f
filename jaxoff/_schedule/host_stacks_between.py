"""Finds the host stacks that one written-out loop fills and another reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jaxoff._device.profile import Device
from jaxoff._jaxpr.compat import JaxprEqn, Var
from jaxoff._jaxpr.dataflow import count_reads
from jaxoff._jaxpr.provenance import Scope, trace_origin
from jaxoff._schedule.decide import estimate_copies
from jaxoff._schedule.host_stack import HostStack
from jaxoff._schedule.loops import Loop


def find_host_stacks(
    loops: Mapping[int, Loop], eqns: list[JaxprEqn], outvars: Iterable[Any], device: Device, large_nbytes: int
) -> Iterator[HostStack]:
    """Finds the host stacks from one loop to another without further readers."""
    uses = count_reads(eqns, outvars)
    written = {
        loop.eqn.outvars[loop.layout.num_carry + k]: (i, k)
        for i, loop in loops.items()
        for k in loop.find_sends()
    }
    late_sends = {
        i: estimate_copies(loop.to_problem(), device, large_nbytes).find_late_sends()
        for i, loop in loops.items()
        if any(writer == i for writer, _ in written.values())
    }
    for i, loop in loops.items():
        reloads = loop.find_reloads()
        late: list[Var] = []
        if reloads:
            late = estimate_copies(loop.to_problem(), device, large_nbytes).find_reloads_to_prefetch()
        for k, v in enumerate(loop.split(loop.eqn.invars)[2]):
            if k not in reloads or v not in written or uses[v] != 1:
                continue
            writer, ys = written[v]
            if loops[writer].step == loop.step or loops[writer].layout.length != loop.layout.length:
                continue
            sent = loops[writer].find_sends()[ys].outvars[0]
            send_deferred, overwrites = sent in late_sends[writer], late_sends[writer].get(sent, False)
            prefetched = send_deferred or reloads[k].outvars[0] in late
            # A prefetching reader reads the row after its last row. Another reader writes into the previous
            # iteration's row, and needs a row before its first row.
            is_spare_first = (loop.step < 0) == prefetched
            value = trace_origin(Scope(loops[writer].body), loops[writer].find_sends()[ys].invars[0])
            row_offset = int(is_spare_first)
            yield HostStack(writer, ys, i, k, prefetched, send_deferred, overwrites, row_offset, value)
