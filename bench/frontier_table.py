"""Turns results of `bench.frontier` into a markdown table and a picture: time against peak memory.

python -m bench.frontier_table frontier.json --markdown frontier.md --chart frontier.png
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from bench.grouped_mlp_table import table
from bench.tables import show

_COLOURS = {
    "plan": "#d62728",
    "layers": "#2ca02c",
    "stock": "#ff7f0e",
    "maxtext": "#1f77b4",
    "single": "#9467bd",
    "bound": "#7f7f7f",
    "every": "#c7c7c7",
}
_LABELS = {
    "plan": "jaxoff.plan",
    "layers": "jaxoff.plan, by layer",
    "stock": "stock policies",
    "maxtext": "MaxText's",
    "single": "one name",
    "every": "all placements",
}
_PLANS = ("plan", "layers")
_HEADINGS = (
    "point",
    "step",
    "predicted",
    "for this card",
    "peak",
    "predicted",
    "budget",
    "steps in it",
)

_AGAINST = ("plan", "the best of all that fit", "gain", "the best that moves nothing", "gain")

type Row = dict[str, Any]
type Measured = Callable[[Row], float | None]


def combine(files: Iterable[Row]) -> dict[str, list[Row]]:
    """The rows of result files by workload; of two rows for a point the later file's holds."""
    found: dict[str, dict[str, Row]] = {}
    for file in files:
        for row in file["rows"]:
            found.setdefault(row["workload"], {})[row["point"]["name"]] = row
    return {workload: list(rows.values()) for workload, rows in found.items()}


def step_ms(row: Row) -> float | None:
    return row.get("time", {}).get("ms")


def peak_bytes(row: Row) -> int | None:
    """Measured in a process of its own; by the compiler where the process failed or was not run."""
    memory, time = row.get("memory", {}), row.get("time", {})
    return memory.get("peak_bytes") or memory.get("device_peak_bytes") or time.get("device_peak_bytes")


def markdown(results: dict[str, list[Row]]) -> str:
    """For each workload: its points, plans against points within their budgets, and failures."""
    parts = []
    for workload, rows in results.items():
        lines = [_cells(row) for row in rows]
        parts.append(f"**{workload}**\n\n{table(_HEADINGS, lines)}")
        gains = [_gains(row, rows) for row in rows if _is_plan(row) and step_ms(row)]
        parts += [table(_AGAINST, gains)] if gains else []
        kinds: list[tuple[str, str, Measured]] = [
            ("Times", "ms", step_ms),
            ("Peaks", "peak_bytes", peak_bytes),
        ]
        parts += [line for kind in kinds if (line := _accuracy(*kind, rows))]
        errors = [
            f"- {row['point']['name']}, {phase}: {row[phase]['error']}"
            for row in rows
            for phase in ("memory", "time")
            if "error" in row.get(phase, {})
        ]
        parts += ["\n".join(errors)] if errors else []
    return "\n\n".join(parts) + "\n"


def _is_plan(row: Row) -> bool:
    return row["point"]["role"] in _PLANS


def _offloads(row: Row) -> bool:
    policy = row["point"]["policy"] or {}
    dots = row["point"]["stock"], policy.get("unmarked")
    return "offload_dots" in dots or bool(policy.get("offload"))


def _gains(plan: Row, rows: list[Row]) -> list[str]:
    """By which part of the plan's time the fastest placements within its budget take longer."""
    budget = plan["point"]["budget"]
    fitting = [
        (ms, row)
        for row in rows
        if (ms := step_ms(row))
        and not _is_plan(row)
        and (peak_bytes(row) or row["point"]["predicted"].get("peak_bytes", math.inf)) <= budget
    ]
    cells = [plan["point"]["name"]]
    for known in (fitting, [(ms, row) for ms, row in fitting if not _offloads(row)]):
        if known:
            ms, best = min(known, key=lambda entry: entry[0])
            cells += [best["point"]["name"], f"{ms / plan['time']['ms'] - 1:+.1%}"]
        else:
            cells += ["", ""]
    return cells


def _accuracy(what: str, key: str, measured: Measured, rows: list[Row]) -> str:
    """The range of the errors of predictions, in a line; empty without any."""
    pairs = [(row["point"]["predicted"].get(key), measured(row)) for row in rows]
    errors = sorted(predicted / value - 1 for predicted, value in pairs if predicted and value)
    if not errors:
        return ""
    half = statistics.median(map(abs, errors))
    return (
        f"{what} of {len(errors)}: predicted {errors[0]:+.1%} to {errors[-1]:+.1%}, half within {half:.1%}."
    )


def _cells(row: Row) -> list[str]:
    point, predicted = row["point"], row["point"]["predicted"]
    ms, peak, budget = step_ms(row), peak_bytes(row), point["budget"]
    steps = row.get("memory", {}).get("steps")
    return [
        ", ".join([point["name"], *point.get("also", ())]),
        "" if ms is None else f"{ms:.1f} ms",
        _against(predicted.get("ms"), ms, "{:.1f} ms"),
        _against(row.get("time", {}).get("predicted_ms"), ms, "{:.1f} ms"),
        "" if peak is None else f"{peak / 1e9:.2f} GB",
        _against(predicted.get("peak_bytes"), peak, "{:.2f} GB", 1e9),
        "" if budget is None else f"{budget / 1e9:.2f} GB",
        "" if budget is None or steps is None else str(steps),
    ]


def _against(predicted: float | None, measured: float | None, text: str, unit: float = 1.0) -> str:
    if predicted is None:
        return ""
    shown = text.format(predicted / unit)
    return shown if not measured else f"{shown} ({predicted / measured - 1:+.1%})"


def draw(results: dict[str, list[Row]], path: Path) -> None:
    """Time against peak memory: the plans a line, all else points."""
    from matplotlib.figure import Figure

    columns = max(1, min(2, len(results)))
    lines = max(1, -(-len(results) // columns))
    figure = Figure(figsize=(7 * columns, 5 * lines), layout="constrained")
    for index, (workload, rows) in enumerate(results.items()):
        axes = figure.add_subplot(lines, columns, index + 1)
        for role, colour in _COLOURS.items():
            known = [
                (peak / 1e9, ms)
                for row in rows
                if row["point"]["role"] == role and (peak := peak_bytes(row)) and (ms := step_ms(row))
            ]
            if not known:
                continue
            known.sort()
            style = "o-" if role in _PLANS else "o"
            axes.plot(*zip(*known, strict=True), style, color=colour, label=_LABELS.get(role))
        _label(axes, [row for row in rows if not _is_plan(row)])
        axes.set(title=workload, xlabel="peak device memory, GB", ylabel="step, ms")
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    figure.savefig(path, dpi=150)


def _label(axes: Any, rows: list[Row]) -> None:
    """Names points; points at the same place share a label."""
    axes.margins(x=0.2, y=0.08)
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    labels: list[tuple[float, float, list[str]]] = []
    for row in sorted(rows, key=lambda row: step_ms(row) or 0, reverse=True):
        peak, ms, name = peak_bytes(row), step_ms(row), row["point"]["name"]
        if not (peak and ms):
            continue
        x, y = peak / 1e9, ms
        near = (
            names
            for a, b, names in labels
            if abs(a - x) < 0.03 * (right - left) and abs(b - y) < 0.03 * (high - low)
        )
        if (names := next(near, None)) is None:
            labels.append((x, y, [name]))
        else:
            names.append(name)
    for x, y, names in labels:
        side, away = ("right", -3) if x > left + 0.75 * (right - left) else ("left", 3)
        axes.annotate(
            "\n".join(names), (x, y), fontsize=6, xytext=(away, 3), textcoords="offset points", ha=side
        )


if __name__ == "__main__":
    show(__doc__ or "", "picture of time against memory", combine, markdown, draw)
