"""Draws profiles of a GPU, below each other on one scale: kernels, hidden copies, and exposed copies.

    python -m bench.timeline stock=DIR jaxoff=DIR --out timeline.png --to 110
    python -m bench.timeline stock=DIR jaxoff=DIR --out layer.png --layer 2
    python -m bench.timeline stock=DIR jaxoff=DIR --out layer.png --layer 1 --marker bprop

A folder is an output of `jax.profiler.trace`, or of `jaxoff.measure` with `trace_dir`. --from and --to are in
ms since the first event. --layer N is the window between runs N and N + 1, counted from 0, of a kernel that
runs once a layer: the first match of --marker, by default attention's forward kernel. A
rematerialised layer runs the forward kernel again in the backward pass: with 12 layers, --layer 14 is the
third layer of the backward pass. In a CONCURRENT CUDA graph the kernels of a layer change places from layer
to layer; compare CONCURRENT programs over --from and --to.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jaxoff._profile.gpu_trace import EventKind, Trace, read
from jaxoff._profile.intervals import Interval, sum_lengths

MARKER = "fprop|fwd"
LANES: dict[EventKind, str] = {"kernel": "kernels", "D2H": "to host", "H2D": "from host"}
COLOURS = {"kernel": "#4c78a8", "D2H": "#f2a541", "H2D": "#59a14f"}
EXPOSED = "#d62728"


@dataclass(frozen=True)
class Panel:
    """A profile's part of the picture.

    Attributes:
      label: the user's name for the profile.
      trace: of one GPU, cut to the window.
      window: start and end of the window in ms, on the trace's clock.
    """

    label: str
    trace: Trace
    window: Interval

    @property
    def width_ms(self) -> float:
        return self.window[1] - self.window[0]

    def shift(self, intervals: list[Interval]) -> list[tuple[float, float]]:
        """Start relative to the window's, and length, in matplotlib's form."""
        return [(start - self.window[0], end - start) for start, end in intervals]

    def title(self) -> str:
        kernels = sum_lengths(self.trace.busy("kernel"))
        said = [f"{self.label}: {self.width_ms:.1f} ms shown, kernels busy {kernels:.1f} ms"]
        ways: tuple[EventKind, ...] = ("D2H", "H2D")
        for way in ways:
            busy, bare = sum_lengths(self.trace.busy(way)), sum_lengths(self.trace.list_exposed(way))
            said.append(f"{LANES[way]} {busy:.1f} ms ({bare:.1f} exposed)")
        return ", ".join(said)


def panel(label: str, trace: Trace, gpu: int | None, window: Interval) -> Panel:
    """The part of a trace inside a window, of one GPU; of the first GPU where none is named."""
    if not trace.events:
        raise ValueError(f"timeline draws what ran on a GPU, and the profile {label!r} has none of one.")
    gpu = trace.gpus[0] if gpu is None else gpu
    if gpu not in trace.gpus:
        raise ValueError(f"--gpu names a GPU that the profile {label!r} has, one of {trace.gpus}; got {gpu}.")
    shown = trace.of_gpu(gpu).between(*window)
    if not shown.events:
        end = trace.start_ms + trace.span_ms
        raise ValueError(
            f"Nothing ran in the window of {label!r}: it is {window[0] - trace.start_ms:.1f} to "
            f"{window[1] - trace.start_ms:.1f} ms, and the profile ends at {end - trace.start_ms:.1f} ms."
        )
    return Panel(label, shown, window)


def window_of_times(trace: Trace, start_ms: float, end_ms: float | None) -> Interval:
    """A window given in ms since the first event; without an end the window ends with the last event."""
    end = trace.span_ms if end_ms is None else end_ms
    if start_ms >= end:
        raise ValueError(
            f"--from lies before --to, and before the profile's end; got {start_ms} and {end:g}."
        )
    return trace.start_ms + start_ms, trace.start_ms + end


def window_of_layer(trace: Trace, layer: int, marker: str) -> Interval:
    """The window between two runs of a kernel; see the top of this file."""
    kernels = [event for event in trace.events if event.kind == "kernel"]
    name = next((event.name for event in kernels if re.search(marker, event.name)), None)
    if name is None:
        often = ", ".join(
            f"{name[:60]} ({n})" for name, n in Counter(e.name for e in kernels).most_common(20)
        )
        raise ValueError(
            f"--marker finds a kernel that runs once a layer, and none matches {marker!r}. Kernels and how "
            f"often they ran: {often}."
        )
    starts = [event.start_ms for event in kernels if event.name == name]
    if not 0 <= layer < len(starts) - 1:
        raise ValueError(
            f"--layer is a number from 0 to {len(starts) - 2}, as {name[:60]} ran {len(starts)} times; "
            f"got {layer}."
        )
    return starts[layer], starts[layer + 1]


def draw(panels: list[Panel], path: Path) -> None:
    """Draws the panels into a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    figure, axes = plt.subplots(
        len(panels), 1, figsize=(14, 0.6 + 1.75 * len(panels)), sharex=True, squeeze=False
    )
    for ax, shown in zip(axes[:, 0], panels, strict=True):
        for row, way in enumerate(LANES):
            # Adjacent kernels are drawn as one bar, so that every gap is idle time of the GPU.
            low = 2 - row + 0.1
            ax.broken_barh(shown.shift(shown.trace.busy(way)), (low, 0.8), color=COLOURS[way], linewidth=0)
            if way != "kernel":
                bare = shown.shift(shown.trace.list_exposed(way))
                ax.broken_barh(bare, (low, 0.25), color=EXPOSED, linewidth=0)
        ax.set_yticks([2.5, 1.5, 0.5], list(LANES.values()))
        ax.set_ylim(0, 3)
        ax.set_title(shown.title(), fontsize=10, loc="left")
        ax.spines[["top", "right"]].set_visible(False)
        ax.tick_params(axis="y", length=0)
        ax.axvline(shown.width_ms, color="black", lw=0.8, ls=":")
    axes[-1, 0].set_xlim(0, 1.002 * max(shown.width_ms for shown in panels))
    axes[-1, 0].set_xlabel("ms")
    patches = [Patch(color=COLOURS[way], label=label) for way, label in LANES.items()]
    patches.append(Patch(color=EXPOSED, label="exposed: a copy beside which no kernel ran"))
    figure.tight_layout(rect=(0, 0.24 / (0.6 + 1.75 * len(panels)), 1, 1))
    figure.legend(handles=patches, loc="lower center", ncols=4, fontsize=9, frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _parse_profile(text: str) -> tuple[str, Path]:
    label, separator, folder = text.partition("=")
    if not (label and separator and folder):
        raise argparse.ArgumentTypeError(f"a profile is given as LABEL=FOLDER; got {text!r}")
    return label, Path(folder)


def panels_of(traces: Mapping[str, Trace], o: argparse.Namespace) -> list[Panel]:
    shown = []
    for label, trace in traces.items():
        if o.layer is None:
            window = window_of_times(trace, o.start, o.end)
        else:
            window = window_of_layer(trace, o.layer, o.marker)
        shown.append(panel(label, trace, o.gpu, window))
    return shown


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Timelines of profiles, one below the other.")
    parser.add_argument("profiles", type=_parse_profile, nargs="+", metavar="LABEL=FOLDER")
    parser.add_argument("--out", type=Path, required=True, help="where the picture goes, PNG")
    parser.add_argument("--from", type=float, dest="start", default=0.0, metavar="MS")
    parser.add_argument("--to", type=float, dest="end", metavar="MS")
    parser.add_argument("--layer", type=int, help="in the place of --from and --to")
    parser.add_argument("--marker", default=MARKER, help="a regular expression for a kernel")
    parser.add_argument("--gpu", type=int, help="which GPU; the profile's first without")
    o = parser.parse_args(arguments)
    if o.layer is not None and (o.start or o.end is not None):
        parser.error("--layer takes the place of --from and --to: give one or the other")
    try:
        draw(panels_of({label: read(folder) for label, folder in o.profiles}, o), o.out)
    except (ValueError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
