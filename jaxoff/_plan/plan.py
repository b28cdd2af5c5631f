"""`plan`: the fastest placement of every residual within a budget of memory, and `frontier`, that of many."""

from __future__ import annotations

import dataclasses
import math
import numbers
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import jax

from jaxoff._device.profile import H200, Device, SharedLink, checked_device
from jaxoff._plan.compiled import CompileStep, fitting
from jaxoff._plan.divide_loss import divide
from jaxoff._plan.divide_step import divide_step, is_train_step
from jaxoff._plan.layer import is_of_others, name_of, of_others
from jaxoff._plan.layer_cost import Choice, LayerModel
from jaxoff._plan.result import BudgetError, Plan, Planned, Verb, fullest
from jaxoff._plan.search import fastest, smallest
from jaxoff._plan.step_cost import Cost, Model
from jaxoff._policy.decision import Placement
from jaxoff._report.near_miss import near_miss
from jaxoff._report.tables import format_nbytes
from jaxoff._residuals.traced_function import TracedFunction
from jaxoff._runtime.pinned_pool import POOL_VARIABLE, pinned_pool_bytes

# What is left free of a budget, less the arguments: predicted peaks have been so much short. The other one is
# for steps over several devices, and for train steps with layers in no loop.
MARGIN, WIDE_MARGIN = 0.1, 0.25
# Two loops are worth it for so much of a step.
_FASTER = 1e-5
# So many numbers of first layers are tried, at even distances: each takes a search of its own.
_COUNTS = 61

_PLACEMENTS: tuple[Placement, ...] = ("save", "offload", "recompute")


def plan(
    fun: Callable[..., Any],
    /,
    *args,
    device_bytes: float,
    host_bytes: float | None = None,
    resident_bytes: float = 0,
    link: int | SharedLink | None = None,
    device: Device | None = None,
    fixed: Mapping[str, Verb] | None = None,
    margin: float | None = None,
    compile_step: CompileStep | None = None,
    first_layers: bool = False,
    argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
    **kwargs,
) -> Plan:
    """Finds the placement of named residuals with which a step is fastest and fits into memory.

    Each name inside of `jax.checkpoint`, in scanned layers or in layers one after the other, is saved,
    offloaded or recomputed, and so are outputs of dots without a name, all of them alike. What loops and
    branches within a layer make is recomputed, and with it what has the same name. Nothing is
    allocated, nor compiled without `compile_step`: times and bytes come from the traced program and the
    device's profile, by the model in `jaxoff._plan.step_cost`, and the choice is the best of all by that
    model, found by an integer program.

    Args:
      fun: a loss: a function of arrays, not yet differentiated, with `jax.checkpoint` around its layers,
        under any policy. Or a whole train step, which differentiates inside and may have an optimizer and a
        loop over microbatches: its layers are under `jaxoff.policy()`, which keeps nothing. What its
        `jax.jit` or `jaxoff.jit` donates is written over; without one, new weights are beside the old ones.
        A train step may differentiate in a `jax.shard_map`: the plan, and all of its figures, are then those
        of one device of the mesh.
      *args, **kwargs: its arguments: pytrees of arrays or `jax.ShapeDtypeStruct`s.
      device_bytes: the budget of device memory, bytes, for all that the step holds and `resident_bytes`. The
        step of a loss is the loss and its gradients.
      host_bytes: the budget of pinned host memory, bytes; None for what XLA's pool has for the device: 64 GiB
        a process, or XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB.
      resident_bytes: what else is on the device all the time: with a loss, an optimizer's state.
      link: how many GPUs of the host copy at once, or the rates that one of them then gets; None for one.
      device: speeds, of `Device.of` or `Device.measure`; None for an H200's.
      fixed: by name, "save", "offload" or "recompute" where that is decided. Marks are honoured anyway.
      margin: the part that stays free of what arguments and results leave of the budget (a loss's gradients
        are results); None for 10%, and 25% for a step over several devices and for a train step with layers
        in no loop, by which predicted peaks have been short (`bench/LOG.md`); 0% with `compile_step`.
      compile_step: compiles the step under a policy. What XLA assigns is then known and not predicted: a plan
        whose program takes more than the budget is made again for as much less, until one fits, and after one
        that takes less than predicted a faster one is tried. Compile for the device that runs it; ahead of
        time XLA picks other kernels, and on an H200 the same steps have taken up to 0.54 GB more.
      first_layers: whether the first layers of each `jaxoff.scan` and `jaxoff.layers` may be placed otherwise
        than its others, where that makes a step faster; then `policy` is a `jaxoff.FirstLayers`. Of more than
        64 layers not every number of first ones is tried. What is in neither goes with the others: hand it
        `policy.rest`.
      argnums: the positional arguments to differentiate a loss for, as for `jax.grad`. None: every
        floating-point argument.
      has_aux: whether a loss returns `(output, auxiliary)`, as for `jax.grad`.

    Returns:
      A `Plan`; its `policy` is what to hand to `jax.checkpoint`, and the step goes through `jaxoff.jit`.

    Raises:
      BudgetError: if nothing fits; it says the smallest budget that does, and what takes the space.
      TypeError: for a `compile_step` that returns something else than a compiled program, a device that is
        none, and a count of bytes or GPUs that is no number.
      ValueError: for a function without `jax.checkpoint`, a train step whose layers keep something, a fixed
        name that it does not have or a placement that is none, a budget or margin out of range, and argnums
        out of range or given with a train step.

    Example:
      >>> import jax, jax.numpy as jnp, jaxoff
      >>> def layer(x, w):
      ...     x = jaxoff.name(x, "x_in")
      ...     return x + jaxoff.name(jnp.tanh(x @ w), "act") @ w.T, None
      >>> def loss(w, x, policy=jaxoff.policy()):
      ...     return jaxoff.scan(layer, x, w, policy=policy)[0].sum()
      >>> w = jax.ShapeDtypeStruct((16, 4096, 4096), "bfloat16")
      >>> x = jax.ShapeDtypeStruct((65536, 4096), "bfloat16")
      >>> plan = jaxoff.plan(loss, w, x, device_bytes=12e9)
      >>> plan.choice("x_in"), plan.peak_bytes < 12e9
      ('offload', True)
      >>> fast = jaxoff.plan(loss, w, x, device_bytes=40e9)
      >>> fast.choice("(dots)"), fast.step_ms < plan.step_ms
      ('save', True)

      A whole step:

      >>> def step(w, x):
      ...     return w - jax.grad(loss)(w, x)
      >>> whole = jaxoff.plan(jaxoff.jit(step, donate_argnums=0), w, x, device_bytes=12e9)
      >>> whole.choice("x_in")
      'offload'

    References:
      Jain et al., Checkmate (MLSys 2020), https://arxiv.org/abs/1910.02653: rematerialisation as an integer
      program.
    """
    planner = Planner.of(fun, args, kwargs, resident_bytes, link, device, argnums, has_aux)
    planner = dataclasses.replace(planner, in_two=first_layers)
    if compile_step is None:
        return planner.plan(device_bytes, host_bytes, fixed or {}, margin)
    return planner.plan_compiled(device_bytes, host_bytes, fixed or {}, margin or 0.0, compile_step)


def no_host_memory(host_bytes: int) -> BudgetError:
    """The error for a budget of host memory that nothing fits."""
    return BudgetError(
        f"host_bytes={format_nbytes(host_bytes)} is too little for what is fixed or marked to be offloaded: "
        "allow "
        f"more, or fix less. Without host_bytes it is XLA's pool, which {POOL_VARIABLE} sets.",
        None,
    )


def _check_count(name: str, given: float) -> None:
    if isinstance(given, bool) or not isinstance(given, numbers.Real):
        raise TypeError(f"{name} is a count of bytes, a number such as 20e9 for 20 GB, got {given!r}.")
    if not 0 <= given < math.inf:
        raise ValueError(f"{name} is a count of bytes, at least 0, got {given!r}.")


@dataclasses.dataclass(frozen=True)
class Planner:
    """A traced program, ready to be planned for any budget.

    Attributes:
      model: the costs of a step.
      device: speeds.
      devices: over how many the step is.
      margin: the part that stays free if no other is given.
      in_two: whether first layers may be placed otherwise than the others.
    """

    model: Model
    device: Device
    devices: int = 1
    margin: float = MARGIN
    in_two: bool = False

    @classmethod
    def of(cls, fun, args, kwargs, resident_bytes, link, device, argnums, has_aux) -> Planner:
        """Traces a function; see `plan`."""
        _check_count("resident_bytes", resident_bytes)
        device = checked_device(H200 if device is None else device)
        if isinstance(link, SharedLink):
            rates = dataclasses.asdict(link)
            del rates["gpus"]
            device = dataclasses.replace(device, **rates)
        elif link is not None:
            device = device.sharing(link)
        program = TracedFunction.trace(fun, args, kwargs, argnums, has_aux)
        is_step = is_train_step(program.primal.jaxpr)
        if is_step and (has_aux or argnums is not None):
            raise ValueError(
                "argnums and has_aux say how a loss is differentiated; got them with a function that "
                "differentiates its layers itself. Leave them out."
            )
        found = divide_step(program.primal, device) if is_step else divide(program, device)
        kinds = zip(found.layers, found.counts, found.runs, found.numbers, strict=True)
        models = tuple(LayerModel(layer, n, device, runs, numbers) for layer, n, runs, numbers in kinds)
        model = Model(models, found.points, found.argument_nbytes, int(resident_bytes), found.outside_ms)
        in_no_loop = any(kind.layer.iterations == 1 and kind.count > 1 for kind in models)
        is_wide = found.devices > 1 or (is_step and in_no_loop)
        return cls(model, device, found.devices, WIDE_MARGIN if is_wide else MARGIN)

    def plan(
        self, device_bytes: float, host_bytes: float | None, fixed: Mapping[str, str], margin: float | None
    ) -> Plan:
        """The plan for a budget; see `plan`."""
        margin = self.margin if margin is None else margin
        places, host = self.checked(fixed), self.host_budget(host_bytes)
        _check_count("device_bytes", device_bytes)
        if not 0 <= margin < 1:
            raise ValueError(f"margin is a part of what is free, at least 0 and below 1, got {margin!r}.")
        model = dataclasses.replace(self.model, margin=margin)
        choice = fastest(model, int(device_bytes), host, places)
        if choice is None:
            raise _too_small(model, int(device_bytes), host, places)
        best, first, ms = model, 0, model.cost(choice).times.total
        places |= {of_others(label): place for label, place in places.items()}
        for count in self._counts() if self.in_two else ():
            two = model.in_two(count)
            found = fastest(two, int(device_bytes), host, places, (1 - _FASTER) * ms)
            if found is not None:
                choice, best, first, ms = found, two, count, two.cost(found).times.total
        return dataclasses.replace(self, model=best).planned(choice, int(device_bytes), first)

    def _counts(self) -> list[int]:
        """The numbers of first layers to try: a loop of one iteration does not overlap its copies.

        Far apart first, so that what is found refutes those between.
        """
        kinds = self.model.layers
        loops = {kind.layer.iterations for kind in kinds if kind.is_loop}
        most = max([*loops, *(n + 1 for kind in kinds for n in kind.numbers)], default=0)
        counts = [n for n in range(1, most) if n + 1 not in loops and not (loops and n == 1)]
        counts = counts[:: max(1, -(-len(counts) // _COUNTS))]
        return sorted(counts, key=lambda count: f"{count:b}"[::-1])

    def plan_compiled(
        self,
        device_bytes: float,
        host_bytes: float | None,
        fixed: Mapping[str, str],
        margin: float,
        compile_step: CompileStep,
    ) -> Plan:
        """The plan for a budget whose compiled step fits it; see `plan`."""

        def plan_for(nbytes: float) -> Plan:
            return self.plan(nbytes, host_bytes, fixed, margin)

        return fitting(plan_for, device_bytes, self.model.resident_nbytes, compile_step)

    def host_budget(self, host_bytes: float | None) -> int:
        """What a device may have of pinned host memory: as given, or its share of XLA's pool."""
        if host_bytes is None:
            return pinned_pool_bytes(os.environ) * jax.process_count() // self.devices
        _check_count("host_bytes", host_bytes)
        return int(host_bytes)

    def checked(self, fixed: Mapping[str, str]) -> dict[str, Placement]:
        """Placements of names that are decided.

        Raises:
          ValueError: for an unknown name or placement.
          TypeError: for what maps no names.
        """
        if not isinstance(fixed, Mapping):
            raise TypeError(
                f"fixed says where names live, as in {{'x_in': 'save'}}, got {type(fixed).__name__}."
            )
        for name, verb in fixed.items():
            if name not in self.model.labels and name not in self.model.within:
                known = ", ".join(self.model.labels)
                raise ValueError(
                    f"fixed takes names that the function's layers have, got {name!r}; they have {known}."
                    f"{near_miss(name, self.model.labels)}"
                )
            if verb not in _PLACEMENTS:
                raise ValueError(
                    f"fixed takes {', '.join(_PLACEMENTS)}, got {verb!r} for {name!r}."
                    f"{near_miss(verb, _PLACEMENTS)}"
                )
            if name in self.model.within and verb != "recompute":
                raise ValueError(
                    f"fixed takes 'recompute' for {name!r}, got {verb!r}: a loop or a branch within a layer "
                    "makes such values, too, and would keep them for each of its iterations. Give what is to "
                    "be kept outside of it a name of its own."
                )
        again: dict[str, Verb] = {}.fromkeys(self.model.within.intersection(self.model.labels), "recompute")
        decided = {**fixed, **again}
        return {name: cast(Placement, verb) for name, verb in decided.items() if name in self.model.labels}

    def planned(self, choice: Choice, device_bytes: int, first: int = 0) -> Plan:
        """A choice with its costs and reasons, of loops with so many first layers if there are any."""
        cost = self.model.cost(choice)
        rows = tuple(self._rows(choice, cost, device_bytes, first))
        return Plan(rows, cost.peak, cost.host_nbytes, cost.times, device_bytes, self.device, first)

    def _rows(self, choice: Choice, cost: Cost, device_bytes: int, first: int) -> Iterator[Planned]:
        values: dict[str, list[tuple[LayerModel, int]]] = {}
        for kind in self.model.layers:
            for n, value in enumerate(kind.layer.values):
                if value.label is not None and kind.is_reached(n):
                    values.setdefault(value.label, []).append((kind, n))
        copied = {label: sum(_copied_ms(kind, n, choice) for kind, n in of) for label, of in values.items()}
        exposed = cost.times.exposed_forward + cost.times.exposed_backward
        for label, of in values.items():
            kind, n = of[0]
            place = choice.get(label, kind.placed(kind.layer.values[n], choice))
            counts = [(kind.layer.iterations * kind.count, kind.layer.values[n].nbytes) for kind, n in of]
            spared = 0.0
            if place == "recompute":
                saved = self.model.cost({**choice, label: "save"})
                spared = cost.times.recomputed - saved.times.recomputed
            yield Planned(
                name=name_of(label),
                shape=kind.layer.values[n].shape if len(of) == 1 else f"{len(of)} values",
                count=sum(count for count, _ in counts),
                nbytes=sum(count * nbytes for count, nbytes in counts),
                choice=place,
                recomputed_ms=spared,
                copied_ms=copied[label],
                exposed_ms=exposed * copied[label] / (sum(copied.values()) or 1.0),
                why=self._why(label, choice, cost, device_bytes),
                layers="others" if is_of_others(label) else "first" if first else "all",
            )

    def _why(self, label: str, choice: Choice, cost: Cost, device_bytes: int) -> str:
        """What the other placements of a name would do, all else as it is."""
        if label not in choice:
            return "marked"
        if name_of(label) in self.model.within:
            return "made in a loop or a branch of a layer, too"
        reasons = []
        for place in _PLACEMENTS:
            if place == choice[label]:
                continue
            with_it: Choice = {**choice, label: place}
            other, over = self.model.cost(with_it), self.model.needed(with_it) - device_bytes
            slower = other.times.total - cost.times.total
            if over > 0:
                reasons.append(f"{place}: {format_nbytes(over)} too much")
            elif abs(slower) >= 0.005 or other.peak.nbytes != cost.peak.nbytes:
                reasons.append(f"{place}: {slower:+.2f} ms")
        return "; ".join(reasons) or "nothing needs it"


def _too_small(model: Model, device_bytes: int, host_bytes: int, fixed: Choice) -> BudgetError:
    least = smallest(model, host_bytes, fixed)
    if least is None:
        return no_host_memory(host_bytes)
    peak, needed = model.cost(least).peak, model.needed(least)
    kept = f", {model.margin:.0%} of what arguments and results leave stays free" if model.margin else ""
    return BudgetError(
        f"device_bytes={format_nbytes(device_bytes)} is less than any placement needs: the smallest budget "
        "is "
        f"{needed} bytes ({format_nbytes(needed)}{kept}). {fullest(peak)}",
        needed,
    )


def _copied_ms(kind: LayerModel, n: int, choice: Choice) -> float:
    moved = n in kind.use(choice).moved
    return moved * kind.iterations * (kind.d2h_ms(n) + kind.h2d_ms(n))
