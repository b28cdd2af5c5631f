"""`frontier`: the curve of memory against time, a plan a point."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxoff._cost import Device, SharedLink
from jaxoff._plan import Planner, no_host_memory
from jaxoff._planned import Plan, Verb
from jaxoff._search import fastest, smallest
from jaxoff._table import printed


@dataclasses.dataclass(frozen=True)
class Frontier:
    """Plans that no other one beats in both memory and time, by the model. Prints as a table.

    Attributes:
      plans: by memory, the smallest first.
    """

    plans: tuple[Plan, ...]

    def to_dict(self) -> dict[str, Any]:
        """The plans as JSON-ready values."""
        return {"plans": [plan.to_dict() for plan in self.plans]}

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Draws time against peak memory into a picture; its format is that of the file's name.

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
        return printed(self)

    def __rich_console__(self, console, options):
        from rich import box
        from rich.table import Table

        from jaxoff._table import human

        table = Table(box=box.SIMPLE_HEAD if console.is_terminal else None, pad_edge=False)
        for heading in ("peak", "host", "step", "save", "offload"):
            table.add_column(heading, overflow="fold")
        for p in self.plans:
            names = {v: [r.name for r in p.rows if r.choice == v] for v in ("save", "offload")}
            cells = (", ".join(names["save"]), ", ".join(names["offload"]))
            table.add_row(human(p.peak_bytes), human(p.host_bytes), f"{p.step_ms:.1f} ms", *cells)
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
    fixed: Mapping[str, Verb] | None = None,
    first_layers: bool = False,
    argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
    **kwargs,
) -> Frontier:
    """Plans a function for budgets from the smallest that there is a plan for to where more does not help.

    Args:
      fun, *args, **kwargs, host_bytes, resident_bytes, link, device, fixed, first_layers, argnums, has_aux:
        as for `jaxoff.plan`.
      points: how many budgets, at even distances.

    Returns:
      A `Frontier`; equal plans are there once.

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
    planner = Planner.of(fun, args, kwargs, resident_bytes, link, device, argnums, has_aux)
    return frontier_of(dataclasses.replace(planner, in_two=first_layers), points, host_bytes, fixed or {})


def frontier_of(
    planner: Planner, points: int, host_bytes: float | None, fixed: Mapping[str, str]
) -> Frontier:
    """As `frontier`, of a traced program."""
    model, places = planner.model, planner.checked(fixed)
    host = planner.host_budget(host_bytes)
    least, most = smallest(model, host, places), fastest(model, 10**15, host, places)
    if least is None or most is None:
        raise no_host_memory(host)
    low, high = (model.cost(choice).peak.nbytes for choice in (least, most))
    budgets = [low + (high - low) * i // (points - 1) for i in range(points)]
    plans: list[Plan] = []
    for budget in (math.ceil(1.000001 * budget) for budget in budgets):
        plan = planner.plan(budget, host, fixed, 0.0)
        if not plans or plan.step_ms < plans[-1].step_ms - 1e-6:
            plans.append(plan)
    return Frontier(tuple(plans))
