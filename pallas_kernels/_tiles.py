"""Cuts rows sorted by expert into tiles, each within one group.

A ragged product over groups becomes a loop over dense tiles of one static height. The first rows of the
groups are known on the device only, so the number of tiles is a static upper bound and the last tiles may be
empty.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

# Rows. The smallest tile, for groups of a few rows. Chosen without measurement.
_MIN_TILE = 8

# Rows. The largest tile, which bounds the float32 copies of one tile. Chosen without measurement.
_MAX_TILE = 512


class Tiles(NamedTuple):
    """Tiles of `height` rows, as arrays over the tiles. Row numbers count from row 0 of the array.

    Attributes:
      expert: (N,) int32, the tile's expert.
      start: (N,) int32, first row of the slice of `height` rows to read, at most `rows - height`.
      first: (N,) int32, first row of the tile.
      stop: (N,) int32, end of the tile (exclusive). An empty tile has `stop <= first`.
    """

    expert: jax.Array
    start: jax.Array
    first: jax.Array
    stop: jax.Array

    def mask(self, height: int) -> jax.Array:
        """Returns for one tile which rows of its slice belong to the tile: (height, 1) bool."""
        row = self.start + lax.iota(jnp.int32, height)
        return jnp.expand_dims((row >= self.first) & (row < self.stop), 1)


def choose_height(rows: int, experts: int) -> int:
    """Chooses the static height of a tile.

    The height is a quarter of the average group, as a power of two between 8 and 512. Each group wastes half
    a tile on average and one tile at most, so the work stays within `rows + experts * height <= 5/4 * rows`
    rows for groups of at least 32 rows on average.

    Args:
      rows: number of rows R.
      experts: number of groups E.

    Returns:
      The height, at most `rows`.

    Example:
      >>> from pallas_kernels._tiles import choose_height
      >>> choose_height(rows=98304, experts=128)
      128
    """
    quarter = max(rows // (4 * experts), 1)
    power = 1 << (quarter.bit_length() - 1)
    return min(max(power, _MIN_TILE), _MAX_TILE, rows)


def cut_tiles(group_sizes: jax.Array, rows: int, height: int) -> Tiles:
    """Lays tiles over groups of rows, without a host sync.

    Args:
      group_sizes: (E,) int32, rows of each group. Groups follow each other from row 0.
      rows: number of rows R. Groups end at row R at the latest.
      height: rows of a tile, at most `rows`.

    Returns:
      `(rows + E * (height - 1)) // height` tiles, ordered by row, the empty ones last.
    """
    experts = group_sizes.shape[0]
    group_stop = jnp.minimum(jnp.cumsum(group_sizes, dtype=jnp.int32), rows)
    group_first = jnp.concatenate([jnp.zeros_like(group_stop[:1]), group_stop[:-1]])
    group_tiles = (group_stop - group_first + height - 1) // height
    tiles_stop = jnp.cumsum(group_tiles, dtype=jnp.int32)
    # sum(ceil(g / height)) <= sum(g + height - 1) / height, and sum(g) <= rows.
    tile = lax.iota(jnp.int32, (rows + experts * (height - 1)) // height)
    # The tile's expert is the number of groups with all tiles before this tile, at most E - 1.
    expert = jnp.sum(tile[:, None] >= tiles_stop[None, :], axis=1, dtype=jnp.int32)
    expert = jnp.minimum(expert, experts - 1)
    first = group_first[expert] + (tile - (tiles_stop - group_tiles)[expert]) * height
    stop = jnp.minimum(first + height, group_stop[expert])
    # The last slices start earlier, at `rows - height`: padding the array would copy the whole array.
    start = jnp.clip(first, 0, rows - height)
    return Tiles(expert, start, first, stop)
