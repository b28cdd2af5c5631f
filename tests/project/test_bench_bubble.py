"""The benchmark of a pipeline's bubble: its figures, all of it at a tiny size."""

import json

import pytest

from bench import bubble
from models.pipeline import Schedule


@pytest.fixture(autouse=True)
def pool_of_pinned_memory(monkeypatch):
    """What the program would set for the process."""
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "64")


@pytest.mark.parametrize("virtual", [1, 2])
def test_ticks_alone_make_the_bubble_of_the_formula(virtual):
    schedules = [Schedule(4, virtual, m) for m in (4, 8, 16)]
    rows = [{"microbatches": s.microbatches, "ms": 3.0 * s.ticks} for s in schedules]
    bubble.derive(rows)
    assert [row["bubble"] for row in rows] == pytest.approx([s.bubble for s in schedules])
    assert rows[0]["microbatch_ms"] == pytest.approx(3.0 * virtual)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--microbatches", "4"], "at least two different numbers, got [4]"),
        (["--microbatches", "4", "7"], "a multiple of 2 microbatches"),
        (["--layers", "3"], "2 equal stages, got 3"),
    ],
)
def test_what_cannot_run_is_refused(options, message, capsys):
    with pytest.raises(SystemExit):
        bubble.parse(["--out", "x.json", *options])
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.long
def test_a_whole_run(tmp_path):
    out = tmp_path / "bubble.json"
    tiny = ["--tiny", "--layers", "2", "--virtual", "1", "--microbatches", "2", "4", "--batch", "1"]
    bubble.main(["--out", str(out), *tiny, "--repeats", "2"])
    rows = json.loads(out.read_text())["rows"]
    assert [(row["microbatches"], row["ticks"], row["formula"]) for row in rows] == [
        (2, 3, 0.5),
        (4, 5, 0.25),
    ]
    assert all(row["ms"] > 0 and row["repeats"] == 2 for row in rows)
