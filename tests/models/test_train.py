"""The training program, run as its users run it."""

import argparse
import dataclasses
import io
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from models import train
from models.checkpoints import Checkpoints
from models.compare import accelerator_installed
from models.compare import compare as compare_twins
from models.history import read
from models.options import Options, parse_overrides
from models.program import Program

MODEL = [
    "d_model=16",
    "num_layers=1",
    "first_k_dense=0",
    "num_heads=2",
    "num_kv_heads=1",
    "head_dim=8",
    "num_experts=4",
]
MODEL += ["d_expert=16", "d_shared=16"]
STEPS = 300
NUMBERS: dict[str, int] = dict(
    steps=STEPS, batch=4, seq=16, accum=2, eval_every=100, checkpoint_every=20, eval_batches=8
)
SETTINGS = [word for field in MODEL for word in ("--set", field)]
SETTINGS += [word for key, value in NUMBERS.items() for word in (f"--{key.replace('_', '-')}", str(value))]


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """A file of real text that no other test changes."""
    path = tmp_path_factory.mktemp("data") / "text.py"
    path.write_bytes(Path(argparse.__file__).read_bytes()[:60_000])
    return path


@pytest.fixture(scope="module")
def arguments(text: Path) -> list[str]:
    return [*SETTINGS, "--data", str(text), "--no-compare"]


@dataclasses.dataclass
class Ended:
    """A run that has ended: its folder, exit status and what it wrote."""

    out: Path
    status: int
    stdout: str
    stderr: str

    @property
    def losses(self) -> list[dict[str, Any]]:
        return read(self.out / "losses.jsonl")

    def weights(self, step: int = STEPS) -> list[bytes]:
        """The bytes of every array of a saved state."""
        options = Options.of("tiny", overrides=parse_overrides(MODEL), **NUMBERS)
        with Checkpoints(self.out / "checkpoints", keep=9) as checkpoints:
            state = checkpoints.restore(step, Program(options, None).state_shapes)
        assert int(state["step"]) == step
        return [np.asarray(x).tobytes() for x in jax.tree.leaves(state)]


@pytest.fixture(scope="module")
def whole(arguments, tmp_path_factory) -> Ended:
    """A run from the first step to the last."""
    out = tmp_path_factory.mktemp("whole") / "run"
    return in_process([*arguments, "--out", str(out)], out)


def in_process(words: list[str], out: Path) -> Ended:
    """Runs the program here, with its output captured."""
    with pytest.MonkeyPatch.context() as patch:
        stdout, stderr = io.StringIO(), io.StringIO()
        patch.setattr(sys, "stdout", stdout)
        patch.setattr(sys, "stderr", stderr)
        status = train.main(words)
    return Ended(out, status, stdout.getvalue(), stderr.getvalue())


def start(words: list[str], out: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "models.train", *words, "--out", str(out)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_step(
    out: Path, step: int, process: subprocess.Popen[str] | None = None, *, saved: bool = True
) -> None:
    """Returns once a run has written so many losses and, if it is to be `saved`, a checkpoint."""
    deadline = time.monotonic() + 120.0
    while time.monotonic() < deadline and (process is None or process.poll() is None):
        losses = out / "losses.jsonl"
        enough = not saved or any(p.name.isdigit() for p in (out / "checkpoints").glob("*"))
        if enough and losses.exists() and losses.read_bytes().count(b"\n") >= step:
            return
        time.sleep(0.002)
    raise TimeoutError(f"{out} did not come to step {step}")


def one_error_line(ended: Ended) -> str:
    assert ended.stderr.startswith("error: ")
    assert ended.stderr.count("\n") == 1
    return ended.stderr


def test_a_run_prints_what_it_does_and_ends_with_a_summary(whole: Ended):
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
    first_table, training = whole.stdout.index("moe.act"), whole.stdout.index("step 1/")
    assert first_table < training < whole.stdout.index("byte-frequency model")


def test_a_run_learns_more_than_byte_frequencies(whole: Ended):
    summary = json.loads((whole.out / "summary.json").read_text())["summary"]
    assert summary["held_out"][-1][0] == STEPS
    assert summary["held_out"][-1][1] < summary["byte_frequency"] - 0.3


def test_the_summary_file_holds_what_a_reader_needs(whole: Ended):
    content = json.loads((whole.out / "summary.json").read_text())
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
    assert [step for step, _ in content["summary"]["held_out"]] == [100, 200, 300]
    assert (whole.out / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_killed_run_resumes_bit_for_bit(arguments, whole: Ended, tmp_path: Path):
    out = tmp_path / "run"
    process = start(arguments, out)
    try:
        wait_for_step(out, 30, process)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not (out / "summary.json").exists()
    resumed = in_process([*arguments, "--out", str(out), "--resume"], out)
    assert (resumed.status, resumed.stderr) == (0, "")
    assert "resumed  after step" in resumed.stdout
    assert resumed.weights() == whole.weights()
    assert resumed.losses == whole.losses
    assert all(p.name.isdigit() for p in (out / "checkpoints").iterdir())


def test_sigint_saves_and_says_how_to_go_on(arguments, whole: Ended, tmp_path: Path):
    out = tmp_path / "run"
    process = start(arguments, out)
    try:
        wait_for_step(out, 30, process)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, stderr) == (130, "")
    step = int(stdout.split("stopped by SIGINT after step ")[1].split()[0])
    assert 30 <= step < STEPS
    assert read(out / "losses.jsonl")[-1]["step"] == step
    again = shlex.split(stdout.strip().splitlines()[-1])
    assert again[:3] == ["python", "-m", "models.train"]
    resumed = in_process(again[3:], out)
    assert resumed.status == 0
    assert f"resumed  after step {step}" in resumed.stdout
    assert resumed.weights() == whole.weights()
    assert resumed.losses == whole.losses


@pytest.fixture
def heed_no_sigterm():
    """Lets a SIGTERM that comes while no run heeds it fall on deaf ears, rather than end the tests."""

    def ignore(signum, frame):
        pass

    before = signal.signal(signal.SIGTERM, ignore)
    yield ignore
    signal.signal(signal.SIGTERM, before)


@pytest.mark.long
def test_sigterm_saves_and_exits_with_143(arguments, whole: Ended, tmp_path: Path, heed_no_sigterm):
    """And a run that was killed before its first checkpoint starts again under --resume."""
    out = tmp_path / "run"
    out.mkdir()
    shutil.copy(whole.out / "run.json", out)
    (out / "losses.jsonl").write_text('{"step": 1, "loss": 9.0, "ce": 9.0}\n{"step": 2, "lo')
    sender = threading.Thread(
        target=lambda: (wait_for_step(out, 25, saved=False), os.kill(os.getpid(), signal.SIGTERM))
    )
    sender.start()
    ended = in_process([*arguments, "--checkpoint-every", "0", "--out", str(out), "--resume"], out)
    sender.join()
    assert ended.status == 143
    step = int(ended.stdout.split("stopped by SIGTERM after step ")[1].split()[0])
    assert 25 <= step < STEPS
    assert ended.losses == [r for r in whole.losses if r["step"] <= step]
    assert [p.name for p in (out / "checkpoints").iterdir()] == [str(step)]
    assert signal.getsignal(signal.SIGTERM) is heed_no_sigterm


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_good_checkpoint(text, tmp_path: Path):
    """The rate is absurd from the first step on, but a few pass before a float overflows."""
    out = tmp_path / "run"
    words = [
        *SETTINGS,
        "--data",
        str(text),
        "--no-compare",
        "--lr",
        "1e38",
        "--warmup",
        "250",
        "--checkpoint-every",
        "1",
        "--keep",
        "3",
    ]
    ended = in_process([*words, "--out", str(out)], out)
    assert ended.status == 3
    line = one_error_line(ended)
    bad = int(line.split("step ")[1].split()[0])
    assert f"checkpoints/{bad - 1}" in line if bad > 1 else "none" in line
    assert [r["step"] for r in ended.losses] == list(range(1, bad))
    assert not (out / "summary.json").exists()
    for saved in (out / "checkpoints").iterdir():
        weights = ended.weights(int(saved.name))
        assert all(np.isfinite(np.frombuffer(w, np.float32)).all() for w in weights)


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        (["--batch", "8"], "batch was 4, is 8"),
        (["--set", "top_k=1"], "model.top_k was 2, is 1"),
        (["--seed", "1"], "seed was 0, is 1"),
        (["--data", os.__file__], "data was"),
        ([], "--resume"),
    ],
)
def test_a_folder_of_another_run_is_refused_and_left_as_it_is(arguments, whole: Ended, changes, difference):
    before = snapshot(whole.out)
    ended = in_process(
        [*arguments, *changes, "--out", str(whole.out), *(["--resume"] if changes else [])], whole.out
    )
    assert ended.status == 2
    assert difference in one_error_line(ended)
    assert snapshot(whole.out) == before


def test_a_checkpoint_of_another_run_is_refused(arguments, whole: Ended, tmp_path: Path):
    """Put under the name of this run, as a copy by hand may do."""
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


@pytest.mark.long
def test_a_run_that_keeps_no_checkpoint_writes_none(arguments, whole: Ended, tmp_path: Path):
    out = tmp_path / "run"
    ended = in_process([*arguments, "--keep", "0", "--out", str(out)], out)
    assert (ended.status, ended.stderr) == (0, "")
    assert "checkpoint saved" not in ended.stdout
    assert [p.name for p in (out / "checkpoints").iterdir()] == []
    assert ended.losses == whole.losses
    assert (out / "summary.json").exists()


def test_a_finished_run_resumes_to_its_summary(arguments, whole: Ended):
    before = whole.losses
    ended = in_process([*arguments, "--out", str(whole.out), "--resume"], whole.out)
    assert ended.status == 0
    assert f"resumed  after step {STEPS}" in ended.stdout
    assert "byte-frequency model" in ended.stdout
    assert ended.losses == before


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
        (["--steps", "many"], "--steps"),
        (["--stepps", "5"], "--stepps"),
        (["surplus"], "surplus"),
        (["--resume"], "--resume needs a folder that holds a run"),
        (["--out", "{short}"], "which is a file"),
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


def test_help_lists_the_options():
    ended = in_process(["--help"], Path())
    assert ended.status == 0
    for option in ("--policy", "--resume", "--accum", "--no-compare"):
        assert option in ended.stdout


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
