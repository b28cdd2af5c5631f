"""The copies of a program between device and host, against the compute beside the copies."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from jaxoff._device.kernel_time import kernel_ms
from jaxoff._device.profile import Device
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import Jaxpr, JaxprEqn, Var
from jaxoff._jaxpr.inline import inline_calls
from jaxoff._jaxpr.kernels import KernelGraph
from jaxoff._jaxpr.primitives import holds_copies, is_compute
from jaxoff._report.finding import Finding, FindingCode
from jaxoff._report.tables import format_nbytes

_NEGLIGIBLE_MS = 1.0
"""ms. Shorter waits in a whole step are below the precision of the estimates."""


@dataclasses.dataclass(frozen=True)
class Traffic:
    """An estimate of the copies and of the compute of a part of a differentiated function.

    Attributes:
      part: "forward" for copies to the host, "backward" for copies back to the device.
      source: `file:line (function)` of the loop, or '' outside of loops.
      iterations: the number of iterations of the loop; 1 outside of loops.
      nbytes: bytes of the copies of an iteration.
      copy_ms: time of the link for the copies of an iteration.
      compute_ms: time of the kernels of an iteration.
    """

    part: str
    source: str
    iterations: int
    nbytes: int
    copy_ms: float
    compute_ms: float

    @property
    def exposed_ms(self) -> float:
        """Time of the copies beyond the time of the kernels, over all iterations."""
        return self.iterations * max(0.0, self.copy_ms - self.compute_ms)

    @property
    def waits(self) -> bool:
        """Whether a step waits for the copies, within the precision of the estimates."""
        return self.exposed_ms > _NEGLIGIBLE_MS

    def to_dict(self) -> dict[str, float | int | str]:
        """Returns the fields and `exposed_ms` as JSON-ready values."""
        return {**dataclasses.asdict(self), "exposed_ms": self.exposed_ms}


def estimate_traffic(jaxpr: Jaxpr, device: Device) -> tuple[Traffic, ...]:
    """Estimates the traffic of a differentiated program, by loop and direction."""
    return tuple(_estimate_traffic(jaxpr, device, "", 1))


def find_slow_links(traffic: Iterable[Traffic]) -> Iterator[Finding]:
    """Finds copies longer than the compute beside the copies."""
    for t in traffic:
        if t.waits:
            where = "an iteration of the loop" if t.source else "the step, outside of loops,"
            way = "to the host" if t.part == "forward" else "back"
            yield Finding(
                FindingCode.LINK_TOO_SLOW,
                f"In the {t.part} pass, {where} copies {format_nbytes(t.nbytes)} {way}, {t.copy_ms:.2f} ms "
                f"of the link, and computes for about {t.compute_ms:.2f} ms: the step will wait about "
                f"{t.exposed_ms:.1f} ms. Offload fewer or smaller values, or give an iteration more work.",
                t.source,
            )


def find_late_offloads(jaxpr: Jaxpr, device: Device) -> Iterator[Finding]:
    """Finds copies of layers outside of loops, more than a layer late at the end of the forward pass."""
    layers = sum(map(compat.is_backward, inline_calls(jaxpr.eqns, {}, checkpoints=False)))
    now_ms, free_ms, copies = 0.0, 0.0, []
    for eqn, ms in _time_kernels(list(inline_calls(jaxpr.eqns, {})), jaxpr.outvars, device):
        way = compat.transfer_in(eqn)
        if way == "H2D":
            break
        if way == "D2H":
            nbytes = compat.nbytes(eqn.outvars[0].aval)
            free_ms = max(now_ms, free_ms) + device.d2h_ms(nbytes)
            copies.append((free_ms, nbytes))
        now_ms += ms
    late_ms = free_ms - now_ms
    if layers and late_ms > max(now_ms / layers, _NEGLIGIBLE_MS):
        nbytes = sum(nbytes for ends_ms, nbytes in copies if ends_ms > now_ms)
        yield Finding(
            FindingCode.OFFLOAD_LATE,
            "When the forward pass ends, the copies of layers that are not in a loop are about "
            f"{late_ms:.1f} ms behind, more than a layer: {nbytes:,} bytes that are to be on the host are on "
            "the device then. Offload fewer or smaller values, or use jaxoff.scan, in which the step waits "
            "for them instead.",
        )


def _time_kernels(
    eqns: list[JaxprEqn], outs: Iterable[Any], device: Device
) -> Iterator[tuple[JaxprEqn, float]]:
    """Yields the kernels of a program and their estimated ms: of a loop for all iterations, of a copy 0."""
    graph = KernelGraph(eqns, frozenset(v for v in outs if isinstance(v, Var)))
    for i in graph.kernels:
        layout = compat.scan_in(eqns[i])
        if layout is not None:
            body = compat.as_open(eqns[i].params["jaxpr"])
            iteration = _time_kernels(list(inline_calls(body.eqns, {})), body.outvars, device)
            yield eqns[i], layout.length * sum(ms for _, ms in iteration)
        elif compat.transfer_in(eqns[i]):
            yield eqns[i], 0.0
        else:
            yield eqns[i], kernel_ms(graph, i, device)


def _holds_copies(eqn: JaxprEqn) -> bool:
    """Whether an equation, such as a loop, has copies inside. Kernels inside then hide these copies only."""
    return any(map(holds_copies, compat.sub_jaxprs(eqn)))


def _estimate_traffic(jaxpr: Jaxpr, device: Device, source: str, iterations: int) -> Iterator[Traffic]:
    eqns = list(inline_calls(jaxpr.eqns, {}))
    first_back = next((i for i, eqn in enumerate(eqns) if compat.transfer_in(eqn) == "H2D"), len(eqns))
    # Outside of loops the passes follow each other; the body of a loop belongs to a single pass.
    forward, backward = (eqns, eqns) if source else (eqns[:first_back], eqns[first_back:])
    for kind, part, beside, copy_ms in (
        ("D2H", "forward", forward, device.d2h_ms),
        ("H2D", "backward", backward, device.h2d_ms),
    ):
        copies = [eqn for eqn in eqns if compat.transfer_in(eqn) == kind]
        if copies:
            nbytes = sum(compat.nbytes(eqn.outvars[0].aval) for eqn in copies)
            times = _time_kernels(beside, jaxpr.outvars, device)
            compute_ms = sum(ms for eqn, ms in times if not _holds_copies(eqn))
            yield Traffic(part, source, iterations, nbytes, copy_ms(nbytes), compute_ms)
    for eqn in eqns:
        if layout := compat.scan_in(eqn):
            body = compat.as_open(eqn.params["jaxpr"])
            yield from _estimate_traffic(
                body, device, compat.source_line(eqn) or "a loop", iterations * layout.length
            )
        elif is_compute(eqn):
            for inner in compat.sub_jaxprs(eqn):
                yield from _estimate_traffic(inner, device, source, iterations)
