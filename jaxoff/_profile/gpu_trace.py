"""What the profiler saw on the GPUs: every kernel and copy with its time, and which copies nothing hid."""

from __future__ import annotations

import dataclasses
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from jaxoff._report.tables import format_nbytes as human
from jaxoff._report.tables import render_text as printed

type Interval = tuple[float, float]
type Kind = Literal["kernel", "D2H", "H2D", "D2D", "H2H", "memset"]

_PLANE = re.compile(r"/device:GPU:(\d+)$")
# A graph of CUDA's spreads its kernels over many streams; lines of other names repeat the same work.
_STREAM = re.compile(r"Stream #(\d+)")
_DETAILS = ("memcpy_details", "Memset_details")
_NBYTES = re.compile(r"\b(?:size|num_bytes):(\d+)")
_ENDS = re.compile(r"kind_src:(\w+) kind_dst:(\w+)")
_HOST_MEMORY = ("pageable", "pinned")


@dataclasses.dataclass(frozen=True)
class Event:
    """Something that ran on a GPU.

    Attributes:
      name: of the kernel, or the profiler's name of the copy.
      kind: "kernel"; "D2H", "H2D", "D2D" (also from one GPU to another) or "H2H" for a copy by an engine;
        "memset". A kernel that reads host memory is a kernel: the profiler cannot tell.
      gpu: the number of the GPU among those of its process.
      stream: the number of the CUDA stream.
      start_ms: since the profile began.
      duration_ms: how long it ran.
      nbytes: copied or set; None for kernels, and where the profiler does not say.
    """

    name: str
    kind: Kind
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
    """The copies of one direction on one GPU.

    Attributes:
      count: how many; of several calls, in one of them.
      nbytes: how much they moved.
      busy_ms: while at least one of them ran.
      exposed_ms: while at least one of them ran and no kernel of that GPU did.
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
        """An equal share of it for each of some calls."""
        return CopyTime(
            self.count / calls, round(self.nbytes / calls), self.busy_ms / calls, self.exposed_ms / calls
        )


@dataclasses.dataclass(frozen=True)
class GpuTimes:
    """How long one GPU was busy with what.

    Attributes:
      gpu: its number among those of its process.
      kernel_ms: while at least one kernel ran.
      d2h: copies to the host.
      h2d: copies from the host.
      d2d_ms: while a copy within device memory, or to another GPU, ran.
      memset_ms: while a memset ran.
      exposed_ms: while a copy to or from the host ran and no kernel did. Both directions at once count once.
    """

    gpu: int
    kernel_ms: float
    d2h: CopyTime
    h2d: CopyTime
    d2d_ms: float
    memset_ms: float
    exposed_ms: float

    def per_call(self, calls: int) -> GpuTimes:
        """An equal share of it for each of some calls."""
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
    """What ran on the GPUs of one process, in the order of its starts. Prints as a table of times.

    Attributes:
      events: kernels, copies and memsets.
    """

    events: tuple[Event, ...]

    @property
    def gpus(self) -> tuple[int, ...]:
        """The GPUs on which something ran."""
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
        """The events of one GPU."""
        return Trace(tuple(event for event in self.events if event.gpu == gpu))

    def between(self, start_ms: float, end_ms: float) -> Trace:
        """What ran in a window, cut at its edges. Bytes stay those of the whole copies."""
        cut = []
        for event in self.events:
            start, end = max(event.interval[0], start_ms), min(event.interval[1], end_ms)
            if start < end:
                cut.append(dataclasses.replace(event, start_ms=start, duration_ms=end - start))
        return Trace(tuple(cut))

    def busy(self, *kinds: Kind) -> list[Interval]:
        """When events of some kinds ran, on any of the trace's GPUs: disjoint intervals in ms, in order."""
        return union(event.interval for event in self.events if event.kind in kinds)

    def exposed(self, *kinds: Kind) -> list[Interval]:
        """When events of some kinds ran and no kernel of the same GPU did, likewise."""
        found: list[Interval] = []
        for gpu in self.gpus:
            of_gpu = self.of_gpu(gpu)
            found += outside(of_gpu.busy(*kinds), of_gpu.busy("kernel"))
        return union(found)

    def times(self) -> tuple[GpuTimes, ...]:
        """How long each GPU was busy with what."""
        return tuple(_times(self.of_gpu(gpu), gpu) for gpu in self.gpus)

    def to_dict(self) -> dict[str, Any]:
        """The events and the times as JSON-ready values."""
        return {
            "span_ms": self.span_ms,
            "gpus": [dataclasses.asdict(times) for times in self.times()],
            "events": [dataclasses.asdict(event) for event in self.events],
        }

    def __str__(self) -> str:
        return printed(self)

    def __rich_console__(self, console, options):
        from rich.text import Text

        yield times_table(self.times(), console.is_terminal)
        yield Text(f"\n{len(self.events)} events in {self.span_ms:.2f} ms")


def _times(trace: Trace, gpu: int) -> GpuTimes:
    return GpuTimes(
        gpu=gpu,
        kernel_ms=total(trace.busy("kernel")),
        d2h=_copy_time(trace, "D2H"),
        h2d=_copy_time(trace, "H2D"),
        d2d_ms=total(trace.busy("D2D")),
        memset_ms=total(trace.busy("memset")),
        exposed_ms=total(trace.exposed("D2H", "H2D")),
    )


def _copy_time(trace: Trace, direction: Kind) -> CopyTime:
    copies = [event for event in trace.events if event.kind == direction]
    return CopyTime(
        count=len(copies),
        nbytes=sum(copy.nbytes or 0 for copy in copies),
        busy_ms=total(trace.busy(direction)),
        exposed_ms=total(trace.exposed(direction)),
    )


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points in as few intervals as possible, in order; those without a length are left out."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if start >= end:
            continue
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def outside(intervals: Iterable[Interval], cover: Iterable[Interval]) -> list[Interval]:
    """The points of some intervals that a cover leaves bare, as `union` gives them."""
    covers, bare, first = union(cover), [], 0
    for start, end in union(intervals):
        while first < len(covers) and covers[first][1] <= start:
            first += 1
        for left, right in covers[first:]:
            if left >= end:
                break
            if start < left:
                bare.append((start, left))
            start = right
        if start < end:
            bare.append((start, end))
    return bare


def total(intervals: Iterable[Interval]) -> float:
    """The length of disjoint intervals."""
    return sum((end - start for start, end in intervals), 0.0)


def read(path: str | os.PathLike[str]) -> Trace:
    """Reads a profile.

    Args:
      path: an `.xplane.pb` file, or a folder that holds one, such as was given to `jax.profiler.trace`.

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

    with warnings.catch_warnings():  # jaxlib's types of a profile lack an attribute that Python asks for
        warnings.filterwarnings("ignore", "builtin type .* has no __module__ attribute", DeprecationWarning)
        events = list(_events(ProfileData.from_file(str(_file(Path(path))))))
    return Trace(tuple(sorted(events, key=lambda event: (event.start_ms, event.gpu, event.stream))))


def _file(path: Path) -> Path:
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


def _events(profile: Any) -> Iterator[Event]:
    for plane in profile.planes:
        if (gpu := _PLANE.match(plane.name)) is None:
            continue
        for line in plane.lines:
            if (stream := _STREAM.match(line.name)) is None:
                continue
            for event in line.events:
                details = _details(event)
                size = _NBYTES.search(details)
                yield Event(
                    name=event.name,
                    kind=_kind(event.name, details),
                    gpu=int(gpu[1]),
                    stream=int(stream[1]),
                    start_ms=event.start_ns / 1e6,
                    duration_ms=event.duration_ns / 1e6,
                    nbytes=int(size[1]) if size else None,
                )


def _details(event: Any) -> str:
    if not event.name.startswith("Mem"):
        return ""
    return " ".join(str(value) for name, value in event.stats if name in _DETAILS)


def _kind(name: str, details: str) -> Kind:
    if name.startswith("Memset"):
        return "memset"
    if not name.startswith("Memcpy"):
        return "kernel"
    for direction in ("D2H", "H2D", "D2D", "H2H"):
        if name == f"Memcpy{direction}":
            return direction
    # From one GPU to another, or something that the profiler has no name for.
    ends = _ENDS.search(details)
    from_host, to_host = (end in _HOST_MEMORY for end in ends.groups()) if ends else (False, False)
    if from_host:
        return "H2H" if to_host else "H2D"
    return "D2H" if to_host else "D2D"


def times_table(gpus: Sequence[GpuTimes], terminal: bool) -> Any:
    """How long GPUs were busy with what, as a table."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD if terminal else None, pad_edge=False, header_style="bold")
    for heading in ("GPU", "what", "busy ms", "exposed ms", "count", "bytes", "GB/s"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    for times in gpus:
        table.add_row(str(times.gpu), "kernels", f"{times.kernel_ms:.2f}")
        for way, copy in (("D2H", times.d2h), ("H2D", times.h2d)):
            cells = (f"{copy.busy_ms:.2f}", f"{copy.exposed_ms:.2f}", f"{copy.count:g}", human(copy.nbytes))
            style = "yellow" if terminal and copy.exposed_ms > 0.1 * copy.busy_ms else None
            table.add_row(str(times.gpu), way, *cells, f"{copy.bandwidth_gbps:.1f}", style=style)
        for what, busy in (("D2D", times.d2d_ms), ("memset", times.memset_ms)):
            if busy:
                table.add_row(str(times.gpu), what, f"{busy:.2f}")
    return table
