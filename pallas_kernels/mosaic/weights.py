"""The gradient of the weights: for each expert, a product over its rows (Hopper)."""

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


def grad_weight(
    left: jax.Array,
    right: jax.Array,
    schedule: Schedule,
    dtype: Any,
    config: Config = Config(192, slots=3),
    accumulator: jax.Array | None = None,
) -> jax.Array:
    """`out[e] = left[rows of e]^T right[rows of e]`.

    Neither operand is transposed in memory, and rows of other groups, which the first and the last step of a
    group may see, are set to zero in shared memory, so that a NaN there does not spread.

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
    block, stages = config.block_columns, config.stages
    m_blocks, n_blocks = pl.cdiv(m, BLOCK_M), pl.cdiv(n, block)
    last_width, last_height = n - (n_blocks - 1) * block, m - (m_blocks - 1) * BLOCK_M
    cluster = config.cluster
    n_wide = pl.cdiv(n_blocks, cluster)
    per_expert = m_blocks * n_wide
    programs = min(num_cores() // cluster, experts * per_expert)
    share = dict(collective_axes="cta") if cluster > 1 else {}
    chunk_width = 128 // jnp.dtype(dtype).itemsize  # columns that are stored at once

    def body(left_gmem, right_gmem, first_gmem, stop_gmem, order_gmem, out_gmem, *scratch):
        left_smem, right_smem, staging, full, empty, raw, summand = scratch
        wg, program = lax.axis_index("wg"), lax.axis_index("program")
        cta = lax.axis_index("cta") if cluster > 1 else 0
        my_tiles = (experts * per_expert - program + programs - 1) // programs

        def tile_at(i):
            """Reads the program's i-th tile: expert, block of M, block of N, and its group's rows."""
            linear = program + jnp.minimum(i, my_tiles - 1) * programs
            expert = order_gmem[lax.div(linear, jnp.int32(per_expert))]
            m_at, n_at = plgpu.planar_snake(
                lax.rem(linear, jnp.int32(per_expert)),
                (m_blocks, n_wide),
                config.minor,
                min(config.width, (m_blocks, n_wide)[config.minor]),
            )
            return expert, m_at, n_at * cluster + cta, first_gmem[expert], stop_gmem[expert]

        def steps_of(first, stop):
            origin = first // ROW_ALIGNMENT * ROW_ALIGNMENT
            return origin, jnp.where(stop > first, lax.div(stop - origin + (STEP - 1), jnp.int32(STEP)), 0)

        def slot_of(step):
            return lax.rem(step, jnp.int32(stages))

        def is_ragged(k, origin, first, stop):
            """Whether a step sees rows of other groups."""
            return (origin + k * STEP < first) | (origin + (k + 1) * STEP > stop)

        def clear_rows(step, low, high):
            """Zeroes what lies outside [low, high) in a slot whose copies have landed, and hands it on."""
            slot = slot_of(step)
            plgpu.barrier_wait(raw.at[slot])
            row = plgpu.broadcasted_iota(jnp.int32, (STEP, 64), 0, layout=plgpu.Layout.WGMMA)
            own = (row >= low) & (row < high)
            refs = [left_smem.at[slot, :, pl.ds(column, 64)] for column in range(0, BLOCK_M, 64)]
            refs += [right_smem.at[slot, :, pl.ds(column, 64)] for column in range(0, block, 64)]
            # All reads before the first write: the waits for them overlap.
            values = [plgpu.load(ref, layout=plgpu.Layout.WGMMA) for ref in refs]
            for ref, value in zip(refs, values, strict=True):
                ref[...] = jnp.where(own, value, jnp.zeros_like(value))
            plgpu.commit_smem()
            plgpu.barrier_arrive(full.at[slot])
            plgpu.barrier_arrive(full.at[slot])

        @pl.when(wg == 2)
        def producer():
            plgpu.set_max_registers(40, action="decrease")

            def load_tile(i, carry):
                step, (_, m_at, n_at, first, stop) = carry
                ahead = tile_at(i + 1)
                origin, steps = steps_of(first, stop)
                origin = pl.multiple_of(origin, ROW_ALIGNMENT)

                def load(k, step):
                    slot = slot_of(step)

                    @pl.when(step >= stages)
                    def _():
                        plgpu.barrier_wait(empty.at[slot])

                    rows = pl.ds(origin + k * STEP, STEP)
                    ragged = is_ragged(k, origin, first, stop)

                    def copy(landed):
                        plgpu.copy_gmem_to_smem(
                            left_gmem.at[rows, pl.ds(m_at * BLOCK_M, BLOCK_M)],
                            left_smem.at[slot],
                            landed.at[slot],
                            **share,
                        )
                        plgpu.copy_gmem_to_smem(
                            right_gmem.at[rows, pl.ds(n_at * block, block)],
                            right_smem.at[slot],
                            landed.at[slot],
                        )

                    pl.when(ragged)(functools.partial(copy, raw))
                    pl.when(~ragged)(functools.partial(copy, full))
                    return step + 1

                return lax.fori_loop(0, steps, load, step), ahead

            steps, _ = lax.fori_loop(0, my_tiles, load_tile, (jnp.int32(0), tile_at(0)))

            # A barrier may not be given up with a phase that nobody saw.
            def drain(j, _):
                plgpu.barrier_wait(empty.at[slot_of(steps + j)])

            lax.fori_loop(jnp.maximum(0, stages - steps), stages, drain, None)

        @pl.when(wg == 3)
        def masker():
            def mask_tile(i, carry):
                step, (_, _, _, first, stop) = carry
                ahead = tile_at(i + 1)
                origin, steps = steps_of(first, stop)

                def mask(k):
                    low, high = first - origin - k * STEP, stop - origin - k * STEP
                    pl.when(is_ragged(k, origin, first, stop))(
                        functools.partial(clear_rows, step + k, low, high)
                    )

                pl.when(steps > 0)(functools.partial(mask, 0))
                pl.when(steps > 1)(functools.partial(mask, steps - 1))
                return step + steps, ahead

            lax.fori_loop(0, my_tiles, mask_tile, (jnp.int32(0), tile_at(0)))

        @pl.when(wg < 2)
        def consumer():
            plgpu.set_max_registers(168, action="increase")

            def release(step):
                plgpu.barrier_arrive(empty.at[slot_of(step)])

            def multiply(width, step, steps, acc):
                def multiply_step(k, step):
                    slot = slot_of(step)
                    plgpu.barrier_wait(full.at[slot])
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

            def skip(step, steps):
                def pass_on(_, step):
                    plgpu.barrier_wait(full.at[slot_of(step)])
                    if cluster > 1:
                        # One thread of the warpgroup speaks to the cluster's barrier: the others first.
                        plgpu.commit_smem()
                    release(step)
                    return step + 1

                lax.fori_loop(0, steps, pass_on, step)

            def store(acc, expert, m_at, n_at):
                chunks, slots = acc.shape[1] // chunk_width, config.slots
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
                            value = value + staging[wg, slot]
                        staging[wg, slot] = value.astype(dtype)
                    plgpu.commit_smem()
                    for slot, target in enumerate(targets):
                        plgpu.copy_smem_to_gmem(staging.at[wg, slot], target)

            def run_tile(i, carry):
                step, (expert, m_at, n_at, first, stop) = carry
                ahead = tile_at(i + 1)
                _, steps = steps_of(first, stop)
                inside = (m_at < m_blocks - 1) | (wg * WG_M < last_height)
                inside &= n_at < n_blocks
                for width, here in widths(block, last_width, n_blocks, n_at):

                    @pl.when(here & inside)
                    def _(width=width):
                        acc = pl.run_scoped(
                            functools.partial(multiply, width, step, steps),
                            plgpu.ACC((WG_M, width), jnp.float32),
                        )
                        store(acc, expert, m_at, n_at)

                pl.when(~inside)(functools.partial(skip, step, steps))
                return step + steps, ahead

            lax.fori_loop(0, my_tiles, run_tile, (jnp.int32(0), tile_at(0)))
            plgpu.wait_smem_to_gmem(0)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((experts, m, n), dtype) if accumulator is None else (),
        grid=(programs,),
        grid_names=("program",),
        **(dict(cluster=(cluster,), cluster_names=("cta",)) if cluster > 1 else {}),
        num_threads=4,
        thread_name="wg",
        kernel_name="grouped_mlp_grad_weight",
        scratch_types=[
            plgpu.SMEM((stages, STEP, BLOCK_M), left.dtype, transforms=OPERAND),
            plgpu.SMEM((stages, STEP, block), right.dtype, transforms=OPERAND),
            plgpu.SMEM(
                (2, config.slots, WG_M, chunk_width),
                dtype,
                transforms=(plgpu.TilingTransform((8, chunk_width)), plgpu.SwizzleTransform(128)),
            ),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages)
            if cluster == 1
            else plgpu.ClusterBarrier(collective_axes=("cta",), num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_arrivals=1, num_barriers=2 * config.slots),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )
    operands = left, right, schedule.group_first, schedule.group_stop, schedule.largest_first
    if accumulator is None:
        return kernel(*operands)
    total = jax.new_ref(accumulator)
    kernel(*operands, total)
    return jax.freeze(total)
