"""The memory of a compiled program, by the compiler's own account."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax


def program_nbytes(compiled: jax.stages.Compiled) -> int:
    """Device memory of a program: arguments, results and temporaries, aliased bytes once."""
    memory: Any = compiled.memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return held - memory.alias_size_in_bytes


def program_nbytes_if_compiled(
    compile_program: Callable[[], jax.stages.Compiled], refusals: list[str] | None = None
) -> float:
    """Device memory of a program; infinite for one that XLA refuses, or that runs out of memory before.

    Args:
      compile_program: compiles the program.
      refusals: takes XLA's reasons.
    """
    try:
        return program_nbytes(compile_program())
    except jax.errors.JaxRuntimeError as error:
        if refusals is not None:
            refusals.append(str(error).splitlines()[0])
        return math.inf


def program_host_nbytes(compiled: jax.stages.Compiled) -> int:
    """Host memory of a program's temporaries: the residuals in pinned host memory, on each device."""
    memory: Any = compiled.memory_analysis()
    return memory.host_temp_size_in_bytes
