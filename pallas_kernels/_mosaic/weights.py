"""The kernel of the weight gradients: for each expert, a product summed over the expert's rows.

Programs, warpgroups and ring work as in `pallas_kernels._mosaic.rows`. The sum takes 64 rows a step. A group
may begin and end at any row, while the copy engine starts at multiples of eight rows. The kernel reads whole
steps from inside the group. XLA gathers the remaining rows at both ends into one or two steps, filled up with
zeros. No step needs a mask, and a NaN in one group does not reach another group's gradient.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

# pyright: reportAbstractUsage=false, reportPrivateImportUsage=false
# (JAX declares the transforms abstract and does not list ACC.)
from pallas_kernels._compat import varying_axes
from pallas_kernels._implementation import count_cores
from pallas_kernels._mosaic.ring import Ring
from pallas_kernels._mosaic.row_copies import RowCopies, fence_rows, pad_index
from pallas_kernels._mosaic.row_tiling import ROW_ALIGNMENT, RowTiling
from pallas_kernels._mosaic.rows import COPY_REGISTERS, OPERAND, PRODUCT_REGISTERS, list_widths, walk
from pallas_kernels._mosaic.tuning import Config

# Rows of an output tile: M columns of the left operand. Two warpgroups multiply 64 each.
BLOCK_M = 128

# Rows of x in a step of the product: a whole swizzled tile, the smallest K that Mosaic compiles.
STEP = 64

# Rows of an output tile for one warpgroup, the M of a `wgmma` instruction.
WG_M = BLOCK_M // 2

# Rows. Bound of a group's remaining rows: less than a step, and less than an aligned unit at either end.
_LEFT_OVER = STEP + 2 * ROW_ALIGNMENT


class _GroupSteps(NamedTuple):
    """The steps of each group, as (E,) int32 arrays, largest group first.

    Attributes:
      start: first row of the whole steps.
      whole: number of whole steps.
      total: number of steps, with the steps of the remaining rows.
      expert: the group's expert.
    """

    start: jax.Array
    whole: jax.Array
    total: jax.Array
    expert: jax.Array


def grad_weight(
    left: jax.Array,
    right: jax.Array,
    tiling: RowTiling,
    dtype: Any,
    config: Config,
    accumulator: jax.Array | None = None,
    *,
    left_index: jax.Array | None = None,
    right_index: jax.Array | None = None,
) -> jax.Array:
    """Computes `out[e] = left[rows of e]^T right[rows of e]`, without transposing an operand in memory.

    With an index, row r of that operand is `left[index[r]]`, read by the copying warpgroup.

    Args:
      left: (R, M), or (T, M) with `left_index`.
      right: (R, N), or (T, N) with `right_index`.
      tiling: the bounds of the groups.
      dtype: dtype of the output.
      config: tile size and tile order.
      accumulator: (E, M, N) float32 array to add to, in place where the caller donates its buffer. The output
        is then float32.
      left_index: (R,) int32 or None.
      right_index: (R,) int32 or None. One of the two at most.

    Returns:
      (E, M, N), zero for an expert without rows.
    """
    if accumulator is not None and varying_axes(accumulator):
        # Inside shard_map a kernel takes no reference to a device-varying value.
        indices = dict(left_index=left_index, right_index=right_index)
        return accumulator + grad_weight(left, right, tiling, jnp.float32, config, **indices)
    (_, m), (_, n) = left.shape, right.shape
    experts = tiling.group_first.shape[0]
    block, stages, slots = config.block_columns, config.stages, config.slots
    m_blocks, n_blocks = pl.cdiv(m, BLOCK_M), pl.cdiv(n, block)
    last_width, last_height = n - (n_blocks - 1) * block, m - (m_blocks - 1) * BLOCK_M
    per_expert = m_blocks * n_blocks
    programs = min(count_cores(), experts * per_expert)
    chunk_width = 128 // jnp.dtype(dtype).itemsize  # columns of a swizzled row of 128 bytes

    assert left_index is None or right_index is None
    index = right_index if left_index is None else left_index
    gathers = index is not None
    steps, left_ends, right_ends = _cut(tiling, (left, left_index), (right, right_index))

    def body(left_gmem, right_gmem, left_ends, right_ends, *refs):
        index_gmem, *refs = refs if gathers else (None, *refs)
        steps_gmem, out_gmem = _GroupSteps(*refs[:4]), refs[4]
        left_smem, right_smem, staging, full, empty, summand = refs[5:]
        ring = Ring(full, empty, stages)
        wg, program = lax.axis_index("wg"), lax.axis_index("program")
        my_tiles = (experts * per_expert - program + programs - 1) // programs

        def tile_at(i):
            """Reads the program's i-th tile: its blocks of M and N, and the steps of its group."""
            linear = program + jnp.minimum(i, my_tiles - 1) * programs
            nth = lax.div(linear, jnp.int32(per_expert))
            m_at, n_at = walk(lax.rem(linear, jnp.int32(per_expert)), (m_blocks, n_blocks), config)
            return m_at, n_at, _GroupSteps(*(field[nth] for field in steps_gmem))

        @pl.when(wg == 2)
        def producer():
            plgpu.set_max_registers(COPY_REGISTERS[gathers], action="decrease")
            copies = RowCopies(ring, OPERAND, bounded=True)

            def load_tile(i, carry):
                step, (m_at, n_at, steps) = carry
                ahead = tile_at(i + 1)
                operands = (
                    (left_gmem, left_ends, left_smem, pl.ds(m_at * BLOCK_M, BLOCK_M), left_index),
                    (right_gmem, right_ends, right_smem, pl.ds(n_at * block, block), right_index),
                )

                def copy(k, step, slot, whole):
                    if whole:
                        rows = pl.ds(pl.multiple_of(steps.start + k * STEP, ROW_ALIGNMENT), STEP)
                    else:
                        rows = pl.ds(pl.multiple_of((k - steps.whole) * STEP, STEP), STEP)
                    for source, ends, target, columns, index in operands:
                        if index is not None and index_gmem is not None:
                            chosen = index_gmem.at[rows] if whole else ends.at[steps.expert, rows]
                            copies.start(step, source, columns, chosen, target.at[slot])
                        else:
                            tile = source.at[rows, columns] if whole else ends.at[steps.expert, rows, columns]
                            plgpu.copy_gmem_to_smem(tile, target.at[slot], full.at[slot])

                def load(k, step):
                    if gathers:
                        copies.publish_before(step)
                    slot = ring.claim(step)
                    pl.when(k < steps.whole)(lambda: copy(k, step, slot, whole=True))
                    pl.when(k >= steps.whole)(lambda: copy(k, step, slot, whole=False))
                    return step + 1

                return lax.fori_loop(0, steps.total, load, step), ahead

            done, _ = lax.fori_loop(0, my_tiles, load_tile, (jnp.int32(0), tile_at(0)))
            if gathers:
                copies.finish(done)
            ring.drain(done)

        @pl.when(wg < 2)
        def consumer():
            plgpu.set_max_registers(PRODUCT_REGISTERS[gathers], action="increase")

            def multiply(width, step, count, acc):
                def issue(slot):
                    if gathers:
                        fence_rows()
                    plgpu.wgmma(
                        acc,
                        left_smem.at[slot, :, pl.ds(wg * WG_M, WG_M)].transpose((1, 0)),
                        right_smem.at[slot, :, pl.ds(0, width)],
                    )

                step = ring.multiply(0, count, step, issue)
                # An expert without rows has no step. The accumulator starts as zero, the gradient.
                pl.when(count > 0)(functools.partial(ring.finish, step))
                return acc[...]

            def store(acc, expert, m_at, n_at):
                chunks = acc.shape[1] // chunk_width
                for begin in range(0, chunks, slots):
                    group = range(begin, min(begin + slots, chunks))
                    targets = [
                        out_gmem.at[
                            expert,
                            pl.ds(m_at * BLOCK_M + wg * WG_M, WG_M),
                            pl.ds(n_at * block + chunk * chunk_width, chunk_width),
                        ]
                        for chunk in group
                    ]
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    if accumulator is not None:
                        for slot, target in enumerate(targets):
                            plgpu.copy_gmem_to_smem(
                                target, staging.at[wg, slot], summand.at[wg * slots + slot]
                            )
                    for slot, chunk in enumerate(group):
                        value = acc[:, chunk * chunk_width : (chunk + 1) * chunk_width]
                        if accumulator is not None:
                            plgpu.barrier_wait(summand.at[wg * slots + slot])
                            # Each thread overwrites the elements of its own reads: no barrier is needed.
                            value = value + staging[wg, slot]
                        staging[wg, slot] = value.astype(dtype)
                    plgpu.commit_smem()
                    for slot, target in enumerate(targets):
                        plgpu.copy_smem_to_gmem(staging.at[wg, slot], target)

            def run_tile(i, carry):
                step, (m_at, n_at, steps) = carry
                ahead = tile_at(i + 1)
                inside = (m_at < m_blocks - 1) | (wg * WG_M < last_height)
                for width, here in list_widths(block, last_width, n_blocks, n_at):

                    @pl.when(here & inside)
                    def _(width=width):
                        acc = pl.run_scoped(
                            functools.partial(multiply, width, step, steps.total),
                            plgpu.ACC((WG_M, width), jnp.float32),
                        )
                        store(acc, steps.expert, m_at, n_at)

                pl.when(~inside)(functools.partial(ring.skip, step, steps.total))
                return step + steps.total, ahead

            lax.fori_loop(0, my_tiles, run_tile, (jnp.int32(0), tile_at(0)))
            plgpu.wait_smem_to_gmem(0)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((experts, m, n), dtype) if accumulator is None else (),
        grid=(programs,),
        grid_names=("program",),
        num_threads=3,
        thread_name="wg",
        kernel_name="grouped_mlp_grad_weight",
        scratch_types=[
            plgpu.SMEM((stages, STEP, BLOCK_M), left.dtype, transforms=OPERAND),
            plgpu.SMEM((stages, STEP, block), right.dtype, transforms=OPERAND),
            plgpu.SMEM(
                (2, slots, WG_M, chunk_width),
                dtype,
                transforms=(plgpu.TilingTransform((8, chunk_width)), plgpu.SwizzleTransform(128)),
            ),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_arrivals=1, num_barriers=2 * slots),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )
    indices = [pad_index(index, STEP)] if index is not None else []
    operands = left, right, left_ends, right_ends, *indices, *steps
    if accumulator is None:
        return kernel(*operands)
    total = jax.new_ref(accumulator)
    kernel(*operands, total)
    return jax.freeze(total)


type _Operand = tuple[jax.Array, jax.Array | None]


def _cut(tiling: RowTiling, left: _Operand, right: _Operand) -> tuple[_GroupSteps, jax.Array, jax.Array]:
    """Cuts each group into steps, the largest group first, and gathers the rows outside of whole steps.

    Args:
      tiling: the bounds of the groups.
      left: the operand and its index.
      right: the operand and its index.

    Returns:
      The steps, and for each operand the groups' remaining rows: (E, 80, N), filled up with zeros. For an
      operand with an index: their indices (E, 128), filled up with -1.
    """
    first, stop = tiling.group_first, tiling.group_stop
    inside = (first + ROW_ALIGNMENT - 1) // ROW_ALIGNMENT * ROW_ALIGNMENT
    whole = jnp.maximum(stop // ROW_ALIGNMENT * ROW_ALIGNMENT - inside, 0) // STEP
    start = jnp.where(whole > 0, inside, first)
    left_over = stop - first - whole * STEP
    total = whole + (left_over + STEP - 1) // STEP

    place = lax.iota(jnp.int32, _LEFT_OVER)[None]
    before = (start - first)[:, None]
    row = first[:, None] + place + jnp.where(place < before, 0, (whole * STEP)[:, None])
    own = place < left_over[:, None]

    def gather_ends(x, index):
        at = jnp.where(own, row, 0)
        if index is None:
            rows = x.at[at].get(mode="promise_in_bounds")
            return jnp.where(own[:, :, None], rows, jnp.zeros((), x.dtype))
        chosen = jnp.where(own, index.at[at].get(mode="promise_in_bounds"), -1)
        return jnp.pad(chosen, ((0, 0), (0, 2 * STEP - _LEFT_OVER)), constant_values=-1)

    order = tiling.largest_first
    sorted_ = _GroupSteps(start[order], whole[order], total[order], order)
    return sorted_, gather_ends(*left), gather_ends(*right)
