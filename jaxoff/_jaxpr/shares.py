"""Functions that each device applies to its own shares of arrays, where the compiler divides the arrays.

A slice of a divided array would need communication: the slice is on one device. These functions work on what
a device has. Their results are arbitrary (an allocation) or only waited for (an element), so that the results
may differ from device to device. To JAX they are `custom_partitioning` functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule, custom_partitioning
from jax.sharding import NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.meshes import list_axes


def nbytes_on_device(aval: Any, sharding: Sharding | None) -> int:
    """Bytes of a device's share of an array; of the array without a sharding."""
    nbytes, shape = compat.nbytes(aval), compat.shape_of(aval)
    if sharding is None or not nbytes:
        return nbytes
    return nbytes // math.prod(shape) * math.prod(sharding.shard_shape(shape))


def apply_to_shares(
    fun: Callable[..., jax.Array],
    operands: Sequence[jax.Array],
    *,
    like: Callable[..., jax.Array],
    follows_first: bool = False,
) -> jax.Array:
    """Applies a function to each device's shares of the operands.

    Args:
      fun: (*shares, shape=shape of the result's share) -> the result's share.
      operands: arrays, divided in any way.
      like: (*operands) -> an array of the result's type; only its type counts where arrays are divided.
      follows_first: whether the result is divided like the first operand, whose rows stay whole.
        Otherwise its division is that of the value combined with it.

    Returns:
      The result. On a single device, `like` of the operands.
    """
    ranks = [operand.ndim for operand in operands]
    factors = [tuple(f"v{k}d{i}" for i in range(rank)) for k, rank in enumerate(ranks)]
    result = jax.eval_shape(like, *operands)
    results = factors[0] if follows_first else tuple(f"r{i}" for i in range(result.ndim))

    def infer(mesh, arguments, shape):
        del shape
        return arguments[0].sharding if follows_first else NamedSharding(mesh, P())

    def partition(mesh, arguments, shape):
        shardings = tuple(_find_shares(argument) for argument in arguments)
        sharding = shardings[0] if follows_first else _find_shares(shape)
        share = sharding.shard_shape(shape.shape)

        def apply(*shares):
            # Shares are whole to JAX: a mesh with Explicit axes around would constrain their shardings.
            with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
                return fun(*shares, shape=share)

        return mesh, apply, sharding, shardings

    applied = custom_partitioning(lambda *operands: like(*operands))
    applied.def_partition(
        partition=partition,
        infer_sharding_from_operands=infer,
        sharding_rule=SdyShardingRule(
            tuple(ArrayMapping(*names) for names in factors), (ArrayMapping(*results),)
        ),
    )
    return applied(*operands)


def _find_shares(value: Any) -> NamedSharding:
    """The sharding of a value without its memory, and without mesh axes that do not divide the value's.

    The compiler pads what does not divide; JAX has no type for a padded share.
    """
    sharding = value.sharding
    sizes = sharding.mesh.shape

    def keep(axes: Any, size: int) -> Any:
        return axes if size % math.prod(sizes[name] for name in list_axes(axes)) == 0 else None

    spec = (keep(axes, size) for axes, size in zip(sharding.spec, value.shape, strict=False))
    return NamedSharding(sharding.mesh, P(*spec))


def _strip_memory_kind(sharding: NamedSharding) -> NamedSharding:
    return NamedSharding(sharding.mesh, sharding.spec)


def record_sharding(value: jax.Array, record: Callable[[NamedSharding], None]) -> jax.Array:
    """The value; when the compiler divides the program, `record` gets the value's sharding."""

    def infer(mesh, arguments, shape):
        del mesh, shape
        return arguments[0].sharding

    def partition(mesh, arguments, shape):
        del shape
        sharding = _strip_memory_kind(arguments[0].sharding)
        record(sharding)
        return mesh, lambda share: share, sharding, (sharding,)

    factors = ArrayMapping(*(f"d{i}" for i in range(value.ndim)))
    marked = custom_partitioning(lambda value: value)
    marked.def_partition(
        partition=partition,
        infer_sharding_from_operands=infer,
        sharding_rule=SdyShardingRule((factors,), (factors,)),
    )
    return marked(value)
