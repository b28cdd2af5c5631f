"""A call of a `jaxoff.jit` function: what tells calls of different programs apart."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, NamedTuple

import jax
from jax.core import Tracer

from jaxoff._jaxpr import meshes, trace_state
from jaxoff._jaxpr.statics import list_parameters
from jaxoff._runtime.garbage import collector_paused
from jaxoff._schedule.argument_types import ArgumentTypes
from jaxoff._state import hosted

_jax_jit = jax.jit  # `jax.jit = jaxoff.jit` must not make this module call jaxoff's


class Place(NamedTuple):
    """The number of devices that a call runs on, and whether these are GPUs."""

    devices: int
    are_gpus: bool


@dataclasses.dataclass(frozen=True)
class Call:
    """The arguments of a call.

    Attributes:
      args, kwargs: the arguments.
      given: the keywords of `jit`.
      key: the types of the arguments, the values of static arguments, and the configuration of traces: equal
        keys mean equal programs.
      is_traced: whether the call is within a trace.
      moves_to_device: whether arguments are in host memory that count as on the device.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    given: Any
    key: Hashable
    is_traced: bool
    moves_to_device: bool = False

    @staticmethod
    def of(
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        given: Any,
        statics: Collection[int | str],
        types: ArgumentTypes,
    ) -> Call:
        """The call of a function that was given to `jit` with keywords; `statics` name static arguments."""
        leaves, tree = jax.tree.flatten((args, kwargs))
        if trace_state.is_tracing() or any(issubclass(kind, Tracer) for kind in set(map(type, leaves))):
            return Call(args, kwargs, given, None, is_traced=True)
        named = (*enumerate(args), *kwargs.items())
        values = [value for name, value in named if name in statics and isinstance(value, Hashable)]
        others = tree, tuple(values), meshes.current_mesh(), trace_state.configuration()
        key, on_host = types.make_key(leaves, others)
        return Call(args, kwargs, given, key, False, on_host and types.ignores_host)

    @functools.cached_property
    def symbolic(self) -> str | None:
        """The shape of an argument with a dimension that has no number, as `jax.export` traces; or None."""
        shapes = (getattr(leaf, "shape", ()) for leaf in jax.tree.leaves((self.args, self.kwargs)))
        return next((str(shape) for shape in shapes if any(map(jax.export.is_symbolic_dim, shape))), None)

    @functools.cached_property
    def described(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments to trace with: a struct on the device for each array that moves there."""
        both = self.args, self.kwargs
        return hosted.describe_on_device(both) if self.moves_to_device else both

    def trace(self, jitted: Any) -> Any:
        """A `jax.jit` function's trace for the arguments."""
        args, kwargs = self.described
        return jitted.trace(*args, **kwargs)

    @collector_paused()
    def lower(self, jitted: Any) -> jax.stages.Lowered:
        """A `jax.jit` function lowered for the arguments."""
        args, kwargs = self.described
        return jitted.lower(*args, **kwargs)

    # Asked for at the first call of a key only, these are left out of every later call.
    @functools.cached_property
    def _shardings(self) -> list[jax.sharding.Sharding]:
        found = map(_sharding_of, jax.tree.leaves((self.args, self.kwargs, self.given)))
        return [sharding for sharding in found if sharding is not None]

    @functools.cached_property
    def devices(self) -> int:
        """The number of devices that the arguments, and the shardings given to `jit`, are over."""
        return max((sharding.num_devices for sharding in self._shardings), default=1)

    @property
    def place(self) -> Place:
        """Where the call runs."""
        return Place(self.devices, self.is_on_gpu)

    @functools.cached_property
    def device(self) -> Any:
        """A device of the arguments and of the shardings given to `jit`, else the default device."""
        found = (device for s in self._shardings for device in _devices_of(s))
        return next(found, None) or jax.local_devices()[0]

    @functools.cached_property
    def why_state_stays(self) -> str | None:
        """Why no argument may rest in host memory; None where arguments may."""
        given = [self.given.get(name) for name in ("in_shardings", "out_shardings")]
        entries = jax.tree.leaves(given, is_leaf=lambda entry: isinstance(entry, jax.P))
        if jax.process_count() > 1:
            return f"in several processes ({jax.process_count()}) state stays on the devices."
        if entries and self._has_statics:
            return "with static arguments and shardings given to jit, state stays on the devices."
        if not all(map(_sharding_of, entries)):
            return (
                "shardings given to jit as a PartitionSpec keep state on the devices: give a NamedSharding."
            )
        return None

    @property
    def _has_statics(self) -> bool:
        return any(self.given.get(name) for name in ("static_argnums", "static_argnames"))

    def list_shardings(self, positions: Sequence[int]) -> list[jax.sharding.Sharding | None]:
        """The shardings over several devices of leaves of `(args, kwargs)`; None for the other leaves."""
        leaves = jax.tree.leaves(self.described)
        return [_over_several_devices(_sharding_of(leaves[i])) for i in positions]

    def list_divisions(self, positions: Sequence[int]) -> list[jax.sharding.Sharding | None]:
        """As `list_shardings`; leaves without such a sharding have that of `in_shardings`."""
        leaves = jax.tree.leaves(self.described)
        given = self._list_in_shardings(len(leaves))
        own = self.list_shardings(positions)
        return [s or _over_several_devices(given[i]) for s, i in zip(own, positions, strict=True)]

    def _list_in_shardings(self, count: int) -> list[jax.sharding.Sharding | None]:
        """The shardings that `jit` was given for the leaves of `(args, kwargs)`, `count` of them."""
        given = self.given.get("in_shardings")
        if given is None or self._has_statics:
            return [None] * count
        entries = jax.tree.broadcast(given, self.args, is_leaf=_is_none)
        found = [_sharding_of(entry) for entry in jax.tree.leaves(entries, is_leaf=_is_none)]
        return found + [None] * (count - len(found))

    def list_paths(self, fun: Callable[..., Any], positions: Sequence[int]) -> list[str]:
        """The paths of leaves of `(args, kwargs)`, such as "state/params/w" in the argument `state`."""
        names = dict(enumerate(list_parameters(fun)))

        def describe(path: tuple[Any, ...]) -> str:
            (_, argument, *rest), is_named = path, path[0].idx == 1
            first = argument.key if is_named else names.get(argument.idx, str(argument.idx))
            return "/".join([first, jax.tree_util.keystr(tuple(rest), simple=True, separator="/")]).rstrip(
                "/"
            )

        paths = [path for path, _ in jax.tree.leaves_with_path((self.args, self.kwargs))]
        return [describe(paths[i]) for i in positions]

    def describe_arguments(
        self, fun: Callable[..., Any], positions: Sequence[int], keywords: dict[str, Any]
    ) -> tuple[list[str], list[bool], list[jax.sharding.Sharding | None]]:
        """The path of each traced argument, whether the program may reuse its memory, and its sharding.

        Args:
          fun: the function; `positions`: the traced arguments among the leaves of a call's arguments.
          keywords: as given to `jax.jit`.
        """
        keywords = {name: value for name, value in keywords.items() if name != "out_shardings"}
        nothing = functools.wraps(fun)(lambda *_, **__: None)
        info = self.trace(_jax_jit(nothing, **keywords)).args_info
        donated = [leaf.donated for leaf in jax.tree.leaves(info, is_leaf=lambda x: hasattr(x, "donated"))]
        return self.list_paths(fun, positions), donated, self.list_shardings(positions)

    @functools.cached_property
    def is_on_gpu(self) -> bool:
        """Whether the call compiles for GPUs."""
        platforms = {device.platform for s in self._shardings for device in _devices_of(s)}
        return not (platforms or {jax.default_backend()}).isdisjoint({"gpu", "cuda", "rocm"})


def _over_several_devices(sharding: jax.sharding.Sharding | None) -> jax.sharding.Sharding | None:
    return sharding if sharding is not None and sharding.num_devices > 1 else None


def _is_none(entry: Any) -> bool:
    return entry is None


def _sharding_of(leaf: Any) -> jax.sharding.Sharding | None:
    """A sharding, or the sharding of an array or a struct."""
    sharding = leaf if isinstance(leaf, jax.sharding.Sharding) else getattr(leaf, "sharding", None)
    return sharding if isinstance(sharding, jax.sharding.Sharding) else None


def _devices_of(sharding: jax.sharding.Sharding) -> Collection[Any]:
    """The devices of a sharding; none for a sharding over an abstract mesh."""
    is_abstract = isinstance(getattr(sharding, "mesh", None), jax.sharding.AbstractMesh)
    return () if is_abstract else sharding.device_set
