"""Which implementation of the grouped MLP serves a call, and why."""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels._compat import abstract_device, default_device, in_interpret_mode

IMPLEMENTATIONS = ("mosaic", "reference")
MAX_EXPERTS = 512
WIDTH_MULTIPLE = 64
# Of the GPUs with compute capability 9.0; an abstract device tells its name only.
_HOPPER_NAMES = ("H100", "H200", "H800", "H20", "GH200")
_DEFAULT_CORES = 132
type _ArrayLike = jax.Array | jax.ShapeDtypeStruct

_MOSAIC_DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))


@dataclasses.dataclass(frozen=True)
class Implementation:
    """An implementation and the reason why it serves a call.

    Attributes:
      name: "mosaic" (the fused kernels) or "reference" (XLA operations).
      reason: why this one, in a sentence.
    """

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


def choose_implementation(x: _ArrayLike, w1: _ArrayLike) -> Implementation:
    """Says which implementation `grouped_mlp(..., implementation=None)` uses for these arguments, and why.

    The kernels serve a GPU of compute capability 9.0 (Hopper), 16-bit rows, widths that are multiples of 64
    and at most 512 experts; everything else goes to the reference. The device is that of the abstract mesh
    in use, else the default device. Nothing is computed.

    Args:
      x: (R, H) rows, or a `jax.ShapeDtypeStruct`.
      w1: (E, H, I) weights, or a `jax.ShapeDtypeStruct`.

    Returns:
      The implementation with its reason.

    Example:
      >>> import jax, jax.numpy as jnp, pallas_kernels
      >>> x = jax.ShapeDtypeStruct((1024, 96), jnp.bfloat16)
      >>> w1 = jax.ShapeDtypeStruct((8, 96, 128), jnp.bfloat16)
      >>> pallas_kernels.choose_implementation(x, w1).name
      'reference'
    """
    obstacle = _obstacle(x, w1)
    if obstacle is not None:
        return Implementation("reference", obstacle)
    return Implementation("mosaic", f"the fused kernels run on {_device_name()}")


def require_mosaic(x: _ArrayLike, w1: _ArrayLike) -> None:
    """Raises NotImplementedError, with the reason, where the fused kernels cannot serve a call."""
    obstacle = _obstacle(x, w1)
    if obstacle is not None:
        raise NotImplementedError(
            f'grouped_mlp: implementation="mosaic" cannot do this case: {obstacle}; '
            'pass implementation="reference" or None'
        )


def count_cores() -> int:
    """The number of streaming multiprocessors of the device that the kernels will run on."""
    abstract = abstract_device()
    if abstract is not None:
        return abstract.num_cores or _DEFAULT_CORES
    return getattr(default_device(), "core_count", _DEFAULT_CORES)


def find_device_kind() -> str:
    """Returns the kind of the device that the kernels will run on, such as "NVIDIA H200"."""
    abstract = abstract_device()
    return abstract.device_kind if abstract is not None else default_device().device_kind


def _obstacle(x: _ArrayLike, w1: _ArrayLike) -> str | None:
    """The first reason why the fused kernels cannot serve a call, or None."""
    (_, width), (experts, _, inner) = x.shape, w1.shape
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
