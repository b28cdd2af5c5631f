"""The memory of a compiled program, by the compiler's own account."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxoff._runtime.disk import make_key, read_facts, write_facts

# Seconds from which a compilation is worth a file, as for JAX's own cache of programs.
_WORTH_A_FILE = 1.0


def program_nbytes(compiled: jax.stages.Compiled) -> int:
    """Device memory of a program: arguments, results and temporaries, aliased bytes once."""
    memory: Any = compiled.memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return held - memory.alias_size_in_bytes


def describe_refusal(error: Exception) -> str:
    """XLA's reason for a program that it does not compile, in a line: of a traceback the last error."""
    lines = str(error).splitlines()
    raised = [line for line in lines if re.match(r"[\w.]+Error: ", line)]
    return raised[-1] if raised and "Traceback" in lines[0] else lines[0]


def program_nbytes_if_compiled(
    compile_program: Callable[[], jax.stages.Compiled], refusals: list[str] | None = None
) -> float:
    """Device memory of a program; infinite if XLA refuses the program or runs out of memory.

    Args:
      compile_program: compiles the program.
      refusals: takes XLA's reasons.
    """
    try:
        return program_nbytes(compile_program())
    except jax.errors.JaxRuntimeError as error:
        if refusals is not None:
            refusals.append(describe_refusal(error))
        return math.inf


def lowered_nbytes(
    lowered: jax.stages.Lowered,
    device: Any,
    devices: int,
    options: Mapping[str, Any],
    refusals: list[str],
) -> float:
    """Device memory of a lowered program, compiled unless an earlier process of this machine compiled it.

    The bytes are kept on disk (`jaxoff._runtime.disk`) if the compilation took a second or more, on devices
    at hand in a single process.

    Args:
      lowered: the program.
      device: a device of the program; `devices`: the number of devices.
      options: compiler options.
      refusals: as for `program_nbytes_if_compiled`.
    """
    if jax.process_count() > 1 or device not in jax.local_devices():
        return program_nbytes_if_compiled(lowered.compile, refusals)
    limit = (device.memory_stats() or {}).get("bytes_limit")
    key = make_key(lowered.as_text(), devices, device, limit, sorted(options.items()))
    nbytes = read_facts("memory", key).get("nbytes")
    if isinstance(nbytes, int):
        return nbytes
    started = time.perf_counter()
    nbytes = program_nbytes_if_compiled(lowered.compile, refusals)
    if math.isfinite(nbytes) and time.perf_counter() - started >= _WORTH_A_FILE:
        write_facts("memory", key, {"device": device.device_kind, "nbytes": nbytes})
    return nbytes


def program_host_nbytes(compiled: jax.stages.Compiled) -> int:
    """Host memory of a program's temporaries: the residuals in pinned host memory, on each device."""
    memory: Any = compiled.memory_analysis()
    return memory.host_temp_size_in_bytes
