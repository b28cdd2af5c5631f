"""The benchmark of steps in other people's styles: its command line, its figures, a run at a tiny size."""

import json

import pytest

from bench import clients


def test_what_cannot_run_is_refused(capsys):
    with pytest.raises(SystemExit):
        clients.parse(["--variants", "saved,best"])
    assert "unknown: best" in capsys.readouterr().err


def test_each_variant_goes_on_from_the_state_of_the_previous():
    functions = {name: lambda state, batch: (state + batch, state + batch) for name in ("a", "b")}
    rows = clients.time_variants(functions, 0.0, 1.0, steps=3, samples=4)
    assert {len(row["samples_ms"]) for row in rows.values()} == {4}
    assert max(row["loss"] for row in rows.values()) == 2 * 3 * (4 + clients.WARMUPS)


def test_a_whole_run(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXOFF_CACHE_DIR", str(tmp_path))
    out = tmp_path / "ssm.json"
    tiny = ["--program", "ssm", "--sizes", "tiny", "--layers", "2", "--steps", "1", "--samples", "2"]
    clients.main([*tiny, "--variants", "saved,jaxoff,tuned", "--out", str(out)])
    result = json.loads(out.read_text())
    assert set(result["rows"]) == {"saved", "jaxoff", "tuned"}
    assert all(row["ms"] > 0 and len(row["samples_ms"]) == 2 for row in result["rows"].values())
    assert result["sizes"]["layers"] == 2
    assert result["provenance"]["options"]["program"] == "ssm"


@pytest.mark.long  # compiles for eight devices
def test_a_divided_run(tmp_path):
    out = tmp_path / "divided.json"
    tiny = ["--sizes", "tiny", "--layers", "2", "--steps", "1", "--samples", "1", "--divide", "rows"]
    clients.main([*tiny, "--variants", "stock,ordered", "--out", str(out)])
    result = json.loads(out.read_text())
    stock, ordered = result["rows"]["stock"], result["rows"]["ordered"]
    assert stock["loss"] > ordered["loss"] > 0  # a step later
    assert result["sizes"]["batch"] == clients.PROGRAMS["decoder-scan"].shrink().sizes.batch * 8
