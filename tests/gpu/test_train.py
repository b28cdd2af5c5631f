"""On a GPU: training within a budget of device memory, in a process of its own."""

import argparse
import json
import subprocess
import sys

import pytest

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
