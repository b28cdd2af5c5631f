"""Chooses the implementation of the MoE layer and of the grouped MLP for a call and gives the reason."""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels._activation import ACTIVATIONS, SQUARED_RELU
from pallas_kernels._compat import abstract_device, default_device, in_interpret_mode

IMPLEMENTATIONS = ("mosaic", "reference")

# Experts. The largest number that the kernels are tested with (512 experts, tests/gpu/test_grouped_mlp.py).
MAX_EXPERTS = 512

# Columns. H and I must be multiples of the kernels' step of K and of their smallest tile (_mosaic/rows.py).
WIDTH_MULTIPLE = 64

# Product names of the GPUs with compute capability 9.0. An abstract device has a name and no capability.
_HOPPER_NAMES = ("H100", "H200", "H800", "H20", "GH200")

# Streaming multiprocessors of an H100 SXM or H200, for a device without a known count.
_DEFAULT_CORES = 132

# Dtypes that the tensor cores multiply with float32 sums and without rounding the operands.
_MOSAIC_DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))

type _ArrayLike = jax.Array | jax.ShapeDtypeStruct


@dataclasses.dataclass(frozen=True)
class Implementation:
    """An implementation and the reason why it serves a call.

    Attributes:
      name: "mosaic" (the fused kernels) or "reference" (XLA operations).
      reason: why this implementation was chosen, in a sentence.
    """

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


def choose_implementation(
    x: _ArrayLike, w1: _ArrayLike, activation: str = SQUARED_RELU.name
) -> Implementation:
    """Chooses the implementation that `moe` and `grouped_mlp` use for these arguments.

    The kernels serve a GPU of compute capability 9.0 (Hopper), 16-bit rows, widths in multiples of 64 and at
    most 512 experts. Every other call goes to the reference. The device is the abstract mesh's device, else
    the default device. The function reads shapes and dtypes only.

    Args:
      x: (R, H) rows or (T, H) tokens, or a `jax.ShapeDtypeStruct`.
      w1: (E, H, I) weights, (E, H, 2 I) for a gated activation, or a `jax.ShapeDtypeStruct`.
      activation: the name of the activation.

    Returns:
      The implementation with its reason.

    Example:
      >>> import jax, jax.numpy as jnp, pallas_kernels
      >>> x = jax.ShapeDtypeStruct((1024, 96), jnp.bfloat16)
      >>> w1 = jax.ShapeDtypeStruct((8, 96, 128), jnp.bfloat16)
      >>> pallas_kernels.choose_implementation(x, w1).name
      'reference'
    """
    obstacle = _find_obstacle(x, w1, activation)
    if obstacle is not None:
        return Implementation("reference", obstacle)
    return Implementation("mosaic", f"the fused kernels run on {_device_name()}")


def require_mosaic(op: str, x: _ArrayLike, w1: _ArrayLike, activation: str) -> None:
    """Raises NotImplementedError, with the reason, where the fused kernels cannot serve a call."""
    obstacle = _find_obstacle(x, w1, activation)
    if obstacle is not None:
        raise NotImplementedError(
            f'{op}: implementation="mosaic" cannot do this case: {obstacle}; '
            'pass implementation="reference" or None'
        )


def count_cores() -> int:
    """Returns the number of streaming multiprocessors of the device in use."""
    abstract = abstract_device()
    if abstract is not None:
        return abstract.num_cores or _DEFAULT_CORES
    return getattr(default_device(), "core_count", _DEFAULT_CORES)


def find_device_kind() -> str:
    """Returns the kind of the device in use, such as "NVIDIA H200"."""
    abstract = abstract_device()
    return abstract.device_kind if abstract is not None else default_device().device_kind


def _find_obstacle(x: _ArrayLike, w1: _ArrayLike, activation: str) -> str | None:
    """Returns the first reason why the fused kernels cannot serve a call, or None."""
    (_, width), (experts, _, columns) = x.shape, w1.shape
    inner = columns // ACTIVATIONS[activation].parts
    if x.dtype not in _MOSAIC_DTYPES:
        return f"x must be bfloat16 or float16 for the tensor cores, got {x.dtype}"
    for letter, size in {"H": width, "I": inner}.items():
        if size == 0 or size % WIDTH_MULTIPLE:
            return f"{letter} must be a multiple of {WIDTH_MULTIPLE}, got {letter} = {size}"
    if experts > MAX_EXPERTS:
        return f"there must be at most {MAX_EXPERTS} experts, got E = {experts}"
    if not in_interpret_mode() and not _is_hopper():
        return f"it needs a GPU of compute capability 9.0 (Hopper), got {_device_name()}"
    return None


def _device_name() -> str:
    return "the interpreter" if in_interpret_mode() else find_device_kind()


def _is_hopper() -> bool:
    abstract = abstract_device()
    if abstract is not None:
        words = abstract.device_kind.replace("-", " ").split()
        return abstract.platform in ("cuda", "gpu") and any(name in words for name in _HOPPER_NAMES)
    return getattr(default_device(), "compute_capability", None) == "9.0"
