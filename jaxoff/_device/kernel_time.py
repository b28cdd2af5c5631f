"""How long kernels take between the others of a step, for the planner: by operations and by bytes.

The shares of a device's rates are those that traces of dense and MoE steps on an H200 show (bench/LOG.md).
`jaxoff.jit`, which only asks when a copy is in time, goes by `Device.compute_ms`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Sequence

from jax import lax

from jaxoff._device.calibration import Calibration, Constant
from jaxoff._device.flops import product_flops
from jaxoff._device.profile import Device
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import Jaxpr, JaxprEqn, Var
from jaxoff._jaxpr.dataflow import map_makers, variables
from jaxoff._jaxpr.inline import Renamed, inlined, now
from jaxoff._jaxpr.kernels import KernelGraph
from jaxoff._jaxpr.primitives import is_attention, is_collective, is_compute, is_pallas

_SLICES = frozenset({"dynamic_slice", "gather", "slice", "split"})


def kernel_ms(graph: KernelGraph, i: int, device: Device) -> float:
    """The time of a kernel alone, in ms: its operations or its bytes at the device's rates.

    The kernel converts operands of another type itself, as copies. The scheduler and `explain` go by this.
    """
    eqn, between = graph.eqns[i], [graph.eqns[j] for j in graph.between[i]]
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
    """About how long it takes a collective to bring so many bytes."""
    return nbytes / (device.calibration.collective_link_share.value * device.memory_gbps) / 1e6


def step_kernel_ms(graph: KernelGraph, i: int, device: Device, rows: Container[Var] = frozenset()) -> float:
    """About how long a kernel takes, in ms, with the copies of what it reads that are made for it.

    Args:
      kernels: of a program.
      i: one of them.
      device: speeds.
      rows: values that a loop takes out of stacks: a kernel that is not elementwise reads a copy.
    """
    eqn, between = graph.eqns[i], [graph.eqns[j] for j in graph.between[i]]
    made = compat.nbytes_of(eqn.outvars)
    if not is_compute(eqn):
        if eqn.primitive.name == "dynamic_update_slice":
            return device.pass_ms(compat.nbytes(eqn.invars[1].aval))
        sliced = not _SLICES.isdisjoint(e.primitive.name for e in (eqn, *between))
        sizes = (compat.nbytes(v.aval) for v in graph.reads[i])
        return _traffic_ms(made + sum(min(n, made) if sliced else n for n in sizes), device)
    copies = _copies_ms(eqn, between, rows, device)
    if compat.control_flow(eqn) is not None:
        return copies + programs_ms(eqn, device)
    if is_collective(eqn):
        return copies + device.calibration.collective_exposed_share.value * collective_ms(made, device)
    traffic = _traffic_ms(made + compat.nbytes_of(variables(eqn)), device)
    if matrix_ms := _matrix_ms(eqn, device):
        return copies + matrix_ms + device.calibration.traffic_share.value * traffic
    return copies + traffic


def programs_ms(eqn: JaxprEqn, device: Device) -> float:
    """How long what a loop or a condition runs takes: all iterations, the longest branch; 0 for others."""
    flow = compat.control_flow(eqn)
    return flow.total(lambda program: _program_ms(program, device)) if flow else 0.0


def _program_ms(program: Jaxpr, device: Device) -> float:
    """About how long all kernels of a program take, one after the other."""
    renamed: Renamed = {}
    eqns = list(inlined(program.eqns, renamed))
    outs = (now(renamed, v) for v in program.outvars)
    graph = KernelGraph(eqns, frozenset(v for v in outs if isinstance(v, Var)))
    return sum(step_kernel_ms(graph, i, device) for i in graph.kernels)


def under_load(
    graph: KernelGraph, pass_: Sequence[int], device: Device, rows: Container[Var] = frozenset()
) -> Device:
    """A device at the clock that a layer leaves it: the more of its time products take, the lower.

    They draw the most power; attention, which does much beside its products, draws less (bench/LOG.md).

    Args:
      kernels: of a program.
      pass_: those of the layer's backward pass; the forward pass is about the same.
      device: speeds.
      rows: as for `step_kernel_ms`.
    """
    kernels = sum(step_kernel_ms(graph, i, device, rows) for i in pass_)
    eqns = (graph.eqns[i] for i in pass_)
    products = sum(_matrix_ms(eqn, device) for eqn in eqns if _is_product(eqn))
    part, fitted = products / kernels if kernels else 0.0, device.calibration
    return dataclasses.replace(
        device, flops=(fitted.idle_clock.value - fitted.load_slope.value * part) * device.flops
    )


def _is_product(eqn: JaxprEqn) -> bool:
    """Whether a kernel may be a product, one of Pallas among them: `product_flops` knows if it is."""
    return is_compute(eqn) and not (is_collective(eqn) or is_attention(eqn))


def _matrix_ms(eqn: JaxprEqn, device: Device) -> float:
    fitted = device.calibration
    return 1e3 * product_flops(eqn, fitted) / (_share_of(eqn, fitted).value * device.flops)


def _share_of(eqn: JaxprEqn, fitted: Calibration) -> Constant:
    """The share of a device's rate of 16-bit products that a kernel reaches."""
    name = eqn.primitive.name
    if is_attention(eqn):
        return fitted.attention_backward_share if "bwd" in name else fitted.attention_share
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
    """Operands that are copied before, most of them as another type."""
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


def _traffic_ms(nbytes: int, device: Device) -> float:
    return nbytes / device.memory_gbps / 1e6
