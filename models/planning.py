"""What a run within a budget of device memory says of its plan."""

from __future__ import annotations

import jaxoff
from models.errors import InputError
from models.summary import Prediction


def profile_of(device: str) -> jaxoff.Device:
    """Reads the profile named by --device.

    Raises:
      InputError: the profile is unknown or unreadable.
    """
    try:
        return jaxoff.Device.of(device)
    except (ValueError, OSError) as error:
        raise InputError(f"--device: {error}") from None


def bytes_by_placement(plan: jaxoff.Plan | None, report: jaxoff.Report) -> dict[str, int]:
    """Bytes of the residuals: of a plan, or of a report without a plan."""
    if plan is None:
        return {name: getattr(report, name) for name in ("device_bytes", "host_bytes", "recompute_bytes")}
    names = {"save": "device_bytes", "offload": "host_bytes", "recompute": "recompute_bytes"}
    return {
        name: sum(v.nbytes for v in plan.values if v.placement == placement)
        for placement, name in names.items()
    }


def prediction_of(plan: jaxoff.Plan | None) -> Prediction | None:
    """The prediction of a plan; None without a plan."""
    if plan is None:
        return None
    sizes = int(plan.peak_bytes), plan.host_bytes, int(plan.device_bytes)
    return Prediction(plan.device, plan.step_ms, *sizes)
