"""Operations of products, convolutions and attention, counted from their shapes."""

from __future__ import annotations

import itertools
import math

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import JaxprEqn
from jaxoff._jaxpr.inline import inlined


def product_flops(eqn: JaxprEqn) -> float:
    """Operations of a product, a convolution, attention, or of what looks like a product by its shapes.

    Those of a loop or a condition are what it runs, the largest branch; those of a Pallas kernel with a cost
    estimate are what that says.
    """
    if (flow := compat.control_flow(eqn)) is not None:
        return flow.total(lambda program: sum(map(product_flops, inlined(program.eqns, {}))))
    if (estimate := eqn.params.get("cost_estimate")) is not None:
        return float(estimate.flops)
    name, shapes = eqn.primitive.name, [compat.shape_of(v.aval) for v in eqn.invars if _has_shape(v.aval)]
    if not shapes:
        return 0.0
    out = max((compat.shape_of(v.aval) for v in eqn.outvars if _has_shape(v.aval)), key=math.prod, default=())
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        return _slowdown(eqn) * 2.0 * math.prod(out) * math.prod(shapes[0][i] for i in contracted)
    if name == "conv_general_dilated":
        kernel, features = shapes[1], eqn.params["dimension_numbers"].rhs_spec[0]
        # The zeros between the elements of a dilated operand, as in the gradient of a stride, cost nothing.
        met = math.prod(out) / math.prod(eqn.params["lhs_dilation"])
        return _slowdown(eqn) * 2.0 * met * math.prod(kernel) / kernel[features]
    if name.startswith("dot_product_attention"):  # query, key: (batch, length, heads, width); half is masked
        forward = 2.0 * math.prod(shapes[0]) * shapes[1][1]
        return forward * (2.5 if "bwd" in name else 1.0)
    matrices = [shape for shape in shapes if len(shape) > 1]
    return max((_pair_flops(pair, out) for pair in itertools.combinations(matrices, 2)), default=0.0)


def _slowdown(eqn: JaxprEqn) -> int:
    """How many times as long operations on wider numbers than 16 bits take."""
    return 1 if compat.struct_of(eqn.invars[0].aval).dtype.itemsize <= 2 else 2


def _pair_flops(pair: tuple[tuple[int, ...], tuple[int, ...]], out: tuple[int, ...]) -> float:
    """Operations of a kernel that multiplies two of its operands, if it does, by their shapes."""
    summed = set(pair[0]) & set(pair[1]) - set(out)
    if not summed:
        return 0.0
    # An expert's rows meet its own weights only: not every leading axis is a factor.
    return 2.0 * min(math.prod(out) * math.prod(summed), math.prod({*pair[0], *pair[1]}))


def _has_shape(aval) -> bool:
    return hasattr(aval, "shape")
