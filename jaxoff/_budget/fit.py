"""The search for the fastest program whose compiled memory is within a budget."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from jaxoff._budget.choose import Costs, choose_placements, saved_nbytes
from jaxoff._budget.loop_pairs import LoopPair
from jaxoff._budget.narrow import narrow_stacks
from jaxoff._budget.parts import Region, write_in_parts
from jaxoff._budget.placements import Placements, list_loop_pairs, write_placed
from jaxoff._budget.report import PlacedValue, list_values
from jaxoff._device.profile import Device
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import ClosedJaxpr
from jaxoff._report.tables import format_nbytes

# Compilations of a search at most.
TRIES = 6
# A program within this part of the budget is not followed by a further search.
CLOSE_ENOUGH = 0.04
# Values from this part of the budget on are worth a loop over parts of their rows.
_LARGE = 1 / 64
# Part of a step by which a further program must be faster, by the model, to be worth a compilation.
_FASTER = 2e-3


class BudgetError(ValueError):
    """No placement fits the budget.

    Attributes:
      smallest_bytes: the smallest budget of device memory for which there is a plan; None where no placement
        fits the budget of host memory.
    """

    def __init__(self, message: str, smallest_bytes: int | None):
        super().__init__(message)
        self.smallest_bytes = smallest_bytes


@dataclasses.dataclass(frozen=True)
class Budget:
    """The most memory of a step, on each device and for it on the host; None on the host for any."""

    device_nbytes: float
    host_nbytes: float | None = None

    @staticmethod
    def of(device_bytes: float | str | None, host_bytes: float | str | None) -> Budget | None:
        """The budget of a caller's arguments; None without a budget.

        Raises:
          ValueError: for anything but a number of bytes, and for a budget of host memory alone.
        """
        host = None if host_bytes is None else parse_nbytes(host_bytes, "host_bytes")
        if device_bytes is None:
            if host is not None:
                raise ValueError(f"host_bytes goes with device_bytes; got host_bytes={host_bytes!r} alone.")
            return None
        return Budget(parse_nbytes(device_bytes, "device_bytes"), host)


@dataclasses.dataclass(frozen=True)
class Tried[P]:
    """A program of the search.

    Attributes:
      pairs: the pairs of loops.
      placements: by pair of loops.
      regions: the regions in parts.
      added_ms: the time added to a step by the placements, by the model.
      nbytes: device memory of the compiled program.
      program: the second result of the caller's `compile_program`.
    """

    pairs: tuple[LoopPair, ...]
    placements: tuple[Placements, ...]
    regions: tuple[Region, ...]
    added_ms: float
    nbytes: float
    program: P

    def list_values(self) -> tuple[PlacedValue, ...]:
        """The values of all loops with their placements."""
        pairs = zip(self.pairs, self.placements, strict=True)
        return tuple(value for pair, placements in pairs for value in list_values(pair, placements))


def find_fitting[P](
    closed: ClosedJaxpr,
    device: Device,
    budget: Budget,
    compile_program: Callable[[ClosedJaxpr], tuple[float, P]],
    *,
    devices: int = 1,
) -> Tried[P]:
    """Finds the fastest program within a budget, by compilations.

    The first program has the room that the arguments leave for kept values. Its compiled memory, and that of
    each further program, corrects the room.

    Args:
      closed: a differentiated program without copies between memories.
      device: rates of a device.
      budget: the memory of a device.
      compile_program: program -> (bytes on a device, a handle of the compiled program); infinitely many
        bytes for a program that XLA refuses.
      devices: the number of devices over which the compiler divides the values of `closed`; the model
        sees a single device with the rates and the memory of all.

    Raises:
      BudgetError: if no program fits.
    """
    whole = compat.map_open(narrow_stacks(closed), _drop_dead)
    pairs = list_loop_pairs(whole)
    device, budget = _join(device, devices), _scale(budget, devices)
    costs = [Costs.of(pair, device) for pair in pairs]
    tried: list[Tried[P]] = []
    device_nbytes, host_nbytes = budget.device_nbytes, budget.host_nbytes
    in_parts, regions = write_in_parts(whole, _LARGE * device_nbytes, is_divided=devices > 1)

    def try_placements(placements: Sequence[Placements], added_ms: float) -> Tried[P]:
        left = iter(placements)
        written = write_placed(in_parts if runs_in_parts else whole, lambda pair: next(left))
        nbytes, program = compile_program(written)
        made = tuple(pairs), tuple(placements), tuple(regions if runs_in_parts else ())
        tried.append(Tried(*made, added_ms, devices * nbytes, program))
        return tried[-1]

    fastest = choose_placements(costs, device, math.inf, host_nbytes)
    assert fastest is not None  # everything may be saved
    room = max(0.0, device_nbytes - compat.nbytes_of(closed.jaxpr.invars))  # for kept values
    runs_in_parts = bool(regions) and saved_nbytes(costs, fastest[0]) + sum(r.nbytes for r in regions) > room
    searches = 0
    while len(tried) < TRIES and searches < 3 * TRIES:
        searches += 1
        chosen = choose_placements(costs, device, room, host_nbytes)
        if chosen is None:  # nothing is as small
            chosen = _choose_least(costs, device, host_nbytes, fastest)
        alike = [t for t in tried if bool(t.regions) is runs_in_parts]
        fits = [t for t in alike if t.nbytes <= device_nbytes]
        if any(t.placements == tuple(chosen[0]) for t in alike):
            over = [saved_nbytes(costs, t.placements) for t in alike if t.nbytes > device_nbytes]
            over.append(saved_nbytes(costs, fastest[0]))
            low = max((saved_nbytes(costs, t.placements) for t in fits), default=0.0)
            middle = (low + min(over)) / 2
            if middle in (room, low):
                break
            room = middle
            continue
        if fits and chosen[1] >= min(t.added_ms for t in fits) - _FASTER * _step_ms(costs):
            break
        latest = try_placements(*chosen)
        if latest.nbytes <= device_nbytes and latest.placements == tuple(fastest[0]):
            break
        if 0 <= device_nbytes - latest.nbytes <= CLOSE_ENOUGH * device_nbytes:
            break
        if regions and not runs_in_parts and latest.nbytes > device_nbytes:
            runs_in_parts = True
            continue
        room = _correct(costs, [t for t in tried if bool(t.regions) is runs_in_parts], device_nbytes)
    fits = [t for t in tried if t.nbytes <= device_nbytes]
    if fits:
        return min(fits, key=lambda t: t.added_ms)
    least = min(tried, key=lambda t: t.nbytes)
    if math.isinf(least.nbytes):
        raise BudgetError(
            f"no program for {format_nbytes(int(device_nbytes / devices))} of device memory: XLA refuses to "
            f"compile the {len(tried)} tried.",
            None,
        )
    kept = _describe(least.list_values())
    if not pairs:
        kept += (
            ": no loop over layers (jax.lax.scan) with a loop of its backward pass was found. "
            "Layers in a Python loop are not placed, nor a jax.shard_map that is differentiated from outside"
        )
    raise BudgetError(
        f"no program fits {format_nbytes(int(device_nbytes / devices))} of device memory. The least of "
        f"{len(tried)} compiled takes {format_nbytes(int(least.nbytes / devices))}, with {kept}.",
        int(least.nbytes / devices),
    )


def _drop_dead(program: compat.Jaxpr) -> compat.Jaxpr:
    """A program without the equations that its results do not need."""
    return compat.dce_jaxpr(program, [True] * len(program.outvars), instantiate=True)[0]


def _join(device: Device, devices: int) -> Device:
    """A single device with the rates of several."""
    rates = ("flops", "memory_gbps", "d2h_gbps", "h2d_gbps")
    return dataclasses.replace(device, **{name: devices * getattr(device, name) for name in rates})


def _scale(budget: Budget, devices: int) -> Budget:
    host = None if budget.host_nbytes is None else devices * budget.host_nbytes
    return Budget(devices * budget.device_nbytes, host)


def _correct(costs: Sequence[Costs], tried: Sequence[Tried[Any]], device_nbytes: float) -> float:
    """Room for kept values, by the compiled memory of the programs nearest to the budget."""
    nearest = min(tried, key=lambda t: abs(t.nbytes - device_nbytes))
    if math.isinf(nearest.nbytes):
        return saved_nbytes(costs, nearest.placements) / 2
    over = nearest.nbytes - device_nbytes
    # Down by a little more than the excess, up by a little less than the rest.
    return max(0.0, saved_nbytes(costs, nearest.placements) - over - abs(over) * 0.05)


def _choose_least(
    costs: Sequence[Costs],
    device: Device,
    host_nbytes: float | None,
    fastest: tuple[list[Placements], float],
) -> tuple[list[Placements], float]:
    """Placements with as little kept on the device as the model knows, between nothing and the fastest."""
    low, high = 0.0, sum(c.pair.layout.length * max(c.nbytes.values(), default=0) for c in costs) + 1.0
    found = fastest
    for _ in range(12):
        middle = (low + high) / 2
        chosen = choose_placements(costs, device, middle, host_nbytes)
        if chosen is None:
            low = middle
        else:
            found, high = chosen, middle
    return found


def _step_ms(costs: Sequence[Costs]) -> float:
    return sum(c.pair.layout.length * (c.forward_ms + c.backward_ms) for c in costs)


def _describe(values: Sequence[PlacedValue]) -> str:
    """The kept values, in bytes of all iterations."""
    saved, offloaded = (
        sum(v.nbytes for v in values if v.placement == placement) for placement in ("save", "offload")
    )
    return f"{format_nbytes(saved)} saved and {format_nbytes(offloaded)} offloaded"


def parse_nbytes(value: float | str, name: str) -> float:
    """A number of bytes, given as a number or as text such as "60GB" or "56 GiB".

    Args:
      value: the number or text.
      name: of the argument, for the error.

    Raises:
      ValueError: for text of another form, and for numbers that are not above 0.
    """
    if isinstance(value, str):
        found = re.fullmatch(r"([0-9.]+)\s*([kMGT]i?)?B", value.strip())
        unit = (found.group(2) or "") if found else ""
        scale = (1024 if unit.endswith("i") else 1000) ** " kMGT".index(unit[:1] or " ")
        nbytes = float(found.group(1)) * scale if found else math.nan
    else:
        nbytes = float(value)
    if not 0 < nbytes < math.inf:
        raise ValueError(f'{name} is a number of bytes above 0, or text such as "60GB"; got {value!r}.')
    return nbytes
