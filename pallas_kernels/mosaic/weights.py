"""The gradient of the weights: for each expert, a product over its rows (Hopper).

The kernel is built like that of `pallas_kernels.mosaic.rows`. Here the rows are summed over, and a group
may begin and end at any row, while the copy engine moves slabs of eight. A slab that two groups share is
therefore laid out beforehand, once for each, with the rows of the other set to zero; so a NaN in a row of one
group does not reach the gradient of another, and no step of the product masks anything.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.implementation import num_cores
from pallas_kernels.mosaic.rows import OPERAND, widths
from pallas_kernels.mosaic.schedule import ROW_ALIGNMENT, Schedule
from pallas_kernels.mosaic.tuning import Config

BLOCK_M = 128
STEP = 64  # rows that one step of the product takes
WG_M = BLOCK_M // 2
_SLABS = STEP // ROW_ALIGNMENT


def grad_weight(
    left: jax.Array,
    right: jax.Array,
    schedule: Schedule,
    dtype: Any,
    config: Config,
    accumulator: jax.Array | None = None,
) -> jax.Array:
    """`out[e] = left[rows of e]^T right[rows of e]`.

    Neither operand is transposed in memory.

    Args:
      left: (R, M).
      right: (R, N).
      schedule: whose rows are whose.
      dtype: of the output.
      config: tile sizes and order.
      accumulator: (E, M, N) float32 to add to, in place where the caller's buffer allows; dtype is then
        float32.

    Returns:
      (E, M, N); zero for an expert without rows.
    """
    (_, m), (_, n) = left.shape, right.shape
    experts = schedule.group_first.shape[0]
    block, stages, slots = config.block_columns, config.stages, config.slots
    m_blocks, n_blocks = pl.cdiv(m, BLOCK_M), pl.cdiv(n, block)
    last_width, last_height = n - (n_blocks - 1) * block, m - (m_blocks - 1) * BLOCK_M
    per_expert = m_blocks * n_blocks
    programs = min(num_cores(), experts * per_expert)
    chunk_width = 128 // jnp.dtype(dtype).itemsize  # columns that are stored at once

    def body(*refs):
        (left_gmem, right_gmem, left_edges, right_edges, first_gmem, stop_gmem, order_gmem, out_gmem) = refs[
            :8
        ]
        left_smem, right_smem, staging, whole, ragged, empty, summand = refs[8:]
        wg, program = lax.axis_index("wg"), lax.axis_index("program")
        my_tiles = (experts * per_expert - program + programs - 1) // programs

        def tile_at(i):
            """Reads the program's i-th tile: expert, block of M, block of N, and its group's rows."""
            linear = program + jnp.minimum(i, my_tiles - 1) * programs
            expert = order_gmem[lax.div(linear, jnp.int32(per_expert))]
            m_at, n_at = plgpu.planar_snake(
                lax.rem(linear, jnp.int32(per_expert)),
                (m_blocks, n_blocks),
                config.minor,
                min(config.width, (m_blocks, n_blocks)[config.minor]),
            )
            return expert, m_at, n_at, first_gmem[expert], stop_gmem[expert]

        def steps_of(first, stop):
            origin = first // ROW_ALIGNMENT * ROW_ALIGNMENT
            return origin, jnp.where(stop > first, lax.div(stop - origin + (STEP - 1), jnp.int32(STEP)), 0)

        def slot_of(step):
            return lax.rem(step, jnp.int32(stages))

        def is_ragged(row, first, stop):
            """Whether a step that starts at a row takes rows of other groups."""
            return (row < first) | (row + STEP > stop)

        @pl.when(wg == 2)
        def producer():
            plgpu.set_max_registers(40, action="decrease")

            def load_tile(i, carry):
                step, (expert, m_at, n_at, first, stop) = carry
                ahead = tile_at(i + 1)
                origin, steps = steps_of(first, stop)
                operands = (
                    (left_gmem, left_edges, left_smem, pl.ds(m_at * BLOCK_M, BLOCK_M)),
                    (right_gmem, right_edges, right_smem, pl.ds(n_at * block, block)),
                )

                def load_whole(row, slot):
                    for source, _, target, columns in operands:
                        plgpu.copy_gmem_to_smem(
                            source.at[pl.ds(row, STEP), columns], target.at[slot], whole.at[slot]
                        )

                def load_slabs(row, slot):
                    for slab in range(_SLABS):
                        at = pl.multiple_of(row + slab * ROW_ALIGNMENT, ROW_ALIGNMENT)
                        inside = (at >= first) & (at + ROW_ALIGNMENT <= stop)
                        last = jnp.where(at < stop, experts + expert, 2 * experts)
                        edge = jnp.where(at < first, expert, last)
                        for source, edges, target, columns in operands:
                            piece = target.at[slot, pl.ds(slab * ROW_ALIGNMENT, ROW_ALIGNMENT)]

                            @pl.when(inside)
                            def _(source=source, piece=piece, columns=columns, at=at):
                                own = source.at[pl.ds(at, ROW_ALIGNMENT), columns]
                                plgpu.copy_gmem_to_smem(own, piece, ragged.at[slot])

                            @pl.when(~inside)
                            def _(edges=edges, piece=piece, columns=columns, edge=edge):
                                plgpu.copy_gmem_to_smem(edges.at[edge, :, columns], piece, ragged.at[slot])

                def load(k, step):
                    slot = slot_of(step)

                    @pl.when(step >= stages)
                    def _():
                        plgpu.barrier_wait(empty.at[slot])

                    row = pl.multiple_of(origin + k * STEP, ROW_ALIGNMENT)
                    shared = is_ragged(row, first, stop)
                    pl.when(shared)(functools.partial(load_slabs, row, slot))
                    pl.when(~shared)(functools.partial(load_whole, row, slot))
                    return step + 1

                return lax.fori_loop(0, steps, load, step), ahead

            steps, _ = lax.fori_loop(0, my_tiles, load_tile, (jnp.int32(0), tile_at(0)))

            # A barrier may not be given up with a phase that nobody saw.
            def drain(j, _):
                plgpu.barrier_wait(empty.at[slot_of(steps + j)])

            lax.fori_loop(jnp.maximum(0, stages - steps), stages, drain, None)

        @pl.when(wg < 2)
        def consumer():
            plgpu.set_max_registers(232, action="increase")

            def await_step(k, step, group):
                first, stop = group
                origin, _ = steps_of(first, stop)
                slot = slot_of(step)
                shared = is_ragged(origin + k * STEP, first, stop)
                pl.when(shared)(lambda: plgpu.barrier_wait(ragged.at[slot]))
                pl.when(~shared)(lambda: plgpu.barrier_wait(whole.at[slot]))
                return slot

            def release(step):
                plgpu.barrier_arrive(empty.at[slot_of(step)])

            def multiply(width, step, group, acc):
                _, steps = steps_of(*group)

                def multiply_step(k, step):
                    slot = await_step(k, step, group)
                    plgpu.wgmma(
                        acc,
                        left_smem.at[slot, :, pl.ds(wg * WG_M, WG_M)].transpose((1, 0)),
                        right_smem.at[slot, :, pl.ds(0, width)],
                    )
                    plgpu.wgmma_wait(1)

                    @pl.when(k > 0)
                    def _():
                        release(step + (stages - 1))

                    return step + 1

                step = lax.fori_loop(0, steps, multiply_step, step)
                plgpu.wgmma_wait(0)

                @pl.when(steps > 0)
                def _():
                    release(step + (stages - 1))

                return acc[...]

            def skip(step, group):
                """Keeps in step with the ring where the half lies below the last row of the output."""

                def pass_on(k, step):
                    await_step(k, step, group)
                    release(step)
                    return step + 1

                lax.fori_loop(0, steps_of(*group)[1], pass_on, step)

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
                            # Each thread writes where it has read.
                            value = value + staging[wg, slot]
                        staging[wg, slot] = value.astype(dtype)
                    plgpu.commit_smem()
                    for slot, target in enumerate(targets):
                        plgpu.copy_smem_to_gmem(staging.at[wg, slot], target)

            def run_tile(i, carry):
                step, (expert, m_at, n_at, *group) = carry
                ahead = tile_at(i + 1)
                inside = (m_at < m_blocks - 1) | (wg * WG_M < last_height)
                for width, here in widths(block, last_width, n_blocks, n_at):

                    @pl.when(here & inside)
                    def _(width=width):
                        acc = pl.run_scoped(
                            functools.partial(multiply, width, step, group),
                            plgpu.ACC((WG_M, width), jnp.float32),
                        )
                        store(acc, expert, m_at, n_at)

                pl.when(~inside)(functools.partial(skip, step, group))
                return step + steps_of(*group)[1], ahead

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
            plgpu.Barrier(num_arrivals=2 * _SLABS, num_barriers=stages),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_arrivals=1, num_barriers=2 * slots),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )
    operands = left, right, _edges(left, schedule), _edges(right, schedule)
    operands += schedule.group_first, schedule.group_stop, schedule.largest_first
    if accumulator is None:
        return kernel(*operands)
    total = jax.new_ref(accumulator)
    kernel(*operands, total)
    return jax.freeze(total)


def _edges(x: jax.Array, schedule: Schedule) -> jax.Array:
    """Lays out the slabs that groups share: (R, N) to (2 E + 1, 8, N).

    The slab in which each group starts, then the one in which each ends, with the rows of other groups set to
    zero, then one of zeros.
    """
    first, stop = schedule.group_first, schedule.group_stop
    start = jnp.concatenate([first, jnp.maximum(stop - 1, 0)]) // ROW_ALIGNMENT * ROW_ALIGNMENT
    row = start[:, None] + lax.iota(jnp.int32, ROW_ALIGNMENT)
    own = (row >= jnp.tile(first, 2)[:, None]) & (row < jnp.tile(stop, 2)[:, None])
    slabs = jnp.where(own[:, :, None], x.at[row].get(mode="clip"), jnp.zeros((), x.dtype))
    return jnp.pad(slabs, [(0, 1), (0, 0), (0, 0)])
