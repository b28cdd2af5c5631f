"""`plan`: the fastest placement of all residuals within a budget of memory."""

from __future__ import annotations

import dataclasses
import math
import numbers
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast, get_args

import jax

from jaxoff._device.profile import H200, Device, SharedLink, checked_device
from jaxoff._plan.calibrations import MARGIN, WIDE_MARGIN
from jaxoff._plan.compiled import CompileStep, find_fitting
from jaxoff._plan.divide_loss import divide_loss
from jaxoff._plan.divide_step import divide_step, is_train_step
from jaxoff._plan.divided import DividedStep
from jaxoff._plan.layer import Label, Placements
from jaxoff._plan.layer_cost import LayerModel
from jaxoff._plan.result import BudgetError, Plan, Planned, describe_peak
from jaxoff._plan.search import find_fastest, find_smallest
from jaxoff._plan.step_cost import Cost, StepModel
from jaxoff._policy.decision import Placement
from jaxoff._report.near_miss import near_miss
from jaxoff._report.tables import format_nbytes
from jaxoff._residuals.traced_function import TracedFunction
from jaxoff._runtime.pinned_pool import POOL_VARIABLE, pinned_pool_bytes

# The placements, in the order of messages.
_PLACEMENTS: tuple[Placement, ...] = get_args(Placement)
# Part of a step by which first layers with a placement of their own must make the step faster.
_FASTER = 1e-5
# Numbers of first layers to try, at most: each takes a search.
_MAX_COUNTS = 61
# Smallest difference of two durations in the table of a plan, in ms: half a unit of its last digit.
_SHOWN_MS = 0.005


def plan(
    fun: Callable[..., Any],
    /,
    *args,
    device_bytes: float,
    host_bytes: float | None = None,
    resident_bytes: float = 0,
    link: int | SharedLink | None = None,
    device: Device | None = None,
    fixed: Mapping[str, Placement] | None = None,
    margin: float | None = None,
    compile_step: CompileStep | None = None,
    first_layers: bool = False,
    argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
    **kwargs,
) -> Plan:
    """Finds the placement of named residuals with which a step is fastest and fits into memory.

    Each name inside of `jax.checkpoint`, in scanned layers or in layers in sequence, is saved, offloaded or
    recomputed. The outputs of dots without a name share a placement of their own. Values of loops and
    branches within a layer are recomputed, and so are all values with the same names. Nothing is allocated,
    nor compiled without `compile_step`: times and bytes come from the traced program and the device's
    profile, by the model in `jaxoff._plan.step_cost`. By this model no other placement is better: an integer
    program finds the plan.

    Args:
      fun: a loss or a train step. A loss is a function of arrays, not yet differentiated, with
        `jax.checkpoint` around its layers, under any policy. A train step differentiates inside and may have
        an optimizer and a loop over microbatches; its layers are under `jaxoff.policy()`, which keeps
        nothing. The step reuses the memory of arguments that its `jax.jit` or `jaxoff.jit` donates; without
        donation, new weights need memory beside the old ones. A train step may differentiate in a
        `jax.shard_map`: the plan, with all of its figures, then applies to a single device of the mesh.
      *args, **kwargs: arguments of `fun`: pytrees of arrays or `jax.ShapeDtypeStruct`s.
      device_bytes: budget of device memory, bytes, for the whole step and `resident_bytes`. The step of a
        loss is the loss and its gradients.
      host_bytes: budget of pinned host memory, bytes; None for the share of the device in XLA's pool: 64 GiB
        a process, or XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB.
      resident_bytes: bytes of other data on the device for the whole step: with a loss, an optimizer's state.
      link: number of GPUs of the host that copy at once, or the rates of each; None for a single GPU.
      device: rates, of `Device.of` or `Device.measure`; None for an H200's.
      fixed: name -> "save", "offload" or "recompute", for placements that are decided. Marks are honoured
        anyway.
      margin: part of the budget less arguments and results that stays unused (the gradients of a loss are
        results); None for 10%, and 25% for a step over several devices and for a train step with layers
        outside of loops. Predicted peaks have been short by nearly as much (`bench/LOG.md`). 0% with
        `compile_step`.
      compile_step: compiles the step under a policy, so that memory is known and not predicted. If the
        compiled step exceeds the budget, the next plan is for a smaller budget, until a plan fits; if the
        step leaves memory unused, a faster plan is tried. Compile for the device that runs the step: ahead of
        time XLA picks other kernels, and on an H200 the same steps have taken up to 0.54 GB more.
      first_layers: whether the first layers of each `jaxoff.scan` and `jaxoff.layers` may have a placement of
        their own, where the step is then faster; `policy` is then a `jaxoff.FirstLayers`. Of more than 64
        layers not every number of first layers is tried. Layers outside of both have the placement of the
        others: give these layers `policy.rest`.
      argnums: positional arguments to differentiate a loss for, as for `jax.grad`. None: all floating-point
        arguments.
      has_aux: whether a loss returns `(output, auxiliary)`, as for `jax.grad`.

    Returns:
      A `Plan`. Give its `policy` to `jax.checkpoint`, and compile the step with `jaxoff.jit`.

    Raises:
      BudgetError: if no placement fits; the message has the smallest possible budget and the largest uses of
        memory.
      TypeError: for a `compile_step` that returns no compiled program, a device of another type, and a
        count of bytes or GPUs that is no number.
      ValueError: for a function without `jax.checkpoint`, a train step whose layers keep residuals, an
        unknown name or placement in `fixed`, a budget or margin out of range, and argnums out of range or
        given with a train step.

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
    planner = Planner.of(
        fun,
        args,
        kwargs,
        resident_bytes=resident_bytes,
        link=link,
        device=device,
        argnums=argnums,
        has_aux=has_aux,
        first_layers=first_layers,
    )
    if compile_step is None:
        return planner.plan(device_bytes, host_bytes, fixed or {}, margin)
    return planner.plan_compiled(device_bytes, host_bytes, fixed or {}, margin or 0.0, compile_step)


def host_budget_error(host_bytes: int) -> BudgetError:
    """Builds the error for a budget of host memory below every placement."""
    return BudgetError(
        f"host_bytes={format_nbytes(host_bytes)} is too little for what is fixed or marked to be offloaded: "
        f"allow more, or fix less. Without host_bytes it is XLA's pool, which {POOL_VARIABLE} sets.",
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
      model: costs of a step under any placement.
      device: rates of the device.
      devices: number of devices of the step.
      margin: margin of plans without a given margin; see `plan`.
      tries_first_layers: whether first layers may have a placement of their own.
    """

    model: StepModel
    device: Device
    devices: int = 1
    margin: float = MARGIN
    tries_first_layers: bool = False

    @classmethod
    def of(
        cls,
        fun: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        resident_bytes: float = 0,
        link: int | SharedLink | None = None,
        device: Device | None = None,
        argnums: int | Sequence[int] | None = None,
        has_aux: bool = False,
        first_layers: bool = False,
    ) -> Planner:
        """Traces a function and divides its step into layer groups; see `plan` for the arguments."""
        _check_count("resident_bytes", resident_bytes)
        device = _share_link(checked_device(H200 if device is None else device), link)
        program = TracedFunction.trace(fun, args, kwargs, argnums, has_aux)
        is_step = is_train_step(program.primal.jaxpr)
        if is_step and (has_aux or argnums is not None):
            raise ValueError(
                "argnums and has_aux say how a loss is differentiated; got them with a function that "
                "differentiates its layers itself. Leave them out."
            )
        divided = divide_step(program.primal, device) if is_step else divide_loss(program, device)
        model = _build_model(divided, device, int(resident_bytes))
        outside_loops = any(kind.layer.iterations == 1 and kind.count > 1 for kind in model.layers)
        is_wide = divided.devices > 1 or (is_step and outside_loops)
        return cls(model, device, divided.devices, WIDE_MARGIN if is_wide else MARGIN, first_layers)

    def plan(
        self, device_bytes: float, host_bytes: float | None, fixed: Mapping[str, str], margin: float | None
    ) -> Plan:
        """Plans for a budget; see `plan`."""
        margin = self.margin if margin is None else margin
        placed, host = self.resolve_fixed(fixed), self.find_host_budget(host_bytes)
        _check_count("device_bytes", device_bytes)
        if not 0 <= margin < 1:
            raise ValueError(f"margin is a part of what is free, at least 0 and below 1, got {margin!r}.")
        budget, model = int(device_bytes), dataclasses.replace(self.model, margin=margin)
        found = find_fastest(model, budget, host, placed)
        if found is None:
            raise _device_budget_error(model, budget, host, placed)
        best, first, ms = model, 0, model.cost(found).times.total
        placed |= {Label(label.name, True): verb for label, verb in placed.items()}
        for count in self._first_counts() if self.tries_first_layers else ():
            split = model.split(count)
            faster = find_fastest(split, budget, host, placed, (1 - _FASTER) * ms)
            if faster is not None:
                found, best, first, ms = faster, split, count, split.cost(faster).times.total
        return dataclasses.replace(self, model=best).build_plan(found, budget, first)

    def _first_counts(self) -> list[int]:
        """Returns the numbers of first layers to try.

        A loop of a single iteration does not overlap its copies, so numbers with such a rest are left
        out. The numbers are far apart at first: an early result speeds up the searches for the numbers
        between.
        """
        kinds = self.model.layers
        loops = {kind.layer.iterations for kind in kinds if kind.is_loop}
        most = max([*loops, *(n + 1 for kind in kinds for n in kind.numbers)], default=0)
        counts = [n for n in range(1, most) if n + 1 not in loops and not (loops and n == 1)]
        counts = counts[:: max(1, -(-len(counts) // _MAX_COUNTS))]
        return sorted(counts, key=lambda count: f"{count:b}"[::-1])

    def plan_compiled(
        self,
        device_bytes: float,
        host_bytes: float | None,
        fixed: Mapping[str, str],
        margin: float,
        compile_step: CompileStep,
    ) -> Plan:
        """Plans for a budget, with the memory of the compiled step; see `plan`."""

        def plan_for(nbytes: float) -> Plan:
            return self.plan(nbytes, host_bytes, fixed, margin)

        return find_fitting(plan_for, device_bytes, self.model.resident_nbytes, compile_step)

    def find_host_budget(self, host_bytes: float | None) -> int:
        """Returns the budget of pinned host memory: as given, or the share of a device in XLA's pool."""
        if host_bytes is None:
            return pinned_pool_bytes(os.environ) * jax.process_count() // self.devices
        _check_count("host_bytes", host_bytes)
        return int(host_bytes)

    def resolve_fixed(self, fixed: Mapping[str, str]) -> dict[Label, Placement]:
        """Checks placements by name and returns placements by label. Names in inner loops are recomputed.

        Raises:
          ValueError: for an unknown name or placement.
          TypeError: for an argument other than a mapping.
        """
        if not isinstance(fixed, Mapping):
            raise TypeError(
                f"fixed says where names live, as in {{'x_in': 'save'}}, got {type(fixed).__name__}."
            )
        names, inner = [label.name for label in self.model.labels], self.model.inner_names
        decided: dict[str, Placement] = {}
        for name, given in fixed.items():
            if name not in names and name not in inner:
                raise ValueError(
                    f"fixed takes names that the function's layers have, got {name!r}; they have "
                    f"{', '.join(names)}.{near_miss(name, names)}"
                )
            if given not in _PLACEMENTS:
                raise ValueError(
                    f"fixed takes {', '.join(_PLACEMENTS)}, got {given!r} for {name!r}."
                    f"{near_miss(given, _PLACEMENTS)}"
                )
            verb = cast(Placement, given)
            if name in inner and verb != "recompute":
                raise ValueError(
                    f"fixed takes 'recompute' for {name!r}, got {verb!r}: a loop or a branch within a layer "
                    "makes such values, too, and would keep them for each of its iterations. Give what is to "
                    "be kept outside of it a name of its own."
                )
            decided[name] = verb
        decided |= {name: "recompute" for name in names if name in inner}
        return {Label(name): verb for name, verb in decided.items() if name in names}

    def build_plan(self, placements: Placements, device_bytes: int, first: int = 0) -> Plan:
        """Builds a plan from a placement.

        Args:
          placements: the placement.
          device_bytes: budget of device memory.
          first: number of first layers with labels of their own, or 0.
        """
        cost = self.model.cost(placements)
        rows = tuple(self._build_rows(placements, cost, device_bytes, has_first=first > 0))
        return Plan(rows, cost.peak, cost.host_nbytes, cost.times, device_bytes, self.device, first)

    def _build_rows(
        self, placements: Placements, cost: Cost, device_bytes: int, *, has_first: bool
    ) -> Iterator[Planned]:
        by_label = self._group_values()
        copied = {
            label: sum(_copy_ms(kind, n, placements) for kind, n in values)
            for label, values in by_label.items()
        }
        exposed = cost.times.exposed_forward + cost.times.exposed_backward
        for label, values in by_label.items():
            kind, n = values[0]
            verb = placements.get(label, kind.find_verb(kind.layer.values[n], placements))
            counts = [(kind.layer.iterations * kind.count, kind.layer.values[n].nbytes) for kind, n in values]
            yield Planned(
                name=label.name,
                shape=kind.layer.values[n].shape if len(values) == 1 else f"{len(values)} values",
                count=sum(count for count, _ in counts),
                nbytes=sum(count * nbytes for count, nbytes in counts),
                choice=verb,
                recomputed_ms=self._spared_ms(label, placements, cost) if verb == "recompute" else 0.0,
                copied_ms=copied[label],
                exposed_ms=exposed * copied[label] / (sum(copied.values()) or 1.0),
                why=self._explain_choice(label, placements, cost, device_bytes),
                layers="others" if label.of_others else "first" if has_first else "all",
            )

    def _group_values(self) -> dict[Label, list[tuple[LayerModel, int]]]:
        """Returns: label -> the needed values with this label, as kind of layer group and index."""
        found: dict[Label, list[tuple[LayerModel, int]]] = {}
        for kind in self.model.layers:
            for n, value in enumerate(kind.layer.values):
                if value.label is not None and kind.is_needed(n):
                    found.setdefault(value.label, []).append((kind, n))
        return found

    def _spared_ms(self, label: Label, placements: Placements, cost: Cost) -> float:
        """Recomputation spared by a step with the values of a label saved, in ms."""
        saved = self.model.cost({**placements, label: "save"})
        return cost.times.recomputed - saved.times.recomputed

    def _explain_choice(self, label: Label, placements: Placements, cost: Cost, device_bytes: int) -> str:
        """Says for each other placement of a label how much slower or larger the step would be."""
        if label not in placements:
            return "marked"
        if label.name in self.model.inner_names:
            return "made in a loop or a branch of a layer, too"
        reasons = []
        for verb in _PLACEMENTS:
            if verb == placements[label]:
                continue
            changed: Placements = {**placements, label: verb}
            other, over = self.model.cost(changed), self.model.find_budget(changed) - device_bytes
            slower = other.times.total - cost.times.total
            if over > 0:
                reasons.append(f"{verb}: {format_nbytes(over)} too much")
            elif abs(slower) >= _SHOWN_MS or other.peak.nbytes != cost.peak.nbytes:
                reasons.append(f"{verb}: {slower:+.2f} ms")
        return "; ".join(reasons) or "nothing needs it"


def _share_link(device: Device, link: int | SharedLink | None) -> Device:
    """Returns a device with the rates of a shared link."""
    if link is None:
        return device
    if isinstance(link, SharedLink):
        rates = dataclasses.asdict(link)
        del rates["gpus"]
        return dataclasses.replace(device, **rates)
    return device.sharing(link)


def _build_model(divided: DividedStep, device: Device, resident_bytes: int) -> StepModel:
    kinds = zip(divided.layers, divided.counts, divided.runs, divided.numbers, strict=True)
    layers = tuple(LayerModel(layer, count, device, runs, numbers) for layer, count, runs, numbers in kinds)
    return StepModel(layers, divided.points, divided.argument_nbytes, resident_bytes, divided.outside_ms)


def _device_budget_error(
    model: StepModel, device_bytes: int, host_bytes: int, fixed: Placements
) -> BudgetError:
    """Builds the error for a budget of device or host memory below every placement."""
    least = find_smallest(model, host_bytes, fixed)
    if least is None:
        return host_budget_error(host_bytes)
    peak, needed = model.cost(least).peak, model.find_budget(least)
    kept = f", {model.margin:.0%} of what arguments and results leave stays free" if model.margin else ""
    return BudgetError(
        f"device_bytes={format_nbytes(device_bytes)} is less than any placement needs: the smallest budget "
        f"is {needed} bytes ({format_nbytes(needed)}{kept}). {describe_peak(peak)}",
        needed,
    )


def _copy_ms(kind: LayerModel, n: int, placements: Placements) -> float:
    """Duration of the copies of a value, both ways, over all iterations of a step; 0 without copies."""
    is_offloaded = n in kind.find_states(placements).offloaded
    return is_offloaded * kind.iterations * (kind.d2h_ms(n) + kind.h2d_ms(n))
