"""What JAX does not export: the one module that looks inside it."""

import jax
from jax._src import config


def in_interpret_mode() -> bool:
    """Whether Pallas kernels traced now would be interpreted, as under `force_gpu_interpret_mode`."""
    return config.pallas_tpu_interpret_mode_context_manager.value is not None


def varying_axes(x: jax.Array) -> frozenset[str]:
    """The mesh axes over which a value differs between devices, inside `jax.shard_map`."""
    return frozenset(getattr(jax.typeof(x).mat, "varying", ()))
