"""Several devices as one, with the rates of all, for a program whose values the compiler divides."""

from __future__ import annotations

import dataclasses

from jaxoff._device.profile import Device

_RATES = ("flops", "memory_gbps", "d2h_gbps", "h2d_gbps")


@dataclasses.dataclass(frozen=True)
class JoinedDevice(Device):
    """A device with the rates of several.

    Attributes:
      devices: their number.
    """

    devices: int = 1


def join_devices(device: Device, devices: int) -> Device:
    """A single device with the rates of several."""
    if devices == 1:
        return device
    fields = {field.name: getattr(device, field.name) for field in dataclasses.fields(device)}
    return JoinedDevice(**fields | {name: devices * fields[name] for name in _RATES}, devices=devices)


def split_device(device: Device, shards: int) -> Device:
    """The device that runs a shard of a `jax.shard_map` with this many shards: of joined devices, a part."""
    if not isinstance(device, JoinedDevice) or shards == 1:
        return device
    rates = {name: getattr(device, name) / shards for name in _RATES}
    return dataclasses.replace(device, **rates, devices=max(1, device.devices // shards))
