"""XLA's flags: their names and values, the options for an ordered program, and harmful options."""

from __future__ import annotations

import shlex
import weakref
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from jaxoff._runtime.versions import parse_release

# What places residuals in the place of a step's policies: the recipe "saved", or a budget.
type PlacedBy = Literal["recipe", "budget"]

# Kinds of command captured into CUDA graphs, with commas between.
COMMAND_BUFFER = "xla_gpu_enable_command_buffer"
# The order of commands inside of a CUDA graph.
SCHEDULING_MODE = "xla_gpu_command_buffer_scheduling_mode"
# Passes left out, with commas between.
DISABLED_PASSES = "xla_disable_hlo_passes"
# Software pipelining of host copies by XLA.
PIPELINED_HOST_COPIES = "xla_gpu_enable_pipelined_host_offloading"
# A file of latencies for XLA's scheduler, and what XLA does where the file leaves instructions out.
PROFILE = "xla_gpu_pgle_profile_file_or_directory_path"
PROFILE_CHECK = "xla_gpu_pgle_accuracy_checker"
# The commands captured where COMMAND_BUFFER is not set (jaxlib 0.11.2).
CAPTURED_BY_DEFAULT = frozenset(
    {"CONDITIONAL", "CUBLAS", "CUBLASLT", "CUDNN", "CUSTOM_CALL", "DYNAMIC_SLICE_FUSION", "FUSION"}
)
# Kernels chosen without a trial: half of the time, for a compiled program which is only read.
UNTUNED = {"xla_gpu_autotune_level": 0}
# Values of jax_optimization_level with pipelining passes, and their effect.
PIPELINING_LEVELS = ("O1", "O2", "O3")
PIPELINING = (
    "switches on pipelining passes, that of host copies among them, which has a history of wrong results. "
    "Leave it unset and set the passes you want by their own flags."
)

# CUDA graphs whose edges follow the use of data instead of the scheduler's order. Collectives have to be in
# the graph, too, or the copies of a loop wait for the collectives.
_CONCURRENT = (
    (SCHEDULING_MODE, "CONCURRENT"),
    (COMMAND_BUFFER, ",".join(sorted(CAPTURED_BY_DEFAULT | {"COLLECTIVES"}))),
)
# In XLA's default mode a copy inside of a CUDA graph waits for the kernels before it: the copies, which are
# slices of stacks, stay outside.
_COPIES = "DYNAMIC_SLICE_FUSION"
COPIES_OUTSIDE_GRAPHS = ((COMMAND_BUFFER, ",".join(sorted(CAPTURED_BY_DEFAULT - {_COPIES}))),)
# XLA cuts the graph of an iteration at collectives with kernels of their own and at CUB's sorts. Copies,
# device-to-device copies too, and collectives then share a few streams and wait for each other: 8% of a step
# on two H200s, a copy of each iteration on a single H200 (bench/LOG.md).
_ONE_GRAPH = (("xla_gpu_experimental_use_collective_kernels", ""), ("xla_gpu_enable_cub_radix_sort", False))
# Passes against an order. Near the device's memory limit XLA recomputes values by itself, which took up to
# 2.9 GB more (bench/LOG.md).
_REMATERIALIZATION = "rematerialization"
# During buffer assignment a barrier is a tuple, which keeps the order. From jaxlib 0.12 on this pass removes
# these tuples before; no other pass needs their removal.
_TUPLES = "tuple-simplifier"
# The pass makes an asynchronous copy of each write of a row that a kernel has made already. XLA's scheduler
# takes such a copy, of a few KB at the end of a loop's body, for one as long as a copy from host memory, and
# starts the reloads of the next iteration after it, with no kernel left to hide them. And rows that wait for
# their copies are kept: 8.3 of 47.5 GB of a step without any copy to the host, at equal time (bench/LOG.md).
_COPIES_OF_ROWS = "dynamic-slice-copy-fusion-async-wrapper"
# Compiled program -> compiler options. A program does not hold its options, which `verify` needs.
_OPTIONS: weakref.WeakKeyDictionary[Any, Mapping[str, Any]] = weakref.WeakKeyDictionary()
# Compiled program -> what placed its residuals, if not the policies.
_PLACED_BY: weakref.WeakKeyDictionary[Any, PlacedBy] = weakref.WeakKeyDictionary()


def remember_options[C](compiled: C, options: Mapping[str, Any]) -> C:
    """Notes the options of a compiled program, as long as the program lives; returns the program."""
    _OPTIONS[compiled] = dict(options)
    return compiled


def recall_options(compiled: Any) -> Mapping[str, Any]:
    """The options by which a program was compiled, where they were noted; {} elsewhere."""
    return _OPTIONS.get(compiled, {})


def remember_placement[C](compiled: C, placed_by: PlacedBy | None) -> C:
    """Notes what placed the residuals of a compiled program, if not its policies; returns the program."""
    if placed_by is not None:
        _PLACED_BY[compiled] = placed_by
    return compiled


def recall_placement(compiled: Any) -> PlacedBy | None:
    """What placed the residuals of a program of `jaxoff.jit`, if not its policies; None elsewhere."""
    return _PLACED_BY.get(compiled)


def parse_xla_flags(text: str) -> dict[str, str]:
    """The flags in `XLA_FLAGS`: name -> value.

    The text holds the flags or, where its first character is no dash, names a file of flags. A flag without
    a value is "true". The last of two settings counts.
    """
    text = text.strip()
    if text and not text.startswith("-"):
        path = Path(text)
        text = path.read_text() if path.is_file() else ""
    flags = (word.lstrip("-").partition("=") for word in shlex.split(text) if word.startswith("-"))
    return {name: value if equals else "true" for name, equals, value in flags}


def is_true(value: str | None) -> bool:
    """Whether a flag is set to a value that XLA reads as true."""
    return value is not None and value.lower() in ("true", "1", "t", "y", "yes")


def is_false(value: str | None) -> bool:
    """Whether a flag is set to a value that XLA reads as false."""
    return value is not None and value.lower() in ("false", "0", "f", "n", "no")


def parse_captured_commands(value: str | None) -> frozenset[str]:
    """The kinds of command captured into CUDA graphs; `+X` and `-X` edit the default list."""
    if value is None:
        return CAPTURED_BY_DEFAULT
    words = [word.strip().upper() for word in value.split(",") if word.strip()]
    if not any(word[0] in "+-" for word in words):
        return frozenset(words)
    added = {word.lstrip("+") for word in words if word[0] != "-"}
    return (CAPTURED_BY_DEFAULT | added) - {word[1:] for word in words if word[0] == "-"}


def choose_options(
    *,
    concurrent: bool = True,
    early: bool = False,
    loops: int = 0,
    scanned: int = 0,
    flat: bool = False,
    streamed: bool = False,
    budgeted: bool = False,
    jaxlib: str,
    disabled: str = "",
) -> tuple[tuple[str, Any], ...]:
    """The compiler options for an ordered program, pairs of a name and a value; none for other programs.

    Outside of loops barriers fix the scheduler's order, which no option changes.

    Args:
      concurrent: whether the copies of loops are in CUDA graphs, concurrent by the use of data. Otherwise
        they are outside of the graphs, and XLA's scheduler overlaps them.
      early: whether, outside of the graphs, copies start as soon as they may; else later, for less memory.
      loops: the number of loops written out.
      scanned: the number of loops with offloaded residuals.
      flat: whether the equations outside of loops are ordered.
      streamed: whether arguments in host memory are updated in a loop.
      budgeted: whether the program is one of a search within a budget.
      jaxlib: its version.
      disabled: passes left out of all programs of the process, with commas between.
    """
    outside = COPIES_OUTSIDE_GRAPHS if streamed else ()
    if not (loops or scanned or flat):
        return (*outside, leave_out_row_copies(disabled)) if budgeted else outside
    passes = [_REMATERIALIZATION]
    if (loops or scanned) and parse_release(jaxlib) >= (0, 12):
        passes.append(_TUPLES)
    if budgeted or (scanned and (concurrent or early)):
        passes.append(_COPIES_OF_ROWS)
    graphs = _CONCURRENT + _ONE_GRAPH if concurrent else COPIES_OUTSIDE_GRAPHS
    return (*(graphs if scanned else outside), _leave_out(passes, disabled))


def leave_out_row_copies(disabled: str) -> tuple[str, str]:
    """The option that leaves out asynchronous copies of rows, beside the passes left out already."""
    return _leave_out([_COPIES_OF_ROWS], disabled)


def _leave_out(passes: Iterable[str], disabled: str) -> tuple[str, str]:
    return DISABLED_PASSES, ",".join([*filter(None, disabled.split(",")), *passes])


def find_harmful_options(given: Mapping[str, Any], *, scanned: bool, level: str = "") -> Iterator[str]:
    """Explains options harmful to a program with offloaded residuals.

    Args:
      given: the caller's compiler options.
      scanned: whether residuals are offloaded in loops.
      level: jax's own, `jax.config.jax_optimization_level`.
    """
    if level in PIPELINING_LEVELS:
        yield f"jax_optimization_level={level} {PIPELINING}"
    if is_true(str(given.get(PIPELINED_HOST_COPIES, "false"))):
        yield (
            f"{PIPELINED_HOST_COPIES} is on: it computed wrong results in several releases of XLA. Leave it "
            "out: the copies overlap without it."
        )
    mode = given.get(SCHEDULING_MODE)
    if mode is not None and scanned and mode != "CONCURRENT":
        yield (
            f"{SCHEDULING_MODE}={mode} puts the copies of scanned layers in line with the kernels. Leave it "
            "out."
        )
    if mode == "CONCURRENT" and not scanned:
        yield (
            f"{SCHEDULING_MODE}=CONCURRENT on a program without a loop gives up the reuse of memory. Leave "
            "it out, or put the layers into jaxoff.scan."
        )
