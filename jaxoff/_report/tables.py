"""How a report looks on a terminal and in a file."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from typing import Any

from jaxoff._report.finding import Finding


def findings_text(findings: tuple[Finding, ...], terminal: bool) -> Iterator[Any]:
    """The renderables of findings."""
    from rich.text import Text

    if not findings:
        yield Text("No findings.")
    for finding in findings:
        yield Text(f"! {finding}", style="bold red" if terminal else "")


def human(nbytes: int) -> str:
    """Bytes in decimal units, as links and memories are sold."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes} B"


def printed(value: Any) -> str:
    """What rich shows of a value, as wide as the terminal, or wide enough where there is none."""
    from rich.console import Console

    terminal = sys.stdout.isatty()
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=None if terminal else 160, highlight=False)
    console.print(value)
    return out.getvalue().rstrip("\n")
