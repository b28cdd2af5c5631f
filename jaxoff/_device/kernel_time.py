"""The time of a kernel, by its operations or by its bytes, at a device's rates.

Two models. `kernel_ms` serves the scheduler and `explain`: a kernel alone at the rates of `Device`.
`step_kernel_ms` serves plans: a kernel inside of a training step, by `Device.calibration`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container, Sequence

from jax import lax

from jaxoff._device.calibration import Calibration, Constant
from jaxoff._device.flops import product_flops
from jaxoff._device.joined import split_device
from jaxoff._device.profile import Device
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import Jaxpr, JaxprEqn, Var
from jaxoff._jaxpr.dataflow import map_makers, variables
from jaxoff._jaxpr.inline import inline_program
from jaxoff._jaxpr.kernels import KernelGraph
from jaxoff._jaxpr.primitives import (
    CONSTRAINTS,
    is_attention,
    is_collective,
    is_compute,
    is_pallas,
    is_shard_map,
    is_threefry,
    num_shards,
)

# Equations that store what was not stored, and move nothing.
_STORES = CONSTRAINTS | {"optimization_barrier"}
# Primitives that read a part of an operand.
_SLICES = frozenset({"dynamic_slice", "gather", "slice", "split"})

# Elements of a head from which cuDNN's attention has its full rate.
_WIDE_HEAD = 128
# Elements of a side of a block of cuBLAS, of 16-bit numbers.
_BLOCK = 8


def kernel_ms(graph: KernelGraph, i: int, device: Device) -> float:
    """The time of a kernel alone, in ms: its operations or its bytes at the device's rates.

    A conversion of an operand counts as a copy before the kernel.
    """
    eqn, between = graph.eqns[i], [graph.eqns[j] for j in graph.fused[i]]
    if not is_compute(eqn):
        updates = eqn.primitive.name == "dynamic_update_slice"
        made = eqn.invars[1:2] if updates else eqn.outvars
        return device.pass_ms(compat.nbytes_of(made))
    converted = (e.outvars[0].aval for e in between if e.primitive.name == "convert_element_type")
    return equation_ms(eqn, device) + sum(device.pass_ms(compat.nbytes(aval)) for aval in converted)


def equation_ms(eqn: JaxprEqn, device: Device) -> float:
    """The time of an equation, in ms: products by operations, other equations by bytes read and written."""
    nbytes = sum(compat.nbytes(v.aval) for v in (*eqn.invars, *eqn.outvars) if hasattr(v.aval, "shape"))
    return 1e3 * max(
        product_flops(eqn, device.calibration) / device.flops, nbytes / (device.memory_gbps * 1e9)
    )


def collective_ms(nbytes: int, device: Device) -> float:
    """The time of a collective with a result of `nbytes`, in ms."""
    return nbytes / (device.calibration.collective_link_share.value * device.memory_gbps) / 1e6


def step_kernel_ms(graph: KernelGraph, i: int, device: Device, rows: Container[Var] = frozenset()) -> float:
    """The time of a kernel in a training step, in ms, with the copies of its operands made for it.

    Args:
      graph: the kernels of a program.
      i: the kernel.
      device: rates and calibration.
      rows: values that a loop slices out of stacks: an opaque kernel reads a copy of such a row.
    """
    eqn = graph.eqns[i]
    made = compat.nbytes_of(eqn.outvars)
    if not is_compute(eqn):
        if eqn.primitive.name == "dynamic_update_slice":
            return device.pass_ms(compat.nbytes(eqn.invars[1].aval))
        reads, between = graph.find_loads(i)
        if eqn.primitive.name in _STORES:
            given = set(variables(eqn))
            made, reads = compat.nbytes_of(given.difference(reads)), [v for v in reads if v not in given]
        sliced = not _SLICES.isdisjoint(e.primitive.name for e in (eqn, *between))
        sizes = (compat.nbytes(v.aval) for v in reads)
        nbytes = made + sum(min(n, made) if sliced else n for n in sizes)
        return max(_traffic_ms(nbytes, device), _drawing_ms(eqn, device))
    copies = _copies_ms(eqn, [graph.eqns[j] for j in graph.fused[i]], rows, device)
    if compat.control_flow(eqn) is not None or is_shard_map(eqn):
        return copies + programs_ms(eqn, device)
    if is_collective(eqn):
        return copies + device.calibration.collective_exposed_share.value * collective_ms(made, device)
    traffic = _traffic_ms(made + compat.nbytes_of(variables(eqn)), device)
    if matrix_ms := _matrix_ms(eqn, device):
        busy_ms = max(matrix_ms + device.calibration.traffic_share.value * traffic, traffic)
        return copies + _paddings_ms(eqn, device) + busy_ms
    return copies + traffic


def programs_ms(eqn: JaxprEqn, device: Device) -> float:
    """The time of a loop's iterations, a condition's mean branch, or a device's part of a `jax.shard_map`.

    In ms; 0 for other equations.
    """
    if is_shard_map(eqn):
        return program_ms(eqn.params["jaxpr"], split_device(device, num_shards(eqn)))
    if (flow := compat.control_flow(eqn)) is None:
        return 0.0
    least_ms = iteration_ms = 0.0
    if compat.is_loop(eqn):
        least_ms = device.calibration.least_kernel_us.value / 1e3
        iteration_ms = device.calibration.iteration_us.value / 1e3
    return flow.sum_over_runs(lambda program: iteration_ms + program_ms(program, device, least_ms))


def program_ms(program: Jaxpr, device: Device, least_ms: float = 0.0) -> float:
    """The time of all kernels of a program in a row, in ms; a kernel takes at least `least_ms`."""
    program = inline_program(program)
    graph = KernelGraph(program.eqns, frozenset(v for v in program.outvars if isinstance(v, Var)))
    return sum(max(least_ms, step_kernel_ms(graph, i, device)) for i in graph.kernels)


def lower_clock(
    graph: KernelGraph, pass_: Sequence[int], device: Device, rows: Container[Var] = frozenset()
) -> Device:
    """Lowers a device's rate of products to the clock in a layer: the larger their share, the lower.

    Products draw the most power. Attention draws less: its products share the time with other work
    (bench/LOG.md, "Products and the power limit").

    Args:
      graph: the kernels of a program.
      pass_: the kernels of the layer's backward pass; the forward pass has about the same share.
      device: rates and calibration.
      rows: as for `step_kernel_ms`.

    Returns:
      The device with the lower `flops`.
    """
    kernels = sum(step_kernel_ms(graph, i, device, rows) for i in pass_)
    eqns = (graph.eqns[i] for i in pass_)
    products = sum(_matrix_ms(eqn, device) for eqn in eqns if _is_product(eqn))
    share, fitted = products / kernels if kernels else 0.0, device.calibration
    return dataclasses.replace(
        device, flops=(fitted.idle_clock.value - fitted.load_slope.value * share) * device.flops
    )


def _is_product(eqn: JaxprEqn) -> bool:
    """Whether a kernel may be a product, by XLA or by Pallas; `product_flops` is 0 for other kernels."""
    return is_compute(eqn) and not (is_collective(eqn) or is_attention(eqn))


def _matrix_ms(eqn: JaxprEqn, device: Device) -> float:
    fitted = device.calibration
    return 1e3 * product_flops(eqn, fitted) / (_share_of(eqn, fitted).value * device.flops)


def _share_of(eqn: JaxprEqn, fitted: Calibration) -> Constant:
    """The share of a device's rate of 16-bit products reached by a kernel."""
    name = eqn.primitive.name
    if is_attention(eqn):
        is_narrow = compat.shape_of(eqn.invars[0].aval)[-1] < _WIDE_HEAD
        if "bwd" in name:
            return fitted.narrow_attention_backward_share if is_narrow else fitted.attention_backward_share
        return fitted.narrow_attention_share if is_narrow else fitted.attention_share
    if name in ("dot_general", "conv_general_dilated") and _is_whole_float32(eqn):
        return fitted.float32_share
    return fitted.pallas_share if is_pallas(eqn) else fitted.product_share


def _is_whole_float32(eqn: JaxprEqn) -> bool:
    """Whether a product is computed in float32 throughout, off the matrix kernels."""
    precision = eqn.params["precision"]
    each = precision if isinstance(precision, tuple) else (precision,)
    wide = compat.struct_of(eqn.invars[0].aval).dtype.itemsize > 2
    return wide and any(p in (lax.Precision.HIGHEST, lax.DotAlgorithmPreset.F32_F32_F32) for p in each)


def _copies_ms(eqn: JaxprEqn, between: Sequence[JaxprEqn], rows: Container[Var], device: Device) -> float:
    """The time of copies of a kernel's operands before the kernel, most of these conversions, in ms."""
    ms, made = 0.0, map_makers(between)
    for v in variables(eqn):
        taken, converted = v, False
        while taken in made and len(operands := variables(made[taken])) == 1:
            if made[taken].primitive.name == "convert_element_type":
                ms += _traffic_ms(compat.nbytes_of([*operands, taken]), device)
                converted = True
            taken = operands[0]
        if taken in rows and not converted:
            ms += device.pass_ms(compat.nbytes(v.aval))
    return ms


def _drawing_ms(eqn: JaxprEqn, device: Device) -> float:
    """The time to draw random numbers by Threefry, in ms; 0 for other equations."""
    if not is_threefry(eqn):
        return 0.0
    numbers = compat.nbytes_of(eqn.outvars) / 4
    return 1e3 * numbers * device.calibration.threefry_operations.value / device.flops


def _paddings_ms(eqn: JaxprEqn, device: Device) -> float:
    """The time to copy a product's operands into matrices of whole blocks, in ms.

    cuBLAS takes 16-bit matrices whose sides are multiples of 8, and XLA pads others.
    """
    if eqn.primitive.name != "dot_general":
        return 0.0
    contracted, batch = eqn.params["dimension_numbers"]
    ms = 0.0
    for v, summed, shared in zip(eqn.invars, contracted, batch, strict=True):
        shape = compat.shape_of(v.aval)
        depth = math.prod(shape[i] for i in summed)
        width = math.prod(n for i, n in enumerate(shape) if i not in (*summed, *shared))
        is_narrow = compat.struct_of(v.aval).dtype.itemsize == 2
        if is_narrow and min(depth, width) > 1 and (depth % _BLOCK or width % _BLOCK):
            ms += device.pass_ms(compat.nbytes(v.aval))
    return ms


def _traffic_ms(nbytes: int, device: Device) -> float:
    return nbytes / device.memory_gbps / 1e6
