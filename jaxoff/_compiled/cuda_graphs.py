"""Says which compute of a compiled program can run while one of its host copies does."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from jaxoff._compiled.hlo import Computation, Instruction, Module
from jaxoff._compiled.transfers import Transfer, call_target, done_of, fused, is_memcpy, is_structure
from jaxoff._compiled.value_identity import needs
from jaxoff._runtime.flags import COMMAND_BUFFER, SCHEDULING_MODE, parse_captured_commands

Kind = Literal["gemm", "custom-call", "fusion", "collective", "loop", "other"]

# Work on less than this takes about as long as its launch: counters, scalars.
SMALL_NBYTES = 1 << 16

_MIN_GRAPH = 5  # XLA leaves fewer commands in a row uncaptured
_COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)
_NO_COMMAND = "xla.gpu.ext.cub_"  # custom calls, its sorts, that a graph cannot hold
_GEMM_FUSIONS = ("gemm", "cublas", "cudnn")


@dataclasses.dataclass(frozen=True)
class Compute:
    """An instruction that computes.

    Attributes:
      name: of the instruction.
      kind: "gemm", "custom-call" (attention, a Pallas kernel), "fusion", "collective", "loop" or "other".
    """

    name: str
    kind: Kind


@dataclasses.dataclass(frozen=True)
class Graphs:
    """What XLA captures into CUDA graphs, and how it orders what it captured.

    Attributes:
      mode: the scheduling mode; "LHS", XLA's default, keeps the order of the program.
      captured: the kinds of command that are captured.
    """

    mode: str
    captured: frozenset[str]

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Graphs:
        """What compiler options, or XLA's flags, ask for."""
        mode, commands = options.get(SCHEDULING_MODE), options.get(COMMAND_BUFFER)
        return cls(
            str(mode).upper() if mode else "LHS",
            parse_captured_commands(None if commands is None else str(commands)),
        )


class Schedule:
    """The compute of each computation, and what of it CUDA graphs hold. Looked up, never changed."""

    def __init__(self, module: Module, graphs: Graphs, moved: Iterable[Transfer]):
        self._module = module
        self._graphs = graphs
        self._segments: dict[str, dict[str, int]] = {}
        self._transfers = {(t.scope.computation.name, t.start.name) for t in moved}

    def is_captured(self, transfer: Transfer) -> bool:
        """Whether a transfer runs inside a CUDA graph."""
        return transfer.start.name in self._segments_of(transfer.scope.computation)

    def cut_by(self, transfer: Transfer) -> str:
        """What no graph holds between the start of a transfer and its end: an instruction, or ''."""
        computation = transfer.scope.computation
        if transfer.done is None or self.is_captured(transfer):
            return ""
        position = computation.position
        between = slice(position[transfer.start.name], position[transfer.done.name])
        for i in computation.instructions[between]:
            if not (is_structure(i) or i.opcode.endswith("-done") or self._is_command(i)):
                return i.name
        return ""

    def overlaps(self, transfer: Transfer) -> tuple[Compute, ...]:
        """The compute that can run while a transfer does: at most this, for buffers that are used again
        order more than the text shows.

        Outside of CUDA graphs that is what stands between its start and its done. Inside, under CONCURRENT,
        what is in the same graph and neither needs the transfer nor is needed by it; under another mode
        nothing, because a graph then keeps the order of the program.
        """
        computation = transfer.scope.computation
        position = computation.position
        if not self.is_captured(transfer):
            if transfer.done is None:
                return ()
            between = slice(position[transfer.start.name] + 1, position[transfer.done.name])
            return self._compute(computation, computation.instructions[between])
        if self._graphs.mode != "CONCURRENT":
            return ()
        segments = self._segments_of(computation)
        tied = _ancestors(computation, transfer.start) | _descendants(
            computation, transfer.done or transfer.start
        )
        beside = (
            i
            for i in computation.instructions
            if segments.get(i.name) == segments[transfer.start.name] and i.name not in tied
        )
        return self._compute(computation, beside)

    def _compute(self, computation: Computation, instructions: Iterable[Instruction]) -> tuple[Compute, ...]:
        return tuple(
            Compute(i.name, kind) for i in instructions if (kind := self._kind(computation, i)) is not None
        )

    def _kind(self, computation: Computation, instruction: Instruction) -> Kind | None:
        opcode = instruction.opcode
        if is_structure(instruction) or opcode.endswith(("-done", "-update")):
            return None
        if opcode in ("copy", "copy-start") or (computation.name, instruction.name) in self._transfers:
            return None
        if opcode.removesuffix("-start") in _COLLECTIVES:
            return "collective"
        if opcode in ("while", "conditional", "call"):
            return "loop" if opcode == "while" else "other"
        body = fused(self._module, instruction)
        if body is not None and is_memcpy(instruction, body):
            return None
        if _is_gemm(instruction, body):
            return "gemm"
        if instruction.shape.nbytes + sum(o.shape.nbytes for o in computation.operands(instruction)) < (
            SMALL_NBYTES
        ):
            return None
        return "custom-call" if call_target(instruction) else "fusion" if body is not None else "other"

    def _segments_of(self, computation: Computation) -> dict[str, int]:
        if computation.name not in self._segments:
            self._segments[computation.name] = self._capture(computation)
        return self._segments[computation.name]

    def _capture(self, computation: Computation) -> dict[str, int]:
        """Which graph each captured instruction is in: runs of commands that can be captured."""
        if not self._graphs.captured:
            return {}
        found: dict[str, int] = {}
        run: dict[str, Instruction] = {}
        number = 0
        for at, instruction in enumerate(computation.instructions):
            if is_structure(instruction):
                continue
            if self._fits(computation, at, run):
                run[instruction.name] = instruction
                continue
            found |= _graph(run, number)
            run, number = {}, number + 1
        return found | _graph(run, number)

    def _fits(self, computation: Computation, at: int, run: dict[str, Instruction]) -> bool:
        """Whether an instruction goes into a graph with those before it.

        The start of an asynchronous command goes with all commands up to its end, or not at all.
        """
        instruction = computation.instructions[at]
        done = done_of(computation, instruction)
        end = computation.position[done.name] if done is not None else at
        region: set[str] = set()
        for member in computation.instructions[at : end + 1]:
            if is_structure(member):
                continue
            if member.opcode.endswith("-done"):
                if member.operands[0] not in run and member.operands[0] not in region:
                    return False
            elif not self._is_command(member):
                return False
            region.add(member.name)
        return True

    def _is_command(self, instruction: Instruction) -> bool:
        command = self._command(instruction)
        return command is not None and command in self._graphs.captured

    def _command(self, instruction: Instruction) -> str | None:
        """The kind of command, in the words of `xla_gpu_enable_command_buffer`, that runs an instruction."""
        opcode = instruction.opcode
        body = fused(self._module, instruction)
        if body is not None:
            return "DYNAMIC_SLICE_FUSION" if is_memcpy(instruction, body) else "FUSION"
        if called := call_target(instruction):
            if "cublas" in called:
                return "CUBLASLT" if "$lt$" in called else "CUBLAS"
            if called.startswith(_NO_COMMAND):
                return None
            return "CUDNN" if "cudnn" in called else "CUSTOM_CALL"
        if opcode.removesuffix("-start") in _COLLECTIVES:
            return "COLLECTIVES"
        if opcode == "copy" and not instruction.shape.on_host:
            return "FUSION"
        return {"while": "WHILE", "conditional": "CONDITIONAL"}.get(opcode)


def _graph(run: Mapping[str, Instruction], number: int) -> dict[str, int]:
    commands = sum(not instruction.opcode.endswith("-done") for instruction in run.values())
    return dict.fromkeys(run, number) if commands >= _MIN_GRAPH else {}


def _is_gemm(instruction: Instruction, body: Computation | None) -> bool:
    if body is None:
        return (
            "gemm" in call_target(instruction)
            or "matmul" in call_target(instruction)
            or instruction.opcode == "dot"
        )
    kind = instruction.config.get("fusion_backend_config", {}).get("kind", "")
    return any(word in kind for word in _GEMM_FUSIONS) or any(
        i.opcode in ("dot", "convolution", "scaled-dot", "ragged-dot") for i in body.instructions
    )


def _ancestors(computation: Computation, instruction: Instruction) -> set[str]:
    found, pending = {instruction.name}, [instruction]
    while pending:
        for needed in needs(computation, pending.pop()):
            if needed.name not in found:
                found.add(needed.name)
                pending.append(needed)
    return found


def _descendants(computation: Computation, instruction: Instruction) -> set[str]:
    found = {instruction.name}
    for later in computation.instructions[computation.position[instruction.name] + 1 :]:
        if any(needed.name in found for needed in needs(computation, later)):
            found.add(later.name)
    return found
