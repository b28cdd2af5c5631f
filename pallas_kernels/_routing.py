"""The order of routed rows: sorted by expert, rows of one expert in the order of their tokens.

Shapes: T tokens, k experts a token, R = T k rows, E experts.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

# Copies of a block of the counting sort. Blocks of 256 balance the E comparisons of a copy for the blocks'
# counts against the 256 for its rank, for the 64 to 512 experts of usual layers.
_BLOCK = 256


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
    """Sorts the copies of tokens by expert: a counting sort, whose counts and ranks are sums of comparisons.

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
    rows = experts.size
    blocks = -(-rows // _BLOCK)
    # Copies past the last choose an expert past the last.
    flat = jnp.pad(experts.reshape(-1), (0, blocks * _BLOCK - rows), constant_values=num_experts)
    of_block = flat.reshape(blocks, _BLOCK)
    count = jnp.sum(of_block[:, :, None] == lax.iota(jnp.int32, num_experts), axis=1, dtype=jnp.int32)
    sizes = jnp.sum(count, axis=0)
    first = jnp.cumsum(sizes) - sizes
    before = jnp.cumsum(count, axis=0) - count + first[None]
    # The number of earlier copies of the block for the same expert.
    same = of_block[:, :, None] == of_block[:, None, :]
    earlier = lax.broadcasted_iota(jnp.int32, same.shape, 2) < lax.broadcasted_iota(jnp.int32, same.shape, 1)
    rank = jnp.sum(same & earlier, axis=2, dtype=jnp.int32)
    block = lax.broadcasted_iota(jnp.int32, of_block.shape, 0)
    place = (before.at[block, of_block].get(mode="clip") + rank).reshape(-1)[:rows]
    copy = lax.iota(jnp.int32, rows)
    order = jnp.zeros_like(copy).at[place].set(copy, unique_indices=True, mode="promise_in_bounds")
    return Routes(order, place.reshape(experts.shape), sizes)
