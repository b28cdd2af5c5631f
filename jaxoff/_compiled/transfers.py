"""Finds in a compiled program what moves between device and pinned host memory, and how."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Literal

from jaxoff._compiled.hlo import Computation, Instruction, Module, Shape

Direction = Literal["D2H", "H2D", "H2H"]

# They make names for values, or stand for work that other instructions do.
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
_CALLS = frozenset({"while", "conditional", "call"})
_SLICES = frozenset({"dynamic-slice", "dynamic-update-slice"})
_MOVES = frozenset({"parameter", "constant", "bitcast", "copy", "tuple", "get-tuple-element", *_SLICES})
# A kernel that writes one element to the host moves nothing: a copy waits for it. See
# `jaxoff._schedule.order`.
_SIGNAL_NBYTES = 8
_ALLOCATIONS = frozenset({"AllocateBuffer", "CreateBuffer"})


@dataclasses.dataclass(frozen=True, eq=False)
class Scope:
    """A computation where it runs.

    Attributes:
      computation: its instructions.
      count: how often it runs in one call of the program; None where a loop around it does not tell.
      loop: the name of the innermost loop around it, or ''.
      caller: the scope that runs it, and the instruction there that does; None for the entry.
    """

    computation: Computation
    count: int | None
    loop: str
    caller: tuple[Scope, Instruction] | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Transfer:
    """One instruction's traffic with host memory in one direction.

    Attributes:
      scope: where the instruction runs.
      start: the instruction, or the one that starts it where it is asynchronous.
      done: the one that waits for it, or None where it is synchronous.
      direction: "D2H", "H2D" or "H2H".
      nbytes: of one transfer.
      is_dma: whether a copy engine does it; otherwise a kernel reaches over the bus.
      operand: the operand of `start` that holds what is written to the host; None for "H2D".
    """

    scope: Scope
    start: Instruction
    done: Instruction | None
    direction: Direction
    nbytes: int
    is_dma: bool
    operand: Instruction | None


def scopes(module: Module) -> Iterator[Scope]:
    """Every computation whose instructions the device runs one by one, the entry first."""
    pending = [Scope(module.entry, 1, "")]
    while pending:
        scope = pending.pop()
        yield scope
        for instruction in scope.computation.instructions:
            if instruction.opcode in _CALLS:
                inner = [module.computations[name] for name in instruction.called]
                pending += [_enter(scope, instruction, computation) for computation in reversed(inner)]


def _enter(scope: Scope, instruction: Instruction, computation: Computation) -> Scope:
    if instruction.opcode != "while":
        return Scope(computation, scope.count, scope.loop, (scope, instruction))
    trips = instruction.config.get("known_trip_count", {}).get("n")
    count = scope.count * int(trips) if scope.count is not None and trips is not None else None
    return Scope(computation, count, instruction.name, (scope, instruction))


def transfers(module: Module) -> Iterator[Transfer]:
    """What moves between the memories, in the order of each computation."""
    for scope in scopes(module):
        computation = scope.computation
        for instruction in computation.instructions:
            if not _may_transfer(instruction):
                continue
            done = done_of(computation, instruction)
            operands = list(computation.operands(instruction))
            if not instruction.shape.on_host and not any(o.shape.on_host for o in operands):
                continue
            body = fused(module, instruction)
            if instruction.opcode in ("copy", "copy-start"):
                found = _copy(scope, instruction, done, operands[0])
            elif body is not None:
                found = _fusion(scope, instruction, done, operands, body)
            else:
                found = _kernel(scope, instruction, done, operands)
            yield from (transfer for transfer in found if transfer.is_dma or transfer.nbytes > _SIGNAL_NBYTES)


def done_of(computation: Computation, start: Instruction) -> Instruction | None:
    """The instruction that waits for an asynchronous one; None for a synchronous one."""
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


def fused(module: Module, instruction: Instruction) -> Computation | None:
    """The fused computation that an instruction runs as one command, or None."""
    if instruction.opcode not in ("fusion", "fusion-start", "async-start"):
        return None
    body = module.computations[instruction.called[0]]
    if instruction.opcode == "async-start":
        return fused(module, body.root)
    return body


def is_memcpy(instruction: Instruction, body: Computation) -> bool:
    """Whether XLA runs a fusion as a copy: it only moves, at offsets known from the loop's own counter."""
    return any(i.opcode in (*_SLICES, "copy") for i in body.instructions) and all(
        _moves(i, body, instruction) for i in body.instructions
    )


def _moves(inner: Instruction, body: Computation, fusion: Instruction) -> bool:
    if inner.opcode in _SLICES:
        return "dynamic_slice_config" in inner.config
    if inner.opcode == "copy":
        (source,) = body.operands(inner)
        return source.shape.layout == inner.shape.layout
    if inner.opcode in _MOVES:
        return True
    custom = "kind=kCustom" in fusion.attribute_text  # XLA checked its offsets and its static slices
    return custom and (inner.opcode == "slice" or inner.shape.dims == ())


def _may_transfer(instruction: Instruction) -> bool:
    if is_structure(instruction) or instruction.opcode in _CALLS:
        return False
    if instruction.opcode.endswith(("-done", "-update")):
        return False
    return 'execution_thread="host"' not in instruction.attribute_text  # the host's own compute


def is_structure(instruction: Instruction) -> bool:
    """Whether an instruction does nothing on the device: a tuple, a parameter, the name of a buffer."""
    return instruction.opcode in _STRUCTURE or call_target(instruction) in _ALLOCATIONS


def call_target(instruction: Instruction) -> str:
    """What a custom call calls, or ''."""
    if not instruction.opcode.startswith("custom-call"):
        return ""
    return instruction.attributes.get("custom_call_target", "").strip('"')


def _copy(
    scope: Scope, start: Instruction, done: Instruction | None, source: Instruction
) -> Iterator[Transfer]:
    result = start.shape.elements[0] if start.shape.elements else start.shape
    reads, writes = source.shape.on_host, result.on_host
    direction: Direction = "H2H" if reads and writes else "D2H" if writes else "H2D"
    is_dma = source.shape.layout == result.layout
    operand = source if direction == "D2H" else None
    yield Transfer(scope, start, done, direction, result.nbytes, is_dma, operand)


def _fusion(
    scope: Scope,
    start: Instruction,
    done: Instruction | None,
    operands: list[Instruction],
    body: Computation,
) -> Iterator[Transfer]:
    is_dma = is_memcpy(start, body)
    read = sum(_read(body, p) for p in body.parameters.values() if p.shape.on_host)
    written, update = 0, None
    for result in _results(body):
        if not result.shape.on_host or result.opcode == "parameter":
            continue
        if result.opcode == "dynamic-update-slice":
            update = _through_bitcasts(body, body.by_name[result.operands[1]])
            written += update.shape.nbytes
        else:
            sources = [_through_bitcasts(body, o) for o in body.operands(result)]
            update = sources[0] if len(sources) == 1 else None
            written += result.shape.nbytes
    is_parameter = update is not None and update.opcode == "parameter"
    operand = operands[update.index] if update is not None and is_parameter else start
    if read and written and is_dma:
        yield Transfer(scope, start, done, "H2H", written, True, None)
        return
    if read:
        yield Transfer(scope, start, done, "H2D", read, is_dma, None)
    if written:
        yield Transfer(scope, start, done, "D2H", written, is_dma, operand)


def _read(body: Computation, parameter: Instruction) -> int:
    """Bytes that a fused computation reads of a parameter: a slice of it, or all."""
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


def _results(body: Computation) -> list[Instruction]:
    """The instructions that make a fused computation's results."""
    root = body.root
    values = list(body.operands(root)) if root.opcode == "tuple" else [root]
    return [_through_bitcasts(body, value) for value in values]


def _through_bitcasts(computation: Computation, instruction: Instruction) -> Instruction:
    while instruction.opcode == "bitcast":
        (instruction,) = computation.operands(instruction)
    return instruction


def _kernel(
    scope: Scope, start: Instruction, done: Instruction | None, operands: list[Instruction]
) -> Iterator[Transfer]:
    """A slice outside a fusion, or a kernel that takes or gives host memory as it is."""
    in_place = start.opcode == "dynamic-update-slice"
    is_dma = start.opcode in _SLICES and "dynamic_slice_config" in start.config
    inputs = [o.shape for o in operands[in_place:]]
    read = sum(_host_bytes(shape) for shape in inputs)
    written = _host_bytes(start.shape)
    if start.opcode.endswith("-start"):  # its shape holds operands and results
        written = _host_bytes(done.shape) if done is not None else 0
    if start.opcode == "dynamic-slice" and read:
        read = start.shape.nbytes
    if in_place and written:
        written = operands[1].shape.nbytes
    if read:
        yield Transfer(scope, start, done, "H2D", read, is_dma, None)
    if written:
        yield Transfer(scope, start, done, "D2H", written, is_dma, operands[1] if in_place else start)


def _host_bytes(shape: Shape) -> int:
    return sum(array.nbytes for array in shape.arrays if array.on_host)
