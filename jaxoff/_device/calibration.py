"""Efficiencies of a device's kernels, fitted to traced training steps: data of its profile.

`Device.measure` measures a profile's rates. A kernel of a training step reaches a share of these rates, by
its class and by the card's clock. `Calibration` holds the shares.
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
from typing import Any


@dataclasses.dataclass(frozen=True)
class Constant:
    """A fitted number.

    Attributes:
      value: the number in use.
      unit: its unit.
      range: the lowest and the highest value supported by measurements; None for a single fit.
      origin: the measurements, with their hardware and date.
    """

    value: float
    unit: str = ""
    range: tuple[float, float] | None = None
    origin: str = ""

    def __repr__(self) -> str:
        return f"Constant({self.value!r})"


@dataclasses.dataclass(frozen=True)
class Calibration:
    """How kernels of a training step perform against the rates of a `Device`.

    A "share of flops" is a share of `Device.flops`, the rate of 16-bit products in a row at the power limit.

    Attributes:
      product_share: 16-bit products, share of flops.
      pallas_share: Pallas kernels with a cost estimate, share of flops.
      attention_share: cuDNN attention, forward, share of flops.
      attention_backward_share: cuDNN attention, backward, share of flops.
      narrow_attention_share, narrow_attention_backward_share: the same of heads narrower than 128.
      float32_share: products in float32 throughout, off the matrix units, share of flops after
        `wide_type_slowdown`.
      traffic_share: the part of a product's memory traffic beside its operations, which adds to its time.
      idle_clock: the rate of products in a layer without products, share of flops.
      load_slope: the decrease of `idle_clock` in a layer of products alone; linear in between.
      collective_link_share: the bandwidth between GPUs, share of `Device.memory_gbps`.
      collective_exposed_share: the part of a collective's time without a product beside.
      wide_type_slowdown: time of a product of wider operands, over the time with 16-bit operands.
      threefry_operations: 16-bit operations in the time of a random number by Threefry, of 32 bits.
      depthwise_line_operations, depthwise_plane_operations: 16-bit operations in the time of a number of a
        convolution in one or two dimensions with a kernel for each channel.
      iteration_us: the time of an iteration of a loop without its kernels, in us.
      least_kernel_us: the least time of a kernel in a loop, in us.
      measured_flops_share: `Device.flops` of a profile, over the rate timed by `Device.measure`.
    """

    product_share: Constant
    pallas_share: Constant
    attention_share: Constant
    attention_backward_share: Constant
    narrow_attention_share: Constant
    narrow_attention_backward_share: Constant
    float32_share: Constant
    traffic_share: Constant
    idle_clock: Constant
    load_slope: Constant
    collective_link_share: Constant
    collective_exposed_share: Constant
    wide_type_slowdown: Constant
    threefry_operations: Constant
    depthwise_line_operations: Constant
    depthwise_plane_operations: Constant
    iteration_us: Constant
    least_kernel_us: Constant
    measured_flops_share: Constant

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Calibration:
        """The calibration whose `to_dict` this is.

        Raises:
          TypeError: for a missing or an unknown constant, or an unknown field of a constant.
        """
        return cls(**{name: _constant_of(entry) for name, entry in fields.items()})

    def to_dict(self) -> dict[str, Any]:
        """The calibration as JSON-ready values."""
        return json.loads(json.dumps(dataclasses.asdict(self)))


def _constant_of(entry: dict[str, Any]) -> Constant:
    bounds = entry.get("range")
    fields: dict[str, Any] = {**entry, "range": None if bounds is None else tuple(bounds)}
    return Constant(**fields)


def read_calibration(profile: str) -> Calibration:
    """Reads the calibration in a profile shipped with jaxoff, e.g. "h200"."""
    text = (importlib.resources.files("jaxoff._device") / "data" / f"{profile}.json").read_text()
    return Calibration.from_dict(json.loads(text)["calibration"])


# The calibration of a profile without its own: only H200s have been traced.
H200_CALIBRATION = read_calibration("h200")
