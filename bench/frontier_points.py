"""The points of `bench.frontier`: plans for budgets, stock policies, MaxText's, single names."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
from jax import lax

import jaxoff
from bench.step_models import Workload, loss
from bench.step_variants import Step
from jaxoff import FirstLayers, Policy
from jaxoff._plan.calibrations import MARGIN
from jaxoff._plan.compiled import CompileStep
from jaxoff._plan.layer import UNNAMED_DOTS, Label, Placements
from jaxoff._plan.plan import Planner
from jaxoff._plan.search import find_fastest, find_smallest
from jaxoff._policy.decision import Placement

type Role = Literal["plan", "layers", "stock", "maxtext", "single", "bound", "every"]

ROLES: tuple[Role, ...] = ("plan", "layers", "stock", "maxtext", "single", "bound")
# All placements of a layer with few names.
EVERY: Role = "every"
FEW_NAMES = ("mlp",)
STOCK = ("nothing_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable", "offload_dots")
_KEPT: tuple[Placement, ...] = ("save", "offload")
_DOTS: dict[str, Placement] = {"dots": "save", "offload_dots": "offload"}
_STOCK_PLACEMENTS: dict[str, Placements] = {
    "nothing_saveable": {},
    "dots_saveable": {Label(UNNAMED_DOTS): "save"},
    "offload_dots": {Label(UNNAMED_DOTS): "offload"},
}
# MaxText's remat_policy (decoders.py, get_remat_policy): the saved or offloaded values, by MaxText's names.
_QKV = ("query_proj", "key_proj", "value_proj", "qkv_proj")
_MINIMAL = (*_QKV, "out_proj", "mlpwi_0", "mlpwi_1", "mlpwi", "mlpwo")
MAXTEXT: dict[str, tuple[str, tuple[str, ...]]] = {
    "minimal_with_context": ("save", (*_MINIMAL, "context")),
    "minimal": ("save", _MINIMAL),
    "save_dot_with_context_except_mlp": ("save", (*_QKV, "context", "out_proj")),
    "save_dot_except_mlpwi": ("save", (*_QKV, "out_proj", "mlpwo")),
    "save_dot_except_mlp": ("save", (*_QKV, "out_proj")),
    "save_qkv_proj": ("save", _QKV),
    "save_out_proj": ("save", ("out_proj",)),
    "qkv_proj_offloaded": ("offload", _QKV),
    "minimal_offloaded": ("offload", _MINIMAL),
}
# MaxText's names by the names of the workloads' layers.
_SAME: dict[str, dict[str, str]] = {
    "mlp": {"mlpwi": "pre", "mlpwo": "down"},
    "dense": {"qkv_proj": "qkv", "context": "attn", "out_proj": "out_proj", "mlpwi": "pre", "mlpwo": "down"},
    "nano": {"qkv_proj": "attn.qkv", "context": "attn.core", "mlpwi": "moe.act", "mlpwo": "moe.combined"},
}
# Part of a budget, and of a small budget, left free by plans made ahead of time: the card has other kernels,
# whose memory of their own has been up to five times 32 MiB (bench/LOG.md).
AHEAD_NBYTES, AHEAD_PART = 192 << 20, 0.012
# XLA's pool of pinned memory, with room for buffers besides residuals.
HOST_BYTES = 90e9


@dataclasses.dataclass(frozen=True)
class Point:
    """A way to place residuals, JSON-ready.

    Attributes:
      name: the point's name.
      role: the kind of point, a `Role`.
      policy: fields of a `jaxoff.Policy` or a `jaxoff.FirstLayers`; None with a stock policy or without any.
      stock: a key of `STOCK`, or None.
      budget: bytes of device memory for which the point was planned, or None.
      predicted: by the planner: "ms", "peak_bytes", "host_bytes", and "compiled_bytes" of the compiled step;
        empty where the planner has no prediction.
      also: names of points with the same program, which is measured once.
    """

    name: str
    role: Role
    policy: dict[str, Any] | None = None
    stock: str | None = None
    budget: int | None = None
    predicted: dict[str, float] = dataclasses.field(default_factory=dict)
    also: tuple[str, ...] = ()

    def step(self, workload: Workload) -> Step:
        """The point's training step, compiled by `jaxoff.jit`, with copies beside compute."""
        step = jax.value_and_grad(loss(workload, "planned", self._stack()), (0, 1))
        return Step("scanned", jaxoff.jit(step), self.name)

    def _stack(self) -> Callable[..., Any]:
        policy = self._callable()

        def stack(layer, carry, weights):
            def body(carry, w):
                return layer(w, carry), None

            if policy is None:
                return lax.scan(body, carry, weights)[0]
            return jaxoff.scan(body, carry, weights, policy=policy, keep_first=False)[0]

        return stack

    def _callable(self) -> Any:
        if self.policy is not None:
            return _policy_of(self.policy)
        if self.stock == "offload_dots":
            return jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")
        return None if self.stock is None else getattr(jax.checkpoint_policies, self.stock)


def _policy_of(fields: dict[str, Any]) -> Policy | FirstLayers:
    if "count" not in fields:
        return Policy(**fields)
    return FirstLayers(fields["count"], _policy_of(fields["policy"]), _policy_of(fields["rest"]))


def planner_of(workload: Workload, device: jaxoff.Device | None = None) -> Planner:
    """The planner of a workload's loss, for an H200 or another device."""
    fun = loss(workload, "planned", Point("", "stock", stock="nothing_saveable")._stack())
    return Planner.of(fun, workload.shapes("scanned"), {}, device=device)


def budgets_of(planner: Planner, number: int) -> list[int]:
    """Even budgets from the peak of recomputing everything to the peak of the fastest placement.

    The first budget is larger where no plan fits the peak of recomputing everything with its margin.
    """
    model = dataclasses.replace(planner.model, margin=MARGIN)

    def needed_bytes(choice: Any) -> float:
        assert choice is not None
        return 1.001 * model.find_budget(choice)

    low = max(1.001 * model.cost({}).peak.nbytes, needed_bytes(find_smallest(model, int(HOST_BYTES), {})))
    high = max(low, needed_bytes(find_fastest(model, 10**15, int(HOST_BYTES), {})))
    return [math.ceil(low + (high - low) * i / max(1, number - 1)) for i in range(number)]


def points_of(
    workload: Workload,
    planner: Planner,
    roles: Sequence[Role],
    budgets: Sequence[int],
    compile_step: CompileStep | None = None,
    *,
    ahead: bool = True,
) -> list[Point]:
    """The points of a workload.

    With `compile_step` plans are checked by compilation, with no margin; plans compiled `ahead` of time leave
    memory for larger kernels on the card.
    """
    spared = AHEAD_PART if ahead else 0.0
    found = {
        "plan": lambda: _plans(planner, budgets, compile_step, spared),
        "layers": lambda: _plans_by_layer(planner, budgets, compile_step, spared),
        "stock": lambda: _stock(planner),
        "maxtext": lambda: _maxtext(planner, workload),
        "single": lambda: _singles(planner, budgets),
        "bound": lambda: iter([Point("no_remat", "bound")]),
        EVERY: lambda: _every(planner),
    }
    return _each_once([point for role in roles for point in found[role]()], planner)


def _each_once(points: list[Point], planner: Planner) -> list[Point]:
    """Merges points with the same residuals in the same places; each plan stays, for its budget."""
    found: dict[Any, Point] = {}
    for point in points:
        key, placements = point.name, _find_placements(point)
        if placements is not None and point.role not in ("plan", "layers"):
            kept = planner.model.find_kept_labels(placements)
            key = frozenset((label, verb) for label, verb in placements.items() if label in kept)
        first = found.setdefault(key, point)
        if first is not point:
            found[key] = dataclasses.replace(first, also=(*first.also, point.name))
    return list(found.values())


def _find_placements(point: Point) -> Placements | None:
    """The placements of a point in a planner's terms; None where a planner has no term."""
    if point.policy is None:
        return _STOCK_PLACEMENTS.get(point.stock or "")
    return _place_by_label(point.policy)


def _place_by_label(policy: dict[str, Any]) -> Placements:
    if "count" not in policy:
        placed: dict[Label, Placement] = {
            Label(name): verb for verb in _KEPT for name in policy.get(verb, ())
        }
        if (verb := _DOTS.get(policy.get("unmarked", ""))) is not None:
            placed[Label(UNNAMED_DOTS)] = verb
        return placed
    first, rest = _place_by_label(policy["policy"]), _place_by_label(policy["rest"])
    return {**first, **{Label(label.name, True): verb for label, verb in rest.items()}}


def predicted_ms(planner: Planner, point: Point) -> float | None:
    """A planner's time of a point; None where the planner has no prediction."""
    return _predict(planner, point).get("ms")


def predicted_anew(planner: Planner, point: Point) -> Point:
    """A point with the planner's prediction; the compiled bytes stay."""
    return dataclasses.replace(point, predicted={**point.predicted, **_predict(planner, point)})


def _predict(planner: Planner, point: Point) -> dict[str, float]:
    placements, first = _find_placements(point), (point.policy or {}).get("count")
    if placements is None:
        return {}
    model = planner.model if first is None else planner.model.split(first)
    cost = model.cost(placements)
    return {"ms": cost.times.total, "peak_bytes": cost.peak.nbytes, "host_bytes": cost.host_nbytes}


def compiled_for(workload: Workload, target: jaxoff.Target | None = None) -> CompileStep:
    """Compiles a workload's step, each policy once, ahead of time or for the device at hand."""

    @functools.cache
    def compile_under(policy: Policy) -> jax.stages.Compiled:
        step = Point("", "plan", dataclasses.asdict(policy)).step(workload)
        if target is None:
            return step.jitted.lower(*workload.shapes("scanned")).compile()
        return target.compile(step.jitted, *workload.shapes("scanned"))

    return compile_under


def _plans(
    planner: Planner, budgets: Sequence[int], compile_step: CompileStep | None, spared: float
) -> Iterator[Point]:
    for number, budget in enumerate(budgets, 1):
        if compile_step is None:
            plan = planner.plan(budget, HOST_BYTES, {}, MARGIN)
        else:
            nbytes = budget - min(AHEAD_NBYTES, spared * budget)
            plan = planner.plan_compiled(nbytes, HOST_BYTES, {}, 0.0, compile_step)
        predicted = {"ms": plan.step_ms, "peak_bytes": plan.peak_bytes, "host_bytes": plan.host_bytes}
        if plan.compiled_bytes is not None:
            predicted["compiled_bytes"] = plan.compiled_bytes
        fields = dataclasses.asdict(plan.policy)
        name = f"plan {number}: {budget / 1e9:.1f} GB"
        yield Point(name, "plan", fields, budget=budget, predicted=predicted)


def _plans_by_layer(
    planner: Planner, budgets: Sequence[int], compile_step: CompileStep | None, spared: float
) -> Iterator[Point]:
    """Plans whose first layers are placed otherwise, for the budgets where these plans are faster."""
    for point in _plans(dataclasses.replace(planner, tries_first_layers=True), budgets, compile_step, spared):
        if point.policy is not None and "count" in point.policy:
            name = point.name.replace("plan", f"first {point.policy['count']},")
            yield dataclasses.replace(point, name=name, role="layers")


def _stock(planner: Planner) -> Iterator[Point]:
    for name in STOCK:
        yield predicted_anew(planner, Point(name, "stock", stock=name))


def _maxtext(planner: Planner, workload: Workload) -> Iterator[Point]:
    same = _SAME.get(workload.kind, _SAME["nano"])
    for name, (verb, theirs) in MAXTEXT.items():
        labels = tuple(same[label] for label in theirs if label in same)
        yield predicted_anew(planner, Point(f"maxtext {name}", "maxtext", {verb: labels}))


def _singles(planner: Planner, budgets: Sequence[int]) -> Iterator[Point]:
    """For each budget the choice with a single kept name and the least predicted time."""
    every = [
        predicted_anew(planner, Point(f"{verb} {label}", "single", {verb: (label,)}))
        for label in _names(planner)
        for verb in _KEPT
    ]
    known = {}
    for budget in budgets:
        fitting = [point for point in every if point.predicted["peak_bytes"] <= budget]
        if fitting:
            point = min(fitting, key=lambda point: point.predicted["ms"])
            known[point.name] = point
    yield from known.values()


def _every(planner: Planner) -> Iterator[Point]:
    """All placements of the names of a layer: three times as many for each further name."""
    labels = sorted(_names(planner))
    for placed in itertools.product((None, *_KEPT), repeat=len(labels)):
        verbs = {verb: tuple(k for k, v in zip(labels, placed, strict=True) if v == verb) for verb in _KEPT}
        name = "; ".join(f"{verb} {', '.join(kept)}" for verb, kept in verbs.items() if kept)
        yield predicted_anew(planner, Point(name or "recompute all", EVERY, verbs))


def _names(planner: Planner) -> list[str]:
    """The names of named values."""
    return [label.name for label in planner.model.labels if not label.name.startswith("(")]
