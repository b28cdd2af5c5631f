"""The summary of a run: losses as a picture and a line of blocks, bytes and speed, as text and JSON."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import itertools
import math
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from models.compare import Comparison, Measurement
from models.data import bits
from models.work import Work

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "_.-~=*#@"
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")

Curve = Sequence[tuple[int, float]]


def sparkline(values: Sequence[float], *, width: int = 60, blocks: str = BLOCKS) -> str:
    """Draws values as a line of at most `width` blocks; a block's height is the mean of its share of values.

    Example:
      >>> from models.summary import sparkline
      >>> sparkline([3.0, 2.0, 1.5, 1.0])
      '█▅▃▁'
    """
    if not values:
        return ""
    count = min(width, len(values))
    edges = [len(values) * i // count for i in range(count + 1)]
    means = [math.fsum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    spread = (high - low) or 1.0
    return "".join(blocks[round((mean - low) / spread * (len(blocks) - 1))] for mean in means)


def draw(path: Path, train: Curve, held_out: Curve, byte_frequency: float, title: str) -> None:
    """Writes a PNG of the losses, in nats a byte, with the loss of the byte-frequency model as a line."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import, and only needed here
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="step", ylabel="loss (nats/byte)", title=title)
    axes.axhline(byte_frequency, color="0.5", linestyle="--", label=f"byte frequencies {byte_frequency:.3f}")
    if train:
        axes.plot(*zip(*train, strict=True), color="tab:blue", linewidth=1, label="training")
    if held_out:
        axes.plot(
            *zip(*held_out, strict=True), color="tab:red", marker="o", label=f"held out {held_out[-1][1]:.3f}"
        )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in _PACKAGES},
    }


def environment() -> str:
    """Describes the devices and the versions in a line."""
    devices = jax.devices()
    found = ", ".join(f"{name} {version}" for name, version in versions().items())
    return f"{len(devices)} x {devices[0].device_kind} ({jax.default_backend()}); {found}"


def settings() -> dict[str, Any]:
    """Collects the environment variables of XLA and JAX, which decide compilation and memory."""
    return {key: value for key, value in sorted(os.environ.items()) if key.startswith(("XLA_", "JAX_"))}


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A plan's prediction for a step on a device: time, peak of device memory, host memory; the budget."""

    device: str
    step_ms: float
    peak_bytes: int
    host_bytes: int
    budget_bytes: int


@dataclasses.dataclass(frozen=True)
class Summary:
    """A finished run.

    Attributes:
      train, held_out: losses as (step, nats a byte).
      byte_frequency: loss of the best model of byte frequencies on the same held-out bytes, nats a byte.
      device_bytes, host_bytes, recompute_bytes: bytes of the residuals by placement.
      work: work of a step.
      step_ms: median time of a step; None if this process took no step.
      compile_s: seconds of compilation; None if this process took no step.
      peak_bytes: peak of device memory in this process; None on a CPU.
      comparison: measurements of the policy and its twin, or None.
      predicted: prediction of the plan, or None for a policy without a plan.
    """

    train: Curve
    held_out: Curve
    byte_frequency: float
    device_bytes: int
    host_bytes: int
    recompute_bytes: int
    work: Work
    step_ms: float | None
    compile_s: float | None
    peak_bytes: int | None
    comparison: Comparison | None
    predicted: Prediction | None = None

    @property
    def tokens_per_s(self) -> float | None:
        return self.work.tokens_per_s(self.step_ms) if self.step_ms else None

    @property
    def mfu(self) -> float | None:
        """The median step's share of the device's peak; None where the peak is unknown."""
        return self.work.mfu(self.step_ms) if self.step_ms else None

    def to_dict(self) -> dict[str, Any]:
        """Converts the summary to JSON-ready values."""
        return dataclasses.asdict(self) | {"tokens_per_s": self.tokens_per_s, "mfu": self.mfu}

    def show(self, console: Console) -> None:
        blocks = BLOCKS if console.encoding.lower().startswith("utf") else ASCII_BLOCKS
        losses = [loss for _, loss in self.train]
        table = Table(box=None, show_header=False, pad_edge=False)
        if losses:
            width = max(8, min(60, console.width - 48))
            line = sparkline(losses, width=width, blocks=blocks)
            table.add_row("training loss", f"{losses[0]:.3f} {line} {losses[-1]:.3f} nats/byte")
        if self.held_out:
            table.add_row("held-out loss", _in_both(self.held_out[-1][1]))
        table.add_row("byte-frequency model", _in_both(self.byte_frequency))
        kept = f"device {_mb(self.device_bytes)}, host {_mb(self.host_bytes)}"
        where = "" if self.peak_bytes is not None else "; on a GPU: on a CPU nothing moves"
        table.add_row("residuals", f"{kept}, recomputed {_mb(self.recompute_bytes)} a microbatch{where}")
        if self.step_ms is not None:
            table.add_row(
                "speed",
                f"{self.work.rate(self.step_ms)}, {self.step_ms:.1f} ms a step (median), "
                f"compiled in {self.compile_s:.1f} s",
            )
        if self.peak_bytes is not None:
            table.add_row("peak device memory", _mb(self.peak_bytes))
        if self.predicted is not None:
            table.add_row(
                "predicted, measured", _compare_prediction(self.predicted, self.step_ms, self.peak_bytes)
            )
        if self.comparison is not None:
            table.add_row("with the policy", _describe(self.comparison.policy, self.work))
            table.add_row("all on the device", _describe(self.comparison.on_device, self.work))
            if line := _gain(self.comparison):
                table.add_row("difference", line)
        console.print(table)


def _compare_prediction(predicted: Prediction, step_ms: float | None, peak_bytes: int | None) -> str:
    """Describes a prediction and the measurement; on a CPU, without a peak, the two are not compared."""
    foretold, budget = _mb(predicted.peak_bytes), _mb(predicted.budget_bytes)
    step = f"step {predicted.step_ms:.1f} ms on {predicted.device}"
    if peak_bytes is None:
        return f"{step}; peak {foretold} of {budget}; a CPU measures neither"
    time = "not measured" if step_ms is None else f"{step_ms:.1f} ms ({predicted.step_ms / step_ms - 1:+.1%})"
    peak = f"{_mb(peak_bytes)} ({predicted.peak_bytes / peak_bytes - 1:+.1%})"
    return f"{step}, {time}; peak {foretold} of {budget}, {peak}"


def _gain(comparison: Comparison) -> str | None:
    ours, twin = comparison.policy, comparison.on_device
    if ours.step_ms is None or twin.step_ms is None:
        return None
    if "cpu" in (ours.platform, twin.platform):
        return "none: on a CPU nothing moves, and the two are one program"
    text = f"{(ours.step_ms / twin.step_ms - 1):+.1%} step time"
    if ours.peak_bytes is not None and twin.peak_bytes is not None:
        sign = "-" if twin.peak_bytes >= ours.peak_bytes else "+"
        text += f", {sign}{_mb(abs(twin.peak_bytes - ours.peak_bytes))} peak device memory"
    return text


def _describe(m: Measurement, work: Work) -> str:
    if m.step_ms is None:
        return f"not measured ({m.error})"
    peak = "peak memory not known on this device" if m.peak_bytes is None else f"peak {_mb(m.peak_bytes)}"
    return f"{m.step_ms:.1f} ms a step, {work.rate(m.step_ms)}, {peak}"


def _in_both(nats: float) -> str:
    return f"{nats:.3f} nats/byte = {bits(nats):.3f} bits/byte"


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e9:,.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:,.2f} MB"
