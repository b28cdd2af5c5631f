"""Decides when the kernels outside of loops wait for copies: without a wait, XLA delays sends."""

from __future__ import annotations

from collections.abc import Sequence

from jaxoff._device.profile import Device
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import JaxprEqn, Var
from jaxoff._jaxpr.kernels import new_nbytes
from jaxoff._schedule.calibrations import HIDDEN_LENGTH, PATIENCE
from jaxoff._schedule.copy_times import CopyTimes


class CopyWaits:
    """The copies under way, by their results."""

    def __init__(self, eqns: Sequence[JaxprEqn], times: CopyTimes, device: Device, *, keeps_pace: bool):
        """Takes the program; with `keeps_pace`, a send is due when the next one starts."""
        self._times, self._device, self._keeps_pace = times, device, keeps_pace
        self._copies = {v: i for i, eqn in enumerate(eqns) if compat.transfer_in(eqn) for v in eqn.outvars}
        self._due: dict[Var, float] = {}  # copy -> time from which the next kernel waits for the copy, ms
        self._last_send_end = 0.0
        self._reload_starts: dict[Var, float] = {}  # reload without a due time -> time of its start, ms

    def start(self, eqn: JaxprEqn, time: float) -> None:
        """Records the start of a copy; ignores other equations."""
        out, kind = eqn.outvars[0], compat.transfer_in(eqn)
        if kind == "D2H":
            if self._keeps_pace:
                self._due = {v: min(due, time) for v, due in self._due.items()}
            send_ms = self._device.d2h_ms(compat.nbytes(out.aval))
            self._last_send_end = max(time, self._last_send_end) + send_ms
            self._due[out] = self._last_send_end + PATIENCE * send_ms
        elif kind == "H2D":
            self._reload_starts[out] = time

    def list_due(self, time: float) -> list[Var]:
        """Lists the copies for which a kernel at a time has to wait."""
        return [v for v, due in self._due.items() if due <= time]

    def mark_awaited(self, v: Var) -> None:
        """Drops copy `v`, because a kernel waits for the copy."""
        self._due.pop(v, None)

    def mark_read(self, v: Var) -> None:
        """Drops reload `v`, because a reader waits for the reload in any case."""
        self._reload_starts.pop(v, None)

    def hide_behind(self, eqn: JaxprEqn, began: float, time: float) -> None:
        """Makes one copy of each direction due at the end of a kernel long enough to hide the copy.

        XLA's scheduler starts a copy just before the last kernel before the wait. If the copy takes more new
        memory than the kernel, the scheduler starts the copy just after the kernel, and nothing is hidden.

        Args:
          eqn: the kernel.
          began: its start, in ms.
          time: its end, in ms.
        """
        hidden_ms = (time - began) * HIDDEN_LENGTH
        waiting = (v for v, due in self._due.items() if due > time)
        sends = [v for v in waiting if self._times.send_starts[self._copies[v]] <= began]
        if sends and hidden_ms >= self._device.d2h_ms(compat.nbytes(sends[0].aval)):
            self._due[sends[0]] = time
        made = new_nbytes(eqn)
        reloads = [v for v, t in self._reload_starts.items() if t <= began and compat.nbytes(v.aval) <= made]
        if reloads and hidden_ms >= self._device.h2d_ms(compat.nbytes(reloads[0].aval)):
            del self._reload_starts[reloads[0]]
            self._due[reloads[0]] = time
