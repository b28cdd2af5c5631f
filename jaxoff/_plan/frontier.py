"""`frontier`: the curve of device memory against step time, with a plan for each point."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxoff._device.profile import Device, SharedLink
from jaxoff._plan.plan import Planner, host_budget_error
from jaxoff._plan.result import Plan
from jaxoff._plan.search import BUDGET_FACTOR, find_fastest, find_smallest
from jaxoff._policy.decision import Placement
from jaxoff._report.tables import render_text

# Bytes of a budget for every placement.
_UNLIMITED = 10**15
# Shortest time, in ms, by which a plan must be faster than the plan for the next smaller budget.
_FASTER_MS = 1e-6


@dataclasses.dataclass(frozen=True)
class Frontier:
    """Plans of which none is beaten by another in both memory and time, by the model. Prints as a table.

    Attributes:
      plans: the plans, by ascending memory.
    """

    plans: tuple[Plan, ...]

    def to_dict(self) -> dict[str, Any]:
        """The plans as JSON-ready values."""
        return {"plans": [plan.to_dict() for plan in self.plans]}

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Draws time against peak memory. The suffix of the path decides the format of the picture.

        Raises:
          ModuleNotFoundError: matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ModuleNotFoundError as error:
            if error.name != "matplotlib":
                raise
            message = (
                "Frontier.draw needs matplotlib, which is not installed. pip install 'jaxoff[plots]' adds it."
            )
            raise ModuleNotFoundError(message, name="matplotlib") from None

        figure = Figure(figsize=(7, 4.5), layout="constrained")
        axes = figure.subplots()
        axes.plot([p.peak_bytes / 1e9 for p in self.plans], [p.step_ms for p in self.plans], "o-")
        axes.set(xlabel="peak device memory, GB, predicted", ylabel="step, ms, predicted")
        axes.grid(alpha=0.3)
        figure.savefig(path)

    def __str__(self) -> str:
        return render_text(self)

    def __rich_console__(self, console, options):
        from rich import box
        from rich.table import Table

        from jaxoff._report.tables import format_nbytes

        table = Table(box=box.SIMPLE_HEAD if console.is_terminal else None, pad_edge=False)
        for heading in ("peak", "host", "step", "save", "offload"):
            table.add_column(heading, overflow="fold")
        for p in self.plans:
            names = {v: [r.name for r in p.rows if r.choice == v] for v in ("save", "offload")}
            cells = (", ".join(names["save"]), ", ".join(names["offload"]))
            table.add_row(
                format_nbytes(p.peak_bytes), format_nbytes(p.host_bytes), f"{p.step_ms:.1f} ms", *cells
            )
        yield table


def frontier(
    fun: Callable[..., Any],
    /,
    *args,
    points: int = 16,
    host_bytes: float | None = None,
    resident_bytes: float = 0,
    link: int | SharedLink | None = None,
    device: Device | None = None,
    fixed: Mapping[str, Placement] | None = None,
    first_layers: bool = False,
    argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
    **kwargs,
) -> Frontier:
    """Plans a function for budgets from the smallest possible to the smallest of the fastest plan.

    Args:
      fun, *args, **kwargs, host_bytes, resident_bytes, link, device, fixed, first_layers, argnums, has_aux:
        as for `jaxoff.plan`.
      points: number of budgets, at even distances.

    Returns:
      A `Frontier`, in which equal plans appear once.

    Raises:
      ValueError: as `jaxoff.plan`, and for less than two points.

    Example:
      >>> import jax, jax.numpy as jnp, jaxoff
      >>> def layer(x, w):
      ...     return x + jaxoff.name(jnp.tanh(x @ w), "act") @ w.T, None
      >>> def loss(w, x):
      ...     return jaxoff.scan(layer, x, w, policy=jaxoff.policy())[0].sum()
      >>> w = jax.ShapeDtypeStruct((8, 512, 512), "bfloat16")
      >>> x = jax.ShapeDtypeStruct((4096, 512), "bfloat16")
      >>> plans = jaxoff.frontier(loss, w, x).plans
      >>> plans[0].peak_bytes < plans[-1].peak_bytes, plans[0].step_ms > plans[-1].step_ms
      (True, True)
    """
    if points < 2:
        raise ValueError(f"points is how many budgets to plan for, at least 2, got {points}.")
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
    return plan_frontier(planner, points, host_bytes, fixed or {})


def plan_frontier(
    planner: Planner, points: int, host_bytes: float | None, fixed: Mapping[str, str]
) -> Frontier:
    """Plans a traced program for several budgets; see `frontier`."""
    model, placements = planner.model, planner.resolve_fixed(fixed)
    host = planner.find_host_budget(host_bytes)
    least = find_smallest(model, host, placements)
    most = find_fastest(model, _UNLIMITED, host, placements)
    if least is None or most is None:
        raise host_budget_error(host)
    low, high = (model.cost(found).peak.nbytes for found in (least, most))
    budgets = [low + (high - low) * i // (points - 1) for i in range(points)]
    plans: list[Plan] = []
    for budget in (math.ceil(BUDGET_FACTOR * budget) for budget in budgets):
        plan = planner.plan(budget, host, fixed, 0.0)
        if not plans or plan.step_ms < plans[-1].step_ms - _FASTER_MS:
            plans.append(plan)
    return Frontier(tuple(plans))
