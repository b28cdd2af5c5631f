"""Progress of what may take minutes, by the logger "jaxoff"."""

from __future__ import annotations

import logging
import time

_LOGGER = logging.getLogger("jaxoff")
# Seconds from which lines are warnings, which Python shows unless told otherwise; before, they are infos.
_PATIENCE = 10.0


class Progress:
    """Lines about a task, with the seconds since its start.

    Attributes:
      programs: the number of programs tried.
    """

    def __init__(self) -> None:
        self.programs = 0
        self._started = time.perf_counter()

    def say(self, text: str) -> None:
        """Logs a line."""
        seconds = time.perf_counter() - self._started
        level = logging.INFO if seconds < _PATIENCE else logging.WARNING
        _LOGGER.log(level, "%s; %.0f s so far", text, seconds)
