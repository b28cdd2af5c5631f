"""Prints a diagnosis as a table, on a terminal or in a file."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxoff._report.tables import format_nbytes
from jaxoff._runtime.doctor import GIB, Diagnosis
from jaxoff._runtime.environment import Environment

# Verdict -> style of a rich text.
_COLOURS = {"helps": "green", "harms": "bold red", "neutral": ""}
# Columns of a table in a file.
_PLAIN_WIDTH = 160


def print_diagnosis(diagnosis: Diagnosis, console: Console | None = None) -> None:
    """Prints a diagnosis: facts, settings, problems. Plain text where the output is not a terminal."""
    console = console or Console(highlight=False)
    if console.is_terminal:
        _render(diagnosis, console)
        return
    console.width = _PLAIN_WIDTH
    with console.capture() as capture:
        _render(diagnosis, console)
    for line in capture.get().splitlines():
        console.file.write(f"{line.rstrip()}\n")


def _render(diagnosis: Diagnosis, console: Console) -> None:
    facts = _make_table(console, "", "")
    for name, value in _facts_of(diagnosis):
        facts.add_row(Text(name), Text(value))
    settings = _make_table(console, "setting", "value", "offload", "why")
    for s in diagnosis.settings:
        value = "unset" if s.value is None else s.value or "''"
        settings.add_row(Text(s.name), Text(value), Text(s.verdict, style=_COLOURS[s.verdict]), Text(s.why))
    console.print(facts, Text(), settings, Text(), sep="\n")
    for problem in diagnosis.problems:
        word, style = ("FAIL", "bold red") if problem.fatal else ("WARN", "yellow")
        console.print(Text.assemble((word, style), f"  {problem}"))
    if diagnosis.exit_status == 0:
        console.print(Text("OK    offload is right and of use here.", style="green"))


def _make_table(console: Console, *headings: str) -> Table:
    plain = not console.is_terminal
    table = Table(
        box=None if plain else box.SIMPLE_HEAD, pad_edge=False, header_style="bold", show_header=any(headings)
    )
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def _facts_of(diagnosis: Diagnosis) -> Iterator[tuple[str, str]]:
    environment = diagnosis.environment
    yield "python", environment.python
    yield from environment.packages.items()
    yield "backend", environment.backend
    for device, same in itertools.groupby(environment.devices):
        memory = f", {format_nbytes(device.memory_bytes)} for jax" if device.memory_bytes is not None else ""
        yield "devices", f"{len(tuple(same))} x {device.kind}{memory}"
    if environment.devices:
        yield "memory kinds", ", ".join(environment.devices[0].memory_kinds) or "none"
    host = f"{environment.host_bytes / GIB:.0f} GiB" if environment.host_bytes is not None else "unknown"
    if environment.backend == "gpu":
        yield "pinned pool", f"at most {diagnosis.pinned_pool_bytes / GIB:.0f} GiB of {host} host memory"
    else:  # there is no pool
        yield "host memory", host
    if environment.nodes.get("gpus"):
        nodes = {key: ", ".join(map(str, found)) for key, found in environment.nodes.items()}
        yield "memory nodes", f"GPUs at {nodes['gpus']}, this process at {nodes['process']}"
    yield "link", _describe_link(environment)


def _describe_link(environment: Environment) -> str:
    link = environment.link
    if link is None:
        return f"not measured: {environment.link_skipped or 'not asked for'}"
    return (
        f"D2H {link.d2h_gbps:.1f} GB/s, H2D {link.h2d_gbps:.1f} GB/s, both at once {link.both_gbps:.1f} GB/s "
        f"({format_nbytes(link.nbytes)} copies)"
    )
