"""All placements of a small layer's values, rated one by one by the planner's model of time, for tests.

`choose_placements` states the model as an integer program. Here it is a sum over given placements, so that a
fault of the integer program shows.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from jaxoff._budget import calibrations, choose
from jaxoff._budget.choose import exposed_state_ms, saved_nbytes
from jaxoff._budget.costs import Costs
from jaxoff._budget.joint_graph import Placements, list_recomputed
from jaxoff._device.profile import Device
from jaxoff._jaxpr.dataflow import variables

_SAVE, _MOVE = "save", "offload"


@dataclasses.dataclass(frozen=True)
class Rated:
    """Placements of all groups of layers, with the time that they add to a step and their memory.

    Attributes:
      placements: by group.
      milliseconds: added to a step, by the model.
      nbytes: kept on the device at the most, by the model's count.
      host_nbytes: kept on the host.
    """

    placements: tuple[Placements, ...]
    milliseconds: float
    nbytes: float
    host_nbytes: int

    def describe(self, costs: Sequence[Costs]) -> str:
        """The kept values of each group, by their places in the layer."""
        groups = (
            f"{cost.pair.count} x save {placed.saved} offload {placed.offloaded} of {len(cost.pair.values)}"
            for cost, placed in zip(costs, self.placements, strict=True)
        )
        return f"{'; '.join(groups)}: {self.milliseconds:.4f} ms, {self.nbytes / 1e6:.1f} MB kept"


def list_useful(cost: Costs) -> list[int]:
    """The places of values that the backward pass may read, or may make others of that it reads."""
    pair = cost.pair
    useful, todo = set(), [*pair.needed]
    while todo:
        v = todo.pop()
        if v not in useful and v not in pair.free:
            useful.add(v)
            todo += variables(pair.makers[v]) if v in pair.makers else []
    return [i for i, v in enumerate(pair.values) if v in useful and v in cost.nbytes]


def list_placements(cost: Costs) -> Iterator[Placements]:
    """All placements of the useful values of a layer, without names or loops in it.

    Each value is saved, offloaded or recomputed, but small ones are never offloaded.
    """
    pair = cost.pair
    assert not (cost.nested or cost.only_with or cost.compressible or pair.names or pair.is_section)
    useful = list_useful(cost)
    large = [cost.nbytes[pair.values[i]] >= choose._LEAST_OFFLOADED_NBYTES for i in useful]
    for ways in itertools.product(*((_SAVE, _MOVE, None) if moves else (_SAVE, None) for moves in large)):
        saved, offloaded = (
            tuple(i for i, way in zip(useful, ways, strict=True) if way == wanted)
            for wanted in (_SAVE, _MOVE)
        )
        yield Placements(saved, offloaded)


def add_ms(cost: Costs, placed: Placements, device: Device) -> float | None:
    """The time that placements add to a step, in ms; None if the backward pass cannot make what it needs."""
    try:
        again = {id(eqn) for eqn in list_recomputed(cost.pair, placed)}
    except ValueError:
        return None
    values, nbytes = cost.pair.values, cost.nbytes
    saved, moved = ([values[i] for i in places] for places in (placed.saved, placed.offloaded))
    times = [ms for eqn, ms in zip(cost.pair.pure, cost.equation_ms, strict=True) if id(eqn) in again]
    total = sum(times) + 1e-6 * len(times)
    total += sum(cost.saving_ms[v] + choose._SAVING_SHARE * device.pass_ms(nbytes[v]) for v in saved)
    total += sum(device.pass_ms(nbytes[v]) for v in moved)
    if moved:
        total += calibrations.ORDERED_KERNEL_MS * cost.kernels
    assert not cost.state_ms and not exposed_state_ms(cost)
    back = sum(device.h2d_ms(nbytes[v]) for v in moved)
    total += max(0.0, back - calibrations.HIDING_SHARE * (cost.backward_ms + sum(times)))
    waits = [0.0]
    for start in {cost.ready_ms[v] for v in moved}:
        later = sum(device.d2h_ms(nbytes[v]) for v in moved if cost.ready_ms[v] >= start)
        waits.append(later - calibrations.HIDING_SHARE * (cost.forward_ms - start))
    return cost.pair.count * cost.pair.runs * (total + max(waits))


def rate(costs: Sequence[Costs], placements: Sequence[Placements], device: Device) -> Rated | None:
    """Placements of all groups of layers, rated; None if a backward pass cannot make what it needs."""
    times = [add_ms(cost, placed, device) for cost, placed in zip(costs, placements, strict=True)]
    known = [ms for ms in times if ms is not None]
    if len(known) < len(times):
        return None
    host = sum(
        (cost.pair.count + 1) * cost.nbytes[cost.pair.values[i]]
        for cost, placed in zip(costs, placements, strict=True)
        for i in placed.offloaded
    )
    return Rated(tuple(placements), sum(known), saved_nbytes(costs, placements), host)


def list_rated(cost: Costs, device: Device) -> list[Rated]:
    """All placements of one group of layers, rated."""
    rated = (rate([cost], [placed], device) for placed in list_placements(cost))
    return [r for r in rated if r is not None]


def list_best(rated: Sequence[Rated], cost: Costs) -> list[Rated]:
    """Those of one group of layers that no others beat in time and in all bytes that count for the group."""
    fastest: dict[tuple[float, float], Rated] = {}
    for r in rated:
        (placed,) = r.placements
        excess = cost.segments.excess_nbytes({*placed.list_kept(cost.pair)})
        key = choose._kept_nbytes(cost, placed), excess
        if key not in fastest or r.milliseconds < fastest[key].milliseconds:
            fastest[key] = r
    beaten = (
        key
        for key, other in itertools.permutations(fastest, 2)
        if other[0] <= key[0]
        and other[1] <= key[1]
        and fastest[other].milliseconds <= fastest[key].milliseconds
    )
    left_out = {*beaten}
    return [r for key, r in fastest.items() if key not in left_out]
