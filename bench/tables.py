"""The command line of programs making tables and a chart of result files."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def show[R](
    description: str,
    chart: str,
    combine: Callable[[Iterator[Any]], R],
    markdown: Callable[[R], str],
    draw: Callable[[R, Path], None],
    arguments: list[str] | None = None,
) -> None:
    """Reads result files, and prints or writes their tables and draws their chart.

    Args:
      description: the program's help text.
      chart: the kind of chart, for the help text.
      combine: joins the results read from files.
      markdown: writes the tables of the combined results.
      draw: draws the combined results into a PNG.
      arguments: the command line; None for the command line of the process.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("results", type=Path, nargs="+", help="result files, JSON")
    parser.add_argument("--markdown", type=Path, help="where the tables go; printed without")
    parser.add_argument("--chart", type=Path, help=f"where the {chart} goes, PNG")
    o = parser.parse_args(arguments)
    results = combine(json.loads(path.read_text()) for path in o.results)
    if o.markdown is None:
        print(markdown(results))
    else:
        o.markdown.write_text(markdown(results))
    if o.chart is not None:
        draw(results, o.chart)
