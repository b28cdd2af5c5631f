"""Text of reports: on a terminal in colour, in a file or a pipe without."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from typing import Any

from jaxoff._report.finding import Finding


def render_findings(findings: tuple[Finding, ...], terminal: bool) -> Iterator[Any]:
    """Renders findings, a line each."""
    from rich.text import Text

    if not findings:
        yield Text("No findings.")
    for finding in findings:
        yield Text(f"! {finding}", style="bold red" if terminal else "")


def format_nbytes(nbytes: int) -> str:
    """Formats a count of bytes in decimal units (1 kB is 1000 bytes), as vendors of memory do."""
    if nbytes >= 1e16:
        return f"{nbytes:.1e} B"
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes} B"


def format_ms(duration_ms: float) -> str:
    """Formats an estimated duration in milliseconds or seconds, with three digits."""
    number, unit = (duration_ms, "ms") if duration_ms < 999.5 else (duration_ms / 1e3, "s")
    decimals = 2 if number < 9.995 else 1 if number < 99.95 else 0
    return f"{number:.{decimals}f} {unit}"


def shorten_source(source: str) -> str:
    """A source line without the folders of its file."""
    path, _, rest = source.partition(":")
    return f"{os.path.basename(path)}:{rest}" if rest else source


def render_text(value: Any) -> str:
    """Renders a value with rich: as wide as the terminal, or 160 columns without a terminal."""
    from rich.console import Console

    terminal = sys.stdout.isatty()
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=None if terminal else 160, highlight=False)
    console.print(value)
    return out.getvalue().rstrip("\n")
