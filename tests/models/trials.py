"""Trials of a run's safety: kills, damaged files, full disks, two runs, read-only folders.

Each trial harms a run of `models.train` in a process of its own, then continues it, and compares the losses
and the last weights with those of a run without harm: nothing may be lost, and nothing may print a traceback.

    python -m tests.models.trials --trials 40 --seed 0
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from models.history import read
from tests.models.runs import MODEL, Ended

ROOT = Path(__file__).parents[2]
NUMBERS = dict(
    steps=60, batch=4, seq=16, accum=2, eval_every=20, checkpoint_every=10, eval_batches=8, keep=3, lr=1e-3
)
TIMEOUT_S = 200
# Lets each write beyond a size fail, if one is given, or takes root's right to write into a read-only folder
# (the capability CAP_DAC_OVERRIDE); then becomes the program. Arguments: the size or "-", and the command.
PRELUDE = """
import ctypes, os, resource, sys
if sys.argv[1] == "-":
    if os.geteuid() == 0:
        ctypes.CDLL(None).prctl(24, 1, 0, 0, 0)  # PR_CAPBSET_DROP
else:
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


@dataclasses.dataclass
class Bench:
    """What the trials share.

    Attributes:
      folder: folder of all files.
      random: source of the trials' choices.
      whole: the run without harm.
      seconds: its duration.
    """

    folder: Path
    random: random.Random
    whole: Ended
    seconds: float

    def copy(self) -> Path:
        """Makes a copy of the folder of the run without harm, as it was after 50 steps."""
        out = Path(tempfile.mkdtemp(dir=self.folder)) / "run"
        shutil.copytree(self.whole.out, out)
        shutil.rmtree(out / "checkpoints" / "60")
        for name in ("summary.json", "loss.png"):
            (out / name).unlink()
        return out


def command(out: Path, *words: str) -> list[str]:
    """The command line of a run."""
    model = [word for field in MODEL for word in ("--set", field)]
    numbers = [w for key, value in NUMBERS.items() for w in (f"--{key.replace('_', '-')}", str(value))]
    text = ["--data", str(ROOT / "models"), "--no-compare", "--out", str(out)]
    return [sys.executable, "-m", "models.train", *model, *numbers, *text, *words]


def start(out: Path, *words: str, prelude: str | None = None) -> subprocess.Popen:
    """Starts a run, under the harm of `PRELUDE` if its argument is given."""
    python, *arguments = command(out, *words)
    before = [] if prelude is None else ["-c", PRELUDE, prelude]
    return subprocess.Popen(
        [python, *before, *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def end(child: subprocess.Popen, out: Path) -> Ended:
    """Waits for a run."""
    try:
        stdout, stderr = child.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()
        raise
    return Ended(out, child.returncode, stdout, stderr)


def run(out: Path, *words: str, prelude: str | None = None) -> Ended:
    return end(start(out, *words, prelude=prelude), out)


def check(condition: bool, what: object) -> None:
    if not condition:
        raise AssertionError(what)


def check_lines(ended: Ended) -> None:
    """Checks that each line of the standard error is an error or a warning of the program."""
    lines = ended.stderr.splitlines()
    check(all(line.startswith(("error: ", "warning: ")) for line in lines), ended.stderr)


def check_whole(bench: Bench, out: Path, warns: bool = False) -> None:
    """Continues a run to its end, and compares it with the run without harm."""
    has_run = (out / "run.json").exists()
    ended = run(out, *(["--resume"] if has_run else []))
    check_lines(ended)
    check(ended.status == 0, ended.stderr)
    check(ended.stderr.count("warning") == warns, ended.stderr or "no warning")
    check(ended.losses == bench.whole.losses, "other losses")
    check(read_weights(out) == read_weights(bench.whole.out), "other weights")
    check((out / "summary.json").exists(), "no summary")


def read_weights(out: Path) -> list[bytes]:
    """The bytes of every array of the last state."""
    import jax
    import numpy as np

    from models.checkpoints import Checkpoints
    from models.options import Options, parse_overrides
    from models.program import Program

    options = Options.of("tiny", overrides=parse_overrides(MODEL), **NUMBERS)
    with Checkpoints(out / "checkpoints", keep=9) as checkpoints:
        state = checkpoints.restore(NUMBERS["steps"], Program(options, None).state_shapes)
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(state)]


def kill(bench: Bench) -> str:
    """Kills a run at any time, and once more when it continues."""
    out, said = Path(tempfile.mkdtemp(dir=bench.folder)) / "run", []
    for words in ([], ["--resume"]):
        if words and not (out / "run.json").exists():
            continue
        child = start(out, *words)
        if bench.random.random() < 0.7:  # while it takes steps
            limit, steps = time.time() + TIMEOUT_S, bench.random.randrange(1, 60)
            while child.poll() is None and time.time() < limit and count_steps(out) < steps:
                time.sleep(0.002)
        else:
            time.sleep(bench.random.uniform(0.1, bench.seconds))
        child.kill()
        check_lines(end(child, out))
        said.append(f"{count_steps(out)} steps")
    check_whole(bench, out)
    return f"killed after {', '.join(said)}"


def count_steps(out: Path) -> int:
    return max((record["step"] for record in read(out / "losses.jsonl")), default=0)


def choose_file(bench: Bench, out: Path) -> Path:
    """Chooses a file of the newest checkpoint, or its checksums."""
    folder = out / "checkpoints" / "50"
    files = [p for p in folder.rglob("*") if p.is_file() and p.parent != folder and p.stat().st_size]
    return bench.random.choice([*sorted(files), folder / "checksums.json"])


def tear(bench: Bench) -> str:
    """Cuts a file of the newest checkpoint, and the last line of the losses."""
    out = bench.copy()
    path = choose_file(bench, out)
    nbytes = bench.random.randrange(path.stat().st_size)
    os.truncate(path, nbytes)
    losses = out / "losses.jsonl"
    os.truncate(losses, losses.stat().st_size - bench.random.randrange(1, 30))
    check_whole(bench, out, warns=True)
    return f"{path.relative_to(out)} cut after {nbytes} bytes"


def flip(bench: Bench) -> str:
    """Flips a bit of the newest checkpoint."""
    out = bench.copy()
    path = choose_file(bench, out)
    content, bit = bytearray(path.read_bytes()), 0
    bit = bench.random.randrange(8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    check_whole(bench, out, warns=True)
    return f"bit {bit} of {path.relative_to(out)} flipped"


def fill(bench: Bench) -> str:
    """Lets each write beyond a size fail, as on a full disk."""
    out, nbytes = Path(tempfile.mkdtemp(dir=bench.folder)) / "run", bench.random.randrange(200, 60_000)
    ended = run(out, prelude=str(nbytes))
    check_lines(ended)
    check(ended.status in (2, 5), f"{ended.status}: {ended.stderr}")
    check(ended.stderr.count("error: ") == 1, ended.stderr)
    if ended.status == 5:
        check("last good checkpoint: " in ended.stderr, ended.stderr)
    check_whole(bench, out)
    return f"writes beyond {nbytes} bytes failed: {ended.stderr[:90]}..."


def meet(bench: Bench) -> str:
    """Starts a second run, or continues the first, while the first lives; then kills the first."""
    out = bench.copy()
    first = start(out, "--resume")
    while first.poll() is None and not is_signed(out, first.pid):
        time.sleep(0.002)
    words = ["--resume"] if bench.random.random() < 0.7 else []
    first.send_signal(signal.SIGSTOP)  # it lives, and does not end before the second
    second = run(out, *words)
    check_lines(second)
    check((second.status, second.stderr.count("\n")) == (2, 1), second.stderr)
    check(f"is in use by another run (process {first.pid} on" in second.stderr, second.stderr)
    first.send_signal(signal.SIGCONT)
    if bench.random.random() < 0.5:
        first.kill()
    check_lines(end(first, out))
    check_whole(bench, out)
    return f"second run {' '.join(words)} refused"


def is_signed(out: Path, pid: int) -> bool:
    lock = out / "run.lock"
    return lock.exists() and lock.read_text().startswith(f"process {pid} ")


def forbid(bench: Bench) -> str:
    """Continues a run in a folder that may not be written, or whose checkpoints may not."""
    out = bench.copy()
    closed = bench.random.choice([out, out / "checkpoints"])
    folders = [closed, *(p for p in closed.rglob("*") if p.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    ended = run(out, "--resume", prelude="-")
    for folder in folders:
        folder.chmod(0o755)
    check_lines(ended)
    check(ended.status in (2, 5), f"{ended.status}: {ended.stderr}")
    check(ended.stderr.count("\n") == 1, ended.stderr)
    check_whole(bench, out)
    return f"{closed.name} read-only: {ended.stderr[:90]}..."


TRIALS: tuple[Callable[[Bench], str], ...] = (kill, tear, flip, fill, kill, meet, forbid, kill)


def main() -> int:
    """Runs the trials. Returns 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # Compiled once, for all trials; nothing is added where writes fail.
        os.environ |= {
            "JAX_COMPILATION_CACHE_DIR": str(folder / "cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        for warm in (True, False):
            out, begin = folder / f"whole-{warm}", time.time()
            whole = run(out)
            check((whole.status, whole.stderr) == (0, ""), whole.stderr)
        bench = Bench(folder, random.Random(options.seed), whole, time.time() - begin)
        print(f"a run without harm takes {bench.seconds:.1f} s", flush=True)
        for number in range(options.trials):
            trial = TRIALS[number % len(TRIALS)]
            try:
                print(f"{number + 1:3} {trial.__name__:7} held: {trial(bench)}", flush=True)
            except (AssertionError, subprocess.TimeoutExpired) as error:
                failed += 1
                print(f"{number + 1:3} {trial.__name__:7} FAILED: {error}", flush=True)
    print(f"{options.trials - failed} of {options.trials} trials held")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
