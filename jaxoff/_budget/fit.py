"""The searches for the fastest program whose compiled memory is within a budget."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from jaxoff._budget.budget_error import BudgetError
from jaxoff._budget.calibrations import GROUPS_SLOWER, PARTS_SLOWER
from jaxoff._budget.limits import Budget
from jaxoff._budget.search import Search
from jaxoff._budget.tried import Tried
from jaxoff._device.profile import Device
from jaxoff._jaxpr.compat import ClosedJaxpr
from jaxoff._jaxpr.faults import FAULTS
from jaxoff._jaxpr.merged_loops import merge_backward_loops
from jaxoff._report.progress import Progress


def find_fitting[P](
    closed: ClosedJaxpr,
    device: Device,
    budget: Budget,
    donated: Sequence[bool],
    compile_program: Callable[[ClosedJaxpr], tuple[float, P]],
    *,
    devices: int = 1,
    compile_otherwise: Callable[[ClosedJaxpr], tuple[float, P] | None] = lambda _: None,
    progress: Progress | None = None,
) -> Tried[P]:
    """Finds the fastest program within a budget, by compilations.

    Args:
      closed: a differentiated program without copies between memories.
      device: rates of a device.
      budget: the memory of a device.
      donated: for each argument, whether the program may reuse its memory.
      compile_program: program -> (bytes on a device, a handle of the compiled program); infinitely many
        bytes for a program that XLA refuses.
      devices: the number of devices of the program. Where the compiler divides the values over devices, the
        model sees a single device with the rates and the memory of all. Where all layers are in a
        `jax.shard_map`, the values are those of one device.
      compile_otherwise: as `compile_program`, by slower options for less memory; None where there are none.
      progress: of this search and of those before for the same step.

    Raises:
      BudgetError: if no program fits.
    """
    progress = progress or Progress()
    search = Search(merge_backward_loops(closed), device, budget, donated, compile_program, devices, progress)
    searches: list[Search[P]] = []

    def find_whole() -> Tried[P] | None:
        searches.append(search)
        found = search.run_both() or search.run_again(compile_otherwise)
        opened = search.open(found)
        if found is None or opened is None:
            return found or run_further(opened)
        faster = run_beside("loops in layers", lambda: opened)
        return min((t for t in (found, faster) if t), key=Tried.milliseconds)

    def run_further(further: Search[P] | None, *, copies: bool = False) -> Tried[P] | None:
        if further is None:
            return None
        searches.append(further)
        return further.run_both() if copies else further.run(copies=False)

    def find_within_reach() -> Tried[P] | None:
        """A program with groups of iterations made again, or with layers in parts."""
        return run_further(search.keep_groups(None)) or run_further(search.tile(copies=True), copies=True)

    def find_in_groups(found: Tried[P]) -> Tried[P]:
        """The program found, or one with groups of iterations made again that takes hardly longer."""
        if found.is_fastest:
            return found
        grouped = run_beside("groups of iterations", lambda: search.keep_groups(found))
        limit_ms = (1 + GROUPS_SLOWER) * found.milliseconds()
        return grouped if grouped is not None and grouped.milliseconds() <= limit_ms else found

    def run_beside(what: str, make: Callable[[], Search[P] | None]) -> Tried[P] | None:
        """A further search, whose fault leaves the program found."""
        try:
            return run_further(make())
        except (ValueError, *FAULTS) as fault:
            progress.say(f"{what} failed by a fault of jaxoff ({type(fault).__name__}: {fault})")
            return None

    if search.is_far_beyond:
        found = find_within_reach() or find_whole()
    elif (found := find_whole()) is None:
        found = find_within_reach()
    else:
        found = find_in_groups(found)
        if search.devices == 1 and search.is_slowed(found):  # parts of divided layers each exchange sums
            tiled = run_beside("layers in parts", lambda: search.tile(copies=False))
            if tiled is not None and PARTS_SLOWER * tiled.milliseconds() < found.milliseconds():
                found = tiled
    if found is None:
        raise min((search.make_error() for search in searches), key=BudgetError.least_bytes)
    return dataclasses.replace(found, nbytes=found.nbytes / search.devices, programs=progress.programs)
