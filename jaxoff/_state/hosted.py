"""Calls of a step whose state rests in pinned host memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

import jax
from jax.extend.mlir import ir

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import Jaxpr

HOST = "pinned_host"
_KIND = "mhlo.memory_kind"


def has_host_arrays(tree: Any) -> bool:
    """Whether an array of a pytree is in pinned host memory."""
    return any(map(_is_on_host, jax.tree.leaves(tree)))


def describe_on_device(tree: Any) -> Any:
    """A pytree with a struct on the device for each array in host memory, to trace functions with."""

    def describe(leaf: Any) -> Any:
        if not _is_on_host(leaf):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=_on_device(leaf.sharding))

    return jax.tree.map(describe, tree)


@dataclasses.dataclass(frozen=True)
class Hosted:
    """A `jax.jit` function of a program that takes and returns some arrays in pinned host memory.

    A call moves its arguments to where the program takes them: the first call's state comes from the device.

    Attributes:
      jitted: the function; it keeps unused arguments.
      arguments: positions of the program's arguments among the leaves of `(args, kwargs)`.
      on_host: those of arguments in host memory.
      results: positions of results in host memory.
    """

    jitted: Any
    arguments: tuple[int, ...]
    on_host: frozenset[int]
    results: frozenset[int]

    @staticmethod
    def of(jitted: Any, program: Jaxpr, arguments: tuple[int, ...]) -> Hosted:
        """The function of a program."""
        pairs = zip(program.invars, arguments, strict=True)
        on_host = frozenset(i for v, i in pairs if compat.is_host(v.aval))
        results = frozenset(i for i, v in enumerate(program.outvars) if compat.is_host(v.aval))
        return Hosted(jitted, arguments, on_host, results)

    def __call__(self, *args, **kwargs):
        return self._apply(self.jitted, args, kwargs)

    def trace(self, *args, **kwargs) -> Any:
        """As `jax.jit(fun).trace`."""
        return self._apply(self.jitted.trace, *_as_structs(args, kwargs))

    def lower(self, *args, **kwargs) -> jax.stages.Lowered:
        """As `jax.jit(fun).lower`."""
        args, kwargs = _as_structs(args, kwargs)
        lowered = self._apply(self.jitted.lower, args, kwargs)
        places = {k for k, i in enumerate(self.arguments) if i in self.on_host}
        _mark(lowered, places, len(self.arguments), self.results)
        return lowered

    def clear_cache(self) -> None:
        """As `jax.jit(fun).clear_cache`."""
        self.jitted.clear_cache()

    def _cache_size(self) -> int:
        return self.jitted._cache_size()

    def _apply(self, fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        args, kwargs = jax.tree.unflatten(
            tree, [_put(leaf, to_host=i in self.on_host) for i, leaf in enumerate(leaves)]
        )
        return fun(*args, **kwargs)


def put_state(tree: Any, like: Any) -> Any:
    """Puts the arrays of a pytree into the memories of the arrays of another, and frees those it moves."""
    return jax.tree.map(lambda x, y: _put(x, to_host=_is_on_host(y)), tree, like)


def _put(leaf: Any, *, to_host: bool) -> Any:
    if _is_on_host(leaf) == to_host or not hasattr(leaf, "sharding"):
        return leaf
    sharding = leaf.sharding
    if isinstance(leaf, jax.ShapeDtypeStruct):
        if sharding is None:
            return leaf
        sharding = sharding.with_memory_kind(HOST) if to_host else _on_device(sharding)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    moved = jax.device_put(leaf, sharding.with_memory_kind(HOST) if to_host else _on_device(sharding))
    leaf.delete()  # a step's state is donated: the caller's array ends with the call
    return moved


def _is_on_host(leaf: Any) -> bool:
    return getattr(getattr(leaf, "sharding", None), "memory_kind", None) == HOST


def _on_device(sharding: Any) -> Any:
    (device, *_) = sharding.device_set
    return sharding.with_memory_kind(device.default_memory().kind)


def _as_structs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with a struct for each array: a trace moves nothing."""

    def describe(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding, weak_type=leaf.weak_type)

    return jax.tree.map(describe, (args, kwargs))


def _mark(
    lowered: jax.stages.Lowered, arguments: Collection[int], count: int, results: Collection[int]
) -> None:
    """Marks arguments and results in host memory in a lowered program.

    JAX does so for arrays of a device that is there; the shardings of a described device have no memory kind.

    Args:
      lowered: a program that keeps its unused arguments.
      arguments: positions of arguments in host memory.
      count: the number of arguments; the program may have constants before them.
      results: positions of results in host memory.
    """
    module: Any = lowered.compiler_ir("stablehlo")
    (main,) = (op for op in module.body.operations if op.attributes["sym_name"].value == "main")
    with module.context:
        constants = len(main.attributes["arg_attrs"]) - count
        for name, places, shift in (("arg_attrs", arguments, constants), ("res_attrs", results, 0)):
            marked = []
            for i, given in enumerate(main.attributes[name]):
                kind = ir.StringAttr.get(HOST if i - shift in places else "device")
                attributes: Any = {item.name: item.attr for item in given} | {_KIND: kind}
                marked.append(ir.DictAttr.get(attributes))
            main.attributes[name] = ir.ArrayAttr.get(marked)
