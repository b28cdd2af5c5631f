"""A plan: the placement of each residual, and the predicted cost of a step."""

from __future__ import annotations

import dataclasses
import glob
import json
from collections.abc import Mapping
from typing import Any, Literal

from jaxoff._budget.fit import BudgetError as BudgetError
from jaxoff._device.profile import Device
from jaxoff._plan.layer import UNNAMED, UNNAMED_DOTS
from jaxoff._plan.layer_states import Times
from jaxoff._plan.step_cost import Moment
from jaxoff._policy.combinators import FirstLayers
from jaxoff._policy.decision import Placement
from jaxoff._policy.policy import PLAN_PRESET, Policy, Unmarked
from jaxoff._report.tables import format_nbytes, render_text

# The layers to which a row of a plan applies.
type Layers = Literal["all", "first", "others"]

# Placement of unnamed dots -> the field `unmarked` of a policy with this placement.
_UNMARKED: dict[Placement, Unmarked] = {"save": "dots", "offload": "offload_dots", "recompute": "recompute"}


@dataclasses.dataclass(frozen=True)
class Planned:
    """The placement of the values of a name, and its predicted cost.

    Attributes:
      name: as given to `jaxoff.name`; "(dots)" for outputs of dots and convolutions without a name,
        "(offload)" and "(not_offload)" for marked values without a name.
      shape: dtype and shape of an instance.
      count: number of instances in a step.
      nbytes: bytes of all instances.
      choice: "save", "offload" or "recompute".
      recomputed_ms: time spared by a step with the values saved instead.
      copied_ms: time on the link, in both directions.
      exposed_ms: share of the time of copies not hidden by kernels.
      why: the effect of each other choice, or the reason why there is no choice.
      layers: the layers of the row: "all", the "first" or the "others".
    """

    name: str
    shape: str
    count: int
    nbytes: int
    choice: Placement
    recomputed_ms: float
    copied_ms: float
    exposed_ms: float
    why: str
    layers: Layers = "all"


@dataclasses.dataclass(frozen=True)
class Plan:
    """A placement of each residual, and its predicted cost. Prints as a table.

    Attributes:
      rows: the placements, in the order in which the forward pass computes the values.
      peak: the moment of a step with most device memory in use.
      host_bytes: bytes of pinned host memory.
      times: duration of a step, by cause.
      device_bytes: the budget of device memory.
      device: the profile of the device.
      first_layers: number of layers of each loop with a placement of their own; 0 if all layers share a
        placement.
      compiled_bytes: device memory of the compiled step, where `compile_step` was given; None otherwise.
    """

    rows: tuple[Planned, ...]
    peak: Moment
    host_bytes: int
    times: Times
    device_bytes: int
    device: Device
    first_layers: int = 0
    compiled_bytes: int | None = None

    @property
    def policy(self) -> Any:
        """The placement as a policy, for `jax.checkpoint`, `jaxoff.scan` or `jaxoff.layers`.

        A `jaxoff.FirstLayers` where first layers have a placement of their own. `keep_first="auto"` does not
        change the policy of a plan.
        """
        if self.first_layers:
            return FirstLayers(self.first_layers, self._policy("first"), self._policy("others"))
        return self._policy("all")

    def _policy(self, layers: Layers) -> Policy:
        rows = [row for row in self.rows if row.layers == layers]

        def find_names(choice: Placement) -> tuple[str, ...]:
            return tuple(glob.escape(r.name) for r in rows if r.choice == choice and r.name not in UNNAMED)

        dots: list[Placement] = [row.choice for row in rows if row.name == UNNAMED_DOTS]
        return Policy(
            offload=find_names("offload"),
            save=find_names("save"),
            recompute=find_names("recompute"),
            unmarked=_UNMARKED[dots[0]] if dots else "recompute",
            preset=PLAN_PRESET,
        )

    @property
    def peak_bytes(self) -> int:
        """The predicted peak of device memory, in bytes."""
        return self.peak.nbytes

    @property
    def step_ms(self) -> float:
        """The predicted duration of a train step, or of a loss and its gradients, in ms."""
        return self.times.total

    def choice(self, name: str, *, others: bool = False) -> Placement:
        """The placement of the values of a name.

        Args:
          name: the name.
          others: whether to return the placement in the layers after the first ones, where it differs.

        Raises:
          KeyError: for a name without a row.
        """
        for row in self.rows:
            if row.name == name and row.layers in ("all", "others" if others else "first"):
                return row.choice
        raise KeyError(f"A plan has {', '.join(row.name for row in self.rows)}, got {name!r}.")

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON-ready values."""
        return {
            "rows": [dataclasses.asdict(row) for row in self.rows],
            "peak": dataclasses.asdict(self.peak),
            "host_bytes": self.host_bytes,
            "times": dataclasses.asdict(self.times),
            "device_bytes": self.device_bytes,
            "device": self.device.to_dict(),
            "first_layers": self.first_layers,
            "compiled_bytes": self.compiled_bytes,
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Plan:
        """Builds a plan from the result of `to_dict`."""
        return cls(
            rows=tuple(Planned(**row) for row in fields["rows"]),
            peak=Moment(**fields["peak"]),
            host_bytes=fields["host_bytes"],
            times=Times(**fields["times"]),
            device_bytes=fields["device_bytes"],
            device=Device.from_dict(fields["device"]),
            first_layers=fields.get("first_layers", 0),
            compiled_bytes=fields.get("compiled_bytes"),
        )

    def to_json(self) -> str:
        """The plan as text, for `from_json`."""
        return json.dumps(self.to_dict(), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Builds a plan from the result of `to_json`.

        Raises:
          ValueError: for other text.
        """
        try:
            return cls.from_dict(json.loads(text))
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(
                f"A plan is read from the JSON of Plan.to_json, got other text: {error!r}."
            ) from None

    def table(self) -> str:
        """The plan as text: for each name bytes, choice, times and the reason; then the totals."""
        return render_text(self)

    def __str__(self) -> str:
        return self.table()

    def __rich_console__(self, console, options):
        from jaxoff._plan.table import render

        yield from render(self, console.is_terminal)


def describe_parts(peak: Moment) -> str:
    """Lists the bytes of device memory at a moment, by use."""
    parts = (
        ("arguments", peak.arguments),
        ("resident", peak.resident),
        ("gradients and others", peak.alive),
        ("residuals", peak.residuals),
        ("working set", peak.working),
    )
    return ", ".join(f"{name} {format_nbytes(nbytes)}" for name, nbytes in parts if nbytes)


def describe_peak(peak: Moment) -> str:
    """Says which use of memory makes a step too large, and which changes make it smaller."""
    return (
        f"At its fullest, in the {peak.what}, the device then holds {describe_parts(peak)}. Take a smaller "
        "batch, or shorter or fewer layers."
    )
