"""What a program copies between device and host, against the compute that could hide it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from jaxoff import _compat
from jaxoff._compat import Jaxpr
from jaxoff._cost import Device
from jaxoff._finding import Finding
from jaxoff._inline import inlined
from jaxoff._order import is_heavy

# Waits shorter than this in a whole step are below what the estimates can tell.
_NEGLIGIBLE_MS = 1.0


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The copies of one part of a differentiated function, and its compute, estimated.

    Attributes:
      part: "forward" or "backward", as the copies go to the host or come back.
      source: `file:line (function)` of the loop, or '' outside of loops.
      turns: how often the part runs; 1 outside of loops.
      nbytes: bytes copied in a turn.
      copy_ms: how long the link takes for them.
      compute_ms: how long the kernels of a turn take.
    """

    part: str
    source: str
    turns: int
    nbytes: int
    copy_ms: float
    compute_ms: float

    @property
    def exposed_ms(self) -> float:
        """What the compute cannot hide, in all turns."""
        return self.turns * max(0.0, self.copy_ms - self.compute_ms)

    @property
    def waits(self) -> bool:
        """Whether a step waits for the copies, as far as estimates can tell."""
        return self.exposed_ms > _NEGLIGIBLE_MS

    def to_dict(self) -> dict[str, float | int | str]:
        return {**dataclasses.asdict(self), "exposed_ms": self.exposed_ms}


def traffic_of(jaxpr: Jaxpr, device: Device) -> tuple[Traffic, ...]:
    """The traffic of a differentiated program, by loop and direction."""
    return tuple(_traffic(jaxpr, device, "", 1))


def too_slow(traffic: Iterable[Traffic]) -> Iterator[Finding]:
    """What the link cannot take while the device computes."""
    for t in traffic:
        if t.waits:
            where = "a turn of the loop" if t.source else "the layers"
            way = "to the host" if t.part == "forward" else "back"
            yield Finding(
                "link-too-slow",
                f"In the {t.part} pass, {where} copies {t.nbytes / 1e6:.0f} MB {way}, {t.copy_ms:.2f} ms of "
                f"the link, and computes for about {t.compute_ms:.2f} ms: the step will wait about "
                f"{t.exposed_ms:.1f} ms. Offload fewer or smaller values, or give a turn more work.",
                t.source,
            )


def _traffic(jaxpr: Jaxpr, device: Device, source: str, turns: int) -> Iterator[Traffic]:
    eqns = list(inlined(jaxpr.eqns, {}))
    first_back = next((i for i, eqn in enumerate(eqns) if _compat.transfer_in(eqn) == "H2D"), len(eqns))
    # Outside of loops the passes follow each other; the body of a loop is of one.
    forward, backward = (eqns, eqns) if source else (eqns[:first_back], eqns[first_back:])
    for kind, part, beside, copy_ms in (
        ("D2H", "forward", forward, device.d2h_ms),
        ("H2D", "backward", backward, device.h2d_ms),
    ):
        moved = [eqn for eqn in eqns if _compat.transfer_in(eqn) == kind]
        if moved:
            nbytes = sum(_compat.nbytes(eqn.outvars[0].aval) for eqn in moved)
            kernels = [eqn for eqn in beside if is_heavy(eqn) and _compat.scan_in(eqn) is None]
            compute_ms = sum(map(device.compute_ms, kernels))
            yield Traffic(part, source, turns, nbytes, copy_ms(nbytes), compute_ms)
    for eqn in eqns:
        if layout := _compat.scan_in(eqn):
            body = _compat.as_open(eqn.params["jaxpr"])
            yield from _traffic(body, device, _compat.source_line(eqn) or "a loop", turns * layout.length)
        elif is_heavy(eqn):
            for inner in _compat.sub_jaxprs(eqn):
                yield from _traffic(inner, device, source, turns)
