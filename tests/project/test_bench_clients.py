"""The benchmark of steps in other people's styles: its command line, its figures, a run at a tiny size."""

import json
from pathlib import Path

import jax.numpy as jnp
import pytest

from bench import clients, clients_table


def test_what_cannot_run_is_refused(capsys):
    with pytest.raises(SystemExit):
        clients.parse(["--variants", "saved,best"])
    assert "unknown: best" in capsys.readouterr().err


def test_each_variant_goes_on_from_the_state_of_the_previous():
    functions = {name: lambda state, batch: (state + batch, state + batch) for name in ("a", "b")}
    rows = clients.time_variants(functions, jnp.zeros(()), 1.0, steps=3, samples=4)
    assert {len(row["samples_ms"]) for row in rows.values()} == {4}
    assert max(row["loss"] for row in rows.values()) == 2 * 3 * (4 + clients.WARMUPS)


@pytest.mark.long
def test_a_whole_run(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXOFF_CACHE_DIR", str(tmp_path))
    out = tmp_path / "decoder.json"
    tiny = ["--program", "decoder-scan", "--sizes", "tiny", "--layers", "2", "--steps", "1", "--samples", "2"]
    clients.main([*tiny, "--variants", "saved,jaxoff", "--out", str(out)])
    result = json.loads(out.read_text())
    assert set(result["rows"]) == {"saved", "jaxoff"}
    assert all(row["ms"] > 0 and len(row["samples_ms"]) == 2 for row in result["rows"].values())
    assert result["sizes"]["layers"] == 2
    assert result["provenance"]["options"]["program"] == "decoder-scan"


@pytest.mark.long  # compiles for eight devices
def test_a_divided_run(tmp_path):
    out = tmp_path / "divided.json"
    tiny = ["--sizes", "tiny", "--layers", "2", "--steps", "1", "--samples", "1", "--divide", "rows"]
    clients.main([*tiny, "--variants", "stock,ordered", "--out", str(out)])
    result = json.loads(out.read_text())
    stock, ordered = result["rows"]["stock"], result["rows"]["ordered"]
    assert stock["loss"] > ordered["loss"] > 0  # a step later
    assert result["sizes"]["batch"] == clients.PROGRAMS["decoder-scan"].shrink().sizes.batch * 8


def test_the_page_is_that_of_the_results():
    root = Path(__file__).parents[2]
    found = sorted((root / "bench" / "results" / "clients").glob("*.json"))
    page = clients_table.markdown((path.stem, json.loads(path.read_text())) for path in found)
    assert (root / "docs" / "clients.md").read_text() == page
    found = sorted((root / "bench" / "results" / "budget").glob("*.json"))
    page = clients_table.budgets_markdown((path.stem, json.loads(path.read_text())) for path in found)
    assert (root / "docs" / "budgets.md").read_text() == page


@pytest.mark.parametrize(
    ("ms", "gigabytes", "fails"),
    [(100.0, 51.9, False), (90.0, 52.1, True), (101.1, 51.0, True)],
)
def test_a_budget_that_is_overrun_or_slower_than_what_fits_is_bold(ms, gigabytes, fails):
    rows = {"saved": {"ms": 90.0, "peak_bytes": 60e9}, "recomputed": {"ms": 100.5, "peak_bytes": 50e9}}
    rows["planned-52"] = {"ms": ms, "peak_bytes": 1e9 * gigabytes}
    page = clients_table.budgets_markdown([("decoder", {"provenance": {"device": "1 x H100"}, "rows": rows})])
    assert f"52: {ms:.1f}, {gigabytes:.2f}" in page
    assert (f"**52: {ms:.1f}" in page) == fails


@pytest.mark.long  # compiles ten programs
def test_a_budget_that_nothing_fits_is_left_out(tmp_path, capsys):
    out = tmp_path / "decoder.json"
    tiny = ["--sizes", "tiny", "--layers", "2", "--steps", "1", "--samples", "1"]
    clients.main([*tiny, "--variants", "recomputed", "--device-gb", "1", "0.0001", "--out", str(out)])
    assert set(json.loads(out.read_text())["rows"]) == {"recomputed", "planned-1"}
    assert "no program fits 100.00 kB" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("ms", "gigabytes", "fails"),
    [(100.4, 48.4, False), (100.6, 48.0, True), (95.0, 48.6, True), (100.4, 40.0, False)],
)
def test_a_row_that_takes_more_memory_or_time_is_bold(ms, gigabytes, fails):
    figures = {"saved": (90.0, 50.0), "stock": (110.0, 48.0), "stock-no-graphs": (100.0, 48.0)}
    rows = {name: {"ms": t, "peak_bytes": 1e9 * g} for name, (t, g) in figures.items()}
    rows["jaxoff"] = {"ms": ms, "peak_bytes": 1e9 * gigabytes, "recipe": "ordered", "host_bytes": 2e9}
    rows["jaxoff"]["exposed_ms"] = 0.0
    origin = {"device": "1 x H100", "date": "2026-11-30T13:45:00+00:00"}
    page = clients_table.markdown([("decoder", {"provenance": origin, "rows": rows})])
    assert f"{ms:.1f}, {gigabytes:.2f} (ordered)" in page
    assert "| H100 | 2026-11-30 | 90.0, 50.00 |" in page
    assert f"| {(50 - gigabytes) / 2:.0%} | -, 0.0 |" in page
    assert ("**" in page) == fails
