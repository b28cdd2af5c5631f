"""The search for the fastest program whose compiled memory is within a budget."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxoff._budget.choose import Costs, choose_placements, saved_nbytes
from jaxoff._budget.joint_graph import JointGraph, Placements
from jaxoff._budget.narrow import narrow_stacks
from jaxoff._budget.parts import Region, write_in_parts
from jaxoff._budget.placements import list_joint_graphs, write_placed
from jaxoff._budget.report import PlacedValue, list_values
from jaxoff._device.profile import Device
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import ClosedJaxpr
from jaxoff._jaxpr.dataflow import drop_dead
from jaxoff._jaxpr.nested_loops import merge_nested_loops
from jaxoff._report.tables import format_nbytes

# Compilations at most, of programs without copies to the host and again of programs with copies.
TRIES = 4
# A program within this part of the budget is not followed by a further search.
CLOSE_ENOUGH = 0.04
# Part of the layers' time by which a program with copies must be faster, by the model, to be tried: copies
# hide less well than the model believes (bench/LOG.md, "2026-11-26: budgets win time").
_COPIES_WIN = 0.01
_NO_COPIES = 0.0
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
    """The most memory of a step, on each device and for it on the host; None on the host for any.

    An infinite `device_nbytes` stands for the limit of the device's allocator; see `resolve`.
    """

    device_nbytes: float
    host_nbytes: float | None = None

    def resolve(self, arguments: Any) -> Budget:
        """The budget of a call, in numbers.

        Args:
          arguments: of the call, a pytree; their bytes count as the step's, those of other arrays do not.

        Raises:
          ValueError: for the limit of an allocator that has none, and in one of several processes.
        """
        if math.isfinite(self.device_nbytes):
            return self
        device = jax.local_devices()[0]
        stats = device.memory_stats() or {}
        if "bytes_limit" not in stats or jax.process_count() > 1:
            where = f"{device.platform!r}, {jax.process_count()} process{'es' * (jax.process_count() > 1)}"
            raise ValueError(
                "device_bytes='fit' takes the limit of a GPU's allocator, in a single process; got "
                f"{where}. Give a number of bytes."
            )
        shards = [
            shard
            for leaf in jax.tree.leaves(arguments)
            if isinstance(leaf, jax.Array)
            for shard in leaf.addressable_shards
        ]
        own = sum(shard.data.nbytes for shard in shards if shard.device == device)
        others = max(0, stats["bytes_in_use"] - own)
        return dataclasses.replace(self, device_nbytes=stats["bytes_limit"] - others)

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
        return Budget(math.inf if device_bytes == "fit" else parse_nbytes(device_bytes, "device_bytes"), host)


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

    pairs: tuple[JointGraph, ...]
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
    search = _Search(closed, _join(device, devices), _scale(budget, devices), compile_program, devices)
    found = search.run(copies=False)
    if search.may_win_by_copies(found):
        with_copies = search.run(copies=True)
        found = min((t for t in (found, with_copies) if t), key=lambda t: t.added_ms, default=None)
    if found is None:
        raise search.make_error()
    return found


class _Search[P]:
    """A search for the fastest program within a budget; bytes are those of all devices together.

    Attributes:
      tried: the programs compiled.
    """

    def __init__(
        self,
        closed: ClosedJaxpr,
        device: Device,
        budget: Budget,
        compile_program: Callable[[ClosedJaxpr], tuple[float, P]],
        devices: int,
    ):
        self._device, self._budget, self._compile, self._devices = device, budget, compile_program, devices
        self._whole = compat.map_open(narrow_stacks(merge_nested_loops(closed)), drop_dead)
        self._in_parts, self._regions = write_in_parts(
            self._whole, _LARGE * budget.device_nbytes, is_divided=devices > 1
        )
        self._pairs = list_joint_graphs(self._whole)
        self._costs = [Costs.of(pair, device) for pair in self._pairs]
        self._step_ms = sum(c.pair.count * (c.forward_ms + c.backward_ms) for c in self._costs)
        fastest = choose_placements(self._costs, device, math.inf, _NO_COPIES)
        assert fastest is not None  # everything may be saved
        self._fastest = fastest
        # Room for kept values, by what is known.
        self._room = max(0.0, budget.device_nbytes - compat.nbytes_of(closed.jaxpr.invars))
        everything = saved_nbytes(self._costs, fastest[0]) + sum(r.nbytes for r in self._regions)
        self._runs_in_parts = bool(self._regions) and everything > self._room
        self.tried: list[Tried[P]] = []

    def may_win_by_copies(self, found: Tried[P] | None) -> bool:
        """Whether a program with copies may be faster than a program found without, by the model."""
        if found is None:
            return bool(self._costs)
        chosen = choose_placements(self._costs, self._device, self._room, self._budget.host_nbytes)
        return chosen is not None and chosen[1] < found.added_ms - _COPIES_WIN * self._step_ms

    def run(self, *, copies: bool) -> Tried[P] | None:
        """The fastest program found within the budget, with or without copies; None if none fits."""
        limit, costs = self._budget.device_nbytes, self._costs
        host_nbytes = self._budget.host_nbytes if copies else _NO_COPIES
        mine: list[Tried[P]] = []
        for _ in range(3 * TRIES):
            if len(mine) == TRIES:
                break
            chosen = choose_placements(costs, self._device, self._room, host_nbytes)
            chosen = chosen or _choose_least(costs, self._device, host_nbytes)
            if chosen is None:
                break
            alike = [t for t in mine if bool(t.regions) is self._runs_in_parts]
            fits = [t for t in alike if t.nbytes <= limit]
            if any(t.placements == tuple(chosen[0]) for t in alike):
                over = [saved_nbytes(costs, t.placements) for t in alike if t.nbytes > limit]
                over.append(saved_nbytes(costs, self._fastest[0]))
                low = max((saved_nbytes(costs, t.placements) for t in fits), default=0.0)
                middle = (low + min(over)) / 2
                if middle in (self._room, low):
                    break
                self._room = middle
                continue
            if fits and chosen[1] >= min(t.added_ms for t in fits) - _FASTER * self._step_ms:
                break
            latest = self._try(*chosen)
            mine.append(latest)
            if latest.nbytes <= limit and latest.placements == tuple(self._fastest[0]):
                break
            if 0 <= limit - latest.nbytes <= CLOSE_ENOUGH * limit:
                break
            if self._regions and not self._runs_in_parts and latest.nbytes > limit:
                self._runs_in_parts = True
                continue
            self._room = _correct(costs, [t for t in mine if bool(t.regions) is self._runs_in_parts], limit)
        return min((t for t in mine if t.nbytes <= limit), key=lambda t: t.added_ms, default=None)

    def _try(self, placements: Sequence[Placements], added_ms: float) -> Tried[P]:
        left = iter(placements)
        program = self._in_parts if self._runs_in_parts else self._whole
        nbytes, handle = self._compile(
            write_placed(program, lambda pair: next(left), fills=self._devices > 1)
        )
        regions = self._regions if self._runs_in_parts else ()
        made = tuple(self._pairs), tuple(placements), tuple(regions)
        self.tried.append(Tried(*made, added_ms, self._devices * nbytes, handle))
        return self.tried[-1]

    def make_error(self) -> BudgetError:
        """The error of a search that found nothing, with the least of its programs."""
        least = min(self.tried, key=lambda t: t.nbytes, default=None)
        budget = format_nbytes(int(self._budget.device_nbytes / self._devices))
        if least is None:
            host = format_nbytes(int(self._budget.host_nbytes or 0))
            return BudgetError(f"no placement keeps a layer's input within {host} of host memory.", None)
        if math.isinf(least.nbytes):
            return BudgetError(
                f"no program for {budget} of device memory: XLA refuses to compile the "
                f"{len(self.tried)} tried.",
                None,
            )
        nbytes = int(least.nbytes / self._devices)
        kept = _describe(least.list_values())
        if not self._pairs:
            kept += (
                ": no layers were found, neither a loop over layers (jax.lax.scan) with a loop of its "
                "backward pass nor alike layers one after the other. Layers that differ in shape from each "
                "other are not placed, nor a jax.shard_map that is differentiated from outside"
            )
        return BudgetError(
            f"no program fits {budget} of device memory. The least of {len(self.tried)} compiled takes "
            f"{format_nbytes(nbytes)}, with {kept}.",
            nbytes,
        )


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
    costs: Sequence[Costs], device: Device, host_nbytes: float | None
) -> tuple[list[Placements], float] | None:
    """Placements with as little kept on the device as the model knows; None without such placements."""
    low, high = 0.0, sum(c.pair.count * sum(c.nbytes.values()) for c in costs) + 1.0
    found = choose_placements(costs, device, high, host_nbytes)
    for _ in range(16):
        middle = (low + high) / 2
        chosen = choose_placements(costs, device, middle, host_nbytes)
        if chosen is None:
            low = middle
        else:
            found, high = chosen, middle
    return found


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
