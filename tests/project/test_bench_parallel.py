"""The benchmark on several devices: its command line, its figures, all of it at a tiny size."""

import json

import pytest

from bench import parallel

TINY = ["--tiny", "--mesh", "pipe=2", "--layers", "2", "--microbatches", "2", "--variants", "jaxoff,saved"]


@pytest.fixture(autouse=True)
def allocator_settings(monkeypatch):
    """What the program would set for the process."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "64")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--mesh", "pipes=2"], "Did you mean 'pipe'"),
        (["--mesh", "pipe=2", "--layers", "3"], "2 equal stages, got 3"),
        (["--mesh", "pipe=2", "--microbatches", "3"], "a multiple of 2 microbatches"),
        (["--mesh", "data=2", "--capacity", "0"], "greater than 0"),
        (["--mesh", "data=2", "--variants", "best"], "unknown: best"),
        (["--mesh", "data=2", "--ahead", "--tiny"], "leave out --tiny and --bits"),
    ],
)
def test_what_cannot_run_is_refused(options, message, capsys):
    with pytest.raises(SystemExit):
        parallel.parse(["--out", "x.json", *options])
    assert message in " ".join(capsys.readouterr().err.split())


def test_figures_are_against_the_fastest_and_the_smallest_twin():
    rows = [
        {"variant": "jaxoff", "role": "ours", "ms": 99.0, "temp_bytes": 600},
        {"variant": "stock_offload", "role": "stock", "ms": 121.0, "temp_bytes": 700},
        {"variant": "saved", "role": "twin", "ms": 110.0, "temp_bytes": 900, "peak_bytes": [2000, 2100]},
        {"variant": "saved_concurrent", "role": "twin", "ms": 100.0, "temp_bytes": 1000},
    ]  # fmt: skip
    rows[0]["peak_bytes"], rows[3]["peak_bytes"] = [1600, None], [2200, 2050]
    rows[0] |= {"moved_bytes": 800, "host_bytes": 400}  # of two microbatches, one after the other
    rows[1] |= {"moved_bytes": 400, "host_bytes": 500}  # with a spare row
    parallel.derive(rows, tokens=1000)
    assert rows[0]["overhead"] == pytest.approx(-0.01)
    assert rows[0]["speedup"] == pytest.approx(121 / 99)
    assert rows[0]["r"] == [1.0, None]
    assert rows[0]["r_compiled"] == pytest.approx(0.75)
    assert rows[1]["r_compiled"] == pytest.approx(0.5)
    assert rows[0]["tokens_per_s"] == pytest.approx(1000 / 0.099)
    assert rows[3]["overhead"] == 0.0
    assert "r" not in rows[3]


@pytest.mark.long
def test_a_whole_run(tmp_path):
    out = tmp_path / "parallel.json"
    parallel.main([*TINY, "--out", str(out), "--repeats", "2", "--sample-ms", "1"])
    result = json.loads(out.read_text())
    assert result["workload"] == "tiny-l2-pipe=2-v1-m2-b1"
    assert [row["variant"] for row in result["rows"]] == ["jaxoff", "saved"]
    assert not any("error" in row or "trace_error" in row for row in result["rows"]), result["rows"]
    assert all(row["ms"] > 0 and row["repeats"] == 2 for row in result["rows"])
    assert result["rows"][0]["overhead"] == result["rows"][0]["ms"] / result["rows"][1]["ms"] - 1
    assert result["link_gbps"] is None  # on no GPU
    assert result["options"]["mesh"] == "pipe=2"


@pytest.mark.long
def test_bits_are_compared_over_many_steps(tmp_path):
    out = tmp_path / "bits.json"
    parallel.main([*TINY, "--out", str(out), "--bits", "3"])
    bits = json.loads(out.read_text())["bits"]
    assert bits["steps"] == 3, bits
    assert bits["finite"]
    assert bits["losses"] == 3


@pytest.mark.long
def test_time_that_is_up_ends_bits_unless_all_steps_are_done(tmp_path):
    def found(steps):
        out = tmp_path / "bits.json"
        parallel.main([*TINY, "--out", str(out), "--bits", str(steps), "--limit-s", "0.001"])
        return json.loads(out.read_text())["bits"]

    assert found(2)["error"] == "TimeoutError: time was up after 1 steps"
    done = found(1)
    assert done["steps"] == 1 and "error" not in done
