"""A run of the training program that others are compared with, and the programs that they share."""

import argparse
import contextlib
import dataclasses
from pathlib import Path

import pytest

from models.program import Program
from tests.models.runs import SETTINGS, Ended, in_process

# Of this process: what was computed for the options and shapes of a run.
COMPUTED: dict[str, object] = {}


@contextlib.contextmanager
def sharing_programs():
    """Runs of this process with the same computations share what was compiled for the first."""
    explain, compiled_step, compile_held_out = (
        Program.explain,
        Program.__dict__["compiled_step"].func,
        Program.compile_held_out,
    )

    def once(make, program, *args):
        unread = dict(checkpoint_every=0, eval_every=0, keep=0, data=())
        if make is not compiled_step:
            unread |= dict(steps=1, warmup=0)
        options = dataclasses.replace(program.options, **unread)
        key = repr((make.__name__, options, program.policy, [(x.shape, x.dtype) for x in args]))
        if key not in COMPUTED:
            COMPUTED[key] = make(program, *args)
        return COMPUTED[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Program, "explain", lambda self: once(explain, self))
        patch.setattr(Program, "compiled_step", property(lambda self: once(compiled_step, self)))
        patch.setattr(
            Program, "compile_held_out", lambda self, windows: once(compile_held_out, self, windows)
        )
        yield


@pytest.fixture(scope="module")
def compile_once():
    """See `sharing_programs`."""
    with sharing_programs():
        yield


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> Path:
    """A file of real text that no other test changes."""
    path = tmp_path_factory.mktemp("data") / "text.py"
    path.write_bytes(Path(argparse.__file__).read_bytes()[:60_000])
    return path


@pytest.fixture(scope="session")
def arguments(text: Path) -> list[str]:
    return [*SETTINGS, "--data", str(text), "--no-compare"]


@pytest.fixture(scope="session")
def whole(arguments, tmp_path_factory) -> Ended:
    """A run from the first step to the last."""
    out = tmp_path_factory.mktemp("whole") / "run"
    with sharing_programs():
        return in_process([*arguments, "--out", str(out)], out)
