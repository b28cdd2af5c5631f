"""When the copies of a loop may start, told to XLA's scheduler.

XLA's latency hiding scheduler takes each copy between device and host memory for 5 ms, whatever its size, and
starts the copy 5 ms before its end: a copy of 800 MB takes 15 ms, and the kernels wait for the rest
(bench/LOG.md, "2026-11-27, evening"). A profile, which XLA reads for profile-guided latency estimates, gives
the scheduler other latencies, by the names of instructions. So a program is compiled without a profile first,
and the names of its copies are read from its text.

Every copy gets a latency above the time of a loop's body: the scheduler starts the copy as soon as its
operands allow, where jaxoff's order has placed the start. Of two copies, the earlier has the longer latency.
Otherwise the scheduler, which works from the end of a loop's body, would start both at the later start.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from jaxoff._compiled.hlo import Computation, Instruction, Module
from jaxoff._compiled.transfers import find_transfers, is_structure

# Microseconds, above the time of a loop's body.
_LONG_US = 1e6
# From a latency to the next one. When the scheduler has waited for a copy, it adds the latency once more, as
# the time of the instruction: below 2 the next copy would count as done, too.
_FACTOR = 3
# The types of indices into a stack.
_INDICES = frozenset({"s32", "s64", "u32", "u64"})
_SCHEDULING_NAME = re.compile(r'scheduling_name="([^"]+)"')


def make_profile(module: Module) -> str:
    """The latencies of the copies in a program's loops, as XLA's text of a profile; "" without such copies.

    Args:
      module: the program, compiled without a profile.
    """
    costs = _find_latencies(module)
    return "".join(f'costs {{ name: "{name}" cost_us: {latency:.1f} }}\n' for name, latency in costs)


def _find_latencies(module: Module) -> Iterator[tuple[str, float]]:
    """The start of each copy in a loop, by its name at scheduling, and a latency in microseconds."""
    copies: dict[str, list[Instruction]] = {}
    for transfer in find_transfers(module):
        if transfer.done is not None and transfer.execution.loop:
            copies.setdefault(transfer.execution.computation.name, []).append(transfer.start)
    for name, starts in copies.items():
        body = module.computations[name]
        places = {start: (_find_earliest(body, start), body.position[start.name]) for start in starts}
        for rank, start in enumerate(sorted(places, key=lambda start: places[start], reverse=True)):
            yield _name_at_scheduling(start), _LONG_US * _FACTOR**rank


def _find_earliest(body: Computation, start: Instruction) -> int:
    """The position of the last instruction that a copy waits for; -1 without such an instruction."""
    last, pending = -1, [*body.operands(start)]
    while pending:
        operand = pending.pop()
        if operand.shape.dtype in _INDICES and not operand.shape.dims:  # computed where it is needed
            continue
        if is_structure(operand) or operand.opcode.endswith(("-start", "-done")):
            pending += body.operands(operand)
        else:
            last = max(last, body.position[operand.name])
    return last


def _name_at_scheduling(instruction: Instruction) -> str:
    """The name that the scheduler saw; passes after it may rename an instruction."""
    found = _SCHEDULING_NAME.search(instruction.attributes.get("metadata", ""))
    return found[1] if found else instruction.name
