"""Renders a plan as a table, for a terminal or a file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from jaxoff._plan.result import describe_parts
from jaxoff._report.tables import format_nbytes

if TYPE_CHECKING:
    from jaxoff._plan.result import Plan

_COLOURS = {"offload": "cyan", "save": "yellow", "recompute": "dim"}
_HEADINGS = ("name", "shape", "count", "bytes", "choice", "recomputed", "copied", "exposed", "why")


def render(plan: Plan, terminal: bool) -> Iterator[Any]:
    """Yields the renderables of a plan: its table, then its totals."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD if terminal else None, pad_edge=False, header_style="bold")
    layers = {"first": f"first {plan.first_layers}", "others": "others"}
    for heading in ("layers", *_HEADINGS) if plan.first_layers else _HEADINGS:
        left = heading in ("layers", "name", "shape", "choice", "why")
        table.add_column(heading, justify="left" if left else "right", overflow="fold")
    for row in plan.rows:
        times = (f"{ms:.2f} ms" if ms else "" for ms in (row.recomputed_ms, row.copied_ms, row.exposed_ms))
        cells = (row.name, row.shape, str(row.count), format_nbytes(row.nbytes), row.choice, *times, row.why)
        cells = (layers[row.layers], *cells) if plan.first_layers else cells
        table.add_row(*map(Text, cells), style=_COLOURS[row.choice] if terminal else None)
    yield table
    t, exposed = plan.times, plan.times.exposed_forward + plan.times.exposed_backward
    yield Text(
        f"\nstep about {t.total:.1f} ms on {plan.device.name}: kernels {t.kernels:.1f}, recomputed "
        f"{t.recomputed:.1f}, stored {t.stored:.1f}, slowed by copies {t.slowed:.1f}, copies exposed "
        f"{exposed:.1f}"
    )
    compiled = "" if plan.compiled_bytes is None else f" (compiled {format_nbytes(plan.compiled_bytes)})"
    yield Text(
        f"device peak {format_nbytes(plan.peak_bytes)}{compiled} of {format_nbytes(plan.device_bytes)}: "
        f"{describe_parts(plan.peak)}; host {format_nbytes(plan.host_bytes)}"
    )
