"""What is known of a compiled program's offload: its copies, its memory, what is wrong with it."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from jaxoff._compiled.cuda_graphs import Compute
from jaxoff._compiled.transfers import Direction
from jaxoff._compiled.value_identity import Value
from jaxoff._report.finding import Finding
from jaxoff._report.tables import render_text as printed


@dataclasses.dataclass(frozen=True)
class HostCopy:
    """Traffic of one instruction with pinned host memory.

    Attributes:
      name: of the instruction in the compiled program.
      direction: "D2H", "H2D", or "H2H" for a copy inside host memory.
      nbytes: of one transfer, on one device.
      count: transfers in one call of the program; None where a loop does not tell how often it runs.
      via: "dma" for a copy engine; "kernel" for a kernel that reaches over the bus, slowly, and keeps the
        device's cores busy.
      is_async: whether it has a start and a done.
      loop: the loop in whose body it stands, or ''.
      captured: whether it runs inside a CUDA graph.
      overlaps: the compute that can run meanwhile.
      cut_by: the instruction that keeps it out of a CUDA graph: no graph holds it, and it stands between the
        copy's start and its end; or ''.
      source: `file:line (function)` of the code that made the value, or of the copy; '' where unknown.
      value: where what is copied to the host was made; None for other directions.
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
    value: Value | None = None
    cut_by: str = ""

    @property
    def total_bytes(self) -> int:
        """Bytes in one call of the program; of one transfer where the count is unknown."""
        return self.nbytes * (1 if self.count is None else self.count)


@dataclasses.dataclass(frozen=True)
class CompiledFacts:
    """What a compiled program keeps where and what it moves, of one device. Prints as a table.

    Attributes:
      host_bytes: pinned host memory that the program takes for its temporaries.
      device_temp_bytes: device memory that it takes for its temporaries.
      device_peak_bytes: device memory that a call holds: arguments, outputs and temporaries, aliased bytes
        once. (The figure that XLA calls the peak counts host memory too.)
      twin_peak_bytes: the same of the saved twin, or None.
      scheduling_mode: how CUDA graphs order what they captured, e.g. "LHS" or "CONCURRENT".
      captured_commands: the kinds of command that CUDA graphs capture.
      copies: all traffic with host memory.
      computed_again: instructions that compute large values a second time since XLA chose so by itself.
      findings: what is wrong; empty if nothing is.
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
        """Bytes that one call moves to the host."""
        return sum(copy.total_bytes for copy in self.copies if copy.direction == "D2H")

    @property
    def h2d_bytes(self) -> int:
        """Bytes that one call moves to the device."""
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
        return printed(self)

    def __rich_console__(self, console, options):
        from jaxoff._compiled.table import render

        yield from render(self, console.is_terminal)
