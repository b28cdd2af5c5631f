"""`measure`: the time and memory of a step, and the time of copies without a kernel beside."""

from __future__ import annotations

import collections
import dataclasses
import inspect
import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.core import Tracer

from jaxoff._profile import gpu_trace
from jaxoff._profile.gpu_trace import GpuTimes
from jaxoff._profile.table import make_times_table
from jaxoff._report.tables import format_nbytes, render_text
from jaxoff._runtime.program_memory import program_nbytes
from jaxoff._schedule.jit import jit
from jaxoff._schedule.jitted import Jitted
from jaxoff._schedule.prepare import watch_rounding

type NextArgs = Callable[[tuple[Any, ...], Any], tuple[Any, ...]]

# Ratio of times, under the profiler to without. Beyond, busy times are of slower calls, and a note says so.
_SLOWED = 1.1


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Time and memory of a call of a program. Prints as a table.

    Attributes:
      device: the number and the kind of devices of this process that ran the program.
      times_ms: the timed calls, each from its start until its results are ready.
      program_bytes: device memory of a call by the compiler's account, per device: arguments, results and
        temporaries, aliased bytes once.
      host_bytes: pinned host memory of the program's temporaries, per device.
      peak_bytes: the most device memory in use during the calls, on the fullest device, other arrays
        included; None where unknown.
      traced_ms: the mean time of the calls under the profiler, from which `gpus` comes; None without a trace.
      gpus: the busy times of each GPU, means of a call; empty without a trace.
      notes: missing measurements, each with its cause and its fix.
      store_errors: name -> the error of its values in float8, by a policy's `store`, in one call: the norm of
        the error over the norm of the exact values.
    """

    device: str
    times_ms: tuple[float, ...]
    program_bytes: int
    host_bytes: int
    peak_bytes: int | None
    traced_ms: float | None
    gpus: tuple[GpuTimes, ...]
    notes: tuple[str, ...] = ()
    store_errors: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def median_ms(self) -> float:
        """The median of the times."""
        return statistics.median(self.times_ms)

    @property
    def spread_ms(self) -> float:
        """The width of the middle half of the times; 0 for a single call."""
        if len(self.times_ms) < 2:
            return 0.0
        lower, _, upper = statistics.quantiles(self.times_ms, n=4, method="inclusive")
        return upper - lower

    @property
    def exposed_ms(self) -> float | None:
        """Time with a copy to or from the host and no kernel running, on the GPU with the most."""
        return max((times.exposed_ms for times in self.gpus), default=None)

    def to_dict(self) -> dict[str, Any]:
        """The measurement as JSON-ready values."""
        return {
            **dataclasses.asdict(self),
            "times_ms": list(self.times_ms),
            "gpus": [dataclasses.asdict(times) for times in self.gpus],
            "notes": list(self.notes),
            "store_errors": dict(self.store_errors),
            "median_ms": self.median_ms,
            "spread_ms": self.spread_ms,
            "exposed_ms": self.exposed_ms,
        }

    def __str__(self) -> str:
        return render_text(self)

    def __rich_console__(self, console, options):
        from rich.text import Text

        if self.gpus:
            yield make_times_table(self.gpus, console.is_terminal)
            yield Text("")
        calls = f"median of {len(self.times_ms)}" if len(self.times_ms) > 1 else "one call"
        yield Text(
            f"step {self.median_ms:.2f} ms on {self.device} ({calls}, middle half within "
            f"{self.spread_ms:.2f} ms, {min(self.times_ms):.2f} to {max(self.times_ms):.2f})"
        )
        peak = "unknown" if self.peak_bytes is None else format_nbytes(self.peak_bytes)
        yield Text(
            f"device peak {peak}, program {format_nbytes(self.program_bytes)}; host memory "
            f"{format_nbytes(self.host_bytes)}"
        )
        if self.store_errors:
            errors = ", ".join(f"{name} {error:.2%}" for name, error in self.store_errors.items())
            yield Text(f"stored in float8, error of the values: {errors}")
        for note in self.notes:
            yield Text(f"! {note}", style="yellow" if console.is_terminal else "")


def measure(
    fun: Callable[..., Any],
    *args: Any,
    repeats: int = 10,
    warmup: int = 3,
    traced: int = 3,
    next_args: NextArgs | None = None,
    trace_dir: str | Path | None = None,
) -> Measurement:
    """Runs a program on a GPU and measures a call: time, memory, and copies without a kernel beside.

    Let K be the times with a kernel of a GPU running, on any stream, and C the times with a copy of the same
    GPU in a direction running. The direction was busy for |C| and exposed for |C - K|.

    Warm-up calls come first, then the timed calls, then the calls under the profiler. A call starts when the
    results of the previous call are ready and freed. On a CPU only the time of a step is measured; `notes`
    says so.

    The peak is the allocator's high-water mark, which no call can reset. If these calls raised the mark, it
    is their peak. If the process had used as much memory before, compilation included, the peak is None:
    measure in a process of its own.

    If the policies of a `jaxoff.jit` function without a budget store values in float8, one more call comes
    first, which computes the errors of these values.

    Args:
      fun: a `jax.jit` or `jaxoff.jit` function, or its `.lower(...).compile()`; any other function is
        compiled with `jaxoff.jit`.
      *args: its arguments, arrays of any shape and dtype in any pytrees. NumPy arrays are copied to the
        device in every call.
      repeats: the number of timed calls.
      warmup: the number of calls before. The first call allocates memory, the next few record CUDA graphs.
      traced: the number of profiled calls; 0 for none.
      next_args: from a call's arguments and results, the arguments of the next call. For a function with
        donated arguments, which are gone after a call.
      trace_dir: a folder for the profile, for TensorBoard and the like; None: the profile is deleted.

    Returns:
      A `Measurement`. Busy and exposed times, copies and bytes are means of the profiled calls.

    Raises:
      TypeError: for a `fun` that is not callable, and for arguments without values.
      ValueError: for a number of calls out of range, for donated arguments without `next_args`, and for a
        program compiled ahead of time for devices that are not here.
      RuntimeError: from JAX, if a profile is being taken already.

    Example:
      >>> import jax, jax.numpy as jnp, jaxoff
      >>> step = jaxoff.jit(jax.grad(lambda w, x: jnp.tanh(x @ w).sum()))
      >>> taken = jaxoff.measure(step, jnp.ones((8, 8)), jnp.ones((4, 8)), repeats=5)
      >>> len(taken.times_ms), taken.median_ms > 0
      (5, True)
      >>> def train(w, x):
      ...     return w - 0.1 * step(w, x)
      >>> train = jax.jit(train, donate_argnums=0)
      >>> taken = jaxoff.measure(
      ...     train, jnp.ones((8, 8)), jnp.ones((4, 8)), next_args=lambda args, w: (w, args[1])
      ... )
    """
    _check_arguments(fun, args, repeats, warmup, traced)
    program: Any = fun if _is_program(fun) else jit(fun)
    compiled = program if isinstance(program, jax.stages.Compiled) else program.lower(*args).compile()
    devices = _find_devices(compiled)
    _check_donation(compiled, next_args)
    calls = _Calls(program, args, next_args)
    store_errors: dict[str, float] = {}
    if isinstance(program, Jitted) and program.plan is None and "f8e4m3fn" in (compiled.as_text() or ""):
        store_errors = calls.watch_rounding(program)

    marks = _read_marks(devices)
    calls.run(warmup)
    times = calls.run(repeats)
    peak, notes = _peak(marks, _read_marks(devices))
    on_gpu = devices[0].platform == "gpu"
    traced_ms, gpus = None, ()
    if on_gpu and traced:
        traced_ms, gpus = _profile_calls(calls, traced, trace_dir)
        notes += _trace_notes(traced_ms, statistics.median(times), gpus)
    if not on_gpu:
        notes = (
            f"Copies and device memory are measured on a GPU; this ran on {devices[0].platform}. What a GPU "
            "would move, jaxoff.verify reads from a program compiled for one, with no GPU: "
            'jaxoff.target("h200").compile(fun, *args).',
        )
    memory: Any = compiled.memory_analysis()
    return Measurement(
        device=f"{len(devices)} x {devices[0].device_kind}",
        times_ms=tuple(times),
        program_bytes=program_nbytes(compiled),
        host_bytes=memory.host_temp_size_in_bytes,
        peak_bytes=peak,
        traced_ms=traced_ms,
        gpus=gpus,
        notes=notes,
        store_errors=store_errors,
    )


def _is_program(fun: Any) -> bool:
    """Whether a function is jitted or compiled; a bound method's `lower` lacks the object."""
    return isinstance(fun, jax.stages.Compiled) or (hasattr(fun, "lower") and not inspect.ismethod(fun))


class _Calls:
    """Calls in a row, each with the arguments that the previous call left."""

    def __init__(self, fun: Any, args: tuple[Any, ...], next_args: NextArgs | None):
        self._fun, self._args, self._next_args = fun, args, next_args

    def run(self, number: int) -> list[float]:
        """Runs calls; returns the time of each, in ms."""
        return [self._call(self._fun) for _ in range(number)]

    def watch_rounding(self, program: Jitted) -> dict[str, float]:
        """Runs a call that says the errors of values in float8: name -> error, relative to the values."""
        errors: dict[str, float] = collections.defaultdict(float)
        values: dict[str, float] = collections.defaultdict(float)

        def add(name: str, error: jax.Array, value: jax.Array) -> None:
            errors[name] += float(error)
            values[name] += float(value)

        with watch_rounding(add):
            self._call(program.within(None))
        jax.effects_barrier()
        return {name: math.sqrt(errors[name] / values[name]) if values[name] else 0.0 for name in values}

    def _call(self, fun: Callable[..., Any]) -> float:
        """Runs a call; returns its time, in ms."""
        start = time.perf_counter()
        results = jax.block_until_ready(fun(*self._args))
        ms = (time.perf_counter() - start) * 1e3
        if self._next_args is not None:
            self._args = self._next_args(self._args, results)
        return ms


def _check_arguments(fun: Any, args: tuple[Any, ...], repeats: int, warmup: int, traced: int) -> None:
    if not callable(fun):
        raise TypeError(f"measure runs a function or a compiled program; got {type(fun).__name__}.")
    for name, number, least in (("repeats", repeats, 1), ("warmup", warmup, 0), ("traced", traced, 0)):
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"{name} is a number of calls, a whole number; got {number!r}.")
        if number < least:
            raise ValueError(f"{name} is a number of calls, {least} or more; got {number}.")
    for path, leaf in jax.tree.leaves_with_path(args):
        if isinstance(leaf, (Tracer, jax.ShapeDtypeStruct)):
            where = f"args{jax.tree_util.keystr(path)}"
            raise TypeError(
                f"measure runs the program, so its arguments have values; got {type(leaf).__name__} at "
                f"{where}. Call it outside of jit and grad, with arrays: jnp.zeros({leaf.shape}, "
                f"jnp.{leaf.dtype})."
            )


def _check_donation(compiled: jax.stages.Compiled, next_args: NextArgs | None) -> None:
    if next_args is not None:
        return
    donated = [path for path, info in jax.tree.leaves_with_path(compiled.args_info) if info.donated]
    if donated:
        listed = ", ".join(f"args{jax.tree_util.keystr(path[1:])}" for path in donated[:3])
        more = f" and {len(donated) - 3} more" if len(donated) > 3 else ""
        raise ValueError(
            f"measure calls the program many times, and donated arguments are gone after one call: {listed}"
            f"{more}. Say what the next call gets, for a training step for example "
            "next_args=lambda args, results: (results[0], *args[1:])."
        )


def _find_devices(compiled: jax.stages.Compiled) -> list[Any]:
    """Finds the devices of this process in a program's shardings."""
    leaves: list[Any] = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    used = {device for sharding in leaves for device in sharding.device_set}
    platforms = sorted({device.platform for device in used})
    try:
        here = {device for platform in platforms for device in jax.devices(platform)}
    except RuntimeError:  # jax has no such platform here
        here = set()
    if not used <= here:
        kind = next(iter(used)).device_kind
        raise ValueError(
            f"measure runs the program, and this one was compiled for {len(used)} x {kind}, which this "
            f"process does not have: it has {jax.device_count()} x {jax.devices()[0].device_kind}. Compile "
            "it here, or read it with jaxoff.verify, which runs nothing."
        )
    local = sorted((d for d in used if d.process_index == jax.process_index()), key=lambda device: device.id)
    if not local:
        raise ValueError("measure times the devices of this process, and the program runs on none of them.")
    return local


def _read_marks(devices: list[Any]) -> list[int] | None:
    """The high-water mark of each device's memory, or None where a device keeps none."""
    stats = [device.memory_stats() or {} for device in devices]
    if not all("peak_bytes_in_use" in found for found in stats):
        return None
    return [found["peak_bytes_in_use"] for found in stats]


def _peak(before: list[int] | None, after: list[int] | None) -> tuple[int | None, tuple[str, ...]]:
    """The peak of the calls between two readings of the marks, and a note where the peak is unknown."""
    if before is None or after is None:
        return None, (
            "This device's allocator keeps no high-water mark, so there is no peak; program_bytes is the "
            "compiler's account. XLA's default allocator keeps one: unset XLA_PYTHON_CLIENT_ALLOCATOR.",
        )
    if all(was < now for was, now in zip(before, after, strict=True)):
        return max(after), ()
    return None, (
        f"The peak is not known, only that it was at most {format_nbytes(max(after))}: as much was in use "
        "before these calls, and the mark cannot be reset. For the peak, measure in a process of its own.",
    )


def _profile_calls(
    calls: _Calls, number: int, trace_dir: str | Path | None
) -> tuple[float, tuple[GpuTimes, ...]]:
    """Profiles calls; returns their mean time and the mean busy times of each GPU in a call."""
    # A folder of its own first: trace_dir may hold profiles of earlier calls or of other processes.
    with tempfile.TemporaryDirectory() as folder:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # Python's events cost time and are not of the device
        with jax.profiler.trace(folder, profiler_options=options):
            times = calls.run(number)
        trace = gpu_trace.read(folder)
        if trace_dir is not None:
            shutil.copytree(folder, trace_dir, dirs_exist_ok=True)
    return statistics.fmean(times), tuple(gpu.per_call(number) for gpu in trace.times())


def _trace_notes(traced_ms: float, median_ms: float, gpus: tuple[GpuTimes, ...]) -> tuple[str, ...]:
    if not gpus:
        return (
            "The profiler saw nothing on the GPU, so busy and exposed times are missing. NVIDIA's driver may "
            "keep profiling to administrators (ERR_NVGPUCTRPERM), or another profiler may hold the GPU.",
        )
    if traced_ms > _SLOWED * median_ms:
        return (
            f"The calls under the profiler took {traced_ms:.2f} ms, not {median_ms:.2f}: busy and exposed "
            "times are of the slower ones.",
        )
    return ()
