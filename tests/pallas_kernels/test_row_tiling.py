"""The work list of the kernels: every row in one tile, and that tile its expert's."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels._mosaic.row_tiling import BLOCK_ROWS, ROW_ALIGNMENT, bound_tiles, find_groups, tile_rows


def check(tiling, sizes, rows):
    """Checks a tiling, of numpy arrays, row by row."""
    experts, count = len(sizes), int(tiling.num_tiles[0])
    assert 0 < count <= bound_tiles(rows, experts) == len(tiling.tiles)
    stops = np.minimum(np.cumsum(sizes), rows)
    owner = np.sum(np.arange(rows)[:, None] >= stops, axis=1)
    covered, last = np.zeros(rows, int), -1
    for expert, row, low, high in tiling.tiles[:count]:
        assert row % ROW_ALIGNMENT == 0 and 0 <= low < high <= BLOCK_ROWS
        assert row >= 0 and row + low > last, "ordered by row"
        assert (owner[row + low : row + high] == expert).all()
        assert len(owner[row + low : row + high]) == high - low
        covered[row + low : row + high] += 1
        last = row + low
    assert (covered == 1).all()
    assert (tiling.tiles[count:] == tiling.tiles[count - 1]).all()
    assert (tiling.group_stop == stops).all() and (tiling.group_first == [0, *stops[:-1]]).all()
    assert (np.diff((tiling.group_stop - tiling.group_first)[tiling.largest_first]) <= 0).all()
    assert sorted(tiling.largest_first) == list(range(experts))


def one(sizes, rows):
    tiling = jax.jit(tile_rows, static_argnums=1)(jnp.asarray(sizes, jnp.int32), rows)
    return jax.tree.map(np.asarray, tiling)


@pytest.mark.parametrize("size", [1, 64, 129])
def test_every_pattern_of_empty_groups(size):
    patterns = size * np.array(list(itertools.product([0, 1], repeat=8)), np.int32)
    rows = -(-8 * size // 8) * 8
    tilings = jax.tree.map(np.asarray, jax.jit(jax.vmap(lambda s: tile_rows(s, rows)))(patterns))
    for i, sizes in enumerate(patterns):
        check(jax.tree.map(lambda v, i=i: v[i], tilings), sizes, rows)


def test_groups_start_at_every_row():
    rows = 512
    cuts = np.array([[first, 130, 1] for first in range(BLOCK_ROWS + 1)], np.int32)
    tilings = jax.tree.map(np.asarray, jax.jit(jax.vmap(lambda s: tile_rows(s, rows)))(cuts))
    for i, sizes in enumerate(cuts):
        check(jax.tree.map(lambda v, i=i: v[i], tilings), sizes, rows)


@pytest.mark.parametrize(
    ("sizes", "rows"),
    [
        ([0], 8),
        ([8], 8),
        ([1000], 1000),
        ([90, 30, 60, 9], 144),  # cut in a group, and a group past the last row
        ([200, 5, 5], 200),  # cut between groups
        ([1] * 512, 512),
        ([0] * 512, 8),
        ([1] * 512, 8),
        ([*([0] * 511), 4096], 4096),
    ],
)
def test_edges(sizes, rows):
    check(one(sizes, rows), sizes, rows)


SEVERAL = {rows: jax.jit(functools.partial(tile_rows, rows=rows)) for rows in (8, 256, 1000)}


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(0, 300), min_size=6, max_size=6), st.sampled_from(sorted(SEVERAL)))
def test_any_groups(sizes, rows):
    check(jax.tree.map(np.asarray, SEVERAL[rows](jnp.array(sizes, jnp.int32))), sizes, rows)


def test_rows_know_their_group():
    tiling = tile_rows(jnp.array([3, 0, 2]), 8)
    assert find_groups(tiling, 8).tolist() == [0, 0, 0, 2, 2, 3, 3, 3]
