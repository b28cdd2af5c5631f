"""Reads the text of a compiled program (XLA's HLO): computations, instructions, shapes with their memory.

Instructions keep the order of the text, which in a scheduled program is the order of execution. Attributes
and configurations are parsed on first use: the text of a deep program has megabytes.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

# XLA's number of the memory space of pinned host memory, as in `S(5)`.
HOST_MEMORY = 5

_BITS = re.compile(r"[a-z]+?(\d+)")
_ARRAY = re.compile(r"([a-z]\w*)\[([^\]]*)\](?:\{([^{}]*)\})?")
_MEMORY = re.compile(r"S\((\d+)\)")
_COMMENT = re.compile(r"/\*.*?\*/")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([^\s=%]+) = ")
_COMPUTATION = re.compile(r"(ENTRY )?%?([^\s(%]+)(?: \(.*| )\{$")
_OPCODE = re.compile(r"\s*([\w-]+)\(")
_NAME = re.compile(r"%?([\w.$~-]+)$")
_COLLECTIVES = frozenset(
    {
        "all-gather",
        "all-reduce",
        "all-to-all",
        "collective-broadcast",
        "collective-permute",
        "ragged-all-to-all",
        "reduce-scatter",
    }
)
_BRACKETS = re.compile(r'[()\[\]{}"]')
_PLAIN_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')


@dataclasses.dataclass(frozen=True)
class Shape:
    """The type of a value.

    Attributes:
      dtype: "bf16", "f32", ..., or "tuple".
      dims: the sizes of an array.
      layout: the order of an array's dimensions in memory, minor first; () where the text has none.
      memory: the number of the memory space; 0 is the device's.
      elements: the shapes of a tuple's elements.
    """

    dtype: str
    dims: tuple[int, ...] = ()
    layout: tuple[int, ...] = ()
    memory: int = 0
    elements: tuple[Shape, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of an array, or of all arrays of a tuple; tokens and opaque values have none."""
        if self.dtype == "tuple":
            return sum(element.nbytes for element in self.elements)
        return (math.prod(self.dims) * _count_bits(self.dtype) + 7) // 8

    @property
    def arrays(self) -> tuple[Shape, ...]:
        """The arrays of a tuple, or the array itself."""
        if self.dtype == "tuple":
            return tuple(array for element in self.elements for array in element.arrays)
        return (self,)

    @property
    def on_host(self) -> bool:
        """Whether any of its arrays lies in pinned host memory."""
        return any(array.memory == HOST_MEMORY for array in self.arrays)

    def __str__(self) -> str:
        if self.dtype == "tuple":
            return f"({', '.join(map(str, self.elements))})"
        tail = ",".join(map(str, self.layout)) + (f":S({self.memory})" if self.memory else "")
        return f"{self.dtype}[{','.join(map(str, self.dims))}]" + (f"{{{tail}}}" if tail else "")


def _count_bits(dtype: str) -> int:
    if dtype == "pred":
        return 8
    found = _BITS.match(dtype)  # bf16, f8e4m3fn, s4, c64; token and opaque have no number
    return int(found[1]) if found else 0


def parse_shape(text: str) -> Shape:
    """Parses a shape, e.g. `bf16[6,2048]{1,0:S(5)}` or `(s32[], f32[8]{0})`.

    Raises:
      ValueError: for a text without a shape.
    """
    text = _COMMENT.sub("", text).strip()
    if text.startswith("("):
        if _find_close(text, 0) != len(text) - 1:
            raise ValueError(f"a tuple's shape ends with its parenthesis; got {text!r}.")
        return Shape("tuple", elements=tuple(parse_shape(part) for part in split_commas(text[1:-1])))
    found = _ARRAY.fullmatch(text)
    if found is None:
        if text in ("token", "opaque"):
            return Shape(text)
        raise ValueError(f"a shape is written as in `bf16[6,2048]{{1,0:S(5)}}`; got {text!r}.")
    dtype, dims, tail = found.groups()
    order, _, tiling = (tail or "").partition(":")
    memory = _MEMORY.search(tiling)
    return Shape(
        dtype,
        tuple(int(size.strip().lstrip("<=")) for size in dims.split(",") if size.strip()),
        tuple(int(d) for d in order.split(",") if d.strip()),
        int(memory[1]) if memory else 0,
    )


def split_commas(text: str) -> list[str]:
    """Splits a text at its commas outside of brackets and strings."""
    parts, start, position = [], 0, 0
    while position < len(text):
        char = text[position]
        if char in '([{"':
            position = _find_close(text, position) + 1
            continue
        if char == ",":
            parts.append(text[start:position].strip())
            start = position + 1
        position += 1
    last = text[start:].strip()
    return [*parts, last] if last else parts


def _find_close(text: str, position: int) -> int:
    """The position of the end of a bracket or string, from the position of its start."""
    depth = 0
    while True:
        found = _BRACKETS.search(text, position)
        if found is None:
            raise ValueError(f"a bracket is never closed: {text[:120]!r}.")
        if found[0] == '"':
            string = _PLAIN_STRING.match(text, found.start())
            if string is None:
                raise ValueError(f"a string is never closed: {text[:120]!r}.")
            position = string.end()
        else:
            depth += 1 if found[0] in "([{" else -1
            position = found.end()
        if depth == 0:
            return position - 1


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
    """An instruction of a computation.

    Attributes:
      name: without its percent sign.
      opcode: "fusion", "copy-start", "while", ...
      operands: the names of the instructions whose results are read.
      arguments: the text in its parentheses where no instruction is named: `0` of `parameter(0)`.
      shape_text: its shape as written; see `shape`.
      attribute_text: the text after its parentheses; see `attributes`.
      is_root: whether its value is the computation's.
    """

    name: str
    opcode: str
    operands: tuple[str, ...]
    arguments: str
    shape_text: str
    attribute_text: str
    is_root: bool

    @functools.cached_property
    def shape(self) -> Shape:
        """The type of its value."""
        return parse_shape(self.shape_text)

    @functools.cached_property
    def attributes(self) -> Mapping[str, str]:
        """Attribute -> value, as written."""
        pairs = (part.partition("=") for part in split_commas(self.attribute_text))
        return {key: value for key, _, value in pairs}

    @functools.cached_property
    def callees(self) -> tuple[str, ...]:
        """The names of the computations called, in the order of the text."""
        names: list[str] = []
        for key in ("calls", "to_apply", "condition", "body", "branch_computations", "called_computations"):
            value = self.attributes.get(key, "").strip("{}")
            names += [part.lstrip("%") for part in split_commas(value)]
        for key in ("true_computation", "false_computation"):
            if key in self.attributes:
                names.append(self.attributes[key].lstrip("%"))
        return tuple(names)

    @functools.cached_property
    def config(self) -> Mapping[str, Any]:
        """Its backend configuration; empty where there is none in JSON."""
        text = self.attributes.get("backend_config", "")
        try:
            value = json.loads(text)
            value = json.loads(value) if isinstance(value, str) else value
        except json.JSONDecodeError:
            return {}
        return value if isinstance(value, dict) else {}

    @property
    def is_collective(self) -> bool:
        """Whether it exchanges bytes between devices, or starts to."""
        return self.opcode.removesuffix("-start") in _COLLECTIVES

    @property
    def index(self) -> int:
        """The index of a get-tuple-element, or the number of a parameter."""
        return int(self.attributes["index"]) if "index" in self.attributes else int(self.arguments)


@dataclasses.dataclass(frozen=True, eq=False)
class Computation:
    """A list of instructions, in order.

    Attributes:
      name: without its percent sign.
      instructions: in the order of the text.
    """

    name: str
    instructions: tuple[Instruction, ...]

    @functools.cached_property
    def by_name(self) -> Mapping[str, Instruction]:
        """Its instructions by their names."""
        return {instruction.name: instruction for instruction in self.instructions}

    @functools.cached_property
    def position(self) -> Mapping[str, int]:
        """Where in the order each instruction stands."""
        return {instruction.name: at for at, instruction in enumerate(self.instructions)}

    @functools.cached_property
    def root(self) -> Instruction:
        """The instruction whose value is the computation's."""
        return next((i for i in self.instructions if i.is_root), self.instructions[-1])

    @functools.cached_property
    def parameters(self) -> Mapping[int, Instruction]:
        """Its parameters by their numbers."""
        return {i.index: i for i in self.instructions if i.opcode == "parameter"}

    def operands(self, instruction: Instruction) -> Iterator[Instruction]:
        """The instructions whose results an instruction reads."""
        return (self.by_name[name] for name in instruction.operands if name in self.by_name)


@dataclasses.dataclass(frozen=True, eq=False)
class Module:
    """A program.

    Attributes:
      header: the line `HloModule ...`.
      computations: name -> computation.
      entry: the first computation.
      tables: table of source lines, e.g. `FileNames` -> number -> line.
    """

    header: str
    computations: Mapping[str, Computation]
    entry: Computation
    tables: Mapping[str, Mapping[int, str]]

    @property
    def is_scheduled(self) -> bool:
        """Whether its instructions stand in the order of execution."""
        return "is_scheduled=true" in self.header

    @property
    def num_partitions(self) -> int:
        """The number of devices sharing each value."""
        found = re.search(r"\bnum_partitions=(\d+)", self.header)
        return int(found[1]) if found else 1

    def source_line(self, instruction: Instruction) -> str:
        """`file:line (function)` of the source of an instruction, or '' where unknown."""
        metadata = instruction.attributes.get("metadata", "")
        direct = re.search(r'source_file="([^"]*)" source_line=(\d+)', metadata)
        if direct:
            return f"{direct[1]}:{direct[2]}"
        frame = re.search(r"stack_frame_id=(\d+)", metadata)
        location = self._field("StackFrames", frame and frame[1], "file_location_id")
        line = self._field("FileLocations", location, "line")
        file = self._entry("FileNames", self._field("FileLocations", location, "file_name_id"))
        function = self._entry("FunctionNames", self._field("FileLocations", location, "function_name_id"))
        return f"{file}:{line}" + (f" ({function})" if function else "") if file and line else ""

    def _entry(self, table: str, number: str | None) -> str:
        return self.tables.get(table, {}).get(int(number), "").strip('"') if number else ""

    def _field(self, table: str, number: str | None, field: str) -> str | None:
        found = re.search(rf"\b{field}=(\d+)", self._entry(table, number))
        return found[1] if found else None


def parse(text: str) -> Module:
    """Parses a program.

    Args:
      text: of `jax.stages.Compiled.as_text`.

    Returns:
      The `Module`.

    Raises:
      ValueError: for a text without a program of XLA's.
    """
    header, entry, table, instructions = "", None, None, None
    computations: dict[str, Computation] = {}
    tables: dict[str, dict[int, str]] = {}
    current = ("", False)
    for line in text.splitlines():
        if instructions is not None:
            if line.startswith("}"):
                computation = Computation(current[0], tuple(instructions))
                computations[computation.name] = computation
                entry = computation if current[1] else entry
                instructions = None
            elif line.strip():
                instructions.append(_parse_instruction(line))
        elif line.startswith("HloModule"):
            header = line
        elif found := _COMPUTATION.match(line):
            current, instructions = (found[2], found[1] is not None), []
        elif line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            table = tables.setdefault(line, {})
        elif table is not None and (row := line.partition(" "))[0].isdigit():
            table[int(row[0])] = row[2]
    if entry is None or instructions is not None:
        raise ValueError(
            "a program's text has an ENTRY computation that ends with a brace, as `Compiled.as_text()` "
            f"writes it; got {len(text)} characters that begin with {text[:80]!r}."
        )
    return Module(header, computations, entry, tables)


def _parse_instruction(line: str) -> Instruction:
    start = _INSTRUCTION.match(line)
    if start is None:
        raise ValueError(f"an instruction is written `%name = shape opcode(operands)`; got {line[:120]!r}.")
    at = start.end()
    # The shape of an array has no blanks; the shape of a tuple ends with its parenthesis.
    end = _find_close(line, at) + 1 if line[at] == "(" else line.find(" ", at)
    opcode = _OPCODE.match(line, end) if end > at else None
    if opcode is None:
        raise ValueError(f"an instruction is written `%name = shape opcode(operands)`; got {line[:120]!r}.")
    close = _find_close(line, opcode.end() - 1)
    arguments = line[opcode.end() : close]
    operands = () if opcode[1] in ("parameter", "constant") else tuple(_parse_operands(arguments))
    return Instruction(
        start[2],
        opcode[1],
        operands,
        "" if operands else arguments,
        line[at:end],
        line[close + 1 :].lstrip(", "),
        start[1] is not None,
    )


def _parse_operands(text: str) -> Iterator[str]:
    if "/*" in text:
        text = _COMMENT.sub("", text)
    parts = split_commas(text) if any(bracket in text for bracket in '([{"') else text.split(",")
    for part in parts:  # `%name`, or with its shape: `f32[8]{0} %name`
        if found := _NAME.match(part.strip().rpartition(" ")[2]):
            yield found[1]
