"""Prints the busy times of GPUs, on a terminal or in a file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxoff._report.tables import format_nbytes

if TYPE_CHECKING:
    from jaxoff._profile.gpu_trace import GpuTimes


def make_times_table(gpus: Sequence[GpuTimes], terminal: bool) -> Any:
    """Makes a table of the busy times of GPUs, by kernels, direction of copies and memsets."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD if terminal else None, pad_edge=False, header_style="bold")
    for heading in ("GPU", "what", "busy ms", "exposed ms", "count", "bytes", "GB/s"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    for times in gpus:
        table.add_row(str(times.gpu), "kernels", f"{times.kernel_ms:.2f}")
        for way, copy in (("D2H", times.d2h), ("H2D", times.h2d)):
            cells = (
                f"{copy.busy_ms:.2f}",
                f"{copy.exposed_ms:.2f}",
                f"{copy.count:g}",
                format_nbytes(copy.nbytes),
            )
            style = "yellow" if terminal and copy.exposed_ms > 0.1 * copy.busy_ms else None
            table.add_row(str(times.gpu), way, *cells, f"{copy.bandwidth_gbps:.1f}", style=style)
        for kind, busy in (("D2D", times.d2d_ms), ("memset", times.memset_ms)):
            if busy:
                table.add_row(str(times.gpu), kind, f"{busy:.2f}")
    return table
