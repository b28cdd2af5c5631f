"""Names and marks: what a value is called, and whether its owner wants it moved."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.tag import Mark, Tag

T = TypeVar("T")

compat.exclude_from_source_lines(__file__)


def name[T](x: T, label: str) -> T:
    """Tags a value with a name that policies select by.

    The value is unchanged, except that its rounding is pinned: it is rounded to its own format here, in the
    forward pass and wherever it is recomputed, so that saving, offloading and recomputing it give the same
    bits. Without this XLA keeps bf16 intermediates wider wherever it fuses them, and each placement fuses
    otherwise.

    Use only the result. A backward pass that needs both `x` and the result keeps both.

    Args:
      x: an array of any shape and dtype, or a pytree of arrays (a quantized tensor's data and scales):
        every array leaf is tagged. Leaves that are not arrays, and None, pass through.
      label: the name, by convention hierarchical ("moe.act").

    Returns:
      `x` tagged. Equal to `x` in value, shape and dtype.

    Raises:
      TypeError: if `label` is not a string.
      ValueError: if `label` is empty.

    Example:
      >>> import jax, jax.numpy as jnp, jaxoff
      >>> def block(w, x):
      ...     return jaxoff.name(jnp.tanh(x @ w), "mlp.act") @ w.T
      >>> policy = jaxoff.policy(offload=["mlp.*"])
      >>> w, x = jnp.ones((8, 16)), jnp.ones((4, 8))
      >>> [(r.name, r.placement) for r in jaxoff.residuals(jax.checkpoint(block, policy=policy), w, x)]
      [('mlp.act', 'host')]
    """
    if not isinstance(label, str):
        raise TypeError(
            f"A name is a string, got {label!r} of type {type(label).__name__}: jaxoff.name(x, 'moe.act')."
        )
    if not label:
        raise ValueError("A name must not be empty, got '': jaxoff.name(x, 'moe.act').")
    if (labels := _recorder.get()) is not None:
        labels.add(label)
    return _tag_leaves(x, label, None)


def mark_offload[T](x: T) -> T:
    """Asks for a value to be kept in pinned host memory between forward and backward.

    The lists of a policy decide before this mark, and `mark_not_offload` wins over both. Use only the result.

    Args:
      x: an array or a pytree of arrays, as for `name`.

    Returns:
      `x` marked, its rounding pinned as by `name`.

    References:
      TransformerEngine, `mark_activation_offload` (cpu_offload v1), which sets an attribute on the tensor.
    """
    return _tag_leaves(x, None, "offload")


def mark_not_offload[T](x: T) -> T:
    """Keeps a value on the device whatever its name, its other marks and the policy say.

    Use only the result.

    Args:
      x: an array or a pytree of arrays, as for `name`.

    Returns:
      `x` marked, its rounding pinned as by `name`.

    References:
      TransformerEngine, `mark_not_offload`.
    """
    return _tag_leaves(x, None, "not_offload")


_recorder: contextvars.ContextVar[set[str] | None] = contextvars.ContextVar("jaxoff_recorder", default=None)


@contextlib.contextmanager
def recorded_labels() -> Iterator[set[str]]:
    """Collects the labels that `name` is called with, so that names which JAX loses can be told."""
    labels: set[str] = set()
    token = _recorder.set(labels)
    try:
        yield labels
    finally:
        _recorder.reset(token)


def _tag_leaves(x: Any, label: str | None, mark: Mark | None) -> Any:
    return jax.tree.map(lambda leaf: _tag(leaf, label, mark) if _is_array(leaf) else leaf, x)


def _is_array(leaf) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic))


def _tag(x, label: str | None, mark: Mark | None):
    """Binds one tag that carries on what an earlier tag said, so that the order does not matter."""
    naming = compat.naming_of(x)
    if naming is None:
        return checkpoint_name(pin_rounding(x), Tag(label, mark))
    earlier = Tag.of(naming.name)
    if (label is None or earlier.label is None) and naming.operand is not None:
        x = naming.operand  # the new tag replaces the earlier one; two labels are both kept
    label = earlier.label if label is None else label
    mark = earlier.mark if mark is None or earlier.mark == "not_offload" else mark
    return checkpoint_name(x, Tag(label, mark))


def pin_rounding(x):
    """Rounds a value to its own format, so that XLA cannot keep it wider where it fuses.

    `lax.reduce_precision` does it where the format has IEEE infinities. For others (8-bit floats, complex
    numbers) a barrier does. Integers and keys need nothing.
    """
    dtype = x.dtype
    if not jnp.issubdtype(dtype, jnp.inexact):
        return x
    if dtype in _IEEE_FORMATS:
        info = jnp.finfo(dtype)
        return lax.reduce_precision(x, exponent_bits=info.nexp, mantissa_bits=info.nmant)
    return lax.optimization_barrier(x)


_IEEE_FORMATS = tuple(jnp.dtype(d) for d in (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64))
