"""Finds the compute able to run during a host copy of a compiled program, by its CUDA graphs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from jaxoff._compiled.hlo import Computation, Instruction, Module
from jaxoff._compiled.transfers import (
    Transfer,
    call_target,
    find_done,
    find_fused_body,
    is_memcpy,
    is_structure,
)
from jaxoff._compiled.value_identity import find_sources
from jaxoff._runtime.flags import COMMAND_BUFFER, SCHEDULING_MODE, parse_captured_commands

ComputeKind = Literal["gemm", "custom-call", "fusion", "collective", "loop", "other"]

# Bytes. A kernel or a copy of fewer bytes (counters, scalars) takes about as long as its launch.
SMALL_NBYTES = 1 << 16

# Commands in a row. XLA captures no shorter row into a CUDA graph (jaxlib 0.11.2).
_MIN_GRAPH = 5
# Prefix of custom calls outside of any graph: CUB's sorts.
_NO_COMMAND = "xla.gpu.ext.cub_"
# Words in the kind of a fusion for a matrix product.
_GEMM_FUSIONS = ("gemm", "cublas", "cudnn")
# Words in the target of a custom call for a matrix product; opcodes of products.
_PRODUCT_CALLS = ("gemm", "matmul")
_PRODUCTS = frozenset({"dot", "convolution", "scaled-dot", "ragged-dot"})


@dataclasses.dataclass(frozen=True)
class Compute:
    """An instruction with work for the device's cores.

    Attributes:
      name: of the instruction.
      kind: "gemm", "custom-call" (attention, a Pallas kernel), "fusion", "collective", "loop" or "other".
    """

    name: str
    kind: ComputeKind


@dataclasses.dataclass(frozen=True)
class GraphOptions:
    """How XLA captures commands into CUDA graphs, and the order inside of a graph.

    Attributes:
      mode: the scheduling mode; "LHS", XLA's default, keeps the order of the program.
      captured: the kinds of captured command.
    """

    mode: str
    captured: frozenset[str]

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> GraphOptions:
        """Reads compiler options or XLA's flags."""
        mode, commands = options.get(SCHEDULING_MODE), options.get(COMMAND_BUFFER)
        return cls(
            str(mode).upper() if mode else "LHS",
            parse_captured_commands(None if commands is None else str(commands)),
        )


class GraphCapture:
    """The instructions of each computation in CUDA graphs, and the overlap this allows. Immutable.

    Computations are looked up when asked for: a deep program has many without a copy.
    """

    def __init__(self, module: Module, graphs: GraphOptions, transfers: Iterable[Transfer]):
        self._module = module
        self._graphs = graphs
        self._numbers: dict[str, dict[str, int]] = {}
        self._transfers = {(t.execution.computation.name, t.start.name) for t in transfers}

    def is_captured(self, transfer: Transfer) -> bool:
        """Whether a transfer runs inside a CUDA graph."""
        return transfer.start.name in self._graphs_of(transfer.execution.computation)

    def cut_by(self, transfer: Transfer) -> str:
        """The name of an instruction outside of any graph, between a transfer's start and its end; or ''."""
        computation = transfer.execution.computation
        if transfer.done is None or self.is_captured(transfer):
            return ""
        position = computation.position
        between = slice(position[transfer.start.name], position[transfer.done.name])
        for i in computation.instructions[between]:
            if not (is_structure(i) or i.opcode.endswith("-done") or self._is_command(i)):
                return i.name
        return ""

    def overlaps(self, transfer: Transfer) -> tuple[Compute, ...]:
        """The compute able to run during a transfer.

        Outside of CUDA graphs: the instructions between its start and its done. Inside, under CONCURRENT: the
        instructions of the same graph, but for ancestors and dependents of the transfer. Inside, under other
        modes: nothing, because the graph keeps the order of the program. An upper bound: reuse of buffers
        adds dependencies absent from the text.
        """
        computation = transfer.execution.computation
        position = computation.position
        if not self.is_captured(transfer):
            if transfer.done is None:
                return ()
            between = slice(position[transfer.start.name] + 1, position[transfer.done.name])
            return self._compute(computation, computation.instructions[between])
        if self._graphs.mode != "CONCURRENT":
            return ()
        graphs = self._graphs_of(computation)
        tied = _find_ancestors(computation, transfer.start) | _find_descendants(
            computation, transfer.done or transfer.start
        )
        independent = (
            i
            for i in computation.instructions
            if graphs.get(i.name) == graphs[transfer.start.name] and i.name not in tied
        )
        return self._compute(computation, independent)

    def _compute(self, computation: Computation, instructions: Iterable[Instruction]) -> tuple[Compute, ...]:
        return tuple(
            Compute(i.name, kind) for i in instructions if (kind := self._kind(computation, i)) is not None
        )

    def _kind(self, computation: Computation, instruction: Instruction) -> ComputeKind | None:
        opcode = instruction.opcode
        if is_structure(instruction) or opcode.endswith(("-done", "-update")):
            return None
        if opcode in ("copy", "copy-start") or (computation.name, instruction.name) in self._transfers:
            return None
        if instruction.is_collective:
            return "collective"
        if opcode in ("while", "conditional", "call"):
            return "loop" if opcode == "while" else "other"
        body = find_fused_body(self._module, instruction)
        if body is not None and is_memcpy(instruction, body):
            return None
        if _is_gemm(instruction, body):
            return "gemm"
        if instruction.shape.nbytes + sum(o.shape.nbytes for o in computation.operands(instruction)) < (
            SMALL_NBYTES
        ):
            return None
        return "custom-call" if call_target(instruction) else "fusion" if body is not None else "other"

    def _graphs_of(self, computation: Computation) -> dict[str, int]:
        if computation.name not in self._numbers:
            self._numbers[computation.name] = self._capture(computation)
        return self._numbers[computation.name]

    def _capture(self, computation: Computation) -> dict[str, int]:
        """Numbers the graphs: name of a captured instruction -> graph. A graph is a row of commands."""
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
            found |= _number_graph(run, number)
            run, number = {}, number + 1
        return found | _number_graph(run, number)

    def _fits(self, computation: Computation, at: int, run: dict[str, Instruction]) -> bool:
        """Whether an instruction joins the graph of the preceding row of commands.

        The start of an asynchronous command joins together with all commands up to its end, or not at all.
        """
        instruction = computation.instructions[at]
        done = find_done(computation, instruction)
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
        """The kind of command of an instruction, as in `xla_gpu_enable_command_buffer`."""
        opcode = instruction.opcode
        body = find_fused_body(self._module, instruction)
        if body is not None:
            return "DYNAMIC_SLICE_FUSION" if is_memcpy(instruction, body) else "FUSION"
        if target := call_target(instruction):
            if "cublas" in target:
                return "CUBLASLT" if "$lt$" in target else "CUBLAS"
            if target.startswith(_NO_COMMAND):
                return None
            return "CUDNN" if "cudnn" in target else "CUSTOM_CALL"
        if instruction.is_collective:
            return "COLLECTIVES"
        if opcode == "copy" and not instruction.shape.on_host:
            return "FUSION"
        return {"while": "WHILE", "conditional": "CONDITIONAL"}.get(opcode)


def _number_graph(run: Mapping[str, Instruction], number: int) -> dict[str, int]:
    commands = sum(not instruction.opcode.endswith("-done") for instruction in run.values())
    return dict.fromkeys(run, number) if commands >= _MIN_GRAPH else {}


def _is_gemm(instruction: Instruction, body: Computation | None) -> bool:
    """Whether an instruction is a matrix product or a convolution, or a fusion around one.

    A fusion holds a cuBLAS call where the product reads or writes the row of a stack in place.
    """
    kind = instruction.config.get("fusion_backend_config", {}).get("kind", "")
    calls = [instruction] if body is None else body.instructions
    return any(word in kind for word in _GEMM_FUSIONS) or any(
        i.opcode in _PRODUCTS or any(word in call_target(i) for word in _PRODUCT_CALLS) for i in calls
    )


def _find_ancestors(computation: Computation, instruction: Instruction) -> set[str]:
    found, pending = {instruction.name}, [instruction]
    while pending:
        for needed in find_sources(computation, pending.pop()):
            if needed.name not in found:
                found.add(needed.name)
                pending.append(needed)
    return found


def _find_descendants(computation: Computation, instruction: Instruction) -> set[str]:
    found = {instruction.name}
    for later in computation.instructions[computation.position[instruction.name] + 1 :]:
        if any(needed.name in found for needed in find_sources(computation, later)):
            found.add(later.name)
    return found
