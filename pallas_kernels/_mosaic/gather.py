"""The kernels of the dispatch and of the combine: rows by index, and sums of rows by index.

Both run at the speed of device memory. `gather_rows` moves whole rows by the copy engine, through slots in
shared memory; no value passes through a register. `sum_rows` reads the rows of a token from global memory.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

# pyright: reportAbstractUsage=false, reportPrivateImportUsage=false
# (JAX declares the transforms abstract.)
from pallas_kernels._implementation import count_cores
from pallas_kernels._mosaic.row_tiling import ROW_ALIGNMENT

# Bytes of a slot of `gather_rows`, at most, where a row is not larger.
_SLOT_NBYTES = 32 * 2**10

# Bytes of shared memory for the slots of `gather_rows`.
_RING_NBYTES = 192 * 2**10

# Slots. More are of no use: a slot is filled while the slot before it is stored.
_MAX_SLOTS = 8

# Threads of a warpgroup, and 16-bit elements of the widest load of a thread.
_THREADS, _VECTOR = 128, 8


def gather_rows(x: jax.Array, index: jax.Array) -> jax.Array:
    """Computes `x[index]`.

    Args:
      x: (T, H), H a multiple of 64.
      index: (R,) int32, each in 0 to T - 1, R a multiple of `ROW_ALIGNMENT`.

    Returns:
      (R, H).
    """
    (rows,), width = index.shape, x.shape[1]
    row_nbytes = width * x.dtype.itemsize
    if 2 * row_nbytes > _RING_NBYTES:
        return x.at[index].get(mode="promise_in_bounds")
    height = ROW_ALIGNMENT
    while height > 1 and height * row_nbytes > _SLOT_NBYTES:
        height //= 2
    slots = max(2, min(_MAX_SLOTS, _RING_NBYTES // (height * row_nbytes)))
    blocks = rows // height
    programs = min(count_cores(), blocks)

    def body(x_gmem, index_gmem, out_gmem, ring, full):
        program = lax.axis_index("program")
        my_blocks = (blocks - program + programs - 1) // programs

        def first_row(i):
            return (program + i * programs) * height

        def load(i):
            slot = lax.rem(i, jnp.int32(slots))
            chosen = [index_gmem[first_row(i) + place] for place in range(height)]
            for place, row in enumerate(chosen):
                plgpu.copy_gmem_to_smem(
                    x_gmem.at[pl.ds(row, 1)],
                    ring.at[slot, pl.ds(place, 1)],
                    full.at[slot],
                    oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
                )

        for i in range(slots - 1):
            pl.when(i < my_blocks)(lambda i=i: load(jnp.int32(i)))

        def move(i, _):
            slot = lax.rem(i, jnp.int32(slots))
            plgpu.barrier_wait(full.at[slot])
            plgpu.copy_smem_to_gmem(ring.at[slot], out_gmem.at[pl.ds(first_row(i), height)])
            # The next load goes to the slot of the store before this store.
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            pl.when(i + slots - 1 < my_blocks)(lambda: load(i + slots - 1))

        lax.fori_loop(0, my_blocks, move, None)
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, width), x.dtype),
        grid=(programs,),
        grid_names=("program",),
        kernel_name="moe_gather_rows",
        scratch_types=[
            plgpu.SMEM((slots, height, width), x.dtype),
            plgpu.Barrier(num_arrivals=height, num_barriers=slots),
        ],
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )(x, index)


def sum_rows(rows: jax.Array, index: jax.Array) -> jax.Array:
    """Computes `sum_j rows[index[t, j]]` in float32, in the order of j.

    Args:
      rows: (R, H), H a multiple of 64.
      index: (T, k) int32, each in 0 to R - 1.

    Returns:
      (T, H), the rows' dtype.
    """
    (tokens, k), width = index.shape, rows.shape[1]
    if width < _THREADS:
        copies = rows.at[index].get(mode="promise_in_bounds")
        return jnp.sum(copies.astype(jnp.float32), axis=1).astype(rows.dtype)

    def body(rows_gmem, index_gmem, out_gmem):
        token = lax.axis_index("token")
        chosen = [index_gmem[token * k + j] for j in range(k)]
        for first, count, vector in _pieces(width):
            columns = pl.ds(first, count)
            layout = plgpu.Layout.WG_STRIDED((count,), vec_size=vector)
            loaded = [
                plgpu.load(rows_gmem.at[row, columns], layout=layout, optimized=False) for row in chosen
            ]
            total = loaded[0].astype(jnp.float32)
            for value in loaded[1:]:
                total = total + value.astype(jnp.float32)
            out_gmem[token, columns] = total.astype(out_gmem.dtype)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((tokens, width), rows.dtype),
        grid=(tokens,),
        grid_names=("token",),
        kernel_name="moe_sum_rows",
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )(rows, index.reshape(-1))


def _pieces(width: int) -> Iterator[tuple[int, int, int]]:
    """Cuts a row into pieces for the threads of a warpgroup: (first column, columns, elements a load).

    The last piece of an odd multiple of 64 begins 64 columns early and stores equal values twice.
    """
    first = 0
    for vector in (_VECTOR, 4, 2, 1):
        while width - first >= _THREADS * vector:
            yield first, _THREADS * vector, vector
            first += _THREADS * vector
    if first < width:
        yield width - _THREADS, _THREADS, 1
