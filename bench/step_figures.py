"""Figures derived from rows of `bench.step`: overhead against the saved twin, R of the offloaded bytes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

type Row = dict[str, Any]

# Floors for offload: time against the saved twin, peak lowered by offloaded bytes, against stock offload.
MAX_OVERHEAD, MIN_R, MIN_SPEEDUP = 0.003, 0.998, 1.15
# The first step against the twin's, without the allocation of pinned memory.
MAX_FIRST_STEP = 2.0
DERIVED = (
    "overhead",
    "overhead_any",
    "r",
    "r_any",
    "r_compiled",
    "r_compiled_any",
    "speedup",
    "first_step_ratio",
    "against",
)


def merge_peaks(rows: Iterable[Row], peaks: Iterable[Row]) -> None:
    """Adds to each row the memory peak and the first step measured in a process of its own."""
    by_key = {(p["workload"], p["variant"]): p for p in peaks}
    for row in rows:
        peak = by_key.get((row["workload"], row["variant"]), {})
        row.setdefault("peak_bytes", None)
        if "error" in peak:
            row["peak_error"] = peak["error"]
        for key in ("peak_bytes", "cold_first_step_s", "cold_second_step_s"):
            if peak.get(key) is not None:
                row[key] = peak[key]


def derive(rows: Iterable[Row]) -> None:
    """Computes each row's figures against the other rows of its workload.

    `overhead = ms / twin_ms - 1` and `R = (twin_peak - peak) / bytes offloaded`, against the best saved twin
    of the same form, scanned or unrolled; `_any` against the best of both forms. The fastest twin and the
    twin of least memory may be two programs. `r` is of measured peaks, `r_compiled` of the compiler's.
    `speedup` is the time of stock offload of the same form over the row's.
    """
    by_workload: dict[str, list[Row]] = {}
    for row in rows:
        by_workload.setdefault(row["workload"], []).append(row)
    for group in by_workload.values():
        twins = [row for row in group if row["role"] == "twin"]
        for row in group:
            alike = [twin for twin in twins if twin["form"] == row["form"]]
            stock = [r for r in group if r["variant"].startswith("stock_") and r["form"] == row["form"]]
            fastest = _least(alike, "ms")
            row |= dict.fromkeys(DERIVED)
            row["against"] = fastest and fastest["variant"]
            row["overhead"], row["overhead_any"] = (_excess(row, _least(t, "ms")) for t in (alike, twins))
            row["r"], row["r_any"] = (_saved_part(row, t, "peak_bytes") for t in (alike, twins))
            row["r_compiled"], row["r_compiled_any"] = (
                _saved_part(row, t, "device_peak_bytes") for t in (alike, twins)
            )
            if fastest is not None and fastest.get("first_step_s") and row.get("first_step_s"):
                row["first_step_ratio"] = row["first_step_s"] / fastest["first_step_s"]
            slow = _least(stock, "ms")
            if slow is not None and row.get("ms"):
                row["speedup"] = slow["ms"] / row["ms"]


def _least(rows: Iterable[Row], key: str) -> Row | None:
    return min((row for row in rows if row.get(key)), key=lambda row: row[key], default=None)


def _excess(row: Row, twin: Row | None) -> float | None:
    return row["ms"] / twin["ms"] - 1 if twin is not None and row.get("ms") else None


def _saved_part(row: Row, twins: Iterable[Row], key: str) -> float | None:
    twin, moved = _least(twins, key), row.get("moved_bytes")
    return (twin[key] - row[key]) / moved if twin is not None and row.get(key) and moved else None
