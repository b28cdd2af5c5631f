"""Name-stack scopes that jaxoff writes and reads, and the scopes of JAX's own transformations.

A scope is the one mark on an equation that survives differentiation, so `jaxoff.scan` and `jaxoff.layers`
tell the scheduler and the planner through scopes which loops and layers are theirs.
"""

from __future__ import annotations

import re

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import JaxprEqn

PLAIN_LOOP = "jaxoff_plain"  # a loop that jaxoff leaves to XLA
LAYER_LOOP = "jaxoff_layers"  # a loop that `jaxoff.jit` may rewrite
_LAYER = "jaxoff_layer_{}_"  # a layer of `jaxoff.layers`, with its number


def layer_scope(number: int) -> str:
    """The scope of a layer of `jaxoff.layers`."""
    return _LAYER.format(number)


def is_layer_loop(eqn: JaxprEqn) -> bool:
    """Whether an equation is the scan of a `jaxoff.scan`, or its backward pass, not left to XLA."""
    return compat.scan_in(eqn) is not None and LAYER_LOOP in _scopes(eqn)


def is_plain_loop(eqn: JaxprEqn) -> bool:
    """Whether an equation stands in a loop that jaxoff leaves to XLA."""
    return PLAIN_LOOP in _scopes(eqn)


def find_layer_number(eqn: JaxprEqn) -> int | None:
    """The number of the layer of `jaxoff.layers` to which an equation belongs, or None outside of layers."""
    found = re.search(_LAYER.format(r"(\d+)"), _scopes(eqn))
    return None if found is None else int(found[1])


def is_differentiated(eqn: JaxprEqn) -> bool:
    """Whether an equation was traced under `jax.jvp`, so that a gradient was asked for."""
    return "jvp(" in _scopes(eqn)


def is_transposed(eqn: JaxprEqn) -> bool:
    """Whether an equation belongs to a backward pass."""
    return "transpose(" in _scopes(eqn)


def _scopes(eqn: JaxprEqn) -> str:
    return str(eqn.source_info.name_stack)
