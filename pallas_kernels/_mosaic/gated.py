"""The row products of gated experts, `a = f(g) u`: FC1 with its activation, and the gradient of z = (g, u).

Both work as their counterparts in `row_products`. Shapes: R rows, H model width, I expert width, E experts.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._activation import Activation
from pallas_kernels._mosaic.row_products import OF_COLUMN, load_of_row, make_staging, pad_rows, sum_partials
from pallas_kernels._mosaic.row_tiling import BLOCK_ROWS, RowTiling
from pallas_kernels._mosaic.rows import CHUNK, WG_ROWS, rows_product, store_ragged
from pallas_kernels._mosaic.tuning import Config


def fc1_gated(
    x: jax.Array,
    w1: jax.Array,
    b1: jax.Array | None,
    tiling: RowTiling,
    config: Config,
    activation: Activation,
    index: jax.Array | None = None,
    *,
    save: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """`(g, u) = x W1 + b1 ; a = f(g) u`, for w1 (E, H, 2 I) and rows x or x[index].

    Rows past the last group are zero. A tile multiplies with a block of columns of g and the same block of u.

    Returns:
      a (R, I), and z = (g, u), (R, 2 I), or None without `save`.
    """
    inputs = [] if b1 is None else [b1.astype(jnp.float32)]
    rows = x.shape[0] if index is None else index.shape[0]
    width, block = w1.shape[2] // 2, config.block_columns
    gate = activation.gate
    assert gate is not None
    row_types = [jax.ShapeDtypeStruct((rows, columns), x.dtype) for columns in (width, 2 * width)]

    def epilogue(accs, early, tile, wg, *refs):
        *bias, a_ref, z_ref, staging = refs if save else (*refs[:-1], None, refs[-1])
        count = accs[0].shape[1]
        if bias:
            for part in range(2):
                column = pl.ds(part * width + tile.block * block, count)
                values = plgpu.load(bias[0].at[tile.expert, column], layout=OF_COLUMN, optimized=False)
                accs[part] = accs[part] + lax.broadcast_in_dim(values, accs[part].shape, (1,))
        stored = 0
        for chunk in range(count // CHUNK):
            column = tile.block * block + chunk * CHUNK
            # Rounded first: the backward pass computes a again from the saved z.
            g, u = (acc[:, chunk * CHUNK : (chunk + 1) * CHUNK].astype(x.dtype) for acc in accs)
            a = (gate(g.astype(jnp.float32))[0] * u.astype(jnp.float32)).astype(x.dtype)
            wanted = [(a, a_ref, column)]
            if save:
                wanted += [(g, z_ref, column), (u, z_ref, width + column)]
            for value, target, at in wanted:
                slot = stored % config.slots
                # At most slots - 1 copies of this tile are in flight, none of them from this slot.
                plgpu.wait_smem_to_gmem(config.slots - 1 if stored else 0, wait_read_only=True)
                staging[wg, slot] = value
                plgpu.commit_smem()
                store_ragged(staging.at[wg, slot], target, tile, at)
                plgpu.commit_smem_to_gmem_group()
                stored += 1

    a, *z = rows_product(
        x,
        w1,
        tiling,
        transpose_w=False,
        config=config,
        inputs=inputs,
        out_types=row_types[: 1 + save],
        scratch_types=[make_staging(x.dtype, config.slots)],
        epilogue=epilogue,
        index=index,
        parts=2,
        zeroed=(1, 2)[: 1 + save],
        name="grouped_mlp_fc1_gated",
    )
    return a, z[0] if save else None


def grad_act_gated(
    dy: jax.Array,
    w2: jax.Array,
    z: jax.Array,
    probs: jax.Array | None,
    tiling: RowTiling,
    config: Config,
    activation: Activation,
    index: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Computes `dA = dy W2^T ; dg = p dA u f'(g) ; du = p dA f(g) ; p a ; dp = sum_I dA a`.

    The rows are dy or dy[index].

    Returns:
      dz = (dg, du) (R, 2 I), `p a` (R, I) and dp (R,) float32. Past the last group dz and dp are zero, and
      `p a` is undefined. Without probs, p is one and dp is None.
    """
    rows, (_, width, _) = z.shape[0], w2.shape
    block = config.block_columns
    blocks, chunks = pl.cdiv(width, block), block // CHUNK
    dtype, gate = z.dtype, activation.gate
    assert gate is not None
    inputs = {"z": z}
    out_types = {
        "dz": jax.ShapeDtypeStruct((rows, 2 * width), dtype),
        "pa": jax.ShapeDtypeStruct((rows, width), dtype),
    }
    # The chunks of g, then those of u. The chunks of dg, du and at last `p a` replace them.
    scratch: dict[str, Any] = {"chunks": make_staging(dtype, 2 * chunks)}
    scratch["loaded"] = plgpu.Barrier(num_arrivals=2, num_barriers=2 * chunks)
    if probs is not None:
        inputs["p"] = pad_rows(probs)
        out_types["dp"] = jax.ShapeDtypeStruct((tiling.max_tiles, blocks, BLOCK_ROWS), jnp.float32)
    names = (*inputs, *out_types, *scratch)

    def prefetch(count, tile, wg, *refs):
        ref = dict(zip(names, refs, strict=True))
        # Copies of the previous tile may still read these slots.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for chunk in range(count // CHUNK):
            for part in range(2):
                column = part * width + tile.block * block + chunk * CHUNK
                plgpu.copy_gmem_to_smem(
                    ref["z"].at[pl.ds(tile.row, WG_ROWS), pl.ds(column, CHUNK)],
                    ref["chunks"].at[wg, part * chunks + chunk],
                    ref["loaded"].at[wg * chunks + chunk],
                )
        return None if probs is None else load_of_row(ref["p"], tile)

    def epilogue(acc, early, tile, wg, *refs):
        ref = dict(zip(names, refs, strict=True))
        p, dp = None, 0.0
        if probs is not None:
            p = lax.broadcast_in_dim(early, (WG_ROWS, CHUNK), (0,))
        scaled = []
        for chunk in range(acc.shape[1] // CHUNK):
            column = tile.block * block + chunk * CHUNK
            g_ref, u_ref = (ref["chunks"].at[wg, part * chunks + chunk] for part in range(2))
            plgpu.barrier_wait(ref["loaded"].at[wg * chunks + chunk])
            value, slope = gate(g_ref[...].astype(jnp.float32))
            u = u_ref[...].astype(jnp.float32)
            # Rounded as in the forward pass.
            a = (value * u).astype(dtype).astype(jnp.float32)
            da = acc[:, chunk * CHUNK : (chunk + 1) * CHUNK]
            if p is not None:
                dp = dp + da * a
                a, da = a * p, da * p
            # Each thread overwrites the elements of its own reads, so no barrier is needed.
            g_ref[...] = (da * u * slope).astype(dtype)
            u_ref[...] = (da * value).astype(dtype)
            scaled.append(a.astype(dtype))
            plgpu.commit_smem()
            store_ragged(g_ref, ref["dz"], tile, column)
            store_ragged(u_ref, ref["dz"], tile, width + column)
            plgpu.commit_smem_to_gmem_group()
        for chunk, a in enumerate(scaled):
            # The copies of the slot's dg are complete; those of later chunks are in flight.
            plgpu.wait_smem_to_gmem(len(scaled) - 1, wait_read_only=True)
            slot = ref["chunks"].at[wg, chunk]
            slot[...] = a
            plgpu.commit_smem()
            store_ragged(slot, ref["pa"], tile, tile.block * block + chunk * CHUNK)
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
        zeroed=(2,),
        name="grouped_mlp_grad_act_gated",
    )
    out = dict(zip(out_types, outs, strict=True))
    dp = None if probs is None else sum_partials(out["dp"], tiling, rows)
    return out["dz"], out["pa"], dp
