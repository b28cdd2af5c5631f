"""The bytes that a compiled program exchanges between devices, and copies to and from the host."""

from __future__ import annotations

import functools

from jaxoff._compiled.hlo import Instruction, Module
from jaxoff._compiled.transfers import find_transfers


def exchanged_nbytes(module: Module) -> int:
    """The bytes made by the collectives of a program on a device, in a loop once for each iteration."""

    @functools.cache
    def count(computation: str) -> int:
        found = module.computations.get(computation)
        return sum(map(count_instruction, found.instructions)) if found else 0

    def count_instruction(instruction: Instruction) -> int:
        if instruction.is_collective:
            return _count_made(instruction)
        iterations = 1
        if instruction.opcode == "while":
            iterations = int(instruction.config.get("known_trip_count", {}).get("n", 1))
        return iterations * sum(map(count, instruction.callees))

    return count(module.entry.name)


def copied_nbytes(module: Module) -> int:
    """The bytes that a program copies to and from the host on a device, as `HostCopy.total_bytes` counts."""
    return sum(t.nbytes * (t.execution.count or 1) for t in find_transfers(module))


def _count_made(collective: Instruction) -> int:
    """The bytes of a collective's results; the shape of a start has the operands before the results."""
    arrays = collective.shape.arrays
    has_operands = collective.opcode.endswith("-start") and len(arrays) > 1
    return sum(array.nbytes for array in arrays[len(arrays) // 2 if has_operands else 0 :])
