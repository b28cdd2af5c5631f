"""Finds a compiled program's transfers between device and pinned host memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Literal

from jaxoff._compiled.hlo import Computation, Instruction, Module, Shape

Direction = Literal["D2H", "H2D", "H2H"]

# Opcodes without work on the device: they name values, or stand for the work of other instructions.
_STRUCTURE = frozenset(
    {
        "add-dependency",
        "after-all",
        "bitcast",
        "constant",
        "domain",
        "get-dimension-size",
        "get-tuple-element",
        "opt-barrier",
        "parameter",
        "partition-id",
        "replica-id",
        "tuple",
    }
)
# Opcodes whose computations the device runs instruction by instruction.
_CALLS = frozenset({"while", "conditional", "call"})
# Opcodes reading or writing a part of an array.
_SLICES = frozenset({"dynamic-slice", "dynamic-update-slice"})
# Opcodes for a copy engine.
_MOVES = frozenset({"parameter", "constant", "bitcast", "copy", "tuple", "get-tuple-element", *_SLICES})
# Bytes. A kernel's write of a single element to the host is a dependency for a copy, and no transfer: see
# `jaxoff._schedule.dependency_kernels`.
_SIGNAL_NBYTES = 8
# Custom calls without work: each names a buffer.
_ALLOCATIONS = frozenset({"AllocateBuffer", "CreateBuffer"})


@dataclasses.dataclass(frozen=True, eq=False)
class Execution:
    """A computation at a place where the program runs its instructions.

    Attributes:
      computation: the instructions.
      count: runs in a call of the program; None inside of a loop without a known number of iterations.
      least_count: the same, where such a loop runs once.
      loop: the name of the innermost loop around the computation, or ''.
      caller: the execution of the caller, and the calling instruction; None for the entry.
    """

    computation: Computation
    count: int | None
    least_count: int
    loop: str
    caller: tuple[Execution, Instruction] | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Transfer:
    """Traffic of an instruction with host memory in a direction.

    Attributes:
      execution: the computation of the instruction, and its place in the program.
      start: the instruction; the start of an asynchronous instruction.
      done: the done of an asynchronous instruction, or None for a synchronous instruction.
      direction: "D2H", "H2D" or "H2H".
      nbytes: bytes of a single transfer.
      is_dma: whether a copy engine makes the transfer; otherwise a kernel reaches over the bus.
      operand: the instruction whose value is written to the host; None for "H2D".
    """

    execution: Execution
    start: Instruction
    done: Instruction | None
    direction: Direction
    nbytes: int
    is_dma: bool
    operand: Instruction | None


def find_executions(module: Module) -> Iterator[Execution]:
    """Finds every computation whose instructions the device runs in order, the entry first."""
    pending = [Execution(module.entry, 1, 1, "")]
    while pending:
        execution = pending.pop()
        yield execution
        for instruction in execution.computation.instructions:
            if instruction.opcode in _CALLS:
                inner = [module.computations[name] for name in instruction.callees]
                pending += [_enter(execution, instruction, computation) for computation in reversed(inner)]


def _enter(execution: Execution, instruction: Instruction, computation: Computation) -> Execution:
    if instruction.opcode != "while":
        return dataclasses.replace(execution, computation=computation, caller=(execution, instruction))
    trips = instruction.config.get("known_trip_count", {}).get("n")
    count = execution.count * int(trips) if execution.count is not None and trips is not None else None
    least = execution.least_count * int(trips or 1)
    return Execution(computation, count, least, instruction.name, (execution, instruction))


def find_transfers(module: Module) -> Iterator[Transfer]:
    """Finds the transfers between device and host memory, in the order of each computation."""
    for execution in find_executions(module):
        computation = execution.computation
        for instruction in computation.instructions:
            if not _may_transfer(instruction):
                continue
            done = find_done(computation, instruction)
            operands = list(computation.operands(instruction))
            if not instruction.shape.on_host and not any(o.shape.on_host for o in operands):
                continue
            body = find_fused_body(module, instruction)
            if instruction.opcode in ("copy", "copy-start"):
                found = _transfers_of_copy(execution, instruction, done, operands[0])
            elif body is not None:
                found = _transfers_of_fusion(execution, instruction, done, operands, body)
            else:
                found = _transfers_of_kernel(execution, instruction, done, operands)
            yield from (transfer for transfer in found if transfer.is_dma or transfer.nbytes > _SIGNAL_NBYTES)


def find_done(computation: Computation, start: Instruction) -> Instruction | None:
    """Finds the done of an asynchronous instruction; None for a synchronous instruction."""
    if not start.opcode.endswith("-start"):
        return None
    waiting = {start.name}
    for instruction in computation.instructions[computation.position[start.name] + 1 :]:
        if instruction.operands and instruction.operands[0] in waiting:
            if instruction.opcode.endswith("-done"):
                return instruction
            if instruction.opcode.endswith("-update"):
                waiting.add(instruction.name)
    return None


def find_fused_body(module: Module, instruction: Instruction) -> Computation | None:
    """Finds the fused computation of an instruction, which runs as a single command; or None."""
    if instruction.opcode not in ("fusion", "fusion-start", "async-start"):
        return None
    body = module.computations[instruction.callees[0]]
    if instruction.opcode == "async-start":
        return find_fused_body(module, body.root)
    return body


def is_memcpy(instruction: Instruction, body: Computation) -> bool:
    """Whether XLA runs a fusion as a copy: data movement only, at offsets affine in the loop's counter."""
    return any(i.opcode in (*_SLICES, "copy") for i in body.instructions) and all(
        _only_moves(i, body, instruction) for i in body.instructions
    )


def _only_moves(inner: Instruction, body: Computation, fusion: Instruction) -> bool:
    if inner.opcode in _SLICES:
        return "dynamic_slice_config" in inner.config
    if inner.opcode == "copy":
        (source,) = body.operands(inner)
        return source.shape.layout == inner.shape.layout
    if inner.opcode in _MOVES:
        return True
    custom = "kind=kCustom" in fusion.attribute_text  # XLA checked the offsets and the static slices
    is_scalar = inner.shape.dtype != "tuple" and inner.shape.dims == ()
    return custom and (inner.opcode == "slice" or is_scalar)


def _may_transfer(instruction: Instruction) -> bool:
    if is_structure(instruction) or instruction.opcode in _CALLS:
        return False
    if instruction.opcode.endswith(("-done", "-update")):
        return False
    return 'execution_thread="host"' not in instruction.attribute_text  # the host's own compute


def is_structure(instruction: Instruction) -> bool:
    """Whether an instruction has no work on the device: a tuple, a parameter, the name of a buffer."""
    return instruction.opcode in _STRUCTURE or call_target(instruction) in _ALLOCATIONS


def call_target(instruction: Instruction) -> str:
    """The target of a custom call, or ''."""
    if not instruction.opcode.startswith("custom-call"):
        return ""
    return instruction.attributes.get("custom_call_target", "").strip('"')


def _transfers_of_copy(
    execution: Execution, start: Instruction, done: Instruction | None, source: Instruction
) -> Iterator[Transfer]:
    result = start.shape.elements[0] if start.shape.elements else start.shape
    reads, writes = source.shape.on_host, result.on_host
    direction: Direction = "H2H" if reads and writes else "D2H" if writes else "H2D"
    is_dma = source.shape.layout == result.layout
    operand = source if direction == "D2H" else None
    yield Transfer(execution, start, done, direction, result.nbytes, is_dma, operand)


def _transfers_of_fusion(
    execution: Execution,
    start: Instruction,
    done: Instruction | None,
    operands: list[Instruction],
    body: Computation,
) -> Iterator[Transfer]:
    is_dma = is_memcpy(start, body)
    read = sum(_count_read_bytes(body, p) for p in body.parameters.values() if p.shape.on_host)
    written, update = 0, None
    for result in _find_results(body):
        if not result.shape.on_host or result.opcode == "parameter":
            continue
        if result.opcode == "dynamic-update-slice":
            update = _skip_bitcasts(body, body.by_name[result.operands[1]])
            written += update.shape.nbytes
        else:
            sources = [_skip_bitcasts(body, o) for o in body.operands(result)]
            update = sources[0] if len(sources) == 1 else None
            written += result.shape.nbytes
    is_parameter = update is not None and update.opcode == "parameter"
    operand = operands[update.index] if update is not None and is_parameter else start
    if read and written and is_dma:
        yield Transfer(execution, start, done, "H2H", written, True, None)
        return
    if read:
        yield Transfer(execution, start, done, "H2D", read, is_dma, None)
    if written:
        yield Transfer(execution, start, done, "D2H", written, is_dma, operand)


def _count_read_bytes(body: Computation, parameter: Instruction) -> int:
    """Counts the bytes read of a parameter by a fused computation: a slice, or all."""
    total, pending = 0, [parameter]
    while pending:
        value = pending.pop()
        for user in body.instructions:
            if value.name not in user.operands:
                continue
            if user.opcode == "bitcast":
                pending.append(user)
            elif user.opcode in ("dynamic-slice", "slice"):
                total += user.shape.nbytes
            elif user.opcode == "dynamic-update-slice" and user.operands[0] == value.name:
                continue  # in place
            elif user.opcode not in ("tuple", "get-tuple-element"):
                return parameter.shape.nbytes
    return total


def _find_results(body: Computation) -> list[Instruction]:
    """Finds the makers of a fused computation's results."""
    root = body.root
    values = list(body.operands(root)) if root.opcode == "tuple" else [root]
    return [_skip_bitcasts(body, value) for value in values]


def _skip_bitcasts(computation: Computation, instruction: Instruction) -> Instruction:
    while instruction.opcode == "bitcast":
        (instruction,) = computation.operands(instruction)
    return instruction


def _transfers_of_kernel(
    execution: Execution, start: Instruction, done: Instruction | None, operands: list[Instruction]
) -> Iterator[Transfer]:
    """Transfers of a slice outside of a fusion, or of a kernel with host memory as operand or result."""
    in_place = start.opcode == "dynamic-update-slice"
    is_dma = start.opcode in _SLICES and "dynamic_slice_config" in start.config
    inputs = [o.shape for o in operands[in_place:]]
    read = sum(_host_bytes(shape) for shape in inputs)
    written = _host_bytes(start.shape)
    if start.opcode.endswith("-start"):  # the shape of a start holds operands and results
        written = _host_bytes(done.shape) if done is not None else 0
    if start.opcode == "dynamic-slice" and read:
        read = start.shape.nbytes
    if in_place and written:
        written = operands[1].shape.nbytes
    if read:
        yield Transfer(execution, start, done, "H2D", read, is_dma, None)
    if written:
        yield Transfer(execution, start, done, "D2H", written, is_dma, operands[1] if in_place else start)


def _host_bytes(shape: Shape) -> int:
    return sum(array.nbytes for array in shape.arrays if array.on_host)
