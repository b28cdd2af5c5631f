"""Lets benchmarks that share a card compile side by side and measure one at a time."""

import contextlib
import fcntl
import time
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def turn(folder: Path | None, of: int = 0, name: str = "") -> Iterator[None]:
    """Holds the card for one process at a time, once so many have warmed up.

    Args:
      folder: what the processes share, empty at the start; None for a process that is alone.
      of: how many processes to wait for; 0 for none.
      name: this one's, different from the others'.

    Yields:
      When it is this process's turn.
    """
    if folder is None:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    if of:
        (folder / f"{name}.ready").touch()
    while len(list(folder.glob("*.ready"))) < of:
        time.sleep(0.2)
    with open(folder / "turn", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
