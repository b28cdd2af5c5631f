"""The profile of the card at hand, or the nearest that ships with jaxoff."""

from __future__ import annotations

import dataclasses
import functools

import jax

from jaxoff._device.profile import H200, Device
from jaxoff._report.finding import Finding, FindingCode

KINDS = {
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA A100 80GB PCIe": "a100",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA H200": "h200",
    "NVIDIA GH200 480GB": "gh200",
    "NVIDIA B200": "b200",
}
"""`jax.Device.device_kind` of a card -> the name of its profile."""

_NEAREST = (
    ("GH200", "gh200"),
    ("GB200", "b200"),
    ("GB300", "b200"),
    ("B200", "b200"),
    ("B300", "b200"),
    ("H200", "h200"),
    ("H100", "h100"),
    ("H800", "h100"),
    ("H20", "h200"),
    ("A100", "a100"),
    ("A800", "a100"),
)
"""Part of the kind of a card without a profile -> the name of the nearest profile; the first that matches."""

_BY_CAPABILITY = (("10", "b200"), ("9", "h100"), ("8", "a100"))
"""Major compute capability -> the name of the nearest profile, where the kind of a card says nothing."""


@dataclasses.dataclass(frozen=True)
class AtHand:
    """A profile for the card at hand.

    Attributes:
      device: the profile.
      findings: `device-not-known`, if the profile is of another card.
    """

    device: Device
    findings: tuple[Finding, ...] = ()


def profile_at_hand() -> AtHand:
    """Finds the profile of the GPU that a target describes, or this process's first; without, the H200's.

    Starts JAX's backend.
    """
    described = jax.sharding.get_abstract_mesh().abstract_device
    if described is not None and described.platform == "cuda":
        return find_profile(described.device_kind, "")
    if jax.default_backend() != "gpu":
        return AtHand(H200)
    card = jax.local_devices()[0]
    return find_profile(card.device_kind, str(getattr(card, "compute_capability", "")))


@functools.cache
def find_profile(kind: str, capability: str) -> AtHand:
    """Finds the profile of a card.

    Args:
      kind: its `jax.Device.device_kind`.
      capability: its compute capability, e.g. "9.0".
    """
    if kind in KINDS:
        return AtHand(Device.of(KINDS[kind]))
    major = capability.partition(".")[0]
    nearest = next((name for part, name in _NEAREST if part in kind), None)
    name = nearest or dict(_BY_CAPABILITY).get(major, "a100")
    device = Device.of(name)
    message = (
        f"No profile of the {kind} at hand ships with jaxoff: copies and times are planned by that of the "
        f"nearest, {device.name} ({device.source.partition(':')[0]}). jaxoff.Device.measure() profiles the "
        "card in seconds; save the profile, and pass device=jaxoff.Device.of(path)."
    )
    return AtHand(device, (Finding(FindingCode.DEVICE_NOT_KNOWN, message),))


def device_or_at_hand(device: Device | None) -> Device:
    """A caller's device, or the profile for the card at hand."""
    return profile_at_hand().device if device is None else device
