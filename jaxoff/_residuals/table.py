"""The table of a report on residuals."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from jaxoff._report.tables import format_nbytes, render_findings, shorten_source
from jaxoff._residuals.residuals import Residual

if TYPE_CHECKING:
    from jaxoff._residuals.report import Report

_COLOURS = {"offload": "cyan", "save": "yellow", "recompute": "dim"}


def render(report: Report, terminal: bool) -> Iterator[Any]:
    """Renders a report: a table of residuals, totals, traffic, findings."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD if terminal else None, pad_edge=False, header_style="bold")
    for heading in ("name", "shape", "count", "bytes", "placement", "rule", "source"):
        table.add_column(
            heading, justify="right" if heading in ("count", "bytes") else "left", overflow="fold"
        )
    for r in merge_layers(report.residuals):
        label = r.name or (f"(mark_{r.mark})" if r.mark else f"({r.made_by})")
        cells = (
            label,
            f"{r.dtype}{list(r.shape)}",
            str(r.count),
            format_nbytes(r.nbytes),
            r.placement,
            r.rule,
            shorten_source(r.source),
        )
        table.add_row(*map(Text, cells), style=_COLOURS[r.placement] if terminal else None)
    if report.residuals:
        yield table
    else:
        yield Text("The backward pass keeps nothing from the forward pass but its inputs.")
    yield Text(
        f"\ndevice {format_nbytes(report.device_bytes)}, host {format_nbytes(report.host_bytes)}, recomputed "
        f"{format_nbytes(report.recompute_bytes)} (named values)"
    )
    for t in report.traffic:
        each = f"{t.iterations} iterations, each " if t.source else ""
        yield Text(
            f"{t.part}: {each}{format_nbytes(t.nbytes)}, {t.copy_ms:.2f} ms of the link beside about "
            f"{t.compute_ms:.2f} ms of compute"
        )
    yield from render_findings(report.findings, terminal)


def merge_layers(residuals: tuple[Residual, ...]) -> list[Residual]:
    """Merges residuals of unrolled layers, equal but for count and bytes, into a row for all layers."""
    groups: dict[Any, Residual] = {}
    for r in residuals:
        key = dataclasses.replace(r, count=0, nbytes=0)
        if key in groups:
            r = dataclasses.replace(
                r, count=r.count + groups[key].count, nbytes=r.nbytes + groups[key].nbytes
            )
        groups[key] = r
    return list(groups.values())
