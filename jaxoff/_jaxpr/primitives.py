"""Classes of primitives: products, views, movement, collectives, opaque kernels."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import Jaxpr, JaxprEqn
from jaxoff._jaxpr.dataflow import variables

DOTS = frozenset(
    {"dot_general", "ragged_dot_general", "ragged_dot", "conv_general_dilated", "scaled_matmul_wrapper"}
)
# Kernels with equations hidden from policies: Pallas and FFI calls, and JAX's fused attention.
OPAQUE = compat.KERNELS | {"ffi_call", "dot_product_attention_fwd_wrapper"}
# A view costs nothing to recompute. A saved view of an offloaded value would keep the value on the device.
VIEWS = frozenset(
    {"reshape", "transpose", "squeeze", "slice", "rev", "broadcast_in_dim", "expand_dims", "copy"}
)
# Arrays of arbitrary contents.
EMPTY = frozenset({"empty", "empty2"})
# Equations that say how a value is divided over devices, or laid out in memory.
CONSTRAINTS = frozenset({"layout_constraint", "sharding_constraint"})
GATHERS = frozenset({"all_gather", "all_gather_invariant", "all_gather_reduced"})
_COLLECTIVE_NAMES = """
all_to_all pmax pmin ppermute psum psum_invariant ragged_all_to_all reduce_scatter unreduced_psum
unreduced_reduce_scatter
"""
_COLLECTIVES = GATHERS | frozenset(_COLLECTIVE_NAMES.split())
_ELEMENTWISE_NAMES = """
abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp convert_element_type copy cos cosh
div eq erf erf_inv erfc exp exp2 expm1 floor ge gt integer_pow is_finite le log log1p logistic lt max min mul
ne neg nextafter not or pow reduce_precision rem round rsqrt select_n shift_left shift_right_arithmetic
shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh xor
"""
# Primitives whose result has, at each index, a value of the operands at this index.
ELEMENTWISE = frozenset(_ELEMENTWISE_NAMES.split())
_OTHER_FUSED_NAMES = """
bessel_i0e bessel_i1e bitcast_convert_type broadcast_in_dim clz complex conj digamma expand_dims igamma
igammac imag iota layout_constraint lgamma log2 mulhi name one_minus_square optimization_barrier pad polygamma
population_count pvary real regularized_incomplete_beta reshape sharding_constraint slice split squeeze
transpose written_over zeta
"""
# XLA computes these equations inside the kernels that read their result.
_FUSED = ELEMENTWISE.union(_OTHER_FUSED_NAMES.split())
_ARGUMENT_VIEW_NAMES = """
convert_element_type dynamic_slice expand_dims layout_constraint name optimization_barrier pvary
reduce_precision reshape reshard sharding_constraint slice split squeeze transpose
"""
# Views of an argument (a layer of stacked weights, for example). XLA reads the view in place, or copies the
# view just before the reader.
ARGUMENT_VIEWS = frozenset(_ARGUMENT_VIEW_NAMES.split())
# Primitives on the way from a kernel to the narrow form of its result. Only convert_element_type makes the
# narrow form.
ROUNDING = ("convert_element_type", "reduce_precision")
# Primitives that draw random bits: of typed keys, of keys as numbers, and by XLA's own generator.
RANDOM = frozenset({"random_bits", "threefry2x32", "rng_bit_generator"})
_MOVE_NAMES = """
argmax argmin concatenate cummax cummin cumprod cumsum device_put dynamic_slice dynamic_update_slice
gather random_bits random_seed random_unwrap random_wrap reduce_and reduce_max reduce_min reduce_or
reduce_prod reduce_sum reshard rev scatter scatter-add scatter_add sort top_k unwritten
"""
# Kernels that move or add up their operands. They are short, so the schedule holds nothing back for them.
_MOVE = frozenset(_MOVE_NAMES.split())
# Equations without a program inside, a name or a copy between memories: a walk skips these first.
LEAVES = (_FUSED | _MOVE) - {"name", "device_put"}


class KernelClass(enum.Enum):
    """How XLA runs an equation.

    FUSED: inside the readers of the result. MOVE: a short kernel that moves or reduces its operands. COMPUTE:
    every other equation; it takes time, in one or more kernels.
    """

    FUSED = enum.auto()
    MOVE = enum.auto()
    COMPUTE = enum.auto()


def classify_kernel(eqn: JaxprEqn) -> KernelClass:
    """Classifies an equation by its primitive. An unknown primitive is COMPUTE."""
    if eqn.primitive.name in _FUSED:
        return KernelClass.FUSED
    return KernelClass.MOVE if eqn.primitive.name in _MOVE else KernelClass.COMPUTE


def is_fused(eqn: JaxprEqn) -> bool:
    """Whether an equation is of `KernelClass.FUSED`."""
    return classify_kernel(eqn) is KernelClass.FUSED


def is_compute(eqn: JaxprEqn) -> bool:
    """Whether an equation is of `KernelClass.COMPUTE`."""
    return classify_kernel(eqn) is KernelClass.COMPUTE


def is_narrowing(eqn: JaxprEqn) -> bool:
    """Whether an equation rounds a value to fewer bytes."""
    is_rounding = eqn.primitive.name == "convert_element_type"
    return is_rounding and compat.nbytes_of(eqn.outvars) < compat.nbytes_of(variables(eqn))


def is_widening(eqn: JaxprEqn) -> bool:
    """Whether an elementwise equation, or a view, makes more bytes than it reads."""
    is_simple = eqn.primitive.name in ("convert_element_type", *VIEWS)
    return is_simple and compat.nbytes_of(eqn.outvars) > compat.nbytes_of(variables(eqn))


def is_shard_map(eqn: JaxprEqn) -> bool:
    """Whether an equation is a `jax.shard_map`."""
    return eqn.primitive.name == "shard_map"


def is_condition(eqn: JaxprEqn) -> bool:
    """Whether an equation is a `jax.lax.cond` or `jax.lax.switch`."""
    return eqn.primitive.name == "cond"


def is_pallas(eqn: JaxprEqn) -> bool:
    """Whether an equation is or calls a Pallas kernel."""
    return eqn.primitive.name in compat.KERNELS or any(
        is_pallas(inner) for jaxpr in compat.sub_jaxprs(eqn) for inner in jaxpr.eqns
    )


def num_shards(eqn: JaxprEqn) -> int:
    """The number of shards of a `jax.shard_map` equation, on each of which its jaxpr runs; 1 for another.

    Over the axes of the mesh that are not manual the compiler divides the shards.
    """
    if not is_shard_map(eqn):
        return 1
    return math.prod(eqn.params["mesh"].shape[axis] for axis in eqn.params["newly_manual_axes"])


def plain_scan_in(eqn: JaxprEqn) -> compat.ScanLayout | None:
    """As `compat.scan_in`, of a scan without unrolling, constants of its own and side effects."""
    layout = compat.scan_in(eqn)
    if layout is None or layout.unroll not in (1, False) or eqn.params["jaxpr"].consts:
        return None
    return None if compat.has_side_effects(eqn) else layout


def holds(program: Jaxpr, is_sought: Callable[[JaxprEqn], bool]) -> bool:
    """Whether `is_sought` holds for an equation of a program, or of a program in it."""
    return any(
        is_sought(eqn) or any(holds(inner, is_sought) for inner in compat.sub_jaxprs(eqn))
        for eqn in program.eqns
    )


def holds_copies(program: Jaxpr) -> bool:
    """Whether a program, or a program in it, copies between device and host."""
    return holds(program, lambda eqn: compat.transfer_in(eqn) is not None)


def is_attention(eqn: JaxprEqn) -> bool:
    """Whether an equation is JAX's fused attention, forward or backward."""
    return eqn.primitive.name.startswith("dot_product_attention")


def is_threefry(eqn: JaxprEqn) -> bool:
    """Whether an equation draws random numbers by Threefry, of a typed key or of a key as numbers."""
    name = eqn.primitive.name
    return name == "threefry2x32" or (name == "random_bits" and "fry" in str(eqn.invars[0].aval))


def is_collective(eqn: JaxprEqn) -> bool:
    """Whether an equation exchanges bytes between devices, over an axis of several devices."""
    named = eqn.primitive.name in _COLLECTIVES and bool(find_collective_axes(eqn))
    return named and compat.nbytes(eqn.outvars[0].aval) > 0


def find_collective_axes(eqn: JaxprEqn) -> list[str]:
    """Finds the mesh axes of several devices over which a collective communicates."""
    axes = eqn.params["axes"] if "axes" in eqn.params else eqn.params["axis_name"]
    sizes = eqn.ctx.cur_abstract_mesh.shape
    return [axis for axis in (axes if isinstance(axes, (tuple, list)) else [axes]) if sizes.get(axis, 2) > 1]
