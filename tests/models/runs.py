"""Runs of the training program in this process, and their results."""

import dataclasses
import io
import signal
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from models import train
from models.checkpoints import Checkpoints
from models.display import Display
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
MODEL += ["d_expert=16", "d_shared=0"]
STEPS = 120
NUMBERS: dict[str, Any] = dict(
    steps=STEPS, batch=4, seq=16, accum=2, eval_every=40, checkpoint_every=40, eval_batches=8, lr=1e-2
)
SETTINGS = [word for field in MODEL for word in ("--set", field)]
SETTINGS += [word for key, value in NUMBERS.items() for word in (f"--{key.replace('_', '-')}", str(value))]

# The program, killed once it has shown a step and written a checkpoint. The last argument is its folder.
DIES_AT_A_STEP = """
import os, pathlib, runpy, signal, sys, time
from models.display import Display
show_step = Display.show_step
def show_and_die(self, step, metrics, time_ms):
    show_step(self, step, metrics, time_ms)
    while step == {step} and not pathlib.Path(sys.argv[-1], "checkpoints", "{saved}").exists():
        time.sleep(0.01)
    if step == {step}:
        os.kill(os.getpid(), signal.SIGKILL)
Display.show_step = show_and_die
runpy.run_module("models.train", run_name="__main__", alter_sys=True)
"""


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


def in_process(words: list[str], out: Path) -> Ended:
    """Runs the program here, with its output captured."""
    with pytest.MonkeyPatch.context() as patch:
        stdout, stderr = io.StringIO(), io.StringIO()
        patch.setattr(sys, "stdout", stdout)
        patch.setattr(sys, "stderr", stderr)
        status = train.main(words)
    return Ended(out, status, stdout.getvalue(), stderr.getvalue())


def at_step(patch: pytest.MonkeyPatch, step: int, signum: int) -> None:
    """Sends this process a signal once a run has shown a step."""
    show_step = Display.show_step

    def show_and_signal(self, shown, metrics, time_ms):
        show_step(self, shown, metrics, time_ms)
        if shown == step:
            signal.raise_signal(signum)

    patch.setattr(Display, "show_step", show_and_signal)


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def one_error_line(ended: Ended) -> str:
    assert ended.stderr.startswith("error: ")
    assert ended.stderr.count("\n") == 1
    return ended.stderr
