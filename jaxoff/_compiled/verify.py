"""`verify`: a compiled program's host copies, the compute beside each copy, and the faults of its offload."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from typing import Any

import jax

from jaxoff._compiled import hlo
from jaxoff._compiled.checks import find_faults
from jaxoff._compiled.cuda_graphs import SMALL_NBYTES, GraphCapture, GraphOptions
from jaxoff._compiled.facts import CompiledFacts, HostCopy
from jaxoff._compiled.transfers import Transfer, find_fused_body, find_transfers, is_structure
from jaxoff._compiled.value_identity import identify_value
from jaxoff._jaxpr.scopes import find_copied_name
from jaxoff._residuals.report import Report
from jaxoff._runtime.flags import parse_xla_flags, recall_options, recall_placement
from jaxoff._runtime.program_memory import program_nbytes

# Names of instructions by XLA's rematerialization pass, as in `fusion.3.remat2`.
_RECOMPUTED = re.compile(r"\.remat\d*(\.\d+)*$")


def verify(
    compiled: jax.stages.Compiled,
    *,
    expected_host_bytes: int | None = None,
    report: Report | None = None,
    saved_twin: jax.stages.Compiled | CompiledFacts | None = None,
    compiler_options: Mapping[str, Any] | None = None,
) -> CompiledFacts:
    """Finds a compiled program's copies between device and host memory, and the faults of its offload.

    Reads the program's schedule and XLA's memory analysis. Nothing runs, and no GPU is needed for a program
    compiled ahead of time (`jaxoff.target`).

    The schedule determines the compute able to run during a copy. Outside of CUDA graphs: the instructions
    between its start and its done. Inside, under CONCURRENT: the instructions of the same graph, but for
    ancestors and dependents of the copy. Inside, under XLA's default: nothing. Reuse of buffers adds
    dependencies absent from the text: an overlap found may not happen, an overlap not found cannot.

    Findings:
      offload-vanished: fewer bytes go to the host than expected, other than by a budget of `jaxoff.jit`.
      recipe-replaced: nothing goes to the host, as `jaxoff.jit` saves the residuals on the device.
      device-memory-not-lower: as much device memory as without offload.
      copy-not-overlapped: nothing can run during a copy.
      graph-cut: a copy is outside of its iteration's CUDA graph, because of a command outside of any graph.
      kernel-touches-host: a kernel, and not a copy engine, reads or writes host memory.
      value-copied-twice: a value goes to the host more than once.
      computed-again: near the device's memory limit XLA recomputes values by its own choice.

    Args:
      compiled: of `jax.jit(fun).lower(...).compile()`, for a GPU.
      expected_host_bytes: the fewest bytes for a call to copy to the host, on each device.
      report: of `jaxoff.explain` for the same function, in the place of `expected_host_bytes`: its host
        bytes, divided by the devices.
      saved_twin: the same program with its residuals saved on the device (`Policy.on_device()`), compiled, or
        its facts.
      compiler_options: the options of the compilation, beside the process's XLA_FLAGS. The overlap of copies
        depends on options, and a compiled program does not hold them. None: those of a program compiled by
        `Target.compile` or lowered by `jaxoff.jit`, which are known; none for other programs.

    Returns:
      The `CompiledFacts`.

    Raises:
      TypeError: for an argument other than a compiled program.
      ValueError: for a program compiled for another platform, for negative bytes, or for both
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
      ...     return jaxoff.verify(compiled)
    """
    if expected_host_bytes is not None and report is not None:
        raise ValueError("expected_host_bytes and report say the same thing: give one of them; got both.")
    if expected_host_bytes is not None and expected_host_bytes < 0:
        raise ValueError(f"expected_host_bytes is a number of bytes, 0 or more; got {expected_host_bytes}.")
    compiled = _unwrap(compiled)
    module = _parse_module(compiled)
    options = recall_options(compiled) if compiler_options is None else compiler_options
    graphs = GraphOptions.of({**parse_xla_flags(os.environ.get("XLA_FLAGS", "")), **options})
    # A device copies all of a replicated value, and its share of a partitioned value.
    expected = expected_host_bytes or 0 if report is None else report.host_bytes // module.num_partitions
    memory: Any = compiled.memory_analysis()
    facts = CompiledFacts(
        host_bytes=memory.host_temp_size_in_bytes,
        device_temp_bytes=memory.temp_size_in_bytes,
        device_peak_bytes=program_nbytes(compiled),
        twin_peak_bytes=_twin_peak_nbytes(saved_twin),
        scheduling_mode=graphs.mode,
        captured_commands=tuple(sorted(graphs.captured)),
        copies=list_host_copies(module, graphs),
        computed_again=find_recomputed(module),
    )
    faults = find_faults(facts, expected, recall_placement(compiled))
    return dataclasses.replace(facts, findings=tuple(faults))


def _unwrap(compiled: Any) -> Any:
    """The program in a compiled function of Flax, or the given one."""
    inner = getattr(compiled, "compiled", None)
    return inner if isinstance(inner, jax.stages.Compiled) else compiled


def _parse_module(compiled: Any) -> hlo.Module:
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


def _twin_peak_nbytes(twin: Any) -> int | None:
    if twin is None or isinstance(twin, CompiledFacts):
        return twin and twin.device_peak_bytes
    return program_nbytes(twin)


def list_host_copies(module: hlo.Module, graphs: GraphOptions) -> tuple[HostCopy, ...]:
    """Lists all traffic of a program with host memory."""
    transfers = tuple(find_transfers(module))
    capture = GraphCapture(module, graphs, transfers)
    return tuple(_describe_copy(transfer, module, capture) for transfer in transfers)


def find_recomputed(module: hlo.Module) -> tuple[str, ...]:
    """Finds the instructions by which XLA's own rematerialization recomputes large values."""
    bodies = (find_fused_body(module, i) for c in module.computations.values() for i in c.instructions)
    inside = {body.name for body in bodies if body is not None}
    return tuple(
        i.name
        for c in module.computations.values()
        if c.name not in inside
        for i in c.instructions
        if _RECOMPUTED.search(i.name) and i.shape.nbytes >= SMALL_NBYTES and not is_structure(i)
    )


def _describe_copy(transfer: Transfer, module: hlo.Module, capture: GraphCapture) -> HostCopy:
    execution = transfer.execution
    value = None if transfer.operand is None else identify_value(execution, transfer.operand)
    label = find_copied_name(transfer.start.attributes.get("metadata", ""))
    source = module.source_line(transfer.start) if label else ""
    if value is not None and not label:
        maker = module.computations[value.computation].by_name.get(value.name)
        source = module.source_line(maker) if maker is not None else ""
    return HostCopy(
        name=transfer.start.name,
        label=label,
        direction=transfer.direction,
        nbytes=transfer.nbytes,
        count=execution.count,
        via="dma" if transfer.is_dma else "kernel",
        is_async=transfer.done is not None,
        loop=execution.loop,
        captured=capture.is_captured(transfer),
        overlaps=capture.overlaps(transfer),
        source=source or module.source_line(transfer.start),
        value=value,
        cut_by=capture.cut_by(transfer),
    )
