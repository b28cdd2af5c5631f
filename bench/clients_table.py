"""Turns results of `bench.clients` into a markdown table: a row for each program.

    python -m bench.clients_table bench/results/clients/*.json --markdown docs/clients.md
    python -m bench.clients_table --budgets bench/results/budget/*.json --markdown docs/budgets.md

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
`jaxoff.jit(tune=True)`. "R" is the memory that `jaxoff.jit` gives back against "saved", in percent of the
bytes that its copies take on the host; more than 100 where its order saves memory of its own. "exposed" is
milliseconds of copies that no kernel hid, by a profile, under "stock" and "jaxoff" (not read in older rows).
Variants alternate in one process; times are medians. Bold: over 1% more memory than the lesser of "stock" and
"saved", or over 0.5% more time than the fastest of the first three columns within that memory.

"""

BUDGETS = """\
# Train steps within a budget

Whole train steps with AdamW (`bench/client_steps`), unchanged but for `jaxoff.jit(step, device_bytes=...)`.
Each cell is milliseconds of a step and the compiler's peak of device memory in GB. "saved" is the program
under the user's policy without offload, "recomputed" the program with every layer under a bare
`jax.checkpoint`, "JAX's policies" programs with every layer under a policy of JAX, all by `jax.jit`; then a
column for each budget, in its cell the budget in GB. Variants alternate in one process; times are medians.
Bold: more memory than the budget, or over 0.5% more time than the fastest program without a budget that fits
the budget.

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


def _returned(rows: dict[str, Any]) -> str:
    saved, ours = rows.get("saved"), rows["jaxoff"]
    if saved is None or not ours["host_bytes"]:
        return NONE
    return f"{(saved['peak_bytes'] - ours['peak_bytes']) / ours['host_bytes']:.0%}"


def _exposed(rows: dict[str, Any]) -> str:
    found = [rows.get(variant, {}).get("exposed_ms") for variant in ("stock", "jaxoff")]
    return ", ".join(NONE if ms is None else f"{ms:.1f}" for ms in found) if found != [None, None] else NONE


def markdown(results: Iterable[tuple[str, Any]]) -> str:
    """The page of results, pairs of a file's name and what it holds."""
    rows = []
    for name, result in results:
        cells = [_cell(result["rows"], variant) for variant in VARIANTS]
        origin = result["provenance"]
        facts = origin["device"].removeprefix("1 x "), origin["date"][:10]
        rows.append([name, *facts, *cells, _returned(result["rows"]), _exposed(result["rows"])])
    return INTRODUCTION + table(["program", "card", "date", *VARIANTS, "R", "exposed"], rows)


def _list_rivals(rows: dict[str, Any]) -> dict[str, Any]:
    """The rows of programs without a budget that were timed, by name."""
    return {name: row for name, row in rows.items() if not name.startswith("planned-") and "ms" in row}


def _planned_cells(rows: dict[str, Any]) -> list[str]:
    """The cells of the budgets, the largest first."""
    cells = []
    for name, row in sorted(rows.items(), key=lambda item: -item[1]["peak_bytes"]):
        if not name.startswith("planned-"):
            continue
        budget = 1e9 * float(name.removeprefix("planned-"))
        others = [r["ms"] for r in _list_rivals(rows).values() if r["peak_bytes"] <= budget]
        fails = row["peak_bytes"] > budget or row["ms"] > MOST_TIME * min(others, default=row["ms"])
        text = f"{budget / 1e9:g}: {row['ms']:.1f}, {row['peak_bytes'] / 1e9:.2f}"
        cells.append(bold(text, fails))
    return cells


def budgets_markdown(results: Iterable[tuple[str, Any]]) -> str:
    """The page of results with budgets, pairs of a file's name and what it holds."""
    lines = []
    for name, result in results:
        rows = result["rows"]
        references = [
            f"{rows[r]['ms']:.1f}, {rows[r]['peak_bytes'] / 1e9:.2f}" if r in rows else NONE
            for r in ("saved", "recomputed")
        ]
        policies = [
            f"{rival}: {row['ms']:.1f}, {row['peak_bytes'] / 1e9:.2f}"
            for rival, row in _list_rivals(rows).items()
            if rival not in ("saved", "recomputed")
        ]
        device = result["provenance"]["device"].removeprefix("1 x ")
        lines.append([name, device, *references, "; ".join(policies) or NONE, *_planned_cells(rows)])
    width = max(len(line) for line in lines)
    padded = [line + [NONE] * (width - len(line)) for line in lines]
    heading = ["program", "card", "saved", "recomputed", "JAX's policies", *["budget"] * (width - 5)]
    return BUDGETS + table(heading, padded)


def main(arguments: list[str] | None = None) -> None:
    """Reads result files and prints or writes their page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, nargs="+", help="result files, JSON")
    parser.add_argument("--budgets", action="store_true", help="the results are of --device-gb")
    parser.add_argument("--markdown", type=Path, help="where the page goes; printed without")
    options = parser.parse_args(arguments)
    write = budgets_markdown if options.budgets else markdown
    page = write((path.stem, json.loads(path.read_text())) for path in sorted(options.results))
    if options.markdown is None:
        print(page)
    else:
        options.markdown.write_text(page)


if __name__ == "__main__":
    main()
