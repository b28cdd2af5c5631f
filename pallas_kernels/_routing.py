"""The order of routed rows: sorted by expert, rows of one expert in the order of their tokens.

Shapes: T tokens, k experts a token, R = T k rows, E experts.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Routes(NamedTuple):
    """Where the rows of a call come from and go to.

    Attributes:
      order: (R,) int32, sorted row -> copy; copy t k + j is the j-th copy of token t.
      places: (T, k) int32, copy -> sorted row.
      group_sizes: (E,) int32, rows of each expert.
    """

    order: jax.Array
    places: jax.Array
    group_sizes: jax.Array

    @property
    def tokens(self) -> jax.Array:
        """(R,) int32, sorted row -> token."""
        return self.order // self.places.shape[1]

    def sort(self, values: jax.Array) -> jax.Array:
        """Brings (T, k) values of copies into the order of the rows: (R,)."""
        return values.reshape(-1).at[self.order].get(mode="promise_in_bounds")

    def unsort(self, values: jax.Array) -> jax.Array:
        """Brings (R,) values of rows into the order of the copies: (T, k)."""
        return values.at[self.places].get(mode="promise_in_bounds")


def route(experts: jax.Array, num_experts: int) -> Routes:
    """Sorts the copies of tokens by expert.

    Args:
      experts: (T, k) int32, each token's experts, each in 0 to E - 1.
      num_experts: number of experts E.

    Returns:
      The routes.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels._routing import route
      >>> route(jnp.array([[2, 0], [0, 1]]), 3).order
      Array([1, 2, 3, 0], dtype=int32)
    """
    flat = experts.reshape(-1)
    copy = lax.iota(jnp.int32, flat.size)
    _, order = lax.sort((flat, copy), num_keys=1, is_stable=True)
    places = jnp.zeros_like(order).at[order].set(copy, unique_indices=True)
    sizes = jnp.sum(flat[:, None] == lax.iota(jnp.int32, num_experts)[None, :], axis=0, dtype=jnp.int32)
    return Routes(order, places.reshape(experts.shape), sizes)
