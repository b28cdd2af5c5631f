"""Prints the facts of a compiled program, on a terminal or in a file."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from jaxoff._report.tables import format_nbytes, render_findings, shorten_source

if TYPE_CHECKING:
    from jaxoff._compiled.facts import CompiledFacts, HostCopy

# Columns aligned to the right.
_RIGHT = ("count", "bytes")


def render(facts: CompiledFacts, terminal: bool) -> Iterator[Any]:
    """The renderables of a program's facts: its copies, its totals, its findings."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD if terminal else None, pad_edge=False, header_style="bold")
    for heading in ("copy", "way", "count", "bytes", "via", "runs in", "beside", "source"):
        table.add_column(heading, justify="right" if heading in _RIGHT else "left", overflow="fold")
    for row, number in group_copies(facts.copies):
        table.add_row(*map(Text, _format_cells(row, number)), style=_choose_style(row) if terminal else None)
    if facts.copies:
        yield table
    else:
        yield Text("Nothing moves between device and host memory.")
    twin = "" if facts.twin_peak_bytes is None else f" (saved twin {format_nbytes(facts.twin_peak_bytes)})"
    yield Text(
        f"\nto the host {format_nbytes(facts.d2h_bytes)}, back {format_nbytes(facts.h2d_bytes)}; host memory "
        f"{format_nbytes(facts.host_bytes)}; device peak {format_nbytes(facts.device_peak_bytes)}{twin}, of "
        f"it temporaries {format_nbytes(facts.device_temp_bytes)}; CUDA graphs {facts.scheduling_mode}"
    )
    yield from render_findings(facts.findings, terminal)


def group_copies(copies: tuple[HostCopy, ...]) -> list[tuple[HostCopy, int]]:
    """Groups copies equal but for their unrolled layer: (first copy, number of copies)."""
    groups: dict[Any, list[HostCopy]] = collections.defaultdict(list)
    for copy in copies:
        key = (copy.direction, copy.nbytes, copy.count, copy.via, copy.is_async, copy.loop, copy.captured)
        groups[*key, bool(copy.overlaps), copy.loop and copy.name].append(copy)
    return [(group[0], len(group)) for group in groups.values()]


def _format_cells(copy: HostCopy, number: int) -> tuple[str, ...]:
    others = f" and {number - 1} more" if number > 1 else ""
    count = "unknown" if copy.count is None else str(copy.count * number)
    place = (f"loop {copy.loop}" if copy.loop else "entry") + (", CUDA graph" if copy.captured else "")
    return (
        (copy.label or copy.name) + others,
        copy.direction,
        count,
        format_nbytes(copy.total_bytes * number),
        ("async " if copy.is_async else "sync ") + copy.via,
        place,
        _describe_overlaps(copy),
        shorten_source(copy.source),
    )


def _describe_overlaps(copy: HostCopy) -> str:
    if not copy.overlaps:
        return "nothing"
    kinds = collections.Counter(compute.kind for compute in copy.overlaps)
    return ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items()))


def _choose_style(copy: HostCopy) -> str:
    return "bold red" if copy.via == "kernel" else "yellow" if not copy.overlaps else "cyan"
