"""The training loop: steps, held-out losses, checkpoints, and the three ways to stop."""

from __future__ import annotations

import dataclasses
import math
import signal
import statistics
import time
from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np

from models.checkpoints import Checkpoints
from models.data import Batches
from models.history import History
from models.options import Options

State = dict[str, Any]
Metrics = dict[str, float]


class DivergedError(ArithmeticError):
    """A step's loss, gradient or weights are not finite.

    Attributes:
      step: number of the step, from 1.
      metrics: all metrics of the step.
    """

    def __init__(self, step: int, metrics: Metrics):
        self.step, self.metrics = step, metrics
        super().__init__(
            f"step {step} gave {', '.join(f'{k} = {v}' for k, v in metrics.items() if not math.isfinite(v))}"
        )


class Stop:
    """Notes the first SIGINT or SIGTERM inside the context; a second has its former effect.

    Attributes:
      signum: the signal received, or None.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self):
        self.signum: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        if jax.process_count() == 1:  # other processes would wait for the stopped process
            self._before = {number: signal.signal(number, self._note) for number in self.SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        self._restore()

    def _note(self, signum: int, frame: object) -> None:
        self.signum = signum
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


class Watcher(Protocol):
    """Shows the progress of a run. `step` counts from 1."""

    def show_step(self, step: int, metrics: Metrics, time_ms: float) -> None: ...

    def show_held_out(self, step: int, loss: float) -> None: ...

    def show_save(self, step: int) -> None: ...


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The end of a run.

    Attributes:
      state: the last state.
      step: number of steps done.
      signum: the signal received, or None.
      step_times_ms: times of this process's steps, without held-out losses and checkpoints.
    """

    state: State
    step: int
    signum: int | None
    step_times_ms: list[float]

    @property
    def median_step_ms(self) -> float | None:
        return statistics.median(self.step_times_ms) if self.step_times_ms else None


@dataclasses.dataclass(frozen=True)
class Trainer:
    """Takes a run's steps.

    Attributes:
      options: number of steps, and the intervals of held-out losses and checkpoints.
      take_step: maps (state, tokens (B, S + 1)) to (state, metrics), arrays still being computed.
      held_out: maps (params, tokens (B, S + 1)) to a held-out loss.
      batches: input of step i.
      windows: held-out text, (K, B, S + 1).
      checkpoints: the run's checkpoints.
      history: the run's losses.
      run: JSON-ready description of the run, saved with each state.
      saved_form: maps a state to the pytree to save.
      watcher: shows the progress.
      stop: checked before every step.
    """

    options: Options
    take_step: Callable[[State, np.ndarray], tuple[State, dict[str, jax.Array]]]
    held_out: Callable[[Any, np.ndarray], jax.Array]
    batches: Batches
    windows: np.ndarray
    checkpoints: Checkpoints
    history: History
    run: dict[str, Any]
    watcher: Watcher
    stop: Stop
    saved_form: Callable[[State], State] = lambda state: state

    def train(self, state: State, first: int) -> Outcome:
        """Trains from a state after `first` steps to the last step, or to a signal.

        Args:
          state: state after `first` steps; donated.
          first: number of steps already taken.

        Raises:
          DivergedError: a step is not finite. Such a step is never saved, since each save waits for the check
            of its step.
        """
        options, readings = self.options, _Readings(self.history, self.watcher)
        step = first
        while step < options.steps and self.stop.signum is None:
            started = time.perf_counter()
            state, metrics = self.take_step(state, self.batches[step])
            step += 1
            readings.push(step, metrics, (time.perf_counter() - started) * 1e3)
            last = step == options.steps
            evaluates, saves = (
                last or _due(step, options.eval_every),
                last or _due(step, options.checkpoint_every),
            )
            if evaluates or saves:
                readings.finish()
                if evaluates:
                    self._evaluate(state, step)
                if saves:
                    self._save(state, step)
                readings.restart_clock()
        readings.finish()
        if self.stop.signum is not None and step > first:
            self._save(state, step)
        self.checkpoints.wait()
        return Outcome(state, step, self.stop.signum, readings.times_ms)

    def _evaluate(self, state: State, step: int) -> None:
        losses = [self.held_out(state["params"], window) for window in self.windows]
        loss = float(np.mean(jax.device_get(losses), dtype=np.float64))
        self.history.append(step, held_out=loss)
        self.watcher.show_held_out(step, loss)

    def _save(self, state: State, step: int) -> None:
        if self.options.keep and step != self.checkpoints.latest:
            self.checkpoints.save(step, self.saved_form(state), self.run)
            self.watcher.show_save(step)


class _Readings:
    """Reads a step's metrics once the next step has started, so the device never waits for the host.

    A step takes the time since the last reading. To start one that is large may wait for memory of the step
    before, or for a loop in it. Then it takes at least the time to start it: its predecessor was read late.
    """

    def __init__(self, history: History, watcher: Watcher):
        self.history, self.watcher = history, watcher
        self.times_ms: list[float] = []
        self._pending: tuple[int, dict[str, jax.Array], float] | None = None
        self.restart_clock()

    def restart_clock(self) -> None:
        self._since = time.perf_counter()

    def push(self, step: int, metrics: dict[str, jax.Array], start_ms: float) -> None:
        """Reads the step before, and keeps a step that was started in `start_ms` to be read."""
        self.finish()
        self._pending = step, metrics, start_ms

    def finish(self) -> None:
        """Waits for the pending step, if any, and checks its metrics."""
        if self._pending is None:
            return
        (step, arrays, start_ms), self._pending = self._pending, None
        metrics = {key: float(value) for key, value in jax.device_get(arrays).items()}
        self.times_ms.append(max(start_ms, (time.perf_counter() - self._since) * 1e3))
        self.restart_clock()
        if not all(map(math.isfinite, metrics.values())):
            raise DivergedError(step, metrics)
        self.history.append(step, **metrics)
        self.watcher.show_step(step, metrics, self.times_ms[-1])


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
