"""Cuts sorted rows into tiles on the device: the work list of the kernels, without a host sync."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

# Rows of a tile. Two warpgroups multiply 64 rows each, the M of a `wgmma` instruction.
BLOCK_ROWS = 128

# Rows. The copy engine reads and writes swizzled units of eight rows (`plgpu.TilingTransform((8, 64))`).
ROW_ALIGNMENT = 8


class RowTiling(NamedTuple):
    """Tiles of `BLOCK_ROWS` rows, ordered by row, each with the rows of one group.

    A tile starts at a multiple of `ROW_ALIGNMENT`, at or before its first own row, and may overlap with the
    tiles of neighbouring groups. The tile owns its rows `low` to `high` (exclusive).

    Attributes:
      tiles: (T, 4) int32, each tile's expert, first row, low and high. Expert E stands for the rows past the
        last group. Tiles past `num_tiles` are copies of the last tile and never run.
      num_tiles: (1,) int32, number of tiles that run.
      group_first: (E,) int32, first row of each group.
      group_stop: (E,) int32, end of each group (exclusive).
      largest_first: (E,) int32, experts by number of rows, descending.
    """

    tiles: jax.Array
    num_tiles: jax.Array
    group_first: jax.Array
    group_stop: jax.Array
    largest_first: jax.Array

    @property
    def max_tiles(self) -> int:
        """The static number of tiles T."""
        return self.tiles.shape[0]


def bound_tiles(rows: int, experts: int) -> int:
    """Bounds the number of tiles: each group, and the rows past the last group, wastes at most one tile."""
    groups = min(experts + 1, rows)
    return (rows + groups * (BLOCK_ROWS + ROW_ALIGNMENT - 2)) // BLOCK_ROWS


def tile_rows(group_sizes: jax.Array, rows: int) -> RowTiling:
    """Lays tiles over the groups and over the rows past the last group.

    Args:
      group_sizes: (E,) int32, rows of each group. Groups follow each other from row 0.
      rows: number of rows R. Groups end at row R at the latest.

    Returns:
      The tiles and the groups' bounds.
    """
    experts = group_sizes.shape[0]
    group_stop = jnp.minimum(jnp.cumsum(group_sizes, dtype=jnp.int32), rows)
    group_first = jnp.concatenate([jnp.zeros_like(group_stop[:1]), group_stop[:-1]])
    # Group E holds the rows past the last group.
    stop = jnp.concatenate([group_stop, jnp.full_like(group_stop[:1], rows)])
    first = jnp.concatenate([group_first, group_stop[-1:]])
    origin = first // ROW_ALIGNMENT * ROW_ALIGNMENT
    count = jnp.where(stop > first, (stop - origin + BLOCK_ROWS - 1) // BLOCK_ROWS, 0)
    tiles_stop = jnp.cumsum(count, dtype=jnp.int32)
    num_tiles = tiles_stop[-1:]
    tile = jnp.minimum(lax.iota(jnp.int32, bound_tiles(rows, experts)), num_tiles - 1)
    # The number of groups that end at or before the tile.
    group = jnp.sum(tile[:, None] >= tiles_stop[None, :], axis=1, dtype=jnp.int32)
    row = origin[group] + (tile - (tiles_stop - count)[group]) * BLOCK_ROWS
    low = jnp.maximum(first[group] - row, 0)
    high = jnp.minimum(stop[group] - row, BLOCK_ROWS)
    largest_first = jnp.argsort(group_first - group_stop, stable=True).astype(jnp.int32)
    tiles = jnp.stack([group, row, low, high], axis=1)
    return RowTiling(tiles, num_tiles, group_first, group_stop, largest_first)


def find_groups(tiling: RowTiling, rows: int) -> jax.Array:
    """Returns the group of each row, E for rows past the last group: (R,) int32."""
    row = lax.iota(jnp.int32, rows)
    return jnp.sum(row[:, None] >= tiling.group_stop[None, :], axis=1, dtype=jnp.int32)
