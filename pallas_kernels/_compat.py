"""Access to private and unstable JAX functions. No other module of the package imports them."""

from typing import Any

import jax
from jax import lax
from jax._src import config
from jax.extend import backend


def in_interpret_mode() -> bool:
    """Returns whether Pallas interprets the kernels traced now, as under `force_gpu_interpret_mode`."""
    return config.pallas_tpu_interpret_mode_context_manager.value is not None


def varying_axes(x: jax.Array) -> frozenset[str]:
    """Returns the mesh axes over which a value differs between devices, inside `jax.shard_map`."""
    return frozenset(getattr(jax.typeof(x).mat, "varying", ()))


def vary(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    """Marks a value as differing over `axes`. Only the type of the value changes."""
    missing = tuple(sorted(axes - varying_axes(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


def default_device() -> Any:
    """Returns the default `jax.Device`."""
    return backend.get_default_device()


def abstract_device() -> Any:
    """Returns the `jax.sharding.AbstractDevice` of the abstract mesh in use, or None."""
    return jax.sharding.get_abstract_mesh().abstract_device


def start_row_copies(
    x: Any, column: Any, index: Any, target: Any, transforms: tuple[Any, ...], *, bounded: bool
) -> None:
    """Starts `target[i, j] = x[index[i], column + j]` by `cp.async` in a Mosaic GPU kernel, as one group.

    The warpgroup's threads copy 16 bytes each: eight threads a row of 64 columns. Pallas's own copies take
    consecutive rows.

    Args:
      x: (T, H) reference to 16-bit values in global memory, H a multiple of 64.
      column: int32 scalar, a multiple of 64.
      index: (N,) int32 reference in global memory, N a multiple of 16.
      target: (N, C) reference in shared memory, in tiles of (8, 64) with a swizzle of 128 bytes.
      transforms: the transforms of `target`.
      bounded: whether indices may be negative, for a row of zeros, and columns past the last, which are zero.
    """
    from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]
    from jax._src.lib.mlir.dialects import arith, llvm, memref, nvvm
    from jax.experimental.mosaic.gpu import utils
    from jax.experimental.pallas import mosaic_gpu as plgpu

    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), scalar, plgpu.RefType(), plgpu.RefType(transforms)))
    def copy(_, x, column, index, target):
        i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
        row_tiles, column_tiles, *_ = ir.MemRefType(target.type).shape
        _, width = ir.MemRefType(x.type).shape
        element = ir.MemRefType(x.type).element_type
        column = column.registers.item()

        def constant(value, kind=i32):
            return utils.c(value, kind)

        thread = arith.remui(utils.thread_idx(), constant(128))
        # A thread copies piece `piece` of rows `row` + 16 j, whose place in a tile of eight rows is the same.
        row, piece = arith.divui(thread, constant(8)), arith.remui(thread, constant(8))
        place = arith.remui(row, constant(8))
        tile_at = arith.muli(arith.divui(row, constant(8)), constant(column_tiles * 8 * 64))
        swizzled = arith.muli(arith.xori(piece, place), constant(8))
        within = arith.addi(arith.muli(place, constant(64)), swizzled)
        smem = utils.getelementptr(utils.memref_ptr(target), [arith.addi(tile_at, within)], element)
        first = arith.extui(i64, arith.addi(column, arith.muli(piece, constant(8))))
        base = llvm.addrspacecast(llvm.PointerType.get(address_space=1), utils.memref_ptr(x))
        gmem = utils.getelementptr(base, [first], element)
        chosen = []
        for step in range(row_tiles // 2):
            at = arith.addi(row, constant(16 * step))
            chosen.append(memref.load(index, [arith.index_castui(ir.IndexType.get(), at)]))
        for step, token in enumerate(chosen):
            real = arith.cmpi(arith.CmpIPredicate.sge, token, constant(0))
            offset = arith.muli(arith.extui(i64, token), constant(width, i64))
            source = utils.getelementptr(gmem, [offset], element)
            for tile in range(column_tiles):
                goal = utils.getelementptr(smem, [(2 * step * column_tiles + tile) * 8 * 64], element)
                begin = utils.getelementptr(source, [tile * 64], element)
                last = arith.addi(column, constant(tile * 64))
                inside = arith.cmpi(arith.CmpIPredicate.slt, last, constant(width))
                # A copy of no bytes writes zeros and does not read its source.
                nbytes = arith.select(arith.andi(real, inside), constant(16), constant(0))
                nbytes = nbytes if bounded else None
                cached = nvvm.LoadCacheModifierKind.CG
                nvvm.cp_async_shared_global(goal, begin, 16, cached, cp_size=nbytes)
        nvvm.cp_async_commit_group()

    copy(x, column, index, target)  # pyright: ignore[reportCallIssue]


def fence_row_copies() -> None:
    """Orders the copies of `start_row_copies`, seen through a barrier, before this thread's products."""
    from jax._src.lib.mlir.dialects import nvvm

    _inline("fence_proxy", nvvm.ProxyKind.async_shared, space=nvvm.SharedSpace.shared_cta)


def await_row_copies(groups: int) -> None:
    """Waits until at most `groups` groups of this thread's copies by `cp.async` are in flight."""
    _inline("cp_async_wait_group", groups)


def _inline(operation: str, *arguments: Any, **options: Any) -> None:
    from jax._src.lib.mlir.dialects import nvvm
    from jax.experimental.pallas import mosaic_gpu as plgpu

    plgpu.inline_mgpu()(lambda _: getattr(nvvm, operation)(*arguments, **options) and None)()
