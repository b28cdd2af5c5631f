"""Calls of a step whose state rests in pinned host memory."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import Jaxpr, Var
from jaxoff._jaxpr.lowered import HOST, mark_host_memory


def move_to(places: Sequence[Var], values: Sequence[Any]) -> list[Any]:
    """Arguments in the memories of a program's variables; a described device has no memories to tell."""

    def move(v: Var, x: Any) -> Any:
        moves = compat.is_host(v.aval) and not compat.is_host(jax.typeof(x))
        return jax.device_put(x, jax.memory.Space.Host) if moves else x

    return [move(v, x) for v, x in zip(places, values, strict=True)]


def describe_on_device(tree: Any) -> Any:
    """A pytree with a struct on the device for each array in host memory, to trace functions with."""

    def describe(leaf: Any) -> Any:
        if not is_on_host(leaf):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=on_device(leaf.sharding))

    return jax.tree.map(describe, tree)


def names_host(keywords: Mapping[str, Any]) -> bool:
    """Whether shardings among the keywords of `jax.jit` are in host memory, by the user's own wish."""
    given = [keywords.get(name) for name in ("in_shardings", "out_shardings")]
    return any(getattr(entry, "memory_kind", None) == HOST for entry in jax.tree.leaves(given))


def move_to_device(tree: Any) -> Any:
    """A pytree with each array of host memory on its device."""
    return jax.tree.map(functools.partial(_put, to_host=False), tree)


# Of XLA's error for a donated array whose memory something else shares.
_HELD = "Donation requested for buffer with external reference"


@dataclasses.dataclass(frozen=True)
class Hosted:
    """A `jax.jit` function of a program with arguments and results in pinned host memory.

    A call moves its arguments to where the program takes them: the first call's state comes from the device.

    Attributes:
      jitted: the function, which keeps unused arguments.
      arguments: positions of the program's arguments among the leaves of `(args, kwargs)`.
      on_host: the arguments in host memory, of the same positions.
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

    def __call__(self, /, *args, **kwargs):
        args, kwargs = self._move(args, kwargs)
        try:
            return self.jitted(*args, **kwargs)
        except ValueError as error:
            if _HELD not in str(error):
                raise
        return self.jitted(*_copy_on_host(args), **_copy_on_host(kwargs))

    def trace(self, /, *args, **kwargs) -> Any:
        """As `jax.jit(fun).trace`."""
        return self._apply(self.jitted.trace, *_as_structs(args, kwargs))

    def lower(self, /, *args, **kwargs) -> jax.stages.Lowered:
        """As `jax.jit(fun).lower`."""
        args, kwargs = _as_structs(args, kwargs)
        lowered = self._apply(self.jitted.lower, args, kwargs)
        places = {k for k, i in enumerate(self.arguments) if i in self.on_host}
        if places or self.results:
            mark_host_memory(lowered, places, len(self.arguments), self.results)
        return lowered

    def clear_cache(self) -> None:
        """As `jax.jit(fun).clear_cache`."""
        self.jitted.clear_cache()

    def _cache_size(self) -> int:
        return self.jitted._cache_size()

    def _apply(self, fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = self._move(args, kwargs)
        return fun(*args, **kwargs)

    def _move(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        leaves, tree = jax.tree.flatten((args, kwargs))
        moved = [_put(leaf, to_host=i in self.on_host) for i, leaf in enumerate(leaves)]
        return jax.tree.unflatten(tree, moved)


def _spread_shardings(given: Any, tree: Any) -> list[Any]:
    """The sharding or None of each leaf of a pytree, from shardings for a prefix of the tree.

    Args:
      given: `in_shardings` or `out_shardings` of `jax.jit`.
      tree: the positional arguments, or the results.
    """
    given = tuple(given) if isinstance(given, list) and isinstance(tree, tuple) else given
    spread = jax.tree.map(lambda s, part: [s] * len(jax.tree.leaves(part)), given, tree, is_leaf=_is_entry)
    return jax.tree.leaves(spread, is_leaf=_is_entry)


def _is_entry(entry: Any) -> bool:
    return entry is None or isinstance(entry, Sharding)


def move_shardings(keywords: Mapping[str, Any], args: Any, results: Any, program: Jaxpr) -> dict[str, Any]:
    """The keywords of `jax.jit` for a program with arguments and results in host memory.

    Args:
      keywords: of the step on the device. With `in_shardings`, all its arguments are positional.
      args: the positional arguments.
      results: a pytree like the results.
      program: the program.
    """
    moved = dict(keywords)
    for name, tree, places in (
        ("in_shardings", args, program.invars),
        ("out_shardings", results, program.outvars),
    ):
        if keywords.get(name) is not None:
            entries = zip(_spread_shardings(keywords[name], tree), places, strict=True)
            found = [s.with_memory_kind(HOST) if s and compat.is_host(v.aval) else s for s, v in entries]
            moved[name] = jax.tree.unflatten(jax.tree.structure(tree), found)
    return moved


def taking_host_arrays(jitted: Any, are_given: bool) -> Any:
    """A function for arguments some of which are in host memory, where `are_given`; else as it is.

    The program of the function may take them on the device: a state from a step with a smaller budget.
    """
    moves = are_given and not isinstance(jitted, Hosted)
    return Hosted(jitted, (), frozenset(), frozenset()) if moves else jitted


def list_shardings(args: tuple[Any, ...], jitted: Any) -> tuple[Any, ...]:
    """The shardings of arguments, with their memories: a pytree like the arguments.

    Args:
      args: the arguments; without a sharding, an argument gets the first device's.
      jitted: the function that takes them; a `Hosted` takes some in host memory.
    """
    on_host = jitted.on_host if isinstance(jitted, Hosted) else ()

    def describe(i: int, leaf: Any) -> Any:
        sharding = getattr(leaf, "sharding", None) or _first_device()
        return sharding.with_memory_kind(HOST) if i in on_host else sharding

    leaves, tree = jax.tree.flatten(args)
    return jax.tree.unflatten(tree, [describe(i, leaf) for i, leaf in enumerate(leaves)])


def _put(leaf: Any, *, to_host: bool) -> Any:
    if is_on_host(leaf) == to_host or not hasattr(leaf, "sharding"):
        return leaf
    sharding = leaf.sharding
    if isinstance(leaf, jax.ShapeDtypeStruct):
        sharding = sharding or _first_device()
        sharding = sharding.with_memory_kind(HOST) if to_host else on_device(sharding)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    moved = jax.device_put(leaf, sharding.with_memory_kind(HOST) if to_host else on_device(sharding))
    if to_host:
        leaf.delete()  # a step's state is donated: the caller's array ends with the call
    return moved


def _copy_on_host(tree: Any) -> Any:
    """A pytree with copies of its arrays in host memory.

    An array in host memory is not donated while a NumPy array shares its memory (`jax.device_get`, or a
    checkpoint that is still being written). On the CPU, JAX makes this copy itself.
    """

    def copy(leaf: Any) -> Any:
        return jax.device_put(np.array(leaf), leaf.sharding) if is_on_host(leaf) else leaf

    return jax.tree.map(copy, tree)


def _first_device() -> jax.sharding.SingleDeviceSharding:
    return jax.sharding.SingleDeviceSharding(jax.devices()[0])


def is_on_host(leaf: Any) -> bool:
    """Whether an array, or a described array, is in pinned host memory."""
    return getattr(getattr(leaf, "sharding", None), "memory_kind", None) == HOST


def on_device(sharding: Any) -> Any:
    """A sharding in the memory of its devices."""
    (device, *_) = sharding.device_set
    return sharding.with_memory_kind(device.default_memory().kind)


def _as_structs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with a struct for each array: a trace moves nothing, and what is alike makes one text."""

    def describe(leaf: Any) -> Any:
        if not isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)):
            return leaf
        # A sharding that says nothing would still be in the program's text, by which its memory is known.
        sharding = None if leaf.sharding == _first_device() else leaf.sharding
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=leaf.weak_type)

    return jax.tree.map(describe, (args, kwargs))
