"""The folder of a run: its lock, its checksums, and the last sound state, whatever happens."""

import dataclasses
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from models import checkpoints
from models.checkpoints import CHECKSUMS, Checkpoints, compute_checksums, find_damage
from models.errors import InputError, SaveError
from models.folder import RunFolder
from models.history import History
from models.program import Program
from tests.models.runs import STEPS, Ended, in_process, one_error_line, snapshot

pytestmark = pytest.mark.usefixtures("compile_once")

# Locks the folder of its last argument, says so, and lives until it is killed.
HOLDS = """
import pathlib, sys, time
from models.folder import RunFolder
folder = RunFolder(pathlib.Path(sys.argv[-1]))
with folder.lock():
    folder.sign_lock()
    print("held", flush=True)
    time.sleep(600)
"""
SHAPES = {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32)}


def copy_of(run: Ended, tmp_path: Path) -> Path:
    shutil.copytree(run.out, tmp_path / "run")
    return tmp_path / "run"


def largest_file(folder: Path) -> Path:
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def save_steps(folder: Path, *steps: int) -> None:
    with Checkpoints(folder, keep=9) as saved:
        for step in steps:
            saved.save(step, {"w": jnp.full((64, 64), float(step))}, {"seed": step})
            saved.wait()


def test_a_second_run_is_refused_while_the_first_lives_and_takes_over_when_it_is_dead(
    arguments, whole: Ended, tmp_path: Path
):
    out = copy_of(whole, tmp_path)
    command = [sys.executable, "-c", HOLDS, str(out)]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert first.stdout.readline() == "held\n"
        before = snapshot(out)
        for words in ([], ["--resume"]):
            second = in_process([*arguments, "--out", str(out), *words], out)
            assert second.status == 2
            assert f"is in use by another run (process {first.pid} on" in one_error_line(second)
        assert snapshot(out) == before
    finally:
        first.send_signal(signal.SIGKILL)
        first.communicate()
    third = in_process([*arguments, "--out", str(out), "--resume"], out)
    assert (third.status, third.stderr) == (0, "")


def test_of_two_holders_the_second_is_refused(tmp_path: Path):
    folder = RunFolder(tmp_path / "run")
    with folder.lock():
        with pytest.raises(InputError, match="is in use by another run \\(just started\\)"), folder.lock():
            pass
        with pytest.raises(InputError, match="is in use"):
            folder.check(resume=False)
    folder.check(resume=False)


def test_a_disk_without_locks_is_used_without(tmp_path: Path, monkeypatch):
    def refuse(stream, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("models.folder.fcntl.flock", refuse)
    with RunFolder(tmp_path / "run").lock():
        assert (tmp_path / "run").is_dir()


def test_a_flipped_bit_is_found_and_the_checkpoint_before_is_used(arguments, whole: Ended, tmp_path: Path):
    out = copy_of(whole, tmp_path)
    flip_a_bit(largest_file(out / "checkpoints" / str(STEPS)))
    ended = in_process([*arguments, "--out", str(out), "--resume"], out)
    assert ended.status == 0
    assert ended.stderr.count("\n") == 1
    assert ended.stderr.startswith("warning: damaged checkpoints, newest first: state/")
    assert f"has another checksum, now {out}/checkpoints/120.damaged; step 80 is sound" in ended.stderr
    assert "resumed  after step 80" in ended.stdout
    assert ended.weights() == whole.weights()
    assert ended.losses == whole.losses


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: largest_file(path / "state").write_bytes(b"short"), r" has 5 bytes of [\d,]+"),
        (lambda path: largest_file(path / "state").unlink(), " is missing"),
        (lambda path: flip_a_bit(largest_file(path / "state")), " has another checksum"),
        (lambda path: (path / CHECKSUMS).write_text("{"), "checksums.json cannot be read"),
        (lambda path: (path / CHECKSUMS).write_text("[3]"), "checksums.json cannot be read"),
        (lambda path: shutil.rmtree(path / "state"), "is missing"),
        # As a checkpoint of an earlier version, without checksums.
        (lambda path: [(path / CHECKSUMS).unlink(), shutil.rmtree(path / "state")], "while reading it"),
        (lambda path: [shutil.rmtree(path), path.mkdir()], "while reading it"),
    ],
)
def test_every_damage_leads_to_the_sound_checkpoint_before(tmp_path: Path, damage, reason):
    save_steps(tmp_path, 1, 2)
    damage(tmp_path / "2")
    with Checkpoints(tmp_path, keep=9) as saved:
        restored = saved.restore_newest(SHAPES, lambda path, run, step: None)
        assert restored is not None and restored.step == saved.latest == 1
        assert float(restored.state["w"][0, 0]) == 1.0
        ((path, found),) = restored.damaged.items()
        assert path == tmp_path / "2.damaged" and path.is_dir()
        assert re.search(reason, found)
        saved.save(2, {"w": jnp.ones((64, 64))}, {})
    assert find_damage(tmp_path / "2") is None


def test_a_checkpoint_without_checksums_is_used_if_it_can_be_read(tmp_path: Path):
    save_steps(tmp_path, 3)
    (tmp_path / "3" / CHECKSUMS).unlink()
    with Checkpoints(tmp_path, keep=9) as saved:
        restored = saved.restore_newest(SHAPES, lambda path, run, step: None)
    assert restored is not None and (restored.step, restored.damaged) == (3, {})


def test_a_folder_without_a_sound_checkpoint_is_refused_and_left_as_it_is(tmp_path: Path):
    save_steps(tmp_path, 1, 2)
    for step in (1, 2):
        flip_a_bit(largest_file(tmp_path / str(step) / "state"))
    before = snapshot(tmp_path)
    with (
        Checkpoints(tmp_path, keep=9) as saved,
        pytest.raises(InputError, match=r"No checkpoint in .* is sound \(2: state/.*; 1: state/.*--out"),
    ):
        saved.restore_newest(SHAPES, lambda path, run, step: None)
    assert snapshot(tmp_path) == before


def test_checksums_cover_the_files_of_state_and_run(tmp_path: Path):
    save_steps(tmp_path, 1)
    listed = json.loads((tmp_path / "1" / CHECKSUMS).read_text())
    assert listed == compute_checksums(tmp_path / "1")
    assert {name.split("/")[0] for name in listed} == {"run", "state"}
    assert len(listed) == sum(p.is_file() for p in (tmp_path / "1").glob("*/**/*"))


def test_a_finished_run_is_trained_further(arguments, whole: Ended, tmp_path: Path, monkeypatch):
    compiled = Program.__dict__["compiled_step"].fget

    def step_of_fewer_steps(program):  # saves a compilation; only the learning rates differ
        options = dataclasses.replace(program.options, steps=STEPS, warmup=STEPS // 10)
        return compiled(Program(options, program.policy))

    monkeypatch.setattr(Program, "compiled_step", property(step_of_fewer_steps))
    out, more = copy_of(whole, tmp_path), ["--steps", str(STEPS + 20)]
    ended = in_process([*arguments, *more, "--out", str(out), "--resume"], out)
    assert (ended.status, ended.stderr) == (0, "")
    assert f"further  from {STEPS} to {STEPS + 20} steps" in ended.stdout
    assert ended.losses[: len(whole.losses)] == whole.losses
    assert ended.losses[-1]["step"] == STEPS + 20
    assert json.loads((out / "run.json").read_text())["identity"]["steps"] == STEPS + 20
    refused = in_process([*arguments, "--out", str(out), "--resume"], out)
    assert refused.status == 2
    assert f"steps was {STEPS + 20}, is {STEPS}" in one_error_line(refused)


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("what", ["checkpoint", "losses"])
def test_a_full_disk_is_one_line_with_what_is_safe(
    arguments, whole: Ended, tmp_path: Path, monkeypatch, what
):
    out = tmp_path / "run"
    append, free = History.append, checkpoints._free_bytes

    def append_until_full(self, step, **values):
        if step == 50 and what == "losses":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        append(self, step, **values)

    with monkeypatch.context() as patch:
        patch.setattr(History, "append", append_until_full)
        if what == "checkpoint":
            full = lambda folder: 1000 if (folder / "40").exists() else free(folder)  # noqa: E731
            patch.setattr(checkpoints, "_free_bytes", full)
        ended = in_process([*arguments, "--out", str(out)], out)
    assert ended.status == 5
    line = one_error_line(ended)
    assert {"checkpoint": "which has 0.0 MB free", "losses": "No space left on device"}[what] in line
    assert f"last good checkpoint: {out}/checkpoints/40. Once it can be written, go on with: " in line
    resumed = in_process([*arguments, "--out", str(out), "--resume"], out)
    assert (resumed.status, resumed.stderr) == (0, "")
    assert resumed.losses == whole.losses
    assert resumed.weights() == whole.weights()


def test_an_error_of_writing_is_a_save_error(tmp_path: Path, monkeypatch):
    saved = Checkpoints(tmp_path / "c", keep=2)
    text = "RESOURCE_EXHAUSTED: Error writing ... [os_error_code='28']"

    def fail():
        raise ValueError(text)

    monkeypatch.setattr(saved._manager, "wait_until_finished", fail)
    with pytest.raises(SaveError, match=r"cannot be written into .*: No space left on device$"):
        saved.wait()
    monkeypatch.undo()
    saved.__exit__(None)


@pytest.mark.parametrize("content", ["", "[]", '{"identity": 3}'])
def test_a_broken_description_of_the_run_is_one_line(arguments, whole: Ended, tmp_path: Path, content):
    out = copy_of(whole, tmp_path)
    (out / "run.json").write_text(content)
    ended = in_process([*arguments, "--out", str(out), "--resume"], out)
    assert ended.status == 2
    assert "run.json does not say what the run is" in one_error_line(ended)


def test_a_broken_line_of_losses_is_said_and_left_out(arguments, whole: Ended, tmp_path: Path):
    out = copy_of(whole, tmp_path)
    with (out / "losses.jsonl").open("a") as stream:
        stream.write("garbage\n")
    ended = in_process([*arguments, "--out", str(out), "--resume"], out)
    assert ended.status == 0
    assert ended.stderr == f"warning: lines without losses in {out}/losses.jsonl, left out: 1\n"
    assert ended.losses == whole.losses
