"""On a GPU: training within a budget of device memory, in a process of its own."""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from models.history import read
from tests.models.runs import DIES_AT_A_STEP

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("card")]

BUDGET = 2e9


def test_training_stays_within_the_budget_that_its_compiled_plan_has(tmp_path):
    words = ["--preset", "tiny", "--batch", "16", "--seq", "1024", "--steps", "3", "--keep", "0"]
    words += ["--eval-batches", "1", "--data", argparse.__file__, "--out", str(tmp_path / "run")]
    command = [sys.executable, "-m", "models.train", *words, "--device-gb", f"{BUDGET / 1e9:g}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "run" / "summary.json").read_text())["summary"]
    assert result["predicted"]["budget_bytes"] == BUDGET
    assert "compiled peak " in " ".join(done.stdout.split())
    assert result["peak_bytes"] <= BUDGET


# Two dense layers with a state of 1.22 GB, beyond its budget: some 0.7 GB of it rest on the host.
WIDE = ("d_model=2048", "num_layers=2", "first_k_dense=2", "d_ff=8192")
WIDE += ("num_heads=16", "head_dim=128", "num_kv_heads=16")
HOSTED = [word for field in WIDE for word in ("--set", field)]
HOSTED += ["--batch", "4", "--seq", "256", "--steps", "8", "--checkpoint-every", "2", "--eval-batches", "1"]
HOSTED += ["--device-gb", "1.2"]
DETERMINISTIC = "--xla_gpu_deterministic_ops=true"


def test_a_killed_run_with_state_on_the_host_goes_on_with_the_same_bits(tmp_path):
    def run(out: Path, *words: str, program: tuple[str, ...] = ("-m", "models.train")):
        command = [sys.executable, *program, *HOSTED, "--data", argparse.__file__, *words, "--out", str(out)]
        flags = f"{os.environ.get('XLA_FLAGS', '')} {DETERMINISTIC}"
        return subprocess.run(
            command, capture_output=True, text=True, timeout=300, env=os.environ | {"XLA_FLAGS": flags}
        )

    whole = run(tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    result = json.loads((tmp_path / "whole" / "summary.json").read_text())["summary"]
    assert result["predicted"]["host_bytes"] > 0.5e9
    assert result["peak_bytes"] <= 1.2e9
    killed = run(tmp_path / "killed", program=("-c", DIES_AT_A_STEP.format(step=5, saved=4)))
    assert killed.returncode == -9
    shutil.rmtree(tmp_path / "killed" / "checkpoints" / "6", ignore_errors=True)
    resumed = run(tmp_path / "killed", "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert "resumed  after step 4" in resumed.stdout
    losses, others = (read(tmp_path / name / "losses.jsonl") for name in ("whole", "killed"))
    assert {record["step"] for record in losses} == {*range(1, 9)}
    assert losses == others
