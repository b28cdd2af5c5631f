"""The row products of the grouped MLP: FC1 with its activation, FC2, and the gradients of their inputs.

Each function gives `rows_product` an epilogue, which turns the float32 accumulator of a half tile into rows.
Shapes: R rows, H model width, I expert width, E experts.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._mosaic.row_tiling import BLOCK_ROWS, RowTiling
from pallas_kernels._mosaic.rows import CHUNK, RAGGED, WG_ROWS, HalfTile, rows_product, store_ragged
from pallas_kernels._mosaic.tuning import Config

# Layouts in registers of one value for each row, and for each column, of an accumulator.
_OF_ROW = plgpu.Layout.WGMMA.reduce(1)
OF_COLUMN = plgpu.Layout.WGMMA.reduce(0)


def pad_rows(p: jax.Array) -> jax.Array:
    """Pads p with one tile of rows, since the last tile's loads past row R have no bounds check."""
    return jnp.pad(p.astype(jnp.float32), (0, BLOCK_ROWS))


def make_staging(dtype, slots):
    """Returns the type of a shared-memory buffer: `slots` chunks for each multiplying warpgroup."""
    return plgpu.SMEM((2, slots, WG_ROWS, CHUNK), dtype, transforms=RAGGED)


def _store_chunks(acc, tile: HalfTile, wg, target, staging, block: int) -> None:
    """Stores an accumulator in chunks: one chunk is copied while the next chunk is converted."""
    chunks, slots = acc.shape[1] // CHUNK, staging.shape[1]
    for begin in range(0, chunks, slots):
        group = range(begin, min(begin + slots, chunks))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for chunk in group:
            staging[wg, chunk - begin] = acc[:, chunk * CHUNK : (chunk + 1) * CHUNK].astype(target.dtype)
        plgpu.commit_smem()
        for chunk in group:
            store_ragged(staging.at[wg, chunk - begin], target, tile, tile.block * block + chunk * CHUNK)
        plgpu.commit_smem_to_gmem_group()


def load_of_row(ref, tile: HalfTile):
    return plgpu.load(ref.at[pl.ds(tile.row, WG_ROWS)], layout=_OF_ROW, optimized=False)


def _load_of_column(ref, tile: HalfTile, block: int, width: int):
    column = pl.ds(tile.block * block, width)
    return plgpu.load(ref.at[tile.expert, column], layout=OF_COLUMN, optimized=False)


def fc1(
    x: jax.Array,
    w1: jax.Array,
    b1: jax.Array | None,
    tiling: RowTiling,
    config: Config,
    index: jax.Array | None = None,
) -> jax.Array:
    """`a = relu(x W1 + b1)^2`, (R, I), for rows x or x[index]; rows past the last group are zero."""
    rows = x.shape[0] if index is None else index.shape[0]
    inputs = [] if b1 is None else [b1.astype(jnp.float32)]

    def epilogue(acc, early, tile, wg, *refs):
        *bias, target, staging = refs
        if bias:
            values = _load_of_column(bias[0], tile, config.block_columns, acc.shape[1])
            acc = acc + lax.broadcast_in_dim(values, acc.shape, (1,))
        on = jnp.maximum(acc, 0.0)
        _store_chunks(on * on, tile, wg, target, staging, config.block_columns)

    (a,) = rows_product(
        x,
        w1,
        tiling,
        transpose_w=False,
        config=config,
        inputs=inputs,
        out_types=[jax.ShapeDtypeStruct((rows, w1.shape[2]), x.dtype)],
        scratch_types=[make_staging(x.dtype, config.slots)],
        epilogue=epilogue,
        index=index,
        name="grouped_mlp_fc1",
    )
    return a


def fc2(
    a: jax.Array,
    w2: jax.Array,
    b2: jax.Array | None,
    probs: jax.Array | None,
    tiling: RowTiling,
    config: Config,
) -> jax.Array:
    """`y = p (a W2 + b2)`, (R, H); rows past the last group are zero."""
    inputs = [] if b2 is None else [b2.astype(jnp.float32)]
    inputs += [] if probs is None else [pad_rows(probs)]

    def epilogue(acc, early, tile, wg, *refs):
        *more, target, staging = refs
        if b2 is not None:
            values = _load_of_column(more[0], tile, config.block_columns, acc.shape[1])
            acc = acc + lax.broadcast_in_dim(values, acc.shape, (1,))
        if probs is not None:
            acc = acc * lax.broadcast_in_dim(early, acc.shape, (0,))
        _store_chunks(acc, tile, wg, target, staging, config.block_columns)

    def prefetch(width, tile, wg, *refs):
        return load_of_row(refs[len(inputs) - 1], tile)

    (y,) = rows_product(
        a,
        w2,
        tiling,
        transpose_w=False,
        config=config,
        inputs=inputs,
        out_types=[jax.ShapeDtypeStruct((a.shape[0], w2.shape[2]), a.dtype)],
        scratch_types=[make_staging(a.dtype, config.slots)],
        epilogue=epilogue,
        prefetch=None if probs is None else prefetch,
        name="grouped_mlp_fc2",
    )
    return y


def grad_x(dz: jax.Array, w1: jax.Array, tiling: RowTiling, config: Config) -> jax.Array:
    """`dx = dz W1^T`, (R, H); rows past the last group are zero."""

    def epilogue(acc, early, tile, wg, target, staging):
        _store_chunks(acc, tile, wg, target, staging, config.block_columns)

    (dx,) = rows_product(
        dz,
        w1,
        tiling,
        transpose_w=True,
        config=config,
        inputs=[],
        out_types=[jax.ShapeDtypeStruct((dz.shape[0], w1.shape[1]), dz.dtype)],
        scratch_types=[make_staging(dz.dtype, config.slots)],
        epilogue=epilogue,
        name="grouped_mlp_grad_x",
    )
    return dx


def grad_act(
    dy: jax.Array,
    w2: jax.Array,
    a: jax.Array,
    probs: jax.Array | None,
    tiling: RowTiling,
    config: Config,
    index: jax.Array | None = None,
    *,
    scale_a: bool,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Computes `dA = dy W2^T ; dz = 2 p dA sqrt(a) ; p a ; dp = sum_I dA a`, for rows dy or dy[index].

    Returns:
      dz (R, I), `p a` (R, I) and dp (R,) float32. Past the last group dz and dp are zero, and `p a` is
      undefined. Without `scale_a`, a stands for `p a`. Without probs, dp is None.
    """
    rows, (_, width, _) = a.shape[0], w2.shape
    block = config.block_columns
    blocks, chunks = pl.cdiv(width, block), block // CHUNK
    dtype = a.dtype
    row_type = jax.ShapeDtypeStruct((rows, width), dtype)
    inputs, out_types = {"a": a}, {"dz": row_type}
    scratch: dict[str, Any] = {"chunks": make_staging(dtype, chunks)}
    scratch["loaded"] = plgpu.Barrier(num_arrivals=1, num_barriers=2 * chunks)
    if scale_a:
        out_types["pa"] = row_type
        scratch["pa_chunks"] = make_staging(dtype, config.slots)
    if probs is not None:
        inputs["p"] = pad_rows(probs)
        out_types["dp"] = jax.ShapeDtypeStruct((tiling.max_tiles, blocks, BLOCK_ROWS), jnp.float32)
    names = (*inputs, *out_types, *scratch)

    def prefetch(width, tile, wg, *refs):
        ref = dict(zip(names, refs, strict=True))
        # Copies of the previous tile may still read these slots.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for chunk in range(width // CHUNK):
            column = tile.block * block + chunk * CHUNK
            plgpu.copy_gmem_to_smem(
                ref["a"].at[pl.ds(tile.row, WG_ROWS), pl.ds(column, CHUNK)],
                ref["chunks"].at[wg, chunk],
                ref["loaded"].at[wg * chunks + chunk],
            )
        return None if probs is None else load_of_row(ref["p"], tile)

    def epilogue(acc, early, tile, wg, *refs):
        ref = dict(zip(names, refs, strict=True))
        p, twice_p, dp = None, 2.0, 0.0
        if probs is not None:
            p = lax.broadcast_in_dim(early, (WG_ROWS, CHUNK), (0,))
            twice_p = lax.broadcast_in_dim(2.0 * early, (WG_ROWS, CHUNK), (0,))
        for chunk in range(acc.shape[1] // CHUNK):
            column = tile.block * block + chunk * CHUNK
            own = ref["chunks"].at[wg, chunk]
            plgpu.barrier_wait(ref["loaded"].at[wg * chunks + chunk])
            a_chunk = own[...].astype(jnp.float32)
            da = acc[:, chunk * CHUNK : (chunk + 1) * CHUNK]
            if probs is not None:
                dp = dp + da * a_chunk
            # Each thread overwrites the elements of its own reads, so no barrier is needed.
            own[...] = (da * twice_p * jnp.sqrt(a_chunk)).astype(dtype)
            if scale_a:
                slot = chunk % config.slots
                if chunk >= config.slots:
                    plgpu.wait_smem_to_gmem(config.slots - 1, wait_read_only=True)
                ref["pa_chunks"][wg, slot] = (a_chunk * p).astype(dtype)
            plgpu.commit_smem()
            store_ragged(own, ref["dz"], tile, column)
            if scale_a:
                store_ragged(ref["pa_chunks"].at[wg, slot], ref["pa"], tile, column)
            plgpu.commit_smem_to_gmem_group()
        if probs is not None:
            ref["dp"][tile.index, tile.block, pl.ds(wg * WG_ROWS, WG_ROWS)] = jnp.sum(dp, axis=1)

    outs = rows_product(
        dy,
        w2,
        tiling,
        transpose_w=True,
        config=config,
        inputs=list(inputs.values()),
        out_types=list(out_types.values()),
        scratch_types=list(scratch.values()),
        epilogue=epilogue,
        prefetch=prefetch,
        index=index,
        name="grouped_mlp_grad_act",
    )
    out = dict(zip(out_types, outs, strict=True))
    dp = None if probs is None else sum_partials(out["dp"], tiling, rows)
    return out["dz"], out.get("pa", a), dp


def sum_partials(partial: jax.Array, tiling: RowTiling, rows: int) -> jax.Array:
    """Sums the column blocks' partial sums of each row in a fixed order: (T, blocks, 128) to (R,)."""
    _, first, low, high = tiling.tiles.T[:, :, None]
    place = lax.broadcasted_iota(jnp.int32, (tiling.max_tiles, BLOCK_ROWS), 1)
    tile = lax.broadcasted_iota(jnp.int32, place.shape, 0)
    own = (place >= low) & (place < high) & (tile < tiling.num_tiles)
    # Rows outside of their tile get distinct indices past the end, which the scatter drops.
    row = jnp.where(own, first + place, rows + tile * BLOCK_ROWS + place)
    total = jnp.sum(partial, axis=1)
    dp = jnp.zeros((rows,), jnp.float32).at[row].set(total, mode="drop", unique_indices=True)
    return jnp.where(lax.iota(jnp.int32, rows) < tiling.group_stop[-1], dp, 0.0)
