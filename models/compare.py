"""Step time and peak memory under a policy and under its twin, which keeps offloaded residuals on the device.

The peak memory of a process covers all its programs, so each measurement runs in a fresh process: `python -m
models.compare` reads a request as JSON and prints the measurement as JSON. Both processes run before the
training process takes the device's memory.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import statistics
import subprocess
import sys
import time
from typing import Any

import jax

from models import data, policy_text
from models.options import Options
from models.program import Program

WARM_UP_STEPS = 2
STEPS = 10


@dataclasses.dataclass(frozen=True)
class Measurement:
    """The measurements of a process.

    Attributes:
      platform: platform of JAX's default device, e.g. "gpu".
      step_ms: median time of `STEPS` steps after `WARM_UP_STEPS`.
      peak_bytes: peak of device memory; None where the device keeps no statistics, as on a CPU.
      device_bytes, host_bytes: bytes of a microbatch's residuals by placement, from `jaxoff.explain`.
      loss: loss of the last step.
      error: reason why all else is None, or None.
    """

    platform: str | None = None
    step_ms: float | None = None
    peak_bytes: int | None = None
    device_bytes: int | None = None
    host_bytes: int | None = None
    loss: float | None = None
    error: str | None = None


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A policy and its twin on the device, measured on the same inputs."""

    policy: Measurement
    on_device: Measurement


def accelerator_installed() -> bool:
    """Tells whether JAX may find an accelerator, without starting JAX and so taking the device's memory."""
    return jax.config.jax_platforms != "cpu" and bool(importlib.metadata.entry_points(group="jax_plugins"))


def compare(options: Options, *, accelerator_only: bool) -> Comparison | None:
    """Measures the policy and its twin in two processes, in sequence.

    Args:
      options: options of the run to measure.
      accelerator_only: measure nothing on a CPU.

    Returns:
      The two measurements; None on a CPU if `accelerator_only`.
    """
    measured = []
    for on_device in (False, True):
        measured.append(
            _in_child(
                {
                    "options": dataclasses.asdict(options),
                    "on_device": on_device,
                    "accelerator_only": accelerator_only,
                }
            )
        )
        if accelerator_only and measured[-1].platform == "cpu":
            return None
    return Comparison(*measured)


def measure(options: Options, *, on_device: bool) -> Measurement:
    """Measures in this process, which should have run no other program."""
    policy = policy_text.parse(options.policy)
    program = Program(options, policy.on_device() if on_device else policy)
    corpus = data.load(options.data)
    batches = data.Batches(corpus.train, options.batch, options.seq, options.seed)
    state, step, times, loss = program.init(), program.compiled_step, [], None
    for i in range(WARM_UP_STEPS + STEPS):
        tokens = program.microbatches(batches[i])
        start = time.perf_counter()
        state, metrics = step(state, tokens)
        loss = float(metrics["loss"])  # waits for the step
        times.append((time.perf_counter() - start) * 1e3)
    stats, report = jax.local_devices()[0].memory_stats() or {}, program.explain()
    return Measurement(
        platform=jax.default_backend(),
        step_ms=statistics.median(times[WARM_UP_STEPS:]),
        peak_bytes=stats.get("peak_bytes_in_use"),
        device_bytes=report.device_bytes,
        host_bytes=report.host_bytes,
        loss=loss,
    )


def _in_child(request: dict[str, Any]) -> Measurement:
    command = [sys.executable, "-m", "models.compare"]
    child = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True)
    lines, complaints = child.stdout.strip().splitlines(), child.stderr.strip().splitlines()
    if child.returncode or not lines:
        return Measurement(
            error=f"exit status {child.returncode}: {complaints[-1][:300] if complaints else 'no output'}"
        )
    return Measurement(**json.loads(lines[-1]))


def main() -> None:
    request = json.load(sys.stdin)
    if request["accelerator_only"] and jax.default_backend() == "cpu":
        result = Measurement(platform="cpu")
    else:
        given = request["options"]
        result = measure(Options(**(given | {"data": tuple(given["data"])})), on_device=request["on_device"])
    print(json.dumps(dataclasses.asdict(result)))


if __name__ == "__main__":
    main()
