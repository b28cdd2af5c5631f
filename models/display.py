"""The progress of a run: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from models.options import Options
from models.work import Work

_LINES = 20


def make_console(*, stderr: bool = False) -> Console:
    """Makes a console; outside a terminal its text is plain and wide enough for tables."""
    console = Console(stderr=stderr, highlight=False, soft_wrap=False)
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=160)


class Display:
    """Shows a run's progress; a `models.loop.Watcher`.

    Args:
      console: console to print on.
      options: options of the run.
      first: number of steps done before.
      work: work of a step.
    """

    def __init__(self, console: Console, options: Options, first: int, work: Work):
        self.console, self.options, self.work = console, options, work
        self._every = max(1, options.steps // _LINES)
        self._held_out = ""
        columns = (
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=16),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self._progress.add_task("", total=options.steps, completed=first)

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def show_step(self, step: int, metrics: dict[str, float], time_ms: float) -> None:
        text = f"loss {metrics['loss']:.4f}  {self.work.rate(time_ms)}  {time_ms:.0f} ms/step"
        self._progress.update(self._task, completed=step, description=text + self._held_out)
        if not self.console.is_terminal and (step % self._every == 0 or step in (1, self.options.steps)):
            self.console.print(f"step {step}/{self.options.steps}  {text}  lr {metrics['lr']:.2e}")

    def show_held_out(self, step: int, loss: float) -> None:
        self._held_out = f"  held-out {loss:.4f}"
        if not self.console.is_terminal:
            self.console.print(f"step {step}/{self.options.steps}  held-out {loss:.4f} nats/byte")

    def show_save(self, step: int) -> None:
        if not self.console.is_terminal:
            self.console.print(f"step {step}/{self.options.steps}  checkpoint saved")
