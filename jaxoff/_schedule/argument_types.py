"""The types of a call's arguments: equal types mean equal programs.

Every call needs them, of hundreds of arrays, before a GPU has work. The arrays that a step returns have the
same objects for their types and shardings each time, so most arguments of a call are known by identity from
the call before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

import jax

from jaxoff._jaxpr.lowered import HOST
from jaxoff._state.hosted import is_on_host, on_device


class Key:
    """What tells programs apart, with its hash computed once."""

    __slots__ = ("_hash", "_parts")

    def __init__(self, parts: Hashable):
        self._parts, self._hash = parts, hash(parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: Any) -> bool:
        return self is other or (isinstance(other, Key) and self._parts == other._parts)


@dataclasses.dataclass(frozen=True)
class _Latest:
    """The leaves of the latest call.

    Attributes:
      avals, shardings: by leaf; None where JAX has none.
      types: by leaf.
      on_host: by leaf, whether it is in pinned host memory.
      others: what else tells programs apart.
      key: of types and others.
    """

    avals: Sequence[Any] = ()
    shardings: Sequence[Any] = ()
    types: tuple[Hashable, ...] = ()
    on_host: Sequence[bool] = ()
    others: Hashable = None
    key: Key = dataclasses.field(default_factory=lambda: Key(((), None)))


class ArgumentTypes:
    """The types of the arguments of a function's calls.

    Attributes:
      ignores_host: whether an array in pinned host memory has the type of an array on its device.
    """

    def __init__(self, *, ignores_host: bool):
        self.ignores_host = ignores_host
        self._latest = _Latest()

    def make_key(self, leaves: Sequence[Any], others: Hashable) -> tuple[Key, bool]:
        """The key of a call with these leaves, and with `others` that tell programs apart.

        Returns:
          The key, and whether an array is in pinned host memory.
        """
        avals = [getattr(leaf, "aval", None) for leaf in leaves]
        shardings = [getattr(leaf, "sharding", None) for leaf in leaves]
        latest, new = self._latest, range(len(leaves))
        types: list[Hashable] = [None] * len(leaves)
        on_host = [False] * len(leaves)
        if len(leaves) == len(latest.types):
            seen = zip(avals, latest.avals, shardings, latest.shardings, strict=True)
            new = [i for i, (a, b, s, t) in enumerate(seen) if a is None or a is not b or s is not t]
            types, on_host = list(latest.types), list(latest.on_host)
        for i in new:
            types[i] = _type_of(leaves[i], ignores_host=self.ignores_host)
            on_host[i] = is_on_host(leaves[i])
        listed = tuple(types)
        key = latest.key if (listed, others) == (latest.types, latest.others) else Key((listed, others))
        self._latest = _Latest(avals, shardings, listed, on_host, others, key)
        return key, any(on_host)


def _type_of(leaf: Any, *, ignores_host: bool) -> Hashable:
    """The type of an argument; of an object that can only be static, the object itself."""
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):  # of JAX, of numpy, and others
        place = _place_of(getattr(leaf, "sharding", None), ignores_host=ignores_host)
        return tuple(leaf.shape), leaf.dtype, getattr(leaf, "weak_type", False), place
    is_object = isinstance(leaf, Hashable) and not isinstance(leaf, (bool, int, float, complex))
    return leaf if is_object else type(leaf)


def _place_of(sharding: Any, *, ignores_host: bool) -> Hashable:
    """The device and memory; None for those of arrays without a sharding, as of described arrays."""
    if not isinstance(sharding, jax.sharding.Sharding):
        return None
    if ignores_host and sharding.memory_kind == HOST:
        sharding = on_device(sharding)
    if type(sharding) is not jax.sharding.SingleDeviceSharding:
        return sharding
    ((device,), memory) = sharding.device_set, sharding.memory_kind
    first = jax.local_devices()[0]
    return None if device is first and memory in (None, first.default_memory().kind) else (device, memory)
