"""Lets processes on a shared card compile side by side and measure alone."""

import contextlib
import fcntl
import time
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def hold_card(folder: Path | None, of: int = 0, name: str = "") -> Iterator[None]:
    """Holds the card for one process at a time, after all processes have compiled.

    Args:
      folder: a folder shared by the processes, empty at the start; None for a single process.
      of: the number of processes to wait for; 0 for none.
      name: the name of this process, different from the others'.

    Yields:
      None, while this process holds the card.
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
