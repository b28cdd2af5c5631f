"""How long equations and copies take, estimated: enough to say what can hide behind what."""

from __future__ import annotations

import dataclasses
import math

from jaxoff import _compat
from jaxoff._compat import JaxprEqn


@dataclasses.dataclass(frozen=True)
class Device:
    """Speeds of one accelerator and of its link to the host.

    Attributes:
      flops: matrix operations a second, 16-bit, as reached by large products.
      memory_gbps: device memory bandwidth, GB/s, as reached.
      d2h_gbps, h2d_gbps: the link each way, GB/s, for copies of pinned memory.
    """

    flops: float
    memory_gbps: float
    d2h_gbps: float
    h2d_gbps: float

    def compute_ms(self, eqn: JaxprEqn) -> float:
        """An estimate of an equation's time, in milliseconds: products by operations, the rest by bytes."""
        nbytes = sum(_compat.nbytes(v.aval) for v in (*eqn.invars, *eqn.outvars) if hasattr(v.aval, "shape"))
        return 1e3 * max(_product_flops(eqn) / self.flops, nbytes / (self.memory_gbps * 1e9))

    def h2d_ms(self, nbytes: int) -> float:
        """A copy from the host, in milliseconds."""
        return nbytes / self.h2d_gbps / 1e6

    def d2h_ms(self, nbytes: int) -> float:
        """A copy to the host, in milliseconds."""
        return nbytes / self.d2h_gbps / 1e6


# Measured: products in steady state at the card's power limit, copies of 512 MB.
H200 = Device(flops=650e12, memory_gbps=4000, d2h_gbps=50, h2d_gbps=50)


def _product_flops(eqn: JaxprEqn) -> float:
    if eqn.primitive.name != "dot_general":
        return 0.0
    (contracted, _), _ = eqn.params["dimension_numbers"]
    left, out = _compat.struct_of(eqn.invars[0].aval), _compat.struct_of(eqn.outvars[0].aval)
    slowdown = 1 if left.dtype.itemsize <= 2 else 2
    return 2.0 * math.prod(out.shape) * math.prod(left.shape[i] for i in contracted) * slowdown
