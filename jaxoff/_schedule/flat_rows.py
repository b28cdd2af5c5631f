"""Stacks with flat rows, whose layout no loop changes.

XLA gives an array of three axes and more the layout that products read best. A stack between two loops may
get two layouts; then XLA copies all rows between the loops, and both stacks are in memory at once
(bench/LOG.md, "2026-11-27, evening"). A stack of flat rows has a single layout, and a product transposes its
row.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxoff._jaxpr import compat

# Rows with this number of axes and more are kept flat. Products read rows of two axes in either layout.
_AXES = 3


def find_flat(rows: Sequence[Any], on_host: Container[int], *, is_divided: bool) -> frozenset[int]:
    """Finds the rows whose stacks are kept flat.

    Args:
      rows: the variables of rows in a loop's body.
      on_host: the indices of the rows whose stacks are in host memory.
      is_divided: whether the compiler may divide the stacks over devices, by their axes.

    Returns:
      Indices of `rows`.
    """
    if is_divided:
        return frozenset()
    return frozenset(k for k, v in enumerate(rows) if k not in on_host and _may_be_flat(v.aval))


def _may_be_flat(row: Any) -> bool:
    if compat.is_host(row) or jnp.issubdtype(row.dtype, jax.dtypes.extended):
        return False
    return row.ndim >= _AXES and not any(row.sharding.spec)


def flatten(stacks: Iterable[jax.Array], flat: Container[int]) -> list[jax.Array]:
    """The stacks; those of the indices `flat` with flat rows."""
    flattened = ((k, stack, (stack.shape[0], math.prod(stack.shape[1:]))) for k, stack in enumerate(stacks))
    return [stack.reshape(shape) if k in flat else stack for k, stack, shape in flattened]
