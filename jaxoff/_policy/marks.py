"""Names and marks, bound to values by the user.

`name` and the marks bind a `Tag` to a value as a checkpoint name, for policies to read. A later tag on the
same value includes the earlier tag, so the order of `name` and the marks has no effect.
"""

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
    """Tags a value with a name, by which policies select the value.

    Shape and dtype stay the same. The rounding is pinned: the value is rounded to its own format in the
    forward pass and wherever the value is recomputed, so save, offload and recompute give the same bits.
    Without the pin XLA keeps bf16 intermediates wider inside fusions, and each placement has other fusions.

    Use only the result. A backward pass with uses of both `x` and the result keeps both.

    Args:
      x: an array of any shape and dtype, or a pytree of arrays, such as the data and scales of a quantized
        tensor. Every array leaf is tagged. Other leaves, and None, pass through.
      label: the name, by convention hierarchical ("moe.act").

    Returns:
      `x` with the tag: equal in value, shape and dtype.

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
      [('mlp.act', 'offload')]

    References:
      `jax.ad_checkpoint.checkpoint_name`, whose names stock policies of `jax.checkpoint_policies` select by.
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
    """Asks for the offload of a value: the value waits for the backward pass in pinned host memory.

    The lists of a policy decide before this mark, and `mark_not_offload` wins over both. Use only the result.

    Args:
      x: an array or a pytree of arrays, as for `name`.

    Returns:
      `x` with the mark, rounding pinned as by `name`.

    Example:
      >>> import jax, jax.numpy as jnp, jaxoff
      >>> def block(w, x):
      ...     return jnp.tanh(jaxoff.mark_offload(x @ w)) @ w.T
      >>> block = jax.checkpoint(block, policy=jaxoff.policy())
      >>> w, x = jnp.ones((8, 16)), jnp.ones((4, 8))
      >>> [(r.mark, r.placement, r.rule) for r in jaxoff.residuals(block, w, x)]
      [('offload', 'offload', 'mark_offload')]

    References:
      TransformerEngine, `mark_activation_offload` (cpu_offload v1): an attribute of the tensor.
    """
    return _tag_leaves(x, None, "offload")


def mark_not_offload[T](x: T) -> T:
    """Keeps a value on the device, against its name, other marks and the policy.

    The value is saved for the backward pass. Use only the result.

    Args:
      x: an array or a pytree of arrays, as for `name`.

    Returns:
      `x` with the mark, rounding pinned as by `name`.

    Example:
      >>> import jax, jax.numpy as jnp, jaxoff
      >>> def block(w, x):
      ...     return jnp.tanh(jaxoff.mark_not_offload(jaxoff.name(x @ w, "mlp.act"))) @ w.T
      >>> block = jax.checkpoint(block, policy=jaxoff.policy(offload=["mlp.*"]))
      >>> w, x = jnp.ones((8, 16)), jnp.ones((4, 8))
      >>> [(r.name, r.placement, r.rule) for r in jaxoff.residuals(block, w, x)]
      [('mlp.act', 'save', 'mark_not_offload')]

    References:
      TransformerEngine, `mark_not_offload`.
    """
    return _tag_leaves(x, None, "not_offload")


_recorder: contextvars.ContextVar[set[str] | None] = contextvars.ContextVar("jaxoff_recorder", default=None)


@contextlib.contextmanager
def record_labels() -> Iterator[set[str]]:
    """Collects the labels of all calls of `name` inside the context, for a search for names lost by JAX."""
    labels: set[str] = set()
    token = _recorder.set(labels)
    try:
        yield labels
    finally:
        _recorder.reset(token)


def is_recording() -> bool:
    """Whether jaxoff itself traces at this moment: every trace of a user's function collects labels."""
    return _recorder.get() is not None


type TagKey = tuple[str | None, Mark | None]


def key_of_tag(tag: Tag | None) -> TagKey | None:
    """Returns the label and mark of a tag, as a key for comparisons and dictionaries.

    A `Tag` is a string and equals its text, so two tags with the same label and different marks are equal.
    """
    return None if tag is None else (tag.label, tag.mark)


def _tag_leaves(x: Any, label: str | None, mark: Mark | None) -> Any:
    return jax.tree.map(lambda leaf: _tag(leaf, label, mark) if _is_array(leaf) else leaf, x)


def _is_array(leaf) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic))


def _tag(x, label: str | None, mark: Mark | None):
    """Binds a tag with the label and mark of an earlier tag included."""
    naming = compat.find_naming(x)
    if naming is None:
        return checkpoint_name(pin_rounding(x), Tag(label, mark))
    earlier = Tag.of(naming.name)
    if (label is None or earlier.label is None) and naming.operand is not None:
        x = naming.operand  # replaces the earlier tag; of two labels both stay
    label = earlier.label if label is None else label
    mark = earlier.mark if mark is None or earlier.mark == "not_offload" else mark
    return checkpoint_name(x, Tag(label, mark))


def pin_rounding(x):
    """Rounds a value to its own format, against wider intermediates inside XLA's fusions.

    Formats with IEEE infinities take `lax.reduce_precision`, other inexact formats (8-bit floats, complex
    numbers) a barrier. Integers and keys need nothing.
    """
    dtype = x.dtype
    if not jnp.issubdtype(dtype, jnp.inexact):
        return x
    if dtype in _IEEE_FORMATS:
        info = jnp.finfo(dtype)
        return lax.reduce_precision(x, exponent_bits=info.nexp, mantissa_bits=info.nmant)
    return lax.optimization_barrier(x)


_IEEE_FORMATS = tuple(jnp.dtype(d) for d in (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64))
