"""The profile of a device: measured rates of products, memory and link, and the calibration."""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
import numbers
import os
from pathlib import Path
from typing import Any

from jaxoff._device.calibration import H200_CALIBRATION, Calibration
from jaxoff._report.near_miss import near_miss

# Of a profile's file in `data/`.
_SUFFIX = ".json"


@dataclasses.dataclass(frozen=True)
class SharedLink:
    """The link of a GPU while several GPUs of its host copy at the same time.

    Attributes:
      gpus: the number of copying GPUs, this GPU included.
      d2h_gbps, h2d_gbps: bandwidth of each GPU in each direction, GB/s.
      both_gbps: the sum of the two directions, copying at the same time.
    """

    gpus: int
    d2h_gbps: float
    h2d_gbps: float
    both_gbps: float


@dataclasses.dataclass(frozen=True)
class Device:
    """Rates of an accelerator and of its link to the host.

    `Device.of("h200")` reads a known profile; `Device.measure()` measures a GPU.

    Attributes:
      flops: matrix operations a second of large 16-bit products in a step, beside other kernels.
      memory_gbps: reached bandwidth of device memory, GB/s.
      d2h_gbps, h2d_gbps: bandwidth of the link in each direction, GB/s, for copies of pinned memory.
      both_gbps: the sum of the two directions, copying at the same time; None without a measurement. State on
        the host is planned by it, copies of residuals in two directions as independent of each other.
      shared_links: the link while several GPUs of the host copy, an entry for each measured number.
      name: the kind of accelerator.
      source: the origin of the figures: "measured: ..." or "data sheet: ...".
      calibration: efficiencies of kernels in a training step, fitted to traces. The default is the H200's.

    Example:
      >>> import jaxoff
      >>> h200 = jaxoff.Device.of("h200")
      >>> h200.d2h_gbps, h200.sharing(4).d2h_gbps
      (50, 35.0)
    """

    flops: float
    memory_gbps: float
    d2h_gbps: float
    h2d_gbps: float
    both_gbps: float | None = None
    shared_links: tuple[SharedLink, ...] = ()
    name: str = "custom"
    source: str = ""
    calibration: Calibration = dataclasses.field(default_factory=lambda: H200_CALIBRATION, repr=False)

    def __post_init__(self):
        for field in ("flops", "memory_gbps", "d2h_gbps", "h2d_gbps"):
            if not getattr(self, field) > 0:
                raise ValueError(f"{field} of a Device is a rate above 0, got {getattr(self, field)!r}.")

    @classmethod
    def of(cls, name: str | os.PathLike[str]) -> Device:
        """Reads a profile, known to jaxoff or in a file.

        Args:
          name: "h100" or "h200", which were measured; "a100" (80 GB), "b200", "gh200" or "h100-pcie", by
            their data sheets, as `source` says; or the path of a file by `save`.

        Raises:
          ValueError: for an unknown name, and for a file without a profile.
          TypeError: for other types than text and paths.
          FileNotFoundError: for a path without a file.
        """
        folder = importlib.resources.files("jaxoff._device") / "data"
        known = sorted(f.name.removesuffix(_SUFFIX) for f in folder.iterdir() if f.name.endswith(_SUFFIX))
        if not isinstance(name, str | os.PathLike):
            raise TypeError(
                f"A device is one of {', '.join(known)}, or the path of a profile; got {name!r} of type "
                f"{type(name).__name__}."
            )
        if name in known:
            return cls.from_dict(json.loads((folder / f"{name}{_SUFFIX}").read_text()))
        path = Path(name)
        if isinstance(name, str) and not path.is_file() and path.name == name:
            raise ValueError(
                f"A device is one of {', '.join(known)}, or the path of a profile that Device.save wrote, "
                f"got {name!r}.{near_miss(name, known)}"
            )
        try:
            return cls.from_dict(json.loads(path.read_text()))
        except (json.JSONDecodeError, TypeError) as error:
            raise ValueError(
                f"A device's profile is JSON that Device.save wrote, got {os.fspath(name)!r}: {error}."
            ) from None

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Device:
        """The profile whose `to_dict` this is."""
        links = tuple(SharedLink(**link) for link in fields.get("shared_links", ()))
        own = fields.get("calibration")
        calibration = H200_CALIBRATION if own is None else Calibration.from_dict(own)
        rates: dict[str, Any] = {**fields, "shared_links": links, "calibration": calibration}
        return cls(**rates)

    def to_dict(self) -> dict[str, Any]:
        """The profile as JSON-ready values, with a calibration other than the default."""
        fields = dataclasses.asdict(self)
        fields["shared_links"] = [dataclasses.asdict(link) for link in self.shared_links]
        del fields["calibration"]
        if self.calibration != H200_CALIBRATION:
            fields["calibration"] = self.calibration.to_dict()
        return fields

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the profile to a JSON file, for `Device.of`."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n")

    @classmethod
    def measure(cls) -> Device:
        """Measures the first GPU of this process: products, memory, and the link, alone and shared.

        Takes some seconds and 4 GB of the GPU's memory. The link is shared with two, four, eight GPUs of this
        process, up to their number. The calibration is the H200's.

        Returns:
          A `Device` named as `jax.Device.device_kind` says.

        Raises:
          RuntimeError: where jax has no GPU.
        """
        from jaxoff._device.measure import measure_device

        return measure_device()

    def sharing(self, gpus: int) -> Device:
        """The device while several GPUs of its host copy at the same time.

        A number without a measurement takes the next larger measured number; beyond the largest, the GPUs
        divide its bandwidth further. Without shared links the device is returned as it is.

        Args:
          gpus: the number of copying GPUs, this GPU included.

        Raises:
          ValueError: for a number below 1.
          TypeError: for other types than a whole number, e.g. a rate.
        """
        if isinstance(gpus, bool) or not isinstance(gpus, numbers.Integral):
            raise TypeError(
                "How many GPUs copy at once is a whole number, and their rates are a jaxoff.SharedLink; "
                f"got {gpus!r}."
            )
        if gpus < 1:
            raise ValueError(f"gpus is how many GPUs copy at once, at least 1, got {gpus}.")
        if gpus == 1 or not self.shared_links:
            return self
        links = sorted(self.shared_links, key=lambda link: link.gpus)
        link = next((link for link in links if link.gpus >= gpus), links[-1])
        part = min(1.0, link.gpus / gpus)
        return dataclasses.replace(
            self,
            d2h_gbps=link.d2h_gbps * part,
            h2d_gbps=link.h2d_gbps * part,
            both_gbps=link.both_gbps * part,
            shared_links=(),
        )

    def pass_ms(self, nbytes: int) -> float:
        """The time of a kernel with `nbytes` read and `nbytes` written, in ms."""
        return 2 * nbytes / self.memory_gbps / 1e6

    def h2d_ms(self, nbytes: int) -> float:
        """The time of a copy from the host, in ms."""
        return nbytes / self.h2d_gbps / 1e6

    def d2h_ms(self, nbytes: int) -> float:
        """The time of a copy to the host, in ms."""
        return nbytes / self.d2h_gbps / 1e6

    def both_ms(self, nbytes: int) -> float:
        """The time of copies of `nbytes` to the host and as many from the host, at the same time, in ms."""
        both_gbps = self.both_gbps or self.d2h_gbps + self.h2d_gbps
        return 2 * nbytes / both_gbps / 1e6


# The default device of `explain`, `jit`, `scan` and `plan` without a GPU.
H200 = Device.of("h200")


def find_device(device: Any) -> Any:
    """The profile that a caller's device is or names; None for None.

    Raises:
      TypeError: for other types than `Device`, text and None.
      ValueError: for a name that is none of a profile, as `Device.of`.
    """
    if isinstance(device, str):
        return Device.of(device)
    if device is not None and not isinstance(device, Device):
        raise TypeError(
            "device is a jaxoff.Device, such as jaxoff.Device.measure(), or the name of one, such as 'h200'; "
            f"got {device!r}."
        )
    return device
