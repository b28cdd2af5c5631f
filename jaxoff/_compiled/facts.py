"""Facts of a compiled program's offload: its copies, its memory, its faults."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from jaxoff._compiled.cuda_graphs import Compute
from jaxoff._compiled.transfers import Direction
from jaxoff._compiled.value_identity import ValueId
from jaxoff._report.finding import Finding
from jaxoff._report.tables import render_text


@dataclasses.dataclass(frozen=True)
class HostCopy:
    """Traffic of an instruction with pinned host memory.

    Attributes:
      name: the name of the instruction in the compiled program.
      direction: "D2H", "H2D", or "H2H" for a copy inside host memory.
      nbytes: bytes of a transfer, on a device.
      count: transfers in a call of the program; None where a loop has no known number of iterations.
      via: "dma" for a copy engine; "kernel" for a kernel's accesses over the bus, which are slow and keep
        the device's cores busy.
      is_async: whether the copy has a start and a done.
      loop: the loop around the copy, or ''.
      captured: whether the copy runs inside a CUDA graph.
      overlaps: the compute able to run during the copy.
      cut_by: an instruction between the copy's start and its end, in no CUDA graph, which keeps the copy out
        of a graph; or ''.
      source: `file:line (function)` of the code behind the value, or of the copy; '' where unknown.
      value: identity of the value copied to the host, to compare copies by; None for other directions.
      label: the name of the value by `jaxoff.name`, where `jaxoff.jit` wrote the copy; or ''.
    """

    name: str
    direction: Direction
    nbytes: int
    count: int | None
    via: Literal["dma", "kernel"]
    is_async: bool
    loop: str
    captured: bool
    overlaps: tuple[Compute, ...]
    source: str
    value: ValueId | None = None
    cut_by: str = ""
    label: str = ""

    @property
    def title(self) -> str:
        """The name of the value and the name of the instruction, for a sentence."""
        return f"{self.label} ({self.name})" if self.label else self.name

    @property
    def total_bytes(self) -> int:
        """Bytes in a call of the program; of a single transfer where the count is unknown."""
        return self.nbytes * (1 if self.count is None else self.count)


@dataclasses.dataclass(frozen=True)
class CompiledFacts:
    """Memory and copies of a compiled program, on each device. Prints as a table.

    Attributes:
      host_bytes: pinned host memory of the program's temporaries.
      device_temp_bytes: device memory of the program's temporaries.
      device_peak_bytes: device memory of a call: arguments, outputs and temporaries, aliased bytes once.
        (XLA's own peak counts host memory too.)
      twin_peak_bytes: `device_peak_bytes` of the saved twin, or None.
      scheduling_mode: the order of commands inside of a CUDA graph, e.g. "LHS" or "CONCURRENT".
      captured_commands: the kinds of command in CUDA graphs.
      copies: all traffic with host memory.
      computed_again: names of instructions recomputing large values by XLA's own choice.
      findings: faults; empty for a sound program.
    """

    host_bytes: int
    device_temp_bytes: int
    device_peak_bytes: int
    twin_peak_bytes: int | None
    scheduling_mode: str
    captured_commands: tuple[str, ...]
    copies: tuple[HostCopy, ...]
    computed_again: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()

    @property
    def d2h_bytes(self) -> int:
        """Bytes copied to the host by a call."""
        return sum(copy.total_bytes for copy in self.copies if copy.direction == "D2H")

    @property
    def h2d_bytes(self) -> int:
        """Bytes copied to the device by a call."""
        return sum(copy.total_bytes for copy in self.copies if copy.direction == "H2D")

    def to_dict(self) -> dict[str, Any]:
        """The facts as JSON-ready values."""
        copies = [
            {
                **dataclasses.asdict(copy),
                "overlaps": [dataclasses.asdict(compute) for compute in copy.overlaps],
                "total_bytes": copy.total_bytes,
            }
            for copy in self.copies
        ]
        return {
            **dataclasses.asdict(dataclasses.replace(self, copies=())),
            "captured_commands": list(self.captured_commands),
            "computed_again": list(self.computed_again),
            "copies": copies,
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
            "d2h_bytes": self.d2h_bytes,
            "h2d_bytes": self.h2d_bytes,
        }

    def __str__(self) -> str:
        return render_text(self)

    def __rich_console__(self, console, options):
        from jaxoff._compiled.table import render

        yield from render(self, console.is_terminal)
