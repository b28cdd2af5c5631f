"""The file of losses."""

from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from models import history
from models.history import History


def test_lines_are_there_at_once_and_come_back_bit_for_bit(tmp_path: Path):
    with History(tmp_path / "losses.jsonl") as losses:
        losses.append(1, loss=0.1 + 0.2, lr=1e-45)
        losses.append(1, held_out=2.5)
        assert history.read(losses.path) == [
            {"step": 1, "loss": 0.1 + 0.2, "lr": 1e-45},
            {"step": 1, "held_out": 2.5},
        ]
    assert losses.of("loss") == [(1, 0.1 + 0.2)]
    assert losses.of("held_out") == [(1, 2.5)]


def test_a_resumed_run_drops_what_it_makes_again(tmp_path: Path):
    with History(tmp_path / "losses.jsonl") as first:
        for step in range(1, 6):
            first.append(step, loss=float(step))
    with History(tmp_path / "losses.jsonl", upto=3) as second:
        assert second.of("loss") == [(1, 1.0), (2, 2.0), (3, 3.0)]
        second.append(4, loss=44.0)
    assert [r["loss"] for r in history.read(second.path)] == [1.0, 2.0, 3.0, 44.0]


@settings(deadline=None)
@given(cut=st.integers(0, 60))
def test_a_file_cut_anywhere_gives_its_whole_lines(tmp_path_factory, cut):
    path = tmp_path_factory.mktemp("history") / "losses.jsonl"
    whole = '{"step": 1, "loss": 1.0}\n{"step": 2, "loss": 2.0}\n'
    path.write_text(whole[:cut])
    assert [r["step"] for r in history.read(path)] == [1, 2][: whole[:cut].count("\n")]


def test_lines_without_losses_are_left_out_and_counted(tmp_path: Path):
    path = tmp_path / "losses.jsonl"
    path.write_bytes(b'{"step": 1, "loss": 1.0}\ngarbage\n[2]\n\xff\n{"step": 2, "loss": 2.0}\n')
    with History(path, upto=9) as losses:
        assert losses.num_unreadable == 3
        assert losses.of("loss") == [(1, 1.0), (2, 2.0)]
    assert path.read_text() == '{"step": 1, "loss": 1.0}\n{"step": 2, "loss": 2.0}\n'
