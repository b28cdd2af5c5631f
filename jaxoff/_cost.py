"""How long equations and copies take, estimated: enough to say what can hide behind what."""

from __future__ import annotations

import dataclasses
import itertools
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

    def pass_ms(self, nbytes: int) -> float:
        """A kernel that makes so many bytes from as many, in milliseconds."""
        return 2 * nbytes / self.memory_gbps / 1e6

    def h2d_ms(self, nbytes: int) -> float:
        """A copy from the host, in milliseconds."""
        return nbytes / self.h2d_gbps / 1e6

    def d2h_ms(self, nbytes: int) -> float:
        """A copy to the host, in milliseconds."""
        return nbytes / self.d2h_gbps / 1e6


# Measured: products in steady state at the card's power limit, copies of 512 MB.
H200 = Device(flops=650e12, memory_gbps=4000, d2h_gbps=50, h2d_gbps=50)


def _product_flops(eqn: JaxprEqn) -> float:
    """Operations of a product, of attention, or of a kernel that looks like a product by its shapes."""
    name, shapes = eqn.primitive.name, [_compat.shape_of(v.aval) for v in eqn.invars if _has_shape(v.aval)]
    if not shapes:
        return 0.0
    out = max(
        (_compat.shape_of(v.aval) for v in eqn.outvars if _has_shape(v.aval)), key=math.prod, default=()
    )
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        slowdown = 1 if _compat.struct_of(eqn.invars[0].aval).dtype.itemsize <= 2 else 2
        return 2.0 * math.prod(out) * math.prod(shapes[0][i] for i in contracted) * slowdown
    if name.startswith("dot_product_attention"):  # query, key: (batch, length, heads, width); half is masked
        forward = 2.0 * math.prod(shapes[0]) * shapes[1][1]
        return forward * (2.5 if "bwd" in name else 1.0)
    matrices = [shape for shape in shapes if len(shape) > 1]
    return max((_pair_flops(pair, out) for pair in itertools.combinations(matrices, 2)), default=0.0)


def _pair_flops(pair: tuple[tuple[int, ...], tuple[int, ...]], out: tuple[int, ...]) -> float:
    """Operations of a kernel that multiplies two of its operands, if it does, by their shapes."""
    summed = set(pair[0]) & set(pair[1]) - set(out)
    if not summed:
        return 0.0
    # An expert's rows meet its own weights only: not every leading axis is a factor.
    return 2.0 * min(math.prod(out) * math.prod(summed), math.prod({*pair[0], *pair[1]}))


def _has_shape(aval) -> bool:
    return hasattr(aval, "shape")
