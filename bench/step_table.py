"""Turns results of `bench.step` into markdown tables and a picture: time against peak memory.

    python -m bench.step_table step.json more.json --markdown step.md --chart step.png

Bold: this project's programs below the floors for offload, failed checks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.grouped_mlp_table import NONE, bold, table
from bench.step_figures import MAX_FIRST_STEP, MAX_OVERHEAD, MIN_R, MIN_SPEEDUP, Row, derive, merge_peaks
from bench.step_variants import VARIANTS
from bench.tables import show

CHECKS = {
    "bits": "Bits against the saved twin",
    "order": "Bits, CONCURRENT against SERIALIZE",
    "steady": "Memory over many steps",
}
_COLOURS = {"bound": "#7f7f7f", "twin": "#1f77b4", "stock": "#ff7f0e", "ours": "#d62728"}
_ROLES = {
    "bound": "other trades", "twin": "saved on the device", "stock": "JAX offload", "ours": "this project",
}  # fmt: skip
_MARKERS = {"scanned": "o", "unrolled": "s"}


@dataclass(frozen=True)
class Results:
    """The content of one or more result files.

    Attributes:
      sources: the provenance of each file.
      rows: workload, then variant -> row, with figures computed anew against the rows of all files.
      checks: kind of check -> its rows.
    """

    sources: list[Row] = field(default_factory=list)
    rows: dict[str, dict[str, Row]] = field(default_factory=dict)
    checks: dict[str, list[Row]] = field(default_factory=lambda: {kind: [] for kind in CHECKS})

    @property
    def failures(self) -> Iterator[str]:
        """Missing figures and their causes, as sentences."""
        for workload, rows in self.rows.items():
            for variant, row in rows.items():
                for key in ("error", "peak_error", "trace_error", "facts_error"):
                    if key in row:
                        yield f"{workload}, {VARIANTS[variant].label}: {row[key]}"


def combine(files: Iterable[Row]) -> Results:
    """Joins result files; of two rows for the same variant the later file's holds.

    The times of a file are from a single run of alternating samples. Where a file repeats some variants of a
    workload, the times of the other variants are from another run.
    """
    results, peaks = Results(), []
    for content in files:
        results.sources.append(content)
        for row in content.get("rows", ()):
            results.rows.setdefault(row["workload"], {})[row["variant"]] = row
        peaks += content.get("peaks", ())
        for kind, rows in results.checks.items():
            rows += content.get(kind, ())
    rows = [row for by_variant in results.rows.values() for row in by_variant.values()]
    merge_peaks(rows, peaks)
    derive(rows)
    return results


def _number(value: float | None, form: str, scale: float = 1.0) -> str:
    return NONE if value is None else format(value * scale, form)


def _above(value: float | None, ceiling: float) -> bool:
    return value is not None and value > ceiling


def _below(value: float | None, floor: float) -> bool:
    return value is not None and value < floor


def times_table(rows: dict[str, Row]) -> str:
    """The table of a workload: time, memory, and figures derived from both."""
    header = [
        "variant", "ms (quartiles)", "overhead", "of both forms", "x stock", "peak GB", "temp GB", "host GB",
        "R", "R, compiled", "R of both", "exposed ms", "first step s", "x twin", "compile s",
    ]  # fmt: skip
    cells = [_cells(variant, rows[variant]) for variant in VARIANTS if "ms" in rows.get(variant, ())]
    return table(header, cells) if cells else ""


def _cells(variant: str, row: Row) -> list[str]:
    ours = row["role"] == "ours"
    overhead, measured = row["overhead"], row["r"] if row["r"] is not None else row["r_compiled"]
    return [
        VARIANTS[variant].label,
        f"{row['ms']:.2f} ({row['q1_ms']:.2f} to {row['q3_ms']:.2f})",
        bold(_number(overhead, "+.2%"), ours and _above(overhead, MAX_OVERHEAD)),
        _number(row["overhead_any"], "+.2%"),
        bold(_number(row["speedup"], ".2f"), ours and _below(row["speedup"], MIN_SPEEDUP)),
        _number(row["peak_bytes"], ".2f", 1e-9),
        _number(row.get("temp_bytes"), ".2f", 1e-9),
        _number(row.get("host_bytes"), ".2f", 1e-9),
        bold(_number(row["r"], ".1%"), ours and _below(row["r"], MIN_R)),
        bold(_number(row["r_compiled"], ".1%"), ours and row["r"] is None and _below(measured, MIN_R)),
        _number(row["r_any"] if row["r_any"] is not None else row["r_compiled_any"], ".1%"),
        _number(row.get("exposed_ms"), ".2f"),
        _number(row.get("first_step_s"), ".2f"),
        bold(
            _number(row["first_step_ratio"], ".1f"), ours and _above(row["first_step_ratio"], MAX_FIRST_STEP)
        ),
        _number(row.get("compile_s"), ".1f"),
    ]


def checks_table(kind: str, rows: list[Row]) -> str:
    """The comparisons of bits, or the long runs."""
    if kind == "steady":
        header = ["workload", "variant", "steps", "host memory grew by MB", "device memory grew by MB"]
        cells = [
            [
                row["workload"],
                VARIANTS[row["variant"]].label,
                str(row.get("steps", 0)),
                bold(_number(row.get("host_growth_bytes"), ".1f", 1e-6), row.get("ok") is False),
                _number(row.get("device_growth_bytes"), ".1f", 1e-6),
            ]
            for row in rows
        ]
        return table(header, cells)
    header = ["workload", "variant", "seed", "steps", "steps with equal bits", "loss, first to last"]
    cells = []
    for row in rows:
        equal = f"{row['equal_steps']}" if "equal_steps" in row else f"not compared: {row.get('error')}"
        loss = f"{row['first_loss']:.4f} to {row['last_loss']:.4f}" if "last_loss" in row else NONE
        at = [row["workload"], VARIANTS[row["variant"]].label, str(row.get("seed", NONE))]
        cells.append([*at, str(row.get("steps", 0)), bold(equal, not row.get("ok")), loss])
    return table(header, cells)


def markdown(results: Results) -> str:
    """All tables, with the origin of the figures and the failures."""
    return "\n".join(_sections(results))


def _sections(results: Results) -> Iterator[str]:
    for source in results.sources:
        known = ", ".join(f"{name} {v}" for name, v in (source.get("versions") or {}).items() if v)
        yield f"{source.get('device')}, {source.get('date')}; {known}; commit {source.get('commit')}:\n"
        yield f"    {source.get('command')}\n"
    times = {workload: times_table(rows) for workload, rows in results.rows.items()}
    if any(times.values()):
        yield (
            "Medians of a step, forward and backward. Overhead and R (bytes of device peak saved, of those "
            "moved) are against the best saved twin of the same form, scanned or unrolled, and then of both; "
            "`x stock` is how many times longer stock offload of the same form takes. Peak and R are "
            "measured in a process of its own; `R, compiled` is by the compiler's figures. Exposed: copies "
            f"that no kernel hid. Bold: overhead above {MAX_OVERHEAD:.1%}, R below {MIN_R:.1%}, less than "
            f"{MIN_SPEEDUP} times as fast as stock offload, a first step (with the pool of pinned memory "
            f"already there) of more than {MAX_FIRST_STEP} times the twin's.\n"
        )
    for workload, text in times.items():
        if text:
            yield f"### {workload}\n"
            yield text
    for kind, title in CHECKS.items():
        if results.checks[kind]:
            yield f"### {title}\n"
            yield checks_table(kind, results.checks[kind])
    if failures := list(results.failures):
        yield "### Not measured\n"
        yield "\n".join(f"- {failure}" for failure in failures) + "\n"


def draw(results: Results, path: Path) -> None:
    """Draws time against peak memory, a panel for each workload and a point for each variant.

    Peaks are the measured ones, or the compiler's where a workload has none.

    Raises:
      ValueError: no result file has a time.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    timed = {workload: _points(rows) for workload, rows in results.rows.items()}
    timed = {workload: points for workload, points in timed.items() if points}
    if not timed:
        raise ValueError("draw: no result has a time; run bench.step without --no-times, --bits and --steady")
    columns = min(3, len(timed))
    lines = -(-len(timed) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(6 * columns, 4.4 * lines), squeeze=False)
    for ax in axes.flat[len(timed) :]:
        ax.set_visible(False)
    shown: dict[str, Any] = {}
    for ax, (workload, points) in zip(axes.flat, timed.items(), strict=False):
        for variant, (gigabytes, ms) in points.items():
            v = VARIANTS[variant]
            at = ax.scatter(gigabytes, ms, s=42, c=_COLOURS[v.role], marker=_MARKERS[v.form], zorder=3)
            shown.setdefault(f"{_ROLES[v.role]}, {v.form}", at)
        for at, labels in _labels(points):
            ax.annotate(
                "\n".join(labels), at, xytext=(5, 0), textcoords="offset points", fontsize=7, va="center"
            )
        ax.margins(0.15)
        ax.set_title(workload, fontsize=10)
        measured = all(results.rows[workload][variant]["peak_bytes"] for variant in points)
        ax.set_xlabel(f"device memory at its fullest, GB ({'measured' if measured else 'by the compiler'})")
        ax.set_ylabel("ms a step")
        ax.grid(alpha=0.3)
        ax.spines[["top", "right"]].set_visible(False)
    figure.legend(shown.values(), shown.keys(), loc="lower center", ncols=4, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.09 if lines == 1 else 0.06, 1, 1))
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _points(rows: dict[str, Row]) -> dict[str, tuple[float, float]]:
    """By variant, gigabytes and milliseconds; one kind of peak for all of a workload."""
    timed = {variant: row for variant, row in rows.items() if "ms" in row}
    key = "peak_bytes" if all(row["peak_bytes"] for row in timed.values()) else "device_peak_bytes"
    return {variant: (row[key] / 1e9, row["ms"]) for variant, row in timed.items()}


def _labels(points: dict[str, tuple[float, float]]) -> Iterator[tuple[tuple[float, float], list[str]]]:
    """Labels and their positions: points closer than the size of a label share a label, slowest first."""
    spans = [max(axis) - min(axis) or 1.0 for axis in zip(*points.values(), strict=True)]
    left = sorted(points.items(), key=lambda item: -item[1][1])
    while left:
        _, at = left[0]
        near = [
            (variant, p)
            for variant, p in left
            if abs(p[0] - at[0]) < 0.15 * spans[0] and abs(p[1] - at[1]) < 0.04 * spans[1]
        ]
        left = [item for item in left if item not in near]
        yield max(p for _, p in near), [VARIANTS[variant].label for variant, _ in near]


def main(arguments: list[str] | None = None) -> None:
    show("Tables and a picture of results of bench.step.", "picture", combine, markdown, draw, arguments)


if __name__ == "__main__":
    main()
