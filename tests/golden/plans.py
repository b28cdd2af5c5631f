"""Plans of `jaxoff.plan` as JSON-ready values: the benchmark's four layers and two whole steps, by budget.

`PLANS` maps a kind of document, a program's, and a name, with its budget, to a function that makes the plan.
Memory is an estimate, for an H200 that need not be there. Nothing is compiled.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
from jax import lax

import jaxoff
from bench.client_steps import PROGRAMS
from bench.step_models import Workload, loss
from jaxoff._budget.limits import Budget
from jaxoff._budget.report import PlacedValue, Plan
from jaxoff._plan.plan import make_planner
from tests.golden.steps import use_h200

# Part of the largest value below which values share a line, as they share a row of a plan's table.
_SMALL = 1e-3
_DIGITS = 4

PLANS: dict[str, dict[str, Callable[[], Any]]] = {}


def _layers(text: str, *, listed: bool = False) -> tuple[Any, tuple[Any, ...]]:
    """A step of gradient descent over a workload's layers, without checkpoints, and its structs."""

    def scan(layer, carry, weights):
        return lax.scan(lambda carry, w: (layer(w, carry), None), carry, weights)[0]

    def apply_each(layer, carry, weights):
        return functools.reduce(lambda carry, w: layer(w, carry), weights, carry)

    workload = Workload.parse(text)
    loss_of = loss(workload, "planned", apply_each if listed else scan)

    def step(weights, x):
        value, grads = jax.value_and_grad(loss_of)(weights, x)
        return jax.tree.map(lambda w, g: w - g.astype(w.dtype), weights, grads), value

    return step, workload.shapes("unrolled" if listed else "scanned")


def _whole_step(name: str) -> tuple[Any, tuple[Any, ...]]:
    """A step of `bench.client_steps` without checkpoints, and its structs."""
    step = dataclasses.replace(PROGRAMS[name], offloads=None).build(attention="cudnn")
    return step.fun, (step.state, step.batch)


@functools.cache
def _planner(name: str) -> Callable[[Budget], Plan]:
    """The planner of a program, which traces the program once for all budgets; under `use_h200`."""
    fun, args = _PROGRAMS[name][0]()
    step = jax.jit(fun, donate_argnums=0)
    return make_planner(step, args, {}, jaxoff.Device.of("h200"), False, None)


def _make(name: str, limit: str) -> dict[str, Any]:
    with use_h200():
        budget = Budget.of(limit, None)
        assert budget is not None
        try:
            return summarize(_planner(name)(budget))
        except jaxoff.BudgetError as error:
            return {"nothing fits, least bytes": error.smallest_bytes}


def summarize(plan: Plan) -> dict[str, Any]:
    """A plan without the lines of sources: of each value where its arrays wait, and their bytes."""
    values: dict[str, list[PlacedValue]] = {}
    least = _SMALL * max((v.nbytes for v in plan.values), default=0)
    for v in plan.values:
        key = "smaller values" if v.nbytes < least else f"{v.value} {v.shape}"
        values.setdefault(key, []).append(v)
    return {
        "peak_bytes": int(plan.peak_bytes),
        "host_bytes": plan.host_bytes,
        "step_ms": float(f"{plan.step_ms:.{_DIGITS}g}"),
        "is_fastest": plan.is_fastest,
        "programs": plan.programs,
        "in_parts": [re.sub(r" parts:.*", " parts", text) for text in plan.in_parts],
        "values": {key: _describe(rows) for key, rows in values.items()},
    }


def _describe(rows: list[PlacedValue]) -> str:
    """The placements of the values of one name and shape: `save 4, 536870912 bytes; offload 4, ...`."""
    found: dict[str, tuple[int, int]] = {}
    for v in rows:
        count, nbytes = found.get(v.placement, (0, 0))
        found[v.placement] = count + v.count, nbytes + v.nbytes
    return "; ".join(f"{place} {count}, {nbytes} bytes" for place, (count, nbytes) in sorted(found.items()))


# A function that makes a program, and budgets: from the least to that of everything kept. Nothing fits the
# first budget of `mlp`.
_PROGRAMS: dict[str, tuple[Callable[[], Any], str]] = {
    "mlp-b4-l4": (lambda: _layers("mlp-b4-l4", listed=True), "3.8GB 3.95GB 4.9GB 5.8GB 6.7GB 7.6GB 9GB"),
    "dense-b4-l12": (lambda: _layers("dense-b4-l12"), "14.8GB 16GB 18GB 25GB 32GB 36GB"),
    "nano-b4-l4": (lambda: _layers("nano-b4-l4"), "47.7GB 48.3GB 49GB 50GB 51GB 52GB"),
    "mixtral-b4-l4": (lambda: _layers("mixtral-b4-l4"), "37.6GB 38.3GB 39GB 40GB 42GB 44GB"),
    "decoder-scan": (lambda: _whole_step("decoder-scan"), "37GB 56GB 80GB"),
    "decoder-python": (lambda: _whole_step("decoder-python"), "46GB 54GB 80GB"),
}
for _name, (_, _limits) in _PROGRAMS.items():
    PLANS[f"plans.{_name}"] = {
        f"{_name}/{_limit}": functools.partial(_make, _name, _limit) for _limit in _limits.split()
    }
