"""Says whether two instructions of a compiled program give the same value."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from jaxoff._compiled.hlo import Computation, Instruction
from jaxoff._compiled.transfers import Scope


@dataclasses.dataclass(frozen=True)
class Value:
    """Where a value was made.

    Attributes:
      computation: the name of the computation that makes it.
      name: the instruction; for a carried value, the loop's parameter.
      element: which element of its tuple; -1 for an array.
      invariant_in: the loop inside which it is used and outside which it was made, or ''.
    """

    computation: str
    name: str
    element: int = -1
    invariant_in: str = dataclasses.field(default="", compare=False)


def value_of(scope: Scope, instruction: Instruction) -> Value:
    """Where the value of an instruction was made.

    A loop's carry and what the body makes of it count as one value: they are, one iteration apart. A value
    that went to the host and came back is the value it was.
    """
    made = _origin(scope.computation, instruction, -1)
    if scope.caller is None or scope.caller[1].opcode != "while":
        return made
    root = scope.computation.root
    parameter = scope.computation.parameters[0]
    carried = list(scope.computation.operands(root)) if root.opcode == "tuple" else []
    if made.name == parameter.name and 0 <= made.element < len(carried):
        following = _origin(scope.computation, carried[made.element], -1)
        if following == made:
            return _outside(scope, made.element)
        return made
    for element, value in enumerate(carried):
        if _origin(scope.computation, value, -1) == made:
            return Value(scope.computation.name, parameter.name, element)
    return made


def _outside(scope: Scope, element: int) -> Value:
    """The value that a loop is given and leaves as it is."""
    if scope.caller is None:
        return Value(scope.computation.name, "", element)
    outer, loop = scope.caller
    (operand,) = outer.computation.operands(loop)
    if operand.opcode == "tuple":
        given = outer.computation.by_name[operand.operands[element]]
        return dataclasses.replace(value_of(outer, given), invariant_in=scope.loop)
    made = _origin(outer.computation, operand, element)
    return dataclasses.replace(made, invariant_in=scope.loop)


def _origin(computation: Computation, instruction: Instruction, element: int) -> Value:
    """Follows a value through instructions that leave it as it is."""
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
            return Value(computation.name, instruction.name, element)


def needs(computation: Computation, instruction: Instruction) -> Iterator[Instruction]:
    """The instructions whose results one takes; of a tuple, only the element that is taken."""
    if instruction.opcode == "get-tuple-element":
        (source,) = computation.operands(instruction)
        if source.opcode == "tuple":
            yield computation.by_name[source.operands[instruction.index]]
            return
    yield from computation.operands(instruction)
