"""`frontier`: the time of a step against its device memory, with a plan for each budget."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

from jaxoff._budget.budget_error import BudgetError
from jaxoff._budget.limits import Budget
from jaxoff._budget.memory import ESTIMATE_MARGIN
from jaxoff._budget.report import Plan
from jaxoff._device.profile import Device
from jaxoff._jaxpr.statics import list_statics
from jaxoff._plan.plan import make_planner
from jaxoff._report.tables import format_ms, format_nbytes, render_text

# A budget for every placement, and one for none.
_MOST_NBYTES, _LEAST_NBYTES = 1e15, 1.0


@dataclasses.dataclass(frozen=True)
class Frontier:
    """Plans by ascending memory, each faster than those before, by the model. Prints as a table.

    Attributes:
      plans: the plans.
    """

    plans: tuple[Plan, ...]

    def to_dict(self) -> dict[str, Any]:
        """The plans as JSON-ready values."""
        return {"plans": [plan.to_dict() for plan in self.plans]}

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Draws the time of a step against its peak. The suffix of the path decides the picture's format.

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
        axes.step(
            [p.peak_bytes / 1e9 for p in self.plans], [p.step_ms for p in self.plans], "o-", where="post"
        )
        judged = "compiled" if all(p.is_compiled for p in self.plans) else "estimated"
        axes.set(xlabel=f"peak device memory, GB, {judged}", ylabel="step, ms, by the model")
        axes.grid(alpha=0.3)
        figure.savefig(path)

    def __str__(self) -> str:
        from rich.table import Table

        table = Table(box=None, pad_edge=False)
        for heading in ("budget", "peak", "host", "step", "saved", "offloaded", "in parts"):
            table.add_column(heading, justify="right")
        for p in self.plans:
            nbytes = [sum(v.nbytes for v in p.values if v.placement == verb) for verb in ("save", "offload")]
            memory = map(format_nbytes, (int(p.device_bytes), int(p.peak_bytes), p.host_bytes))
            cells = (*memory, format_ms(p.step_ms), *map(format_nbytes, nbytes))
            table.add_row(*cells, "yes" if p.in_parts else "no")
        return render_text(table)


def frontier(
    fun: Callable[..., Any],
    /,
    *args,
    points: int = 8,
    host_bytes: float | str | None = None,
    compress: Sequence[str] | None = None,
    device: Device | str | None = None,
    compiled: bool | None = False,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    **kwargs,
) -> Frontier:
    """Plans a train step for budgets between the least possible and that of no recomputation.

    Args:
      fun, *args, **kwargs, host_bytes, compress, device, compiled, static_argnums, static_argnames: as for
        `jaxoff.plan`, but for the default: memory is estimated, since each budget takes compilations.
      points: number of budgets, at even distances.

    Returns:
      A `Frontier`, in which equal plans appear once.

    Raises:
      BudgetError: if `host_bytes` is less than every placement needs.
      ValueError: as `jaxoff.plan`, and for less than two points.

    Example:
      >>> import jax, jax.numpy as jnp, jaxoff
      >>> def layer(x, w):
      ...     return x + jnp.tanh(x @ w) @ w.T, None
      >>> def step(w, x):
      ...     loss = lambda w: jax.lax.scan(layer, x, w)[0].astype(jnp.float32).var()
      ...     return w - jax.grad(loss)(w)
      >>> w = jax.ShapeDtypeStruct((8, 512, 512), "bfloat16")
      >>> x = jax.ShapeDtypeStruct((65536, 512), "bfloat16")
      >>> plans = jaxoff.frontier(step, w, x, points=4).plans
      >>> plans[0].peak_bytes < plans[-1].peak_bytes, plans[0].step_ms > plans[-1].step_ms
      (True, True)
    """
    if isinstance(points, bool) or not isinstance(points, int):
        raise TypeError(f"points is how many budgets to plan for, a whole number; got {points!r}.")
    if points < 2:
        raise ValueError(f"points is how many budgets to plan for, at least 2; got {points}.")

    statics = list_statics(static_argnums, static_argnames)
    planner = make_planner(fun, args, kwargs, device, compiled, statics)

    def plan_within(nbytes: float) -> Plan:
        budget = Budget.of(nbytes, host_bytes, compress)
        assert budget is not None
        return planner(budget)

    fastest = plan_within(_MOST_NBYTES)
    part = 1.0 if fastest.is_compiled else 1 - ESTIMATE_MARGIN  # of a budget that may be used
    try:
        least = plan_within(_LEAST_NBYTES).peak_bytes
    except BudgetError as error:
        if error.smallest_bytes is None:
            raise
        least = part * error.smallest_bytes
    found: list[Plan] = []
    for i in range(points):
        nbytes = least + (fastest.peak_bytes - least) * i / (points - 1)
        found.append(plan_within(1.001 * nbytes / part))
    found.sort(key=lambda p: p.peak_bytes)
    front: list[Plan] = []
    for p in found:
        if not front or p.step_ms < front[-1].step_ms:
            front.append(p)
    return Frontier(tuple(front))
