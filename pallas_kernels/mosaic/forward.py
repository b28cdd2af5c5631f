"""The row products of the grouped MLP: FC1 with its activation, FC2, and their gradients toward the rows."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic.rows import CHUNK, RAGGED, WG_ROWS, Tile, rows_product, store_ragged
from pallas_kernels.mosaic.schedule import BLOCK_ROWS, Schedule
from pallas_kernels.mosaic.tuning import RowsConfig

_OF_ROW = plgpu.Layout.WGMMA.reduce(1)
_OF_COLUMN = plgpu.Layout.WGMMA.reduce(0)


def _pad_rows(p: jax.Array) -> jax.Array:
    """Lets the last tile read past the last row: such a read has no bounds check."""
    return jnp.pad(p.astype(jnp.float32), (0, BLOCK_ROWS))


def _staging(dtype):
    """Two chunks for each of the two multiplying warpgroups."""
    return plgpu.SMEM((2, 2, WG_ROWS, CHUNK), dtype, transforms=RAGGED)


def _store_chunks(acc, tile: Tile, wg, target, staging, block: int) -> None:
    """Writes an accumulator out in chunks, copying one while the next is converted."""
    for chunk in range(acc.shape[1] // CHUNK):
        slot = chunk % 2
        # The number of chunks may be odd: the first slot is then used twice in a row, from tile to tile.
        plgpu.wait_smem_to_gmem(0 if chunk == 0 else 1, wait_read_only=True)
        staging[wg, slot] = acc[:, chunk * CHUNK : (chunk + 1) * CHUNK].astype(target.dtype)
        plgpu.commit_smem()
        store_ragged(staging.at[wg, slot], target, tile, tile.block * block + chunk * CHUNK)
        plgpu.commit_smem_to_gmem_group()


def _load_of_row(ref, tile: Tile):
    return plgpu.load(ref.at[pl.ds(tile.row, WG_ROWS)], layout=_OF_ROW, optimized=False)


def _load_of_column(ref, tile: Tile, block: int, width: int):
    column = pl.ds(tile.block * block, width)
    return plgpu.load(ref.at[tile.expert, column], layout=_OF_COLUMN, optimized=False)


def fc1(
    x: jax.Array, w1: jax.Array, b1: jax.Array | None, schedule: Schedule, config: RowsConfig = RowsConfig()
) -> jax.Array:
    """`a = relu(x W1 + b1)^2`, (R, I); rows past the last group are zero."""
    inputs = [] if b1 is None else [b1.astype(jnp.float32)]

    def epilogue(acc, tile, wg, *refs):
        *bias, target, staging = refs
        if bias:
            values = _load_of_column(bias[0], tile, config.block_columns, acc.shape[1])
            acc = acc + lax.broadcast_in_dim(values, acc.shape, (1,))
        on = jnp.maximum(acc, 0.0)
        _store_chunks(on * on, tile, wg, target, staging, config.block_columns)

    (a,) = rows_product(
        x,
        w1,
        schedule,
        transpose_w=False,
        config=config,
        inputs=inputs,
        out_types=[jax.ShapeDtypeStruct((x.shape[0], w1.shape[2]), x.dtype)],
        scratch_types=[_staging(x.dtype)],
        epilogue=epilogue,
        name="grouped_mlp_fc1",
    )
    return a


def fc2(
    a: jax.Array,
    w2: jax.Array,
    b2: jax.Array | None,
    probs: jax.Array | None,
    schedule: Schedule,
    config: RowsConfig = RowsConfig(),
) -> jax.Array:
    """`y = p (a W2 + b2)`, (R, H); rows past the last group are zero."""
    inputs = [] if b2 is None else [b2.astype(jnp.float32)]
    inputs += [] if probs is None else [_pad_rows(probs)]

    def epilogue(acc, tile, wg, *refs):
        *more, target, staging = refs
        if b2 is not None:
            values = _load_of_column(more[0], tile, config.block_columns, acc.shape[1])
            acc = acc + lax.broadcast_in_dim(values, acc.shape, (1,))
        if probs is not None:
            acc = acc * lax.broadcast_in_dim(_load_of_row(more[-1], tile), acc.shape, (0,))
        _store_chunks(acc, tile, wg, target, staging, config.block_columns)

    (y,) = rows_product(
        a,
        w2,
        schedule,
        transpose_w=False,
        config=config,
        inputs=inputs,
        out_types=[jax.ShapeDtypeStruct((a.shape[0], w2.shape[2]), a.dtype)],
        scratch_types=[_staging(a.dtype)],
        epilogue=epilogue,
        name="grouped_mlp_fc2",
    )
    return y


def grad_x(
    dz: jax.Array, w1: jax.Array, schedule: Schedule, config: RowsConfig = RowsConfig(block_columns=192)
) -> jax.Array:
    """`dx = dz W1^T`, (R, H); rows past the last group are zero."""

    def epilogue(acc, tile, wg, target, staging):
        _store_chunks(acc, tile, wg, target, staging, config.block_columns)

    (dx,) = rows_product(
        dz,
        w1,
        schedule,
        transpose_w=True,
        config=config,
        inputs=[],
        out_types=[jax.ShapeDtypeStruct((dz.shape[0], w1.shape[1]), dz.dtype)],
        scratch_types=[_staging(dz.dtype)],
        epilogue=epilogue,
        name="grouped_mlp_grad_x",
    )
    return dx


def grad_act(
    dy: jax.Array,
    w2: jax.Array,
    a: jax.Array,
    probs: jax.Array | None,
    schedule: Schedule,
    config: RowsConfig = RowsConfig(block_columns=192),
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """`dA = dy W2^T ; dz = 2 p dA sqrt(a) ; p a ; dp = sum_I dA a`.

    Returns:
      dz (R, I), `p a` (R, I) whose rows past the last group hold anything, and dp (R,) float32, zero there.
      Without probs, `p a` is a itself and dp is None.
    """
    rows, (_, width, _) = a.shape[0], w2.shape
    block = config.block_columns
    blocks = pl.cdiv(width, block)
    has_p = probs is not None
    dtype = a.dtype
    out_types = [jax.ShapeDtypeStruct((rows, width), dtype)]
    scratch = [_staging(dtype), _staging(dtype), plgpu.Barrier(num_arrivals=1, num_barriers=4)]
    if has_p:
        out_types += [
            jax.ShapeDtypeStruct((rows, width), dtype),
            jax.ShapeDtypeStruct((schedule.max_tiles, blocks, BLOCK_ROWS), jnp.float32),
        ]

    def epilogue(acc, tile, wg, a_gmem, *refs):
        if has_p:
            p_gmem, dz_gmem, pa_gmem, dp_gmem, dz_smem, a_smem, loaded = refs
            p = lax.broadcast_in_dim(_load_of_row(p_gmem, tile), (WG_ROWS, CHUNK), (0,))
        else:
            dz_gmem, dz_smem, a_smem, loaded = refs
            p = pa_gmem = dp_gmem = None
        chunks = acc.shape[1] // CHUNK
        first = tile.block * block

        def load(chunk):
            plgpu.copy_gmem_to_smem(
                a_gmem.at[pl.ds(tile.row, WG_ROWS), pl.ds(first + chunk * CHUNK, CHUNK)],
                a_smem.at[wg, chunk % 2],
                loaded.at[wg * 2 + chunk % 2],
            )

        # Both slots may still be on their way out, from the tile before.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for chunk in range(min(2, chunks)):
            load(chunk)
        dp = None
        for chunk in range(chunks):
            slot = chunk % 2
            plgpu.barrier_wait(loaded.at[wg * 2 + slot])
            a_chunk = a_smem[wg, slot].astype(jnp.float32)
            da = acc[:, chunk * CHUNK : (chunk + 1) * CHUNK]
            if has_p:
                dp = da * a_chunk if dp is None else dp + da * a_chunk
                da = da * p
            dz_smem[wg, slot] = (2.0 * da * jnp.sqrt(a_chunk)).astype(dtype)
            if has_p:
                # Each thread writes where it has read.
                a_smem[wg, slot] = (a_chunk * p).astype(dtype)
            plgpu.commit_smem()
            column = first + chunk * CHUNK
            store_ragged(dz_smem.at[wg, slot], dz_gmem, tile, column)
            if has_p:
                store_ragged(a_smem.at[wg, slot], pa_gmem, tile, column)
            plgpu.commit_smem_to_gmem_group()
            if chunk + 2 < chunks:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                load(chunk + 2)
        if has_p:
            dp_gmem[tile.index, tile.block, pl.ds(wg * WG_ROWS, WG_ROWS)] = jnp.sum(dp, axis=1)

    outs = rows_product(
        dy,
        w2,
        schedule,
        transpose_w=True,
        config=config,
        inputs=[a] + ([_pad_rows(probs)] if has_p else []),
        out_types=out_types,
        scratch_types=scratch,
        epilogue=epilogue,
        name="grouped_mlp_grad_act",
    )
    if not has_p:
        return outs[0], a, None
    dz, pa, partial = outs
    return dz, pa, _sum_partials(partial, schedule, rows)


def _sum_partials(partial: jax.Array, schedule: Schedule, rows: int) -> jax.Array:
    """Adds what each block of columns gave to a row, always in the same order: (T, blocks, 128) to (R,)."""
    row = lax.iota(jnp.int32, rows)
    first = schedule.tiles[:, 1] + schedule.tiles[:, 2]
    # The last tile whose first own row is at or before the row. Tiles past the end repeat the last one.
    tile = jnp.searchsorted(first, row, side="right", method="sort").astype(jnp.int32) - 1
    tile = jnp.minimum(tile, schedule.num_tiles[0] - 1)
    total = jnp.sum(partial, axis=1)
    dp = total[tile, row - schedule.tiles[tile, 1]]
    return jnp.where(row < schedule.group_stop[-1], dp, 0.0)
