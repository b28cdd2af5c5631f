"""Offloads of a traced program, left out by the compiled program."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping

import jax

from jaxoff._compiled import hlo
from jaxoff._compiled.transfers import find_transfers
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import ClosedJaxpr, Jaxpr
from jaxoff._jaxpr.primitives import num_shards
from jaxoff._jaxpr.tag import Tag
from jaxoff._report.finding import Finding, FindingCode
from jaxoff._report.tables import format_nbytes

# A program may reload this part less than asked for: the last layer's residuals may stay on the device.
_TOLERANCE = 0.1
# The part of the bytes asked for from which on values that are never reloaded are said.
_LEAST_SHARE = 0.01

# From this part of the bytes asked for on, an offload that vanished is most of the program's.
_MOST = 0.5

type Reloads = collections.Counter[int]  # bytes of a copy from the host -> the number of such copies


@dataclasses.dataclass(frozen=True)
class Vanished(Finding):
    """The finding of a compiled program that keeps on the device what it was to offload.

    Attributes:
      is_most: whether this is most of what the program was to offload.
    """

    is_most: bool = False


def find_vanished(closed: ClosedJaxpr, devices: int, compiled: jax.stages.Compiled) -> Iterator[Vanished]:
    """Finds a compiled program with fewer copies from the host than the traced program.

    The reloads are compared: XLA may send equal values once and reload them twice, and the stacks of two
    passes may have the same host memory.

    Args:
      closed: the user's program.
      devices: the number of devices of the arrays.
      compiled: the compiled program.
    """
    jaxpr = compat.as_open(closed)
    asked = count_reloads(jaxpr)
    moved = _count_compiled_reloads(compiled, may_repeat=_reloads_in_while(jaxpr))
    if moved is None or not asked:
        return
    total, left = _sum_nbytes(asked) // devices, _sum_nbytes(moved)
    has_host_arguments = any(compat.is_host(v.aval) for v in jaxpr.invars)  # which may move in parts
    left_out = {} if devices > 1 or has_host_arguments else asked - moved
    gone = {n: k for n, k in left_out.items() if n not in moved}
    nbytes = max(total - left, _sum_nbytes(gone))
    if left >= (1 - _TOLERANCE) * total and _sum_nbytes(gone) < _LEAST_SHARE * total:
        return
    if not moved.keys() <= asked.keys():  # XLA moves some values in parts or together
        left_out = gone
    sent = ((n, repr(label)) for n, label in _list_sent(jaxpr) if n in left_out)
    labels = ", ".join(dict.fromkeys(label if n in gone else f"some of {label}" for n, label in sent))
    which = f"{format_nbytes(nbytes)} of them on the device{labels and f': {labels}'}"
    yield Vanished(
        FindingCode.OFFLOAD_VANISHED,
        f"the program offloads {format_nbytes(total)}, and the compiled program keeps {which}. Outside of "
        "loops XLA folds a copy to the host with its reload where no kernel between the two is long enough, "
        "or where the link is still busy with earlier copies. Offload less (jaxoff.explain says which copies "
        "are late), scan the layers (jaxoff.scan), or give each more work.",
        is_most=nbytes > _MOST * total,
    )


def count_reloads(jaxpr: Jaxpr) -> Reloads:
    """Counts a program's copies from the host, on all devices; of a condition, of the branch with most.

    A `while` loop, whose number of runs is not known, counts as one run.
    """
    found: Reloads = collections.Counter()
    for eqn in jaxpr.eqns:
        if compat.transfer_in(eqn) == "H2D":
            found[compat.nbytes_of(eqn.outvars)] += 1
        inside = [count_reloads(program) for program in compat.sub_jaxprs(eqn)]
        layout = compat.scan_in(eqn)
        runs = (layout.length if layout else 1) * num_shards(eqn)
        for nbytes, count in max(inside, key=_sum_nbytes, default=collections.Counter()).items():
            found[nbytes] += runs * count
    return found


def _reloads_in_while(jaxpr: Jaxpr) -> bool:
    """Whether a `while` loop of a program reloads values."""
    return any(
        bool(count_reloads(program)) if eqn.primitive.name == "while" else _reloads_in_while(program)
        for eqn in jaxpr.eqns
        for program in compat.sub_jaxprs(eqn)
    )


def _count_compiled_reloads(compiled: jax.stages.Compiled, *, may_repeat: bool) -> Reloads | None:
    """The copies of a compiled program.

    Args:
      compiled: the compiled program.
      may_repeat: whether a loop whose number of runs is not known may have such copies, and counts as one
        run. Otherwise the result is None where there is such a loop.
    """
    found: Reloads = collections.Counter()
    for transfer in find_transfers(hlo.parse(compiled.as_text() or "")):
        if transfer.direction == "H2D":
            if transfer.execution.count is None and not may_repeat:
                return None
            found[transfer.nbytes] += transfer.execution.least_count
    return found


def _sum_nbytes(reloads: Mapping[int, int]) -> int:
    return sum(nbytes * count for nbytes, count in reloads.items())


def _list_sent(jaxpr: Jaxpr) -> Iterator[tuple[int, str]]:
    """The named values copied to the host by a program and its inner programs: their bytes and labels."""
    sent = {eqn.invars[0] for eqn in jaxpr.eqns if compat.transfer_in(eqn) == "D2H"}
    for eqn in jaxpr.eqns:
        name = compat.name_in(eqn)
        if name and eqn.outvars[0] in sent:
            yield compat.nbytes_of(eqn.outvars), Tag.of(name).label or name
        for program in compat.sub_jaxprs(eqn):
            yield from _list_sent(program)
