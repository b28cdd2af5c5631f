"""How the facts of a compiled program look on a terminal and in a file."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from jaxoff._report.tables import format_nbytes as human
from jaxoff._report.tables import render_findings as findings_text

if TYPE_CHECKING:
    from jaxoff._compiled.facts import CompiledFacts, HostCopy

_RIGHT = ("count", "bytes")


def render(facts: CompiledFacts, terminal: bool) -> Iterator[Any]:
    """The renderables of a program's facts: its copies, its totals, its findings."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD if terminal else None, pad_edge=False, header_style="bold")
    for heading in ("copy", "way", "count", "bytes", "via", "runs in", "beside"):
        table.add_column(heading, justify="right" if heading in _RIGHT else "left", overflow="fold")
    for row, number in grouped(facts.copies):
        table.add_row(*map(Text, _cells(row, number)), style=_style(row) if terminal else None)
    if facts.copies:
        yield table
    else:
        yield Text("Nothing moves between device and host memory.")
    twin = "" if facts.twin_peak_bytes is None else f" (saved twin {human(facts.twin_peak_bytes)})"
    yield Text(
        f"\nto the host {human(facts.d2h_bytes)}, back {human(facts.h2d_bytes)}; host memory "
        f"{human(facts.host_bytes)}; device peak {human(facts.device_peak_bytes)}{twin}, of it temporaries "
        f"{human(facts.device_temp_bytes)}; CUDA graphs {facts.scheduling_mode}"
    )
    yield from findings_text(facts.findings, terminal)


def grouped(copies: tuple[HostCopy, ...]) -> list[tuple[HostCopy, int]]:
    """Copies that differ only in which unrolled layer they belong to, as one row with their number."""
    groups: dict[Any, list[HostCopy]] = collections.defaultdict(list)
    for copy in copies:
        key = (copy.direction, copy.nbytes, copy.count, copy.via, copy.is_async, copy.loop, copy.captured)
        groups[*key, bool(copy.overlaps), copy.loop and copy.name].append(copy)
    return [(group[0], len(group)) for group in groups.values()]


def _cells(copy: HostCopy, number: int) -> tuple[str, ...]:
    others = f" and {number - 1} more" if number > 1 else ""
    count = "unknown" if copy.count is None else str(copy.count * number)
    place = (f"loop {copy.loop}" if copy.loop else "entry") + (", CUDA graph" if copy.captured else "")
    return (
        copy.name + others,
        copy.direction,
        count,
        human(copy.total_bytes * number),
        ("async " if copy.is_async else "sync ") + copy.via,
        place,
        _beside(copy),
    )


def _beside(copy: HostCopy) -> str:
    if not copy.overlaps:
        return "nothing"
    kinds = collections.Counter(compute.kind for compute in copy.overlaps)
    return ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items()))


def _style(copy: HostCopy) -> str:
    return "bold red" if copy.via == "kernel" else "yellow" if not copy.overlaps else "cyan"
