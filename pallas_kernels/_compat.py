"""Access to private and unstable JAX functions. No other module of the package imports them."""

from typing import Any

import jax
from jax import lax
from jax._src import config
from jax.extend import backend


def in_interpret_mode() -> bool:
    """Returns whether Pallas interprets the kernels traced now, as under `force_gpu_interpret_mode`."""
    return config.pallas_tpu_interpret_mode_context_manager.value is not None


def varying_axes(x: jax.Array) -> frozenset[str]:
    """Returns the mesh axes over which a value differs between devices, inside `jax.shard_map`."""
    return frozenset(getattr(jax.typeof(x).mat, "varying", ()))


def vary(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    """Marks a value as differing over `axes`. Only the type of the value changes."""
    missing = tuple(sorted(axes - varying_axes(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


def default_device() -> Any:
    """Returns the default `jax.Device`."""
    return backend.get_default_device()


def abstract_device() -> Any:
    """Returns the `jax.sharding.AbstractDevice` of the abstract mesh in use, or None."""
    return jax.sharding.get_abstract_mesh().abstract_device
