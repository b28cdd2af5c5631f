"""A plan: where every residual lives, and what a step is predicted to cost."""

from __future__ import annotations

import dataclasses
import glob
import json
from collections.abc import Mapping
from typing import Any, Literal

from jaxoff._device.profile import Device
from jaxoff._plan.layer import UNNAMED, UNNAMED_DOTS
from jaxoff._plan.layer_cost import Times
from jaxoff._plan.step_cost import Moment
from jaxoff._policy.combinators import FirstLayers
from jaxoff._policy.policy import PLAN_PRESET, Policy, Unmarked
from jaxoff._report.tables import format_nbytes, render_text

type Verb = Literal["save", "offload", "recompute"]
type Layers = Literal["all", "first", "others"]

# What a policy does with dots without a name.
_UNMARKED: dict[Verb, Unmarked] = {"save": "dots", "offload": "offload_dots", "recompute": "recompute"}


class BudgetError(ValueError):
    """No placement fits the budget.

    Attributes:
      smallest_bytes: the smallest budget of device memory for which there is a plan; None where the budget of
        host memory is what nothing fits.
    """

    def __init__(self, message: str, smallest_bytes: int | None):
        super().__init__(message)
        self.smallest_bytes = smallest_bytes


@dataclasses.dataclass(frozen=True)
class Planned:
    """Where the values of one name live, and what that costs.

    Attributes:
      name: as given to `jaxoff.name`; "(dots)" for outputs of dots and convolutions without a name,
        "(offload)" and "(not_offload)" for marked values without one.
      shape: of one instance.
      count: instances in a step.
      nbytes: of all of them.
      choice: "save", "offload" or "recompute".
      recomputed_ms: of a step, that saving it instead would spare.
      copied_ms: of the link, both ways.
      exposed_ms: of that, its share of what nothing hides.
      why: what the other choices would do, or which mark decided.
      layers: whether it is of "all" layers, of the "first" ones, or of the "others".
    """

    name: str
    shape: str
    count: int
    nbytes: int
    choice: Verb
    recomputed_ms: float
    copied_ms: float
    exposed_ms: float
    why: str
    layers: Layers = "all"


@dataclasses.dataclass(frozen=True)
class Plan:
    """A placement of every residual, and what it is predicted to cost. Prints as a table.

    Attributes:
      rows: the placements, in the order in which the values are made.
      peak: the moment of a step at which most device memory is in use.
      host_bytes: pinned host memory.
      times: of a step, split.
      device_bytes: the budget.
      device: what it was planned for.
      first_layers: how many layers of each loop are placed otherwise than the others; 0 if none.
      compiled_bytes: device memory that the compiled step takes, where `compile_step` was given; None else.
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

        A `jaxoff.FirstLayers` where first layers are placed otherwise. Their `keep_first="auto"` leaves it as
        it is.
        """
        if self.first_layers:
            return FirstLayers(self.first_layers, self._policy("first"), self._policy("others"))
        return self._policy("all")

    def _policy(self, layers: Layers) -> Policy:
        rows = [row for row in self.rows if row.layers == layers]

        def named(choice: Verb) -> tuple[str, ...]:
            return tuple(glob.escape(r.name) for r in rows if r.choice == choice and r.name not in UNNAMED)

        dots: list[Verb] = [row.choice for row in rows if row.name == UNNAMED_DOTS]
        return Policy(
            offload=named("offload"),
            save=named("save"),
            recompute=named("recompute"),
            unmarked=_UNMARKED[dots[0]] if dots else "recompute",
            preset=PLAN_PRESET,
        )

    @property
    def peak_bytes(self) -> int:
        """The most device memory in use at once, predicted."""
        return self.peak.nbytes

    @property
    def step_ms(self) -> float:
        """The time of a step, predicted: of the train step, or of the loss and its gradients."""
        return self.times.total

    def choice(self, name: str, *, others: bool = False) -> Verb:
        """Where the values of a name live: of the first layers, or of the others, if those differ.

        Raises:
          KeyError: for a name that is not planned.
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
        """The plan whose `to_dict` this is."""
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
        """The plan whose `to_json` this is.

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
        """The plan as text: name, bytes, choice, ms recomputed, copied and exposed, why; and the totals."""
        return render_text(self)

    def __str__(self) -> str:
        return self.table()

    def __rich_console__(self, console, options):
        from jaxoff._plan.table import render

        yield from render(self, console.is_terminal)


def split(peak: Moment) -> str:
    """What takes the device's memory at a moment."""
    parts = (
        ("arguments", peak.arguments),
        ("resident", peak.resident),
        ("gradients and others", peak.alive),
        ("residuals", peak.residuals),
        ("working set", peak.working),
    )
    return ", ".join(f"{name} {format_nbytes(nbytes)}" for name, nbytes in parts if nbytes)


def fullest(peak: Moment) -> str:
    """What takes the space of a step that does not fit, and what to do."""
    return (
        f"At its fullest, in the {peak.what}, the device then holds {split(peak)}. Take a smaller batch, or "
        "shorter or fewer layers."
    )
