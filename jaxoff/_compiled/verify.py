"""`verify`: what a compiled program really moves to the host, how, beside what, and what is wrong with it."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from typing import Any

import jax

from jaxoff._compiled import hlo
from jaxoff._compiled.checks import find
from jaxoff._compiled.cuda_graphs import SMALL_NBYTES, Graphs, Schedule
from jaxoff._compiled.facts import CompiledFacts, HostCopy
from jaxoff._compiled.transfers import Transfer, fused, is_structure, transfers
from jaxoff._compiled.value_identity import value_of
from jaxoff._residuals.report import Report
from jaxoff._runtime.flags import parse_xla_flags

_AGAIN = re.compile(r"\.remat\d*(\.\d+)*$")


def verify(
    compiled: jax.stages.Compiled,
    *,
    expected_host_bytes: int | None = None,
    report: Report | None = None,
    saved_twin: jax.stages.Compiled | CompiledFacts | None = None,
    compiler_options: Mapping[str, Any] | None = None,
) -> CompiledFacts:
    """Says what a compiled program moves between device and host memory, and what is wrong with it.

    It reads the program's schedule and XLA's memory analysis; nothing runs, and no GPU is needed for a
    program that was compiled for one ahead of time (`jaxoff.target`).

    Which compute can run beside a copy follows from the schedule: outside of CUDA graphs what stands between
    its start and its done; inside them, under CONCURRENT, what neither needs the copy nor is needed by it;
    inside them under XLA's default, nothing. Buffers that are used again order more than the text shows, so
    an overlap found is one that is possible, and one not found is not.

    Findings:
      offload-vanished: less goes to the host than was expected.
      device-memory-not-lower: as much device memory as without offload.
      copy-not-overlapped: nothing can run beside a copy.
      graph-cut: a copy is out of the CUDA graph of its iteration, for what cannot be in it.
      kernel-touches-host: a kernel, and not a copy engine, reads or writes host memory.
      value-copied-twice: one value goes to the host more than once.
      computed-again: near the device's limit XLA chose by itself to compute values a second time.

    Args:
      compiled: what `jax.jit(fun).lower(...).compile()` gives, compiled for a GPU.
      expected_host_bytes: how many bytes one call is to move to the host, on each device, at least.
      report: what `jaxoff.explain` says of the same function, in the place of `expected_host_bytes`: its host
        bytes, divided by the devices.
      saved_twin: the same program with its residuals saved on the device (`Policy.on_device()`), compiled, or
        its facts.
      compiler_options: those that `compiled` was compiled with, beside the process's XLA_FLAGS. A compiled
        program does not tell them, and whether copies overlap depends on them.

    Returns:
      The `CompiledFacts`.

    Raises:
      TypeError: for something that is not a compiled program.
      ValueError: for a program that is not compiled for a GPU, for negative bytes, or for both
        `expected_host_bytes` and `report`.

    Example:
      >>> import jax, jaxoff
      >>> def layer(x, w):
      ...     return jaxoff.name(x, "x_in") @ w, None
      >>> def loss(w, x, policy):
      ...     block = jax.checkpoint(layer, policy=policy, prevent_cse=False)
      ...     return jax.lax.scan(block, x, w)[0].sum()
      >>> w = jax.ShapeDtypeStruct((6, 512, 512), "bfloat16")
      >>> x = jax.ShapeDtypeStruct((64, 512), "bfloat16")
      >>> def facts_of_a_step(policy):  # needs jax[cuda13], no GPU
      ...     step = jax.grad(lambda w, x: loss(w, x, policy))
      ...     options = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}
      ...     compiled = jaxoff.target("h200").compile(step, w, x, compiler_options=options)
      ...     return jaxoff.verify(compiled, compiler_options=options)
    """
    if expected_host_bytes is not None and report is not None:
        raise ValueError("expected_host_bytes and report say the same thing: give one of them; got both.")
    if expected_host_bytes is not None and expected_host_bytes < 0:
        raise ValueError(f"expected_host_bytes is a number of bytes, 0 or more; got {expected_host_bytes}.")
    graphs = Graphs.of({**parse_xla_flags(os.environ.get("XLA_FLAGS", "")), **(compiler_options or {})})
    module = _module(compiled)
    # Every device moves all of a value that is replicated, and its share of one that is not.
    expected = expected_host_bytes or 0 if report is None else report.host_bytes // module.num_partitions
    memory: Any = compiled.memory_analysis()
    facts = CompiledFacts(
        host_bytes=memory.host_temp_size_in_bytes,
        device_temp_bytes=memory.temp_size_in_bytes,
        device_peak_bytes=held_nbytes(compiled),
        twin_peak_bytes=_twin_peak(saved_twin),
        scheduling_mode=graphs.mode,
        captured_commands=tuple(sorted(graphs.captured)),
        copies=host_copies(module, graphs),
        computed_again=computed_again(module),
    )
    return dataclasses.replace(facts, findings=tuple(find(facts, expected)))


def _module(compiled: Any) -> hlo.Module:
    if not isinstance(compiled, jax.stages.Compiled):
        raise TypeError(
            "verify takes a compiled program, jax.jit(fun).lower(...).compile(); got "
            f"{type(compiled).__name__}."
        )
    module = hlo.parse(compiled.as_text() or "")
    if not module.is_scheduled or "cpu" in _platforms(compiled):
        raise ValueError(
            "verify reads programs compiled for a GPU: on the CPU nothing moves. Without a GPU compile ahead "
            'of time: jaxoff.target("h200").compile(fun, *args).'
        )
    return module


def _platforms(compiled: jax.stages.Compiled) -> set[str]:
    shardings: list[Any] = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    return {device.platform for sharding in shardings for device in sharding.device_set}


def _twin_peak(twin: Any) -> int | None:
    if twin is None or isinstance(twin, CompiledFacts):
        return twin and twin.device_peak_bytes
    return held_nbytes(twin)


def held_nbytes(compiled: jax.stages.Compiled) -> int:
    """The device memory that a program takes: arguments, results and temporaries, aliased bytes once."""
    memory: Any = compiled.memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return held - memory.alias_size_in_bytes


def host_copies(module: hlo.Module, graphs: Graphs) -> tuple[HostCopy, ...]:
    """All traffic of a program with host memory."""
    moved = tuple(transfers(module))
    schedule = Schedule(module, graphs, moved)
    return tuple(_host_copy(transfer, module, schedule) for transfer in moved)


def computed_again(module: hlo.Module) -> tuple[str, ...]:
    """The large values that XLA's own rematerialization makes a second time, by its names for them."""
    bodies = (fused(module, i) for c in module.computations.values() for i in c.instructions)
    inside = {body.name for body in bodies if body is not None}
    return tuple(
        i.name
        for c in module.computations.values()
        if c.name not in inside
        for i in c.instructions
        if _AGAIN.search(i.name) and i.shape.nbytes >= SMALL_NBYTES and not is_structure(i)
    )


def _host_copy(transfer: Transfer, module: hlo.Module, schedule: Schedule) -> HostCopy:
    scope = transfer.scope
    value = None if transfer.operand is None else value_of(scope, transfer.operand)
    source = ""
    if value is not None:
        maker = module.computations[value.computation].by_name.get(value.name)
        source = module.source_line(maker) if maker is not None else ""
    return HostCopy(
        name=transfer.start.name,
        direction=transfer.direction,
        nbytes=transfer.nbytes,
        count=scope.count,
        via="dma" if transfer.is_dma else "kernel",
        is_async=transfer.done is not None,
        loop=scope.loop,
        captured=schedule.is_captured(transfer),
        overlaps=schedule.overlaps(transfer),
        source=source or module.source_line(transfer.start),
        value=value,
        cut_by=schedule.cut_by(transfer),
    )
