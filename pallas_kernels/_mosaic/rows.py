"""The kernel of row products: each row times its expert's matrix, with an epilogue on the accumulator.

The kernel is persistent: each streaming multiprocessor runs one of P programs, and a program takes every P-th
tile of the output. One warpgroup of a program copies operands into a ring in shared memory. Each of the two
other warpgroups multiplies 64 of the tile's 128 rows and runs the epilogue on its half tile.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

# pyright: reportAbstractUsage=false, reportPrivateImportUsage=false
# (JAX declares the transforms abstract and does not list ACC.)
from pallas_kernels._compat import in_interpret_mode
from pallas_kernels._implementation import count_cores
from pallas_kernels._mosaic.ring import Ring
from pallas_kernels._mosaic.row_copies import RowCopies, fence_rows, pad_index
from pallas_kernels._mosaic.row_tiling import BLOCK_ROWS, RowTiling
from pallas_kernels._mosaic.tuning import Config

# Elements of K in a step of the product: 64 16-bit elements fill the 128 bytes of a swizzled row.
BLOCK_K = 64

# Columns of a step of an epilogue: the width of a swizzled row of 16-bit elements.
CHUNK = 64

# Rows of a half tile, the M of a `wgmma` instruction.
WG_ROWS = BLOCK_ROWS // 2

# Registers of a thread of the copying and of the multiplying warpgroups, without and with gathered rows. The
# three warpgroups together have the 3 * 168 that the kernel starts with.
COPY_REGISTERS, PRODUCT_REGISTERS = (40, 56), (232, 224)

# The widest swizzle in bytes, free of bank conflicts for `wgmma` operands.
_SWIZZLE = plgpu.SwizzleTransform(128)

# Shared-memory layout of operands, as `wgmma` reads it.
OPERAND = (plgpu.TilingTransform((8, 64)), _SWIZZLE)

# The same layout for operands of several parts, (BLOCK_K, parts, columns): the parts of a row of tiles follow
# each other, so a product reads them as one operand of all parts' columns.
_PARTS_OPERAND = (plgpu.TilingTransform((8, 1, 64)), _SWIZZLE)

# Shared-memory layout of stored rows: tiles of one row, so that a copy may take any number of rows.
RAGGED = (plgpu.TilingTransform((1, 64)), _SWIZZLE)


class HalfTile(NamedTuple):
    """One warpgroup's half of a tile, as int32 scalars.

    Attributes:
      index: the tile's position in `RowTiling.tiles`.
      block: index of the block of columns.
      expert: the tile's expert.
      row: first row of the half tile, a multiple of 8.
      low: first own row, relative to `row`.
      count: number of own rows.
    """

    index: Any
    block: Any
    expert: Any
    row: Any
    low: Any
    count: Any


def store_ragged(source, target, tile: HalfTile, column) -> None:
    """Copies the own rows of a half tile to global memory, without committing the copy group.

    Copies have static heights: one copy of 64 rows, or copies of the powers of two in the number of rows.
    """
    width = source.shape[1]

    @pl.when(tile.count == WG_ROWS)
    def _():
        plgpu.copy_smem_to_gmem(
            source, target.at[pl.ds(tile.row, WG_ROWS), pl.ds(column, width)], commit_group=False
        )

    @pl.when(tile.count < WG_ROWS)
    def _():
        first = tile.low
        for power in range(WG_ROWS.bit_length() - 2, -1, -1):
            height = 1 << power

            @pl.when((tile.count & height) != 0)
            def _(first=first, height=height):
                plgpu.copy_smem_to_gmem(
                    source.at[pl.ds(first, height)],
                    target.at[pl.ds(tile.row + first, height), pl.ds(column, width)],
                    commit_group=False,
                )

            first = first + (tile.count & height)


def rows_product(
    x: jax.Array,
    w: jax.Array,
    tiling: RowTiling,
    *,
    transpose_w: bool,
    config: Config,
    inputs: Sequence[jax.Array],
    out_types: Sequence[jax.ShapeDtypeStruct],
    scratch_types: Sequence[Any],
    epilogue: Callable[..., None],
    prefetch: Callable[..., Any] | None = None,
    index: jax.Array | None = None,
    parts: int = 1,
    zeroed: Sequence[int] = (1,),
    name: str,
) -> Any:
    """Runs an epilogue on every half tile of `x[r] @ w[expert(r)]`.

    Args:
      x: (R, K) rows, or (T, K) with `index`.
      w: (E, K, N), or (E, N, K) with `transpose_w`.
      tiling: the tiles of the rows.
      transpose_w: whether to multiply with each matrix's transpose, which is read in place.
      config: tile size and tile order.
      inputs: further arrays in global memory for the epilogue.
      out_types: the outputs, all in global memory.
      scratch_types: the epilogue's shared memory and barriers. The first entry is a (2, slots, 64, 64) buffer
        of the two warpgroups. The epilogue may return while copies from this buffer to global memory are in
        flight.
      epilogue: takes the (64, width) float32 accumulator in the WGMMA layout, the result of `prefetch`, the
        `HalfTile`, the warpgroup, and the refs of inputs, outputs and scratch. With several parts it takes a
        list of accumulators, one a part.
      prefetch: takes the width, the `HalfTile`, the warpgroup and the same refs. The kernel calls it halfway
        through the product, to start the loads of the epilogue.
      index: (R,) int32: row r is `x[index[r]]`, read from x by the copying warpgroup.
      parts: number of equal parts of w's columns, at most 256 columns of a tile together. A tile multiplies
        with the same block of columns of each part, by one `wgmma` of all parts' columns: each `wgmma` reads
        x from shared memory, whose bandwidth two of half the width would exceed. A last, narrow block is
        multiplied with zeros up to a block's width.
      zeroed: a number of parts for each of the first outputs, (R, N) with as many times the columns of a
        tile's part. The kernel zeroes the rows past the last group of these outputs, without the epilogue.
      name: the kernel's name in profiles.

    Returns:
      The outputs.
    """
    depth = x.shape[1]
    experts = w.shape[0]
    columns = w.shape[1] if transpose_w else w.shape[2] // parts
    block, stages = config.block_columns, config.stages
    blocks, steps_of_tile = pl.cdiv(columns, block), depth // BLOCK_K
    last_width = columns - (blocks - 1) * block
    programs = max(min(count_cores(), tiling.max_tiles * blocks), 1)
    n_in, n_out = len(inputs), len(out_types)
    gathers = index is not None

    def body(x_gmem, w_gmem, tiles_gmem, num_tiles_gmem, *refs):
        index_gmem, *refs = refs if gathers else (None, *refs)
        in_refs, out_refs, rest = refs[:n_in], refs[n_in : n_in + n_out], refs[n_in + n_out :]
        x_smem, w_smem, full, empty, *scratch = rest
        ring = Ring(full, empty, stages)
        wg, program = lax.axis_index("wg"), lax.axis_index("program")
        num_tiles = num_tiles_gmem[0]
        my_tiles = lax.div(num_tiles * blocks - program + programs - 1, jnp.int32(programs))

        def tile_at(i):
            """Reads the program's i-th tile. An index past the end gives the last tile."""
            linear = program + jnp.minimum(i, my_tiles - 1) * programs
            index, at = walk(linear, (num_tiles, blocks), config)
            return index, at, *(tiles_gmem[index, field] for field in range(4))

        @pl.when((wg == 2) & (my_tiles > 0))
        def producer():
            plgpu.set_max_registers(COPY_REGISTERS[gathers], action="decrease")
            copies = RowCopies(ring, OPERAND, bounded=False)

            def load_tile(i, carry):
                step, (_, at, expert, row, _, _) = carry
                ahead = tile_at(i + 1)
                row = pl.multiple_of(row, 8)

                def load(k, step):
                    if gathers:
                        copies.publish_before(step)
                    slot = ring.claim(step)
                    ks = pl.ds(k * BLOCK_K, BLOCK_K)
                    rows = pl.ds(row, BLOCK_ROWS)
                    if not gathers:
                        plgpu.copy_gmem_to_smem(x_gmem.at[rows, ks], x_smem.at[slot], full.at[slot])
                    ns = pl.ds(at * block, block)
                    if parts > 1:
                        source = w_gmem.at[pl.ds(expert * depth + k * BLOCK_K, BLOCK_K), :, ns]
                    else:
                        source = w_gmem.at[expert, ns, ks] if transpose_w else w_gmem.at[expert, ks, ns]
                    plgpu.copy_gmem_to_smem(source, w_smem.at[slot], full.at[slot])
                    if index_gmem is not None:
                        copies.start(step, x_gmem, ks, index_gmem.at[rows], x_smem.at[slot])
                    return step + 1

                return lax.fori_loop(0, jnp.where(expert < experts, steps_of_tile, 0), load, step), ahead

            steps, _ = lax.fori_loop(0, my_tiles, load_tile, (jnp.int32(0), tile_at(0)))
            if gathers:
                copies.finish(steps)
            ring.drain(steps)

        @pl.when((wg < 2) & (my_tiles > 0))
        def consumer():
            plgpu.set_max_registers(PRODUCT_REGISTERS[gathers], action="increase")
            staging = scratch[0]

            def multiply(width, tile, step, acc):
                def issue(slot):
                    if gathers:
                        fence_rows()
                    x_step = x_smem.at[slot, pl.ds(wg * WG_ROWS, WG_ROWS)]
                    if parts > 1:
                        _multiply_parts(acc, x_step, w_smem.at[slot])
                    elif transpose_w:
                        plgpu.wgmma(acc, x_step, w_smem.at[slot, pl.ds(0, width)].transpose((1, 0)))
                    else:
                        plgpu.wgmma(acc, x_step, w_smem.at[slot, :, pl.ds(0, width)])

                # Halfway through the product, the previous tile's copies have left the epilogue's buffers.
                middle, early = 0, None
                if prefetch is not None:
                    middle = steps_of_tile // 2
                    step = ring.multiply(0, middle, step, issue)
                    early = prefetch(width, tile, wg, *in_refs, *out_refs, *scratch)
                ring.finish(ring.multiply(middle, steps_of_tile, step, issue))
                value = acc[...]
                if parts > 1:
                    value = [value[:, part * block : part * block + width] for part in range(parts)]
                return value, early

            def zero(width, tile):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                staging[wg, 0] = jnp.zeros(staging.shape[2:], staging.dtype)
                plgpu.commit_smem()
                for target, count in zip(out_refs, zeroed, strict=False):
                    for part, column in itertools.product(range(count), range(0, width, CHUNK)):
                        at = part * columns + tile.block * block + column
                        store_ragged(staging.at[wg, 0], target, tile, at)
                plgpu.commit_smem_to_gmem_group()

            def run_tile(i, carry):
                step, (index, at, expert, row, low, high) = carry
                ahead = tile_at(i + 1)
                low = jnp.clip(low - wg * WG_ROWS, 0, WG_ROWS)
                count = jnp.maximum(jnp.clip(high - wg * WG_ROWS, 0, WG_ROWS) - low, 0)
                tile = HalfTile(index, at, expert, pl.multiple_of(row + wg * WG_ROWS, 8), low, count)
                pl.when((expert < experts) & (count == 0))(functools.partial(ring.skip, step, steps_of_tile))
                for width, here in list_widths(block, last_width, blocks, at):

                    @pl.when(here & (expert < experts) & (count > 0))
                    def _(width=width):
                        acc, early = pl.run_scoped(
                            functools.partial(multiply, width, tile, step),
                            plgpu.ACC((WG_ROWS, parts * block if parts > 1 else width), jnp.float32),
                        )
                        epilogue(acc, early, tile, wg, *in_refs, *out_refs, *scratch)

                    pl.when(here & (expert == experts) & (count > 0))(functools.partial(zero, width, tile))
                return step + jnp.where(expert < experts, steps_of_tile, 0), ahead

            lax.fori_loop(0, my_tiles, run_tile, (jnp.int32(0), tile_at(0)))
            plgpu.wait_smem_to_gmem(0)

    w_shape, w_layout = ((block, BLOCK_K) if transpose_w else (BLOCK_K, block)), OPERAND
    if parts > 1:
        w = w.reshape(experts * depth, parts, columns)
        w_shape, w_layout = (BLOCK_K, parts, block), _PARTS_OPERAND
    launch = jax.custom_jvp(
        plgpu.kernel(
            body,
            out_type=tuple(out_types),
            grid=(programs,),
            grid_names=("program",),
            num_threads=3,
            thread_name="wg",
            kernel_name=name,
            scratch_types=[
                plgpu.SMEM((stages, BLOCK_ROWS, BLOCK_K), x.dtype, transforms=OPERAND),
                plgpu.SMEM((stages, *w_shape), w.dtype, transforms=w_layout),
                plgpu.Barrier(num_arrivals=2, num_barriers=stages),
                plgpu.Barrier(num_arrivals=2, num_barriers=stages),
                *scratch_types,
            ],
            compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        )
    )
    launch.defjvp(_refuse_derivative)
    indices = [pad_index(index, BLOCK_ROWS)] if index is not None else []
    return launch(x, w, tiling.tiles, tiling.num_tiles, *indices, *inputs)


def _multiply_parts(acc, x_step, w_step) -> None:
    """Starts `acc += x w` for w of several parts, (BLOCK_K, parts, columns), in one `wgmma`."""
    depth, parts, block = w_step.shape
    if not in_interpret_mode():
        plgpu.wgmma(acc, x_step, w_step.reshape(depth, parts * block))
        return
    for part in range(parts):  # the interpreter multiplies with no reshaped operand
        plgpu.wgmma(acc.at[:, pl.ds(part * block, block)], x_step, w_step.at[:, part])


def _refuse_derivative(primals, tangents):
    """Refuses a second derivative. JAX's own error would name a primitive inside of the kernel."""
    raise NotImplementedError(
        "grouped_mlp: the fused kernels have no second derivative; "
        'pass implementation="reference" where the gradient is differentiated'
    )


def walk(linear, shape, config: Config):
    """Returns the (row, column) of the block at a position of the tile order. `shape[1]` is static."""
    if config.minor == 1 and config.width >= shape[1]:
        # A fast path, since both multiplying warpgroups compute this position between two tiles.
        return lax.div(linear, jnp.int32(shape[1])), lax.rem(linear, jnp.int32(shape[1]))
    width = min(config.width, shape[1]) if config.minor == 1 else config.width
    return plgpu.planar_snake(linear, shape, config.minor, width)


def list_widths(block, last_width, blocks, at):
    """Returns the possible widths of a block of columns, each with whether block `at` has this width."""
    if last_width == block:
        return [(block, jnp.bool_(True))]
    if blocks == 1:
        return [(last_width, jnp.bool_(True))]
    return [(block, at < blocks - 1), (last_width, at == blocks - 1)]
