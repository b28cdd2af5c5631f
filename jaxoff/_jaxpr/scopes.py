"""Name-stack scopes that jaxoff writes and reads, and the scopes of JAX's own transformations.

Of all marks on an equation, only scopes survive differentiation. `jaxoff.scan` marks its
loops with scopes for the scheduler.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import jax

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import JaxprEqn

PLAIN_LOOP = "jaxoff_plain"  # a loop left to XLA
_RECOMPUTED = "rematted_computation"  # JAX's own
LAYER_LOOP = "jaxoff_layers"  # a loop for `jaxoff.jit` to rewrite
_DIFFERENTIATION = re.compile(r"\b(?:jvp|transpose)\(")
_MOVED = re.compile(r"offload\[(.*?)\](?:/|$)")  # the copies of a named value


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
    """Whether an equation belongs to a backward pass.

    The outermost transformation decides: a backward pass that is differentiated, such as that of a gradient
    penalty, belongs to the forward pass of the outer gradient, with scopes like `jvp(transpose(jvp(...)))`.
    """
    outermost = _DIFFERENTIATION.search(_read_scopes(eqn))
    return outermost is not None and outermost[0] == "transpose("


def is_recomputed(eqn: JaxprEqn) -> bool:
    """Whether an equation of a backward pass recomputes a value of a `jax.checkpoint`."""
    return _RECOMPUTED in _read_scopes(eqn)


@contextlib.contextmanager
def mark_copies(eqn: JaxprEqn, name: str | None) -> Iterator[None]:
    """A context whose equations have the source line of an equation, and the scope of a named value's copies.

    XLA keeps both as metadata of its instructions.
    """
    scope = jax.named_scope(f"offload[{name}]") if name else contextlib.nullcontext()
    with compat.user_context(eqn.source_info.traceback), scope:
        yield


def find_copied_name(scopes: str) -> str:
    """The name of the value that an instruction copies, by its scopes; '' for any other instruction."""
    found = _MOVED.search(scopes)
    return found[1] if found else ""


def _read_scopes(eqn: JaxprEqn) -> str:
    return str(eqn.source_info.name_stack)
