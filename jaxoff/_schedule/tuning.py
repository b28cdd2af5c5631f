"""The fastest of several programs of a step, by the times of the caller's own steps.

No model of time tells programs apart whose times differ by a few percent (bench/LOG.md, "2026-11-25, night:
programs in other people's styles on one GPU"). All programs compute the same step, so each of the first steps
is taken by another program and timed. The decision is kept on disk, by the program, the devices and the
versions.
"""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxoff._budget.report import Plan
from jaxoff._report.finding import Finding, FindingCode
from jaxoff._runtime.disk import read_facts, write_facts
from jaxoff._runtime.program_memory import program_nbytes_if_compiled
from jaxoff._schedule.recipes import TOLERANCE, Recipe
from jaxoff._schedule.settings import Setting

# The first step of each program loads the program and is not timed. The median of the others counts.
WARMUPS, SAMPLES = 1, 3
# Among programs within this part of the least time, about the noise of medians, the first is preferred.
MARGIN = 0.003


class Tuning:
    """The times of settings, each of which takes every n-th of the first steps.

    Attributes:
      settings: the settings, the preferred one first.
      key: the key of the decision on disk.
      unmet: by setting, the findings of its compiled program.
      plans: by setting, the plan of a step within a budget.
      samples: the seconds of the steps of each, without the first.
    """

    def __init__(
        self,
        settings: Sequence[Setting],
        key: str,
        unmet: dict[Setting, Sequence[Finding]],
        plans: Mapping[Setting, Plan] | None = None,
    ):
        self.settings, self.key, self.unmet, self.plans = tuple(settings), key, unmet, plans or {}
        self.samples: dict[Setting, list[float]] = {setting: [] for setting in settings}
        self._steps = 0

    @property
    def is_done(self) -> bool:
        """Whether every setting has its samples."""
        return self._steps == len(self.settings) * (WARMUPS + SAMPLES)

    @property
    def current(self) -> Setting:
        """The setting of the next step."""
        return self.settings[self._steps % len(self.settings)]

    def run(self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Takes a step by the program of the current setting and times it. Returns what the step returns."""
        jax.block_until_ready((args, kwargs))
        started = time.perf_counter()
        results = jax.block_until_ready(step(*args, **kwargs))
        seconds = time.perf_counter() - started
        if self._steps >= WARMUPS * len(self.settings):
            self.samples[self.current].append(seconds)
        self._steps += 1
        return results

    @property
    def milliseconds(self) -> dict[str, float]:
        """The median time of a step by each setting with samples: name -> milliseconds."""
        return {str(s): 1e3 * statistics.median(found) for s, found in self.samples.items() if found}

    def decide(self) -> Setting:
        """The fastest setting of all with samples; keeps their times on disk."""
        write_decision(self.key, self.milliseconds)
        fastest = find_fastest(self.settings, self.milliseconds)
        assert fastest is not None
        return fastest


def find_fastest(settings: Sequence[Setting], milliseconds: Mapping[str, float]) -> Setting | None:
    """The setting with the least time; within `MARGIN`, the first. None without a time."""
    limit = (1 + MARGIN) * min(milliseconds.values(), default=math.nan)
    return next((s for s in settings if milliseconds.get(str(s), math.inf) <= limit), None)


def list_within_limit(
    settings: Sequence[Setting], compile_setting: Callable[[Setting], jax.stages.Compiled]
) -> list[Setting]:
    """The settings within the device memory of the program as given and of its saved twin (1% more).

    Settings refused by XLA are left out. If none is left, the first setting is returned alone.
    """
    nbytes = {s: program_nbytes_if_compiled(functools.partial(compile_setting, s)) for s in settings}
    references = [nbytes[s] for s in settings if s.recipe in (Recipe.STOCK, Recipe.SAVED)]
    limit = (1 + TOLERANCE) * min(references, default=math.inf)
    return [s for s in settings if math.isfinite(nbytes[s]) and nbytes[s] <= limit] or [*settings[:1]]


def find_saved(chosen: Setting, milliseconds: Mapping[str, float]) -> list[Finding]:
    """A finding if the chosen program offloads nothing."""
    if chosen.recipe is not Recipe.SAVED:
        return []
    others = {name: ms for name, ms in milliseconds.items() if name != str(chosen)}
    least = min(others, key=lambda name: others[name], default=None)
    reason = (
        "no other recipe takes as little device memory"
        if least is None
        else f"a step takes {milliseconds[str(chosen)]:.1f} ms, and {others[least]:.1f} ms by {least!r}"
    )
    text = (
        f"the program runs by the recipe 'saved', nothing is offloaded: {reason}. "
        "recipe= in jaxoff.jit insists."
    )
    return [Finding(FindingCode.RECIPE_REPLACED, text)]


def refuse_several_processes() -> None:
    """Raises a ValueError in one of several processes: each would choose by its own times."""
    if jax.process_count() > 1:
        raise ValueError(
            f"jaxoff.jit(tune=True) compares programs in one process; got {jax.process_count()} processes, "
            "which must all run one program. Tune in one process, and pass what it found as recipe=."
        )


def read_decision(key: str) -> dict[str, float]:
    """The milliseconds by setting under a key; empty without a sound file."""
    with contextlib.suppress(TypeError, ValueError, AttributeError):
        found = read_facts("tuned", key).get("milliseconds", {})
        return {str(name): float(ms) for name, ms in found.items()}
    return {}


def write_decision(key: str, milliseconds: dict[str, float]) -> None:
    """Keeps the times of settings under a key, where the folder can be written."""
    write_facts("tuned", key, {"device": jax.devices()[0].device_kind, "milliseconds": milliseconds})
