"""Operations of products, convolutions and attention, counted from their shapes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from jaxoff._device.calibration import H200_CALIBRATION, Calibration
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import JaxprEqn
from jaxoff._jaxpr.inline import inline_calls
from jaxoff._jaxpr.primitives import is_compute

# Products in a pass of attention. Forward: query by key, weights by value. Backward: two gradients of each of
# these, and query by key again, since the weights are not stored.
_ATTENTION_PRODUCTS, _ATTENTION_BACKWARD_PRODUCTS = 2, 5
# Axes of the operands of a convolution in one dimension: batch, channels, and the dimension.
_LINE_AXES = 3


def product_flops(eqn: JaxprEqn, fitted: Calibration = H200_CALIBRATION) -> float:
    """Operations of an equation on matrix units, in operations on 16-bit numbers.

    Counts products, convolutions, attention, and kernels whose shapes look like a product. An elementwise
    equation has none. A loop has the operations of all its iterations, a condition the mean of
    its branches, a Pallas kernel the operations of its cost estimate.

    Args:
      eqn: an equation.
      fitted: holds the time of an operation on a wider type, in 16-bit operations.
    """
    if (flow := compat.control_flow(eqn)) is not None:
        return flow.sum_over_runs(
            lambda jaxpr: sum(product_flops(e, fitted) for e in inline_calls(jaxpr.eqns, {}))
        )
    if (estimate := eqn.params.get("cost_estimate")) is not None:
        return float(estimate.flops)
    name, shapes = eqn.primitive.name, [compat.shape_of(v.aval) for v in eqn.invars if _has_shape(v.aval)]
    if not shapes:
        return 0.0
    out = max((compat.shape_of(v.aval) for v in eqn.outvars if _has_shape(v.aval)), key=math.prod, default=())
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        return _slowdown(eqn, fitted) * 2.0 * math.prod(out) * math.prod(shapes[0][i] for i in contracted)
    if name == "conv_general_dilated":
        if (own := _depthwise_flops(eqn, shapes, out, fitted)) is not None:
            return own
        kernel, features = shapes[1], eqn.params["dimension_numbers"].rhs_spec[0]
        # The zeros between the elements of a dilated operand, as in the gradient of a stride, cost nothing.
        positions = math.prod(out) / math.prod(eqn.params["lhs_dilation"])
        return _slowdown(eqn, fitted) * 2.0 * positions * math.prod(kernel) / kernel[features]
    if name.startswith("dot_product_attention"):
        return _attention_flops(eqn, shapes[0], shapes[1])
    if not is_compute(eqn):
        return 0.0
    matrices = [shape for shape in shapes if len(shape) > 1]
    return max((_pair_flops(pair, out) for pair in itertools.combinations(matrices, 2)), default=0.0)


def _depthwise_flops(
    eqn: JaxprEqn, shapes: Sequence[tuple[int, ...]], out: tuple[int, ...], fitted: Calibration
) -> float | None:
    """Operations in the time of a convolution with a kernel for each channel; None for other convolutions.

    cuDNN computes such a convolution and its gradients off the matrix units, in a time by their elements.
    """
    numbers, groups = eqn.params["dimension_numbers"], eqn.params["feature_group_count"]
    batch_groups = eqn.params["batch_group_count"]  # of the gradient of a kernel
    channels = shapes[0][numbers.lhs_spec[0 if batch_groups > 1 else 1]]
    if channels == 1 or channels not in (groups, batch_groups):
        return None
    each = fitted.depthwise_line_operations if len(out) <= _LINE_AXES else fitted.depthwise_plane_operations
    elements = math.prod(shapes[0]) if batch_groups > 1 else math.prod(out)
    return elements * each.value


def _attention_flops(eqn: JaxprEqn, query: tuple[int, ...], key: tuple[int, ...]) -> float:
    """Operations of cuDNN attention over a query and a key of shape (batch, length, heads, width).

    A kernel under a causal mask skips the masked half.
    """
    products = _ATTENTION_BACKWARD_PRODUCTS if "bwd" in eqn.primitive.name else _ATTENTION_PRODUCTS
    product = 2.0 * math.prod(query) * key[1]
    return products * product * (0.5 if _is_causal(eqn) else 1.0)


def _is_causal(eqn: JaxprEqn) -> bool:
    """Whether cuDNN attention has a causal mask: 16-bit and 8-bit kernels have a parameter each."""
    mask = getattr(eqn.params.get("mask_type"), "name", "")
    return "CAUSAL" in mask or bool(eqn.params.get("use_causal_mask"))


def _slowdown(eqn: JaxprEqn, fitted: Calibration) -> float:
    """Time of a product over the time of the same product of 16-bit operands."""
    is_wide = compat.struct_of(eqn.invars[0].aval).dtype.itemsize > 2
    return fitted.wide_type_slowdown.value if is_wide else 1


def _pair_flops(pair: tuple[tuple[int, ...], tuple[int, ...]], out: tuple[int, ...]) -> float:
    """Operations of a product of two operands of these shapes; 0 where no axis is contracted."""
    summed = set(pair[0]) & set(pair[1]) - set(out)
    if not summed:
        return 0.0
    # The rows of an expert meet the weights of the same expert only: not every leading axis is a factor.
    return 2.0 * min(math.prod(out) * math.prod(summed), math.prod({*pair[0], *pair[1]}))


def _has_shape(aval) -> bool:
    return hasattr(aval, "shape")
