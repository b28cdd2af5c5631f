"""The fitted and chosen constants of the scheduler: leads and slacks of copies.

Each constant has a docstring with its unit, its range, and its origin: an entry of `bench/LOG.md` by its
heading. Every origin named is a program compiled for or run on an H200. Another device may need other values.
"""

from __future__ import annotations

LEAD_KERNELS: int = 2
"""Kernels of the chain between the start of a reload and the time when the reload must be under way.

Unit: number of kernels. Range: at least 0. The small kernels which start a reload may wait for a large kernel
to end. Origin: chosen, not fitted (2026-11-21: copies with a time).
"""

LEAD_MS: float = 0.1
"""The least duration of the kernels of `LEAD_KERNELS`; longer compute kernels leave small kernels no room.

Unit: ms. Range: at least 0. Origin: chosen after reading a program of `mixtral`, in which two kernels of the
chain took microseconds (2026-11-23, later: steps in balanced rounds; reloads that meet at the end of a turn).
In traces of `mixtral` a lead of 0.13 ms was too short before a kernel of 5.6 ms (2026-11-24, night: what
keeps a reload waiting); `copy_times.find_unhindered_start` therefore moves starts before long kernels.
"""

RELOAD_SLACK: float = 1.5
"""Time planned for a reload, as a multiple of the reload's estimated duration.

Unit: none. Range: at least 1. Origin: chosen, not fitted.
"""

LEAST_RELOAD_SLACK: float = 1.1
"""As `RELOAD_SLACK`, for a reload which a long kernel delays: with less time, the reload starts earlier.

Unit: none. Range: 1 to `RELOAD_SLACK`. Origin: chosen, not fitted. Of five programs of `mixtral` and `nano`
whose reloads changed, four ran 0.5 to 2.0% faster on an H200, and one 0.2% slower (2026-11-24, night: what
keeps a reload waiting).
"""

SEND_SLACK: float = 1.1
"""Time planned for a send, as a multiple of the send's estimated duration.

Unit: none. Range: at least 1. Origin: chosen, not fitted.
"""

HIDDEN_LENGTH: float = 1.25
"""The longest copy which one kernel outside of loops hides, as a multiple of the kernel's duration.

Unit: none. Range: at least 0. Origin: chosen, not fitted.
"""

PATIENCE: float = 2.0
"""Delay of the wait for a send which no kernel hides, from the send's estimated end; outside of loops.

Unit: durations of the send. Range: at least 0. Origin: chosen, not fitted. Before, each send took three
durations of the link's time, so that delays added up. The schedules of the measured programs did not change
(2026-11-21: what the traces of the MoE block and of the Python loop showed).
"""
