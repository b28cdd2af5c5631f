"""Turns results of `bench.clients` into a markdown table: a row for each program.

    python -m bench.clients_table bench/results/clients/*.json --markdown docs/clients.md

Bold: rows of `jaxoff.jit` that take more memory than `jax.jit`, or over 0.5% more time than the fastest of
`jax.jit` and the saved twin that takes no more memory than either.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.grouped_mlp_table import NONE, bold, table

VARIANTS = ("saved", "stock", "stock-no-graphs", "jaxoff", "tuned")
REFERENCES = ("saved", "stock", "stock-no-graphs")
MOST_MEMORY, MOST_TIME = 1.01, 1.005
INTRODUCTION = """\
# Train steps in other people's styles

Whole train steps with AdamW, written as users of JAX, Flax and Equinox write them (`bench/client_steps`).
Each cell is milliseconds of a step and the compiler's peak of device memory in GB. "saved" keeps the
residuals on the device, "stock" offloads them under `jax.jit`, "stock-no-graphs" does so with CUDA graphs
switched off, "jaxoff" is `jaxoff.jit` and in brackets the recipe it chose, "tuned" is
`jaxoff.jit(tune=True)`. Variants alternate in one process; times are medians. Bold: over 1% more memory than
the lesser of "stock" and "saved", or over 0.5% more time than the fastest of the first three columns within
that memory.

"""


def _fails(rows: dict[str, Any], variant: str) -> bool:
    row, references = rows[variant], [rows[name] for name in REFERENCES if name in rows]
    limit = MOST_MEMORY * min(reference["peak_bytes"] for reference in references)
    allowed = [reference["ms"] for reference in references if reference["peak_bytes"] <= limit]
    return row["peak_bytes"] > limit or row["ms"] > MOST_TIME * min(allowed)


def _cell(rows: dict[str, Any], variant: str) -> str:
    if variant not in rows:
        return NONE
    row = rows[variant]
    text = f"{row['ms']:.1f}, {row['peak_bytes'] / 1e9:.2f}"
    if variant in REFERENCES:
        return text
    text += f" ({row['recipe']})"
    return bold(text, _fails(rows, variant))


def markdown(results: Iterable[tuple[str, Any]]) -> str:
    """The page of results, pairs of a file's name and what it holds."""
    rows = []
    for name, result in results:
        cells = [_cell(result["rows"], variant) for variant in VARIANTS]
        rows.append([name, result["provenance"]["device"].removeprefix("1 x "), *cells])
    return INTRODUCTION + table(["program", "card", *VARIANTS], rows)


def main(arguments: list[str] | None = None) -> None:
    """Reads result files and prints or writes their page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, nargs="+", help="result files, JSON")
    parser.add_argument("--markdown", type=Path, help="where the page goes; printed without")
    options = parser.parse_args(arguments)
    page = markdown((path.stem, json.loads(path.read_text())) for path in sorted(options.results))
    if options.markdown is None:
        print(page)
    else:
        options.markdown.write_text(page)


if __name__ == "__main__":
    main()
