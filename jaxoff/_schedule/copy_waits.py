"""When an order waits for copies outside of loops: without that XLA puts copies to the host off."""

from __future__ import annotations

from collections.abc import Sequence

from jaxoff._device.profile import Device
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import JaxprEqn, Var
from jaxoff._jaxpr.kernels import new_nbytes
from jaxoff._schedule.copy_times import CopyTimes

# A kernel hides a copy of at most so many times its length; what finds none to hide behind is waited for so
# many times the copy's length after it should have ended.
_HIDDEN, _PATIENCE = 1.25, 2.0


class CopyWaits:
    """The copies under way, by their results."""

    def __init__(self, eqns: Sequence[JaxprEqn], times: CopyTimes, device: Device):
        self._times, self._device = times, device
        self._copies = {v: i for i, eqn in enumerate(eqns) if compat.transfer_in(eqn) for v in eqn.outvars}
        self._leaving: dict[Var, float] = {}  # copies to the host, and when to wait for them
        self._sent_by = 0.0  # when the last of them is
        self._coming: dict[Var, float] = {}  # copies from the host, and when they began

    def start(self, eqn: JaxprEqn, time: float) -> None:
        """Adds a copy that starts."""
        out, kind = eqn.outvars[0], compat.transfer_in(eqn)
        if kind == "D2H":
            sent_ms = self._device.d2h_ms(compat.nbytes(out.aval))
            self._sent_by = max(time, self._sent_by) + sent_ms
            self._leaving[out] = self._sent_by + _PATIENCE * sent_ms
        elif kind == "H2D":
            self._coming[out] = time

    def due(self, time: float) -> list[Var]:
        """The copies to wait for by a time."""
        return [v for v, until in self._leaving.items() if until <= time]

    def end(self, v: Var) -> None:
        """Takes away a copy that is waited for."""
        self._leaving.pop(v, None)

    def read(self, v: Var) -> None:
        """Takes away a copy from the host that is read: that waits for it."""
        self._coming.pop(v, None)

    def hide(self, eqn: JaxprEqn, began: float, time: float) -> None:
        """Waits for a copy of each direction at the end of a kernel that is long enough to hide it.

        XLA's scheduler starts a copy just before the kernel that comes before the wait, or just after that if
        the copy takes more new memory than the kernel.
        """
        hidden_ms = (time - began) * _HIDDEN
        waiting = (v for v, until in self._leaving.items() if until > time)
        sent = [v for v in waiting if self._times.sent[self._copies[v]] <= began]
        if sent and hidden_ms >= self._device.d2h_ms(compat.nbytes(sent[0].aval)):
            self._leaving[sent[0]] = time
        made = new_nbytes(eqn)
        coming = [v for v, start in self._coming.items() if start <= began and compat.nbytes(v.aval) <= made]
        if coming and hidden_ms >= self._device.h2d_ms(compat.nbytes(coming[0].aval)):
            del self._coming[coming[0]]
            self._leaving[coming[0]] = time
