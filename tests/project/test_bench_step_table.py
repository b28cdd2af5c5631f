"""What the step benchmark's rows say: figures against the twins, tables, picture."""

import json

import pytest

from bench import step_figures, step_table
from bench.step_variants import VARIANTS


def row(variant, ms, peak_gb, *, moved_gb=0, temp_gb=None):
    v = VARIANTS[variant]
    at = {"workload": "dense-b4-l12", "variant": variant, "role": v.role, "form": v.form}
    times = {"ms": ms, "q1_ms": ms, "q3_ms": ms, "calls": 1, "repeats": 3}
    compiled = peak_gb if temp_gb is None else temp_gb
    return at | times | {
        "peak_bytes": peak_gb * 10**9, "device_peak_bytes": compiled * 10**9, "temp_bytes": compiled * 10**9,
        "host_bytes": moved_gb * 10**9, "moved_bytes": moved_gb * 10**9, "exposed_ms": 1.5,
        "first_step_s": 0.5, "compile_s": 20.0,
    }  # fmt: skip


@pytest.fixture
def content():
    """The captured program wins; the ordered one is too slow and too large."""
    rows = [
        row("saved", 500.0, 18), row("saved_concurrent", 510.0, 20), row("saved_unrolled", 400.0, 14),
        row("stock_offload", 625.0, 13, moved_gb=5), row("stock_offload_unrolled", 420.0, 23, moved_gb=5),
        row("captured", 500.5, 13, moved_gb=5), row("ordered", 410.0, 10, moved_gb=5),
        {"workload": "dense-b4-l12", "variant": "no_remat", "role": "bound", "form": "scanned",
         "error": "skipped: needs 200.0 GB of device memory, 130.0 GB can be had"},
    ]  # fmt: skip
    bits = {"workload": "dense-b4-l12", "seed": 0, "steps": 50, "first_loss": 2.0, "last_loss": 1.0}
    return {
        "device": "1 x GPU", "date": "2026-11-21", "versions": {"jax": "0.11.2"}, "commit": "abc",
        "command": "python -m bench.step", "rows": rows, "peaks": [],
        "bits": [bits | {"variant": "captured", "equal_steps": 50, "ok": True},
                 bits | {"variant": "ordered", "equal_steps": 49, "ok": False}],
        "order": [], "steady": [{"workload": "dense-b4-l12", "variant": "auto", "steps": 1000,
                                 "host_growth_bytes": 90e6, "device_growth_bytes": 0, "ok": False}],
    }  # fmt: skip


def test_figures_are_against_the_best_twin_of_the_form_and_of_both(content):
    rows = {r["variant"]: r for r in content["rows"]}
    step_figures.derive(content["rows"])
    captured, ordered = rows["captured"], rows["ordered"]
    assert captured["against"] == "saved"
    assert captured["overhead"] == pytest.approx(0.001)
    assert captured["overhead_any"] == pytest.approx(500.5 / 400 - 1)
    assert captured["r"] == pytest.approx(1.0)  # 18 - 13 of 5
    assert captured["r_any"] == pytest.approx(0.2)  # 14 - 13 of 5
    assert captured["speedup"] == pytest.approx(625 / 500.5)
    assert ordered["against"] == "saved_unrolled"
    assert ordered["overhead"] == pytest.approx(0.025)
    assert ordered["r"] == pytest.approx(0.8)
    assert ordered["speedup"] == pytest.approx(420 / 410)
    assert rows["saved_concurrent"]["overhead"] == pytest.approx(0.02)
    assert rows["saved"]["r"] is None
    assert rows["no_remat"]["overhead"] is None


def test_the_least_memory_and_the_least_time_may_be_of_two_twins():
    rows = [
        row("saved", 510.0, 18),
        row("saved_concurrent", 500.0, 20),
        row("captured", 500.0, 14, moved_gb=5),
    ]
    step_figures.derive(rows)
    assert rows[2]["against"] == "saved_concurrent"
    assert rows[2]["overhead"] == 0.0
    assert rows[2]["r"] == pytest.approx(0.8)


def test_peaks_of_processes_of_their_own_join_the_rows():
    rows = [row("saved", 500.0, 0), row("captured", 500.0, 0, moved_gb=5)]
    for entry in rows:
        del entry["peak_bytes"]
    at = {"workload": "dense-b4-l12"}
    measured = at | {"variant": "saved", "peak_bytes": 7, "cold_first_step_s": 2.0}
    step_figures.merge_peaks(rows, [measured, at | {"variant": "captured", "error": "x"}])
    assert (rows[0]["peak_bytes"], rows[0]["cold_first_step_s"]) == (7, 2.0)
    assert rows[1]["peak_bytes"] is None
    assert rows[1]["peak_error"] == "x"


# Tables


def cells(text, *start):
    """The cells after those given, of the only line that starts with them."""
    head = "| " + " | ".join(start) + " |"
    (line,) = [line for line in text.splitlines() if line.startswith(head)]
    return [cell.strip() for cell in line[len(head) : -1].split("|")]


def test_losing_cases_are_bold(content):
    text = step_table.markdown(step_table.combine([content]))
    won, lost = (
        cells(text, "jaxoff captured")[:12],
        cells(text, "jaxoff ordered", "410.00 (410.00 to 410.00)"),
    )
    assert won[0] == "500.50 (500.50 to 500.50)" and won[1] == "+0.10%" and won[3] == "1.25"
    assert won[7:10] == ["100.0%", "100.0%", "20.0%"]
    assert lost[0] == "**+2.50%**" and lost[2] == "**1.02**" and lost[6] == "**80.0%**"
    assert "**" not in "".join(cells(text, "stock offload"))
    assert cells(text, "dense-b4-l12", "jaxoff ordered", "0", "50")[0] == "**49**"
    assert cells(text, "dense-b4-l12", "jaxoff captured", "0", "50")[0] == "50"
    assert cells(text, "dense-b4-l12", "jaxoff auto", "1000") == ["**90.0**", "0.0"]
    assert "- dense-b4-l12, no remat: skipped: needs 200.0 GB" in text
    assert "1 x GPU, 2026-11-21; jax 0.11.2; commit abc" in text


def test_of_two_files_the_later_holds_and_figures_are_made_anew(content):
    later = {"rows": [row("saved", 480.0, 18)], "peaks": []}
    results = step_table.combine([json.loads(json.dumps(content)), later])
    assert results.rows["dense-b4-l12"]["captured"]["overhead"] == pytest.approx(500.5 / 480 - 1)


def test_tables_and_picture_are_written(content, tmp_path):
    source, page, chart = (tmp_path / name for name in ("step.json", "step.md", "step.png"))
    source.write_text(json.dumps(content))
    step_table.main([str(source), "--markdown", str(page), "--chart", str(chart)])
    assert "### dense-b4-l12" in page.read_text()
    assert chart.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="no result has a time"):
        step_table.draw(step_table.combine([content | {"rows": []}]), chart)


def test_points_that_would_hide_each_others_names_share_them():
    points = {
        "saved": (10.0, 500.0),
        "captured": (5.0, 501.0),
        "auto": (5.1, 500.0),
        "stock_offload": (5.0, 620.0),
    }
    labels = [names for _, names in step_table._labels(points)]
    assert labels == [["stock offload"], ["jaxoff captured", "jaxoff auto"], ["saved"]]
