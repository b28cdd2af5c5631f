"""Name-stack scopes that jaxoff writes and reads, and the scopes of JAX's own transformations.

Of all marks on an equation, only scopes survive differentiation. `jaxoff.scan` marks its
loops with scopes for the scheduler.
"""

from __future__ import annotations

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import JaxprEqn

PLAIN_LOOP = "jaxoff_plain"  # a loop left to XLA
_RECOMPUTED = "rematted_computation"  # JAX's own
LAYER_LOOP = "jaxoff_layers"  # a loop for `jaxoff.jit` to rewrite


def is_layer_loop(eqn: JaxprEqn) -> bool:
    """Whether an equation is the scan of a `jaxoff.scan` not left to XLA, or its backward pass."""
    return compat.scan_in(eqn) is not None and LAYER_LOOP in _read_scopes(eqn)


def is_plain_loop(eqn: JaxprEqn) -> bool:
    """Whether an equation stands in a loop left to XLA."""
    return PLAIN_LOOP in _read_scopes(eqn)


def is_differentiated(eqn: JaxprEqn) -> bool:
    """Whether an equation was traced under `jax.jvp`, for a gradient."""
    return "jvp(" in _read_scopes(eqn)


def is_transposed(eqn: JaxprEqn) -> bool:
    """Whether an equation belongs to a backward pass."""
    return "transpose(" in _read_scopes(eqn)


def is_recomputed(eqn: JaxprEqn) -> bool:
    """Whether an equation of a backward pass recomputes a value of a `jax.checkpoint`."""
    return _RECOMPUTED in _read_scopes(eqn)


def _read_scopes(eqn: JaxprEqn) -> str:
    return str(eqn.source_info.name_stack)
