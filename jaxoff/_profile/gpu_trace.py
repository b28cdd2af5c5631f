"""Reads a GPU profile: the times of kernels and copies, and the times of copies without a kernel beside."""

from __future__ import annotations

import dataclasses
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from jaxoff._profile.intervals import Interval, subtract, sum_lengths, unite
from jaxoff._profile.table import make_times_table
from jaxoff._report.tables import render_text

type EventKind = Literal["kernel", "D2H", "H2D", "D2D", "H2H", "memset"]

# The plane of a GPU in a profile, and its number.
_PLANE = re.compile(r"/device:GPU:(\d+)$")
# The line of a CUDA stream: a CUDA graph has many. Lines of other names repeat the same work.
_STREAM = re.compile(r"Stream #(\d+)")
# Statistics of a copy or memset with its size and its ends.
_DETAILS = ("memcpy_details", "Memset_details")
_NBYTES = re.compile(r"\b(?:size|num_bytes):(\d+)")
_ENDS = re.compile(r"kind_src:(\w+) kind_dst:(\w+)")
# The profiler's words for host memory.
_HOST_MEMORY = ("pageable", "pinned")


@dataclasses.dataclass(frozen=True)
class Event:
    """A kernel, a copy or a memset on a GPU.

    Attributes:
      name: of the kernel, or the profiler's name of the copy.
      kind: "kernel"; "D2H", "H2D", "D2D" (also between GPUs) or "H2H" for a copy by an engine; "memset". A
        kernel's read of host memory counts as a kernel: the profiler cannot tell.
      gpu: the number of the GPU among the GPUs of its process.
      stream: the number of the CUDA stream.
      start_ms: since the profile began.
      duration_ms: from its start to its end.
      nbytes: copied or set; None for kernels, and where the profiler does not say.
    """

    name: str
    kind: EventKind
    gpu: int
    stream: int
    start_ms: float
    duration_ms: float
    nbytes: int | None = None

    @property
    def interval(self) -> Interval:
        """Start and end, in ms."""
        return self.start_ms, self.start_ms + self.duration_ms


@dataclasses.dataclass(frozen=True)
class CopyTime:
    """The copies of a direction on a GPU.

    Attributes:
      count: the number of copies; a mean where `per_call` divided several calls.
      nbytes: bytes copied.
      busy_ms: time with a copy running.
      exposed_ms: time with a copy and no kernel of the same GPU running.
    """

    count: float
    nbytes: int
    busy_ms: float
    exposed_ms: float

    @property
    def bandwidth_gbps(self) -> float:
        """Bytes over busy time, in 1e9 bytes a second; 0 where nothing was copied."""
        return self.nbytes / self.busy_ms / 1e6 if self.busy_ms else 0.0

    def per_call(self, calls: int) -> CopyTime:
        """The mean of several calls, from their sum."""
        return CopyTime(
            self.count / calls, round(self.nbytes / calls), self.busy_ms / calls, self.exposed_ms / calls
        )


@dataclasses.dataclass(frozen=True)
class GpuTimes:
    """Busy times of a GPU.

    Attributes:
      gpu: the number of the GPU among the GPUs of its process.
      kernel_ms: time with a kernel running.
      d2h: copies to the host.
      h2d: copies from the host.
      d2d_ms: time with a copy running within device memory, or to another GPU.
      memset_ms: time with a memset running.
      exposed_ms: time with a copy to or from the host and no kernel running. Two directions at the same time
        count once.
    """

    gpu: int
    kernel_ms: float
    d2h: CopyTime
    h2d: CopyTime
    d2d_ms: float
    memset_ms: float
    exposed_ms: float

    def per_call(self, calls: int) -> GpuTimes:
        """The mean of several calls, from their sum."""
        return dataclasses.replace(
            self,
            kernel_ms=self.kernel_ms / calls,
            d2h=self.d2h.per_call(calls),
            h2d=self.h2d.per_call(calls),
            d2d_ms=self.d2d_ms / calls,
            memset_ms=self.memset_ms / calls,
            exposed_ms=self.exposed_ms / calls,
        )


@dataclasses.dataclass(frozen=True)
class Trace:
    """The events on the GPUs of a process, in the order of their starts. Prints as a table of times.

    Attributes:
      events: kernels, copies and memsets.
    """

    events: tuple[Event, ...]

    @property
    def gpus(self) -> tuple[int, ...]:
        """The GPUs with an event."""
        return tuple(sorted({event.gpu for event in self.events}))

    @property
    def start_ms(self) -> float:
        """When the first event started, since the profile began; 0 without events."""
        return min((event.start_ms for event in self.events), default=0.0)

    @property
    def span_ms(self) -> float:
        """From the first event's start to the last one's end."""
        return max((event.interval[1] for event in self.events), default=0.0) - self.start_ms

    def of_gpu(self, gpu: int) -> Trace:
        """The events of a GPU."""
        return Trace(tuple(event for event in self.events if event.gpu == gpu))

    def between(self, start_ms: float, end_ms: float) -> Trace:
        """The events in a window, cut at its edges. Bytes remain of the whole copies."""
        cut = []
        for event in self.events:
            start, end = max(event.interval[0], start_ms), min(event.interval[1], end_ms)
            if start < end:
                cut.append(dataclasses.replace(event, start_ms=start, duration_ms=end - start))
        return Trace(tuple(cut))

    def busy(self, *kinds: EventKind) -> list[Interval]:
        """The times of events of some kinds, on any GPU: disjoint intervals in ms, in order."""
        return unite(event.interval for event in self.events if event.kind in kinds)

    def list_exposed(self, *kinds: EventKind) -> list[Interval]:
        """The times of events of some kinds without a kernel on the same GPU, likewise."""
        found: list[Interval] = []
        for gpu in self.gpus:
            of_gpu = self.of_gpu(gpu)
            found += subtract(of_gpu.busy(*kinds), of_gpu.busy("kernel"))
        return unite(found)

    def times(self) -> tuple[GpuTimes, ...]:
        """The busy times of each GPU."""
        return tuple(_measure_times(self.of_gpu(gpu), gpu) for gpu in self.gpus)

    def to_dict(self) -> dict[str, Any]:
        """The events and the times as JSON-ready values."""
        return {
            "span_ms": self.span_ms,
            "gpus": [dataclasses.asdict(times) for times in self.times()],
            "events": [dataclasses.asdict(event) for event in self.events],
        }

    def __str__(self) -> str:
        return render_text(self)

    def __rich_console__(self, console, options):
        from rich.text import Text

        yield make_times_table(self.times(), console.is_terminal)
        yield Text(f"\n{len(self.events)} events in {self.span_ms:.2f} ms")


def _measure_times(trace: Trace, gpu: int) -> GpuTimes:
    return GpuTimes(
        gpu=gpu,
        kernel_ms=sum_lengths(trace.busy("kernel")),
        d2h=_measure_copies(trace, "D2H"),
        h2d=_measure_copies(trace, "H2D"),
        d2d_ms=sum_lengths(trace.busy("D2D")),
        memset_ms=sum_lengths(trace.busy("memset")),
        exposed_ms=sum_lengths(trace.list_exposed("D2H", "H2D")),
    )


def _measure_copies(trace: Trace, direction: EventKind) -> CopyTime:
    copies = [event for event in trace.events if event.kind == direction]
    return CopyTime(
        count=len(copies),
        nbytes=sum(copy.nbytes or 0 for copy in copies),
        busy_ms=sum_lengths(trace.busy(direction)),
        exposed_ms=sum_lengths(trace.list_exposed(direction)),
    )


def read(path: str | os.PathLike[str]) -> Trace:
    """Reads a profile.

    Args:
      path: an `.xplane.pb` file, or a folder with such a file, as given to `jax.profiler.trace`.

    Returns:
      The `Trace`; without events if the profile has none of a GPU.

    Raises:
      FileNotFoundError: where there is no profile.
      ValueError: where a folder holds several.

    Example:
      >>> import tempfile, jax, jax.numpy as jnp
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     with jax.profiler.trace(folder):
      ...         _ = jax.block_until_ready(jnp.ones((8, 8)) @ jnp.ones((8, 8)))
      ...     trace = read(folder)
      >>> all(event.duration_ms >= 0 for event in trace.events)
      True
    """
    from jax.profiler import ProfileData

    with warnings.catch_warnings():  # jaxlib's types of a profile lack `__module__`
        warnings.filterwarnings("ignore", "builtin type .* has no __module__ attribute", DeprecationWarning)
        file = _find_file(Path(path))
        try:
            profile = ProfileData.from_file(str(file))
        except RuntimeError as error:
            raise ValueError(f"A trace is a file that jax.profiler.trace wrote; {file}: {error}.") from None
        events = list(_read_events(profile))
    return Trace(tuple(sorted(events, key=lambda event: (event.start_ms, event.gpu, event.stream))))


def _find_file(path: Path) -> Path:
    if path.is_file():
        return path
    found = sorted(path.rglob("*.xplane.pb"))
    if not found:
        raise FileNotFoundError(
            f"A trace is an .xplane.pb file, or a folder that jax.profiler.trace wrote one to; {path} "
            f"{'holds none' if path.exists() else 'does not exist'}."
        )
    if len(found) > 1:
        listed = ", ".join(str(file.relative_to(path)) for file in found)
        raise ValueError(f"{path} holds {len(found)} profiles, and a trace is of one: give one of {listed}.")
    return found[0]


def _read_events(profile: Any) -> Iterator[Event]:
    for plane in profile.planes:
        if (gpu := _PLANE.match(plane.name)) is None:
            continue
        for line in plane.lines:
            if (stream := _STREAM.match(line.name)) is None:
                continue
            for event in line.events:
                details = _read_details(event)
                size = _NBYTES.search(details)
                yield Event(
                    name=event.name,
                    kind=_classify(event.name, details),
                    gpu=int(gpu[1]),
                    stream=int(stream[1]),
                    start_ms=event.start_ns / 1e6,
                    duration_ms=event.duration_ns / 1e6,
                    nbytes=int(size[1]) if size else None,
                )


def _read_details(event: Any) -> str:
    if not event.name.startswith("Mem"):
        return ""
    return " ".join(str(value) for name, value in event.stats if name in _DETAILS)


def _classify(name: str, details: str) -> EventKind:
    if name.startswith("Memset"):
        return "memset"
    if not name.startswith("Memcpy"):
        return "kernel"
    for direction in ("D2H", "H2D", "D2D", "H2H"):
        if name == f"Memcpy{direction}":
            return direction
    # A copy between GPUs, or a copy without a direction in its name.
    ends = _ENDS.search(details)
    from_host, to_host = (end in _HOST_MEMORY for end in ends.groups()) if ends else (False, False)
    if from_host:
        return "H2H" if to_host else "H2D"
    return "D2H" if to_host else "D2D"
