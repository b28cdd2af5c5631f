"""What JAX does not export: the one module that looks inside it."""

from typing import Any

import jax
from jax import lax
from jax._src import config
from jax.extend import backend


def in_interpret_mode() -> bool:
    """Whether Pallas kernels traced now would be interpreted, as under `force_gpu_interpret_mode`."""
    return config.pallas_tpu_interpret_mode_context_manager.value is not None


def varying_axes(x: jax.Array) -> frozenset[str]:
    """The mesh axes over which a value differs between devices, inside `jax.shard_map`."""
    return frozenset(getattr(jax.typeof(x).mat, "varying", ()))


def vary(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    """Marks a value as differing over `axes`, which changes its type and nothing else."""
    missing = tuple(sorted(axes - varying_axes(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


def default_device() -> Any:
    """The `jax.Device` that a computation runs on unless something says otherwise."""
    return backend.get_default_device()


def abstract_device() -> Any:
    """The `jax.sharding.AbstractDevice` that is traced for without being there, or None."""
    return jax.sharding.get_abstract_mesh().abstract_device
