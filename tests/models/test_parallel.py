"""Training on a mesh: what is saved, two processes of which one is killed, another mesh to go on."""

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from models import policy_text, train
from models.errors import InputError
from models.history import read
from models.options import POLICY, Options
from models.parallel import ParallelProgram
from models.program import Program

MODEL = dict(
    d_model=16, num_layers=4, first_k_dense=0, num_heads=2, num_kv_heads=1, head_dim=8, num_experts=4,
    d_expert=16, d_shared=16,
)  # fmt: skip
NUMBERS = dict(steps=10, batch=8, seq=16, accum=2, eval_batches=2, checkpoint_every=5)
SETTINGS = [word for key, value in MODEL.items() for word in ("--set", f"{key}={value}")]
SETTINGS += [word for key, value in NUMBERS.items() for word in (f"--{key.replace('_', '-')}", str(value))]
SETTINGS += ["--no-compare", "--data", argparse.__file__]
# Twice as many processes as anything here needs may be at work beside it.
PATIENCE_S = 240
TWO = "pipe=2,fsdp=2,data=2"


def options(**overrides):
    return Options.of("tiny", overrides=MODEL, **(NUMBERS | overrides))


def program(mesh, virtual=1):
    return ParallelProgram(options(mesh=mesh, virtual=virtual), policy_text.parse(POLICY))


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def test_what_is_saved_is_the_same_as_on_one_device():
    one = Program(options(), policy_text.parse(POLICY))
    want = one.saved_form(one.init())
    divided = program("data=2,expert=2,pipe=2", 2)
    state = divided.init()
    saved = divided.saved_form(state)
    assert jax.tree.structure(saved) == jax.tree.structure(want)
    assert bits(saved) == bits(want)
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), divided.saved_shapes)
    assert jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), saved) == shapes
    again = divided.from_saved(saved)
    assert bits(again) == bits(state)
    kept = jax.tree.map(lambda x, like: x.sharding == like.sharding, again, divided.state_shapes)
    assert jax.tree.all(kept)


def test_each_device_has_its_own_sequences():
    divided = program("data=2,expert=2,pipe=2", 2)
    tokens = np.arange(8 * 17, dtype=np.int32).reshape(8, 17)
    placed = divided.microbatches(tokens)
    np.testing.assert_array_equal(placed, tokens.reshape(2, 4, 17))
    assert {shard.data.shape for shard in placed.addressable_shards} == {(2, 1, 17)}


def test_too_little_held_out_text_is_refused():
    with pytest.raises(InputError, match="in batches of 8 x 16 bytes, got 100 held-out bytes"):
        program("data=4,pipe=2").held_out_windows(np.zeros(100, np.uint8))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--mesh", "data=3"], "divided by data x fsdp x expert = 3, got 4 sequences"),
        (["--virtual", "2"], "--virtual divides what --mesh divides"),
        (["--mesh", "data=2"], "the number of devices, 8, got data=2 = 2"),
        (["--mesh", "data=4,pipe=2", "--compare"], "--compare measures one device"),
        (["--mesh", "data=4,pipe=2", "--process", "1"], "go together"),
    ],
)
def test_options_that_do_not_fit_end_with_status_2(given, message, tmp_path, capsys):
    settings = [word for word in SETTINGS if word != "--no-compare"]
    assert train.main([*settings, "--out", str(tmp_path / "run"), *given]) == train.BAD_INPUT
    assert message in capsys.readouterr().err


def start(out, *words, process=None, port=0, devices=4):
    """A training program, one of two if it has a number."""
    command = [sys.executable, "-m", "models.train", *SETTINGS, "--out", str(out), *map(str, words)]
    if process is not None:
        command += ["--coordinator", f"localhost:{port}", "--processes", "2", "--process", str(process)]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("XLA_", "PYTEST_"))}
    environment |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True)


def start_two(out, *words):
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    return [start(out, "--mesh", TWO, *words, process=i, port=port) for i in range(2)]


def ended(process, within_s=PATIENCE_S):
    stdout, stderr = process.communicate(timeout=within_s)
    return process.returncode, stdout, stderr


def losses(out):
    return {record["step"]: record["loss"] for record in read(out / "losses.jsonl") if "loss" in record}


@pytest.mark.long
def test_two_processes_of_which_one_is_killed(tmp_path):
    """The other one ends with an error; both go on from the checkpoint, or one process on another mesh."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for process in start_two(whole):
        status, _, stderr = ended(process)
        assert status == 0, stderr
    # A run of the same options that stops for good in the middle: what comes after its checkpoint goes.
    first, second = start_two(killed)
    wait_for(killed / "checkpoints" / "5", first)
    second.send_signal(signal.SIGKILL)
    second.communicate()
    since = time.monotonic()
    status, _, stderr = ended(first, within_s=60)
    assert time.monotonic() - since < 60
    if status != 0:  # it may have been done before
        assert "another task died" in stderr or "another process ends" in stderr
    keep_only(killed, 5)
    elsewhere = tmp_path / "elsewhere"
    subprocess.run(["cp", "-r", str(killed), str(elsewhere)], check=True)

    for process in start_two(killed, "--resume"):
        status, stdout, stderr = ended(process)
        assert status == 0, stderr
    assert losses(killed) == losses(whole)  # bit for bit
    other = start(elsewhere, "--mesh", "expert=2,pipe=2", "--virtual", "2", "--capacity", "2", "--resume")
    status, stdout, stderr = ended(other)
    assert status == 0, stderr
    assert "resumed  after step 5" in stdout
    got, want = losses(elsewhere), losses(whole)
    assert [got[step] for step in range(1, 6)] == [want[step] for step in range(1, 6)]
    np.testing.assert_allclose([got[s] for s in range(6, 11)], [want[s] for s in range(6, 11)], rtol=1e-2)


def wait_for(path: Path, process):
    end = time.monotonic() + PATIENCE_S
    while not path.exists():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end, f"no {path}"
        time.sleep(0.02)


def keep_only(run: Path, step: int):
    """Takes away checkpoints after a step, and those that were being written."""
    for folder in (run / "checkpoints").iterdir():
        if folder.name != str(step):
            subprocess.run(["rm", "-r", str(folder)], check=True)
