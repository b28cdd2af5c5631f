"""What JAX's traces depend on besides arguments; reads private names of JAX, like `jaxoff._jaxpr.compat`."""

from __future__ import annotations

from jax._src import core as _core
from jax._src import util as _util


@_util.cache()
def configuration() -> object:
    """An object for each configuration by which JAX traces: precision, x64, promotion, mesh and others.

    `jax.clear_caches` forgets the objects, as it forgets JAX's traces. `jax.jit` traces calls with different
    objects apart.
    """
    return object()


def is_tracing() -> bool:
    """Whether a function is being traced or transformed around the caller."""
    return not _core.trace_state_clean()
