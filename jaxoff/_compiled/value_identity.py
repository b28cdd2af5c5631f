"""Identifies values of a compiled program: equal identities mean equal values."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from jaxoff._compiled.hlo import Computation, Instruction
from jaxoff._compiled.transfers import Execution


@dataclasses.dataclass(frozen=True)
class ValueId:
    """The origin of a value.

    Attributes:
      computation: the name of the instruction's computation.
      name: the instruction; for a carried value, the loop's parameter.
      element: the index in the instruction's tuple; -1 for an array.
      invariant_in: the loop whose body reads the value without a change, or ''.
    """

    computation: str
    name: str
    element: int = -1
    invariant_in: str = dataclasses.field(default="", compare=False)


def identify_value(execution: Execution, instruction: Instruction) -> ValueId:
    """Identifies the value of an instruction.

    A loop's carry and the body's result for the same carry have the same identity: the result is the carry of
    the next iteration. A value reloaded from the host has the identity of the offloaded value.
    """
    made = _find_origin(execution.computation, instruction, -1)
    if execution.caller is None or execution.caller[1].opcode != "while":
        return made
    root = execution.computation.root
    parameter = execution.computation.parameters[0]
    carried = list(execution.computation.operands(root)) if root.opcode == "tuple" else []
    if made.name == parameter.name and 0 <= made.element < len(carried):
        following = _find_origin(execution.computation, carried[made.element], -1)
        if following == made:
            return _identify_outside(execution, made.element)
        return made
    for element, value in enumerate(carried):
        if _find_origin(execution.computation, value, -1) == made:
            return ValueId(execution.computation.name, parameter.name, element)
    return made


def _identify_outside(execution: Execution, element: int) -> ValueId:
    """Identifies a loop's constant operand."""
    if execution.caller is None:
        return ValueId(execution.computation.name, "", element)
    outer, loop = execution.caller
    (operand,) = outer.computation.operands(loop)
    if operand.opcode == "tuple":
        given = outer.computation.by_name[operand.operands[element]]
        return dataclasses.replace(identify_value(outer, given), invariant_in=execution.loop)
    made = _find_origin(outer.computation, operand, element)
    return dataclasses.replace(made, invariant_in=execution.loop)


def _find_origin(computation: Computation, instruction: Instruction, element: int) -> ValueId:
    """Follows a value back through views, copies and barriers."""
    while True:
        opcode = instruction.opcode
        if opcode == "get-tuple-element" and element < 0:
            element = instruction.index
            instruction = computation.by_name[instruction.operands[0]]
        elif opcode == "tuple" and element >= 0:
            instruction = computation.by_name[instruction.operands[element]]
            element = -1
        elif opcode == "opt-barrier" or (
            opcode in ("bitcast", "copy", "copy-done", "copy-start") and element < 0
        ):
            instruction = computation.by_name[instruction.operands[0]]
        else:
            return ValueId(computation.name, instruction.name, element)


def find_sources(computation: Computation, instruction: Instruction) -> Iterator[Instruction]:
    """Finds the instructions whose results an instruction reads; of a tuple, only the element read."""
    if instruction.opcode == "get-tuple-element":
        (source,) = computation.operands(instruction)
        if source.opcode == "tuple":
            yield computation.by_name[source.operands[instruction.index]]
            return
    yield from computation.operands(instruction)
