"""The training program, run as its users run it."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from models.compare import accelerator_installed
from models.compare import compare as compare_twins
from models.history import read
from models.options import Options, parse_overrides
from models.program import Program
from tests.models.runs import (
    DIES_AT_A_STEP,
    MODEL,
    NUMBERS,
    STEPS,
    Ended,
    at_step,
    in_process,
    one_error_line,
    snapshot,
)

pytestmark = pytest.mark.usefixtures("compile_once")


def test_a_run_prints_what_it_does_learns_and_writes_a_summary(whole: Ended):
    assert (whole.status, whole.stderr) == (0, "")
    for words in (
        "parameters",
        "jax 0.",
        "experts  ",
        "moe.act",
        "host",
        f"step {STEPS}/{STEPS}",
        "tokens/s",
        "ms/step",
        "byte-frequency model",
        "bits/byte",
    ):
        assert words in whole.stdout
    assert ("on a CPU nothing moves" in whole.stdout) == (jax.default_backend() == "cpu")
    first_table, training = whole.stdout.index("moe.act"), whole.stdout.index("step 1/")
    assert first_table < training < whole.stdout.index("byte-frequency model")
    content = json.loads((whole.out / "summary.json").read_text())
    losses = content["summary"]
    assert losses["held_out"][-1][1] < losses["byte_frequency"] - 0.3
    assert content["identity"]["model"]["d_model"] == 16
    assert content["versions"]["jax"] == jax.__version__
    assert content["options"]["batch"] == 4
    assert content["devices"]["platform"] == jax.default_backend()
    assert content["summary"]["host_bytes"] == content["report"]["bytes"]["host"] > 0
    assert content["summary"]["step_ms"] > 0
    assert content["summary"]["work"]["tokens"] == 4 * 16
    assert content["experts"]["name"] == "reference"  # of this width
    assert "multiple of 64, got H = 16" in content["experts"]["reason"]
    assert len(content["summary"]["train"]) == STEPS
    assert [step for step, _ in content["summary"]["held_out"]] == [40, 80, 120]
    assert (whole.out / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_sigint_saves_and_says_how_to_go_on(arguments, whole: Ended, tmp_path: Path, monkeypatch):
    out = tmp_path / "run"
    before = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        at_step(patch, 50, signal.SIGINT)
        stopped = in_process([*arguments, "--out", str(out)], out)
    assert (stopped.status, stopped.stderr) == (130, "")
    assert signal.getsignal(signal.SIGINT) is before
    step = int(stopped.stdout.split("stopped by SIGINT after step ")[1].split()[0])
    assert 50 <= step <= 51  # a step is shown once the next has started
    assert stopped.losses[-1]["step"] == step
    # As a killed run leaves its folder: losses of steps after the last checkpoint.
    killed = tmp_path / "killed"
    shutil.copytree(out, killed)
    shutil.rmtree(killed / "checkpoints" / str(step))
    again = shlex.split(stopped.stdout.strip().splitlines()[-1])
    assert again[:3] == ["python", "-m", "models.train"]
    for words, folder, saved in (
        (again[3:], out, step),
        ([*arguments, "--out", str(killed), "--resume"], killed, 40),
    ):
        resumed = in_process(words, folder)
        assert (resumed.status, resumed.stderr) == (0, "")
        assert f"resumed  after step {saved}" in resumed.stdout
        assert resumed.weights() == whole.weights()
        assert resumed.losses == whole.losses


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_good_checkpoint(
    arguments, whole: Ended, tmp_path: Path, monkeypatch
):
    compiled = Program.__dict__["compiled_step"].fget

    def step_with_a_bad_fourth(program):
        def step(state, tokens):
            factor = np.nan if int(state["step"]) == 3 else 1.0
            return compiled(program)(
                state | {"params": jax.tree.map(lambda x: x * factor, state["params"])}, tokens
            )

        return step

    monkeypatch.setattr(Program, "compiled_step", property(step_with_a_bad_fourth))
    out = tmp_path / "run"
    ended = in_process([*arguments, "--checkpoint-every", "1", "--keep", "2", "--out", str(out)], out)
    assert ended.status == 3
    line = one_error_line(ended)
    assert "step 4 gave" in line and "loss = nan" in line
    assert "checkpoints/3" in line
    assert ended.losses == [r for r in whole.losses if r["step"] <= 3]
    assert not (out / "summary.json").exists()
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["2", "3"]
    for step in (2, 3):
        assert all(np.isfinite(np.frombuffer(w, np.float32)).all() for w in ended.weights(step))


def test_a_folder_of_another_run_is_refused_and_left_as_it_is(arguments, whole: Ended, tmp_path: Path):
    before = snapshot(whole.out)
    for changes, difference in (
        (["--batch", "8"], "batch was 4, is 8"),
        (["--set", "top_k=1"], "model.top_k was 2, is 1"),
        (["--seed", "1"], "seed was 0, is 1"),
        (["--data", os.__file__], "data was"),
        ([], "--resume"),
    ):
        resume = ["--resume"] if changes else []
        ended = in_process([*arguments, *changes, "--out", str(whole.out), *resume], whole.out)
        assert ended.status == 2
        assert difference in one_error_line(ended)
    assert snapshot(whole.out) == before
    # The checkpoints of another run under the name of this one, as a copy by hand may leave them.
    out = tmp_path / "run"
    shutil.copytree(whole.out, out)
    run = json.loads((out / "run.json").read_text())
    run["identity"]["seed"] = 7
    (out / "run.json").write_text(json.dumps(run))
    before = snapshot(out / "checkpoints")
    ended = in_process([*arguments, "--seed", "7", "--out", str(out), "--resume"], out)
    assert ended.status == 2
    assert "seed was 0, is 7" in one_error_line(ended)
    assert snapshot(out / "checkpoints") == before


def test_a_finished_run_resumes_to_its_summary(arguments, whole: Ended):
    before = whole.losses
    ended = in_process([*arguments, "--out", str(whole.out), "--resume"], whole.out)
    assert ended.status == 0
    assert f"resumed  after step {STEPS}" in ended.stdout
    assert "byte-frequency model" in ended.stdout
    assert ended.losses == before


@pytest.mark.long
def test_a_killed_run_resumes_bit_for_bit(arguments, whole: Ended, tmp_path: Path):
    out = tmp_path / "run"
    command = [sys.executable, "-c", DIES_AT_A_STEP.format(step=50, saved=40), *arguments, "--out", str(out)]
    killed = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert read(out / "losses.jsonl")[-1]["step"] == 50
    assert not (out / "summary.json").exists()
    resumed = in_process([*arguments, "--out", str(out), "--resume"], out)
    assert (resumed.status, resumed.stderr) == (0, "")
    assert "resumed  after step 40" in resumed.stdout
    assert resumed.weights() == whole.weights()
    assert resumed.losses == whole.losses
    assert all(p.name.isdigit() for p in (out / "checkpoints").iterdir())


@pytest.mark.long
def test_sigterm_saves_and_exits_with_143(arguments, whole: Ended, tmp_path: Path, monkeypatch):
    """And a run that was killed before its first checkpoint starts again under --resume."""
    out = tmp_path / "run"
    out.mkdir()
    shutil.copy(whole.out / "run.json", out)
    (out / "losses.jsonl").write_text('{"step": 1, "loss": 9.0, "ce": 9.0}\n{"step": 2, "lo')
    before = signal.getsignal(signal.SIGTERM)
    at_step(monkeypatch, 25, signal.SIGTERM)
    ended = in_process([*arguments, "--checkpoint-every", "0", "--out", str(out), "--resume"], out)
    assert ended.status == 143
    step = int(ended.stdout.split("stopped by SIGTERM after step ")[1].split()[0])
    assert 25 <= step <= 26
    assert ended.losses == [r for r in whole.losses if r["step"] <= step and "held_out" not in r]
    assert [p.name for p in (out / "checkpoints").iterdir()] == [str(step)]
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.long
def test_a_run_that_keeps_no_checkpoint_writes_none(arguments, whole: Ended, tmp_path: Path):
    out = tmp_path / "run"
    ended = in_process([*arguments, "--keep", "0", "--out", str(out)], out)
    assert (ended.status, ended.stderr) == (0, "")
    assert "checkpoint saved" not in ended.stdout
    assert [p.name for p in (out / "checkpoints").iterdir()] == []
    assert ended.losses == whole.losses
    assert (out / "summary.json").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--data", "/no/such/file"], "/no/such/file"),
        (["--data", "{empty}"], "at least one byte"),
        (["--data", "{short}", "--seq", "64"], "sequence of 64 needs 65"),
        (["--data", "{short}", "--seq", "20"], "held-out"),
        (["--batch", "6", "--accum", "4"], "--batch is a multiple of --accum"),
        (["--preset", "tinny"], "'tiny'"),
        (["--policy", "offlod=moe.act"], "offload"),
        (["--policy", "te_v9"], "te_v2"),
        (["--set", "num_layer=1"], "num_layers"),
        (["--set", "num_layers=x"], "a whole number"),
        (["--set", "vocab_size=100"], "vocab_size >= 256"),
        (["--steps", "0"], "--steps is at least 1"),
        (["--steps", "many"], "integer. --help shows all options."),
        (["--stepps", "5"], "--stepps"),
        (["surplus"], "surplus"),
        (["--resume"], "--resume needs a folder that holds a run"),
        (["--out", "{short}"], "which is a file"),
        (["--out", ""], "--out takes a folder, got ''"),
        (["--out", "{short}/run"], "can be written"),
    ],
)
def test_bad_input_is_one_line_and_exit_status_2(words, message, tmp_path: Path):
    (tmp_path / "empty").touch()
    (tmp_path / "short").write_bytes(bytes(range(60)))
    words = [w.format(empty=tmp_path / "empty", short=tmp_path / "short") for w in words]
    before = snapshot(tmp_path)
    ended = in_process(["--out", str(tmp_path / "run"), *words], tmp_path / "run")
    assert ended.status == 2
    assert message in one_error_line(ended)
    assert snapshot(tmp_path) == before


def test_too_little_disk_is_told_before_anything_is_written(arguments, tmp_path: Path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    ended = in_process([*arguments, "--out", str(tmp_path / "run")], tmp_path / "run")
    assert ended.status == 2
    assert "on disk, got 0.0 MB free" in one_error_line(ended)
    assert list(tmp_path.iterdir()) == []


def test_what_is_odd_about_the_data_is_said(arguments, tmp_path: Path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))  # ends the run
    (tmp_path / "image.bin").write_bytes(bytes(range(256)) * 100)
    words = ["--data", str(tmp_path / "image.bin"), "--out", str(tmp_path / "run")]
    warning, error = in_process([*arguments, *words], tmp_path / "run").stderr.splitlines()
    assert warning.startswith("warning: --data: ") and "image.bin looks like no text" in warning
    assert error.startswith("error: ")


def test_help_lists_the_options_their_defaults_and_the_presets():
    command = [sys.executable, "-m", "models.train", "--help"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stderr) == (0, "")
    for option in ("--policy", "--resume", "--accum", "--no-compare"):
        assert option in ended.stdout
    text = " ".join(ended.stdout.split())
    for words in (
        "one of tiny, nano, mixtral",
        "Optimizer steps [tiny: 500, others: 100]",
        "Of matrices [0.1]",
    ):
        assert words in text


@pytest.mark.long
def test_twins_are_measured_in_processes_of_their_own_and_agree(text: Path):
    options = Options.of("tiny", overrides=parse_overrides(MODEL), data=(str(text),), **NUMBERS)
    comparison = compare_twins(options, accelerator_only=False)
    assert comparison is not None
    for twin in (comparison.policy, comparison.on_device):
        assert twin.error is None
        assert twin.step_ms is not None and twin.step_ms > 0
    ours, on_device = comparison.policy, comparison.on_device
    assert ours.loss == on_device.loss
    assert ours.host_bytes and ours.device_bytes
    assert (on_device.host_bytes, on_device.device_bytes) == (0, ours.device_bytes + ours.host_bytes)


@pytest.mark.long
def test_a_measurement_that_fails_says_why():
    comparison = compare_twins(Options.of("tiny", data=("/no/such/file",)), accelerator_only=False)
    assert comparison is not None
    assert comparison.policy.step_ms is None
    assert "/no/such/file" in (comparison.policy.error or "")


@pytest.mark.skipif(accelerator_installed(), reason="is about machines whose JAX has no accelerator")
def test_without_an_accelerator_nothing_is_measured_unless_asked(text: Path):
    options = Options.of("tiny", overrides=parse_overrides(MODEL), data=(str(text),), **NUMBERS)
    assert compare_twins(options, accelerator_only=True) is None
