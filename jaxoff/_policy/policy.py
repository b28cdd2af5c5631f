"""`Policy`: lists of names and a default, from which a value's tag or primitive gets its placement."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, get_args

import jax.numpy as jnp

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.float8 import DTYPE
from jaxoff._jaxpr.primitives import DOTS, OPAQUE, VIEWS
from jaxoff._jaxpr.tag import Tag
from jaxoff._policy.combinators import Either
from jaxoff._policy.decision import Decision, Rule, RuleKind
from jaxoff._policy.protocol import DecidingPolicy, check_choice, infer_out_avals

type ListName = Literal["offload", "save", "recompute"]
Unmarked = Literal["recompute", "save", "dots", "offload", "offload_dots"]

LISTS: tuple[ListName, ...] = ("offload", "save", "recompute")
UNMARKED = get_args(Unmarked)
MEMORY_KINDS = ("pinned_host", "device")
_FLOAT8 = jnp.dtype(DTYPE).name


_OFFLOADED_PRIMITIVES = {"offload": DOTS | OPAQUE, "offload_dots": DOTS}
"""`unmarked` -> primitives with offloaded outputs."""


@dataclasses.dataclass(frozen=True)
class Policy(DecidingPolicy):
    """Decides for each value of a `jax.checkpoint`ed function: save, offload or recompute.

    Make a policy with `jaxoff.policy`. Policies are hashable; equal policies share the entries of JAX's trace
    caches.

    Precedence: `mark_not_offload` > the lists, `recompute` before `save` before `offload` > `mark_offload`
      > `unmarked`.

    Attributes:
      offload, save, recompute: names or globs (`fnmatch`, case-sensitive), sorted, without repeats.
      unmarked: the placement of a value without an entry in a list and without a mark:
        "recompute": all are recomputed.
        "save": the residuals of autograd are saved; views are recomputed from the viewed value.
        "dots": outputs of dots and convolutions are saved, other values recomputed.
        "offload_dots": outputs of dots and convolutions are offloaded, other values recomputed.
        "offload": anchors (names, dots, ragged dots, convolutions, Pallas and FFI calls) are offloaded, other
        values recomputed.
      min_bytes: the least bytes of an offload by a glob, a name or `unmarked`. Smaller values stay on the
        device. A `mark_offload`ed value is offloaded at any size.
      memory_kind: "pinned_host", or "device" for the saved twin: a policy with saves in place of offloads.
      store: pairs of a name or glob and "float8_e4m3fn", sorted: `jaxoff.jit` stores kept values with such a
        name in float8, with a float32 scale for each block of 128 along the last axis (64 or 32 where 128
        does not divide the axis). Takes a mapping, too.
      preset: the name of the preset behind this policy, or None.

    Raises:
      ValueError: for a name in two lists, an unknown `unmarked` or `memory_kind`, a negative `min_bytes`, or
        a name in `store` with another dtype, or in `recompute`, too.
      TypeError: for an entry other than a string.
    """

    offload: tuple[str, ...] = ()
    save: tuple[str, ...] = ()
    recompute: tuple[str, ...] = ()
    unmarked: Unmarked = "recompute"
    min_bytes: int = 0
    memory_kind: str = "pinned_host"
    store: tuple[tuple[str, str], ...] = ()
    preset: str | None = None

    def __post_init__(self):
        for field in LISTS:
            object.__setattr__(self, field, _sort_patterns(field, getattr(self, field)))
        object.__setattr__(self, "store", _sort_store(self.store))
        _check_disjoint(self)
        check_choice("unmarked", self.unmarked, UNMARKED)
        check_choice("memory_kind", self.memory_kind, MEMORY_KINDS)
        if isinstance(self.min_bytes, bool) or not isinstance(self.min_bytes, int) or self.min_bytes < 0:
            raise ValueError(
                f"min_bytes is a count of bytes, an integer of at least 0, got {self.min_bytes!r}."
            )

    def __call__(self, prim, *in_avals, **params) -> Any:
        placement = self.decide(prim, *in_avals, **params).placement
        if placement == "offload":
            return compat.Offloadable(src="device", dst="pinned_host")
        return compat.Saveable if placement == "save" else compat.Recompute

    def decide(self, prim, *in_avals, **params) -> Decision:
        if compat.is_name(prim):
            decision = self._decide_tag(Tag.of(params["name"]), functools.partial(_count_nbytes, in_avals))
        else:
            decision = self._decide_primitive(prim, in_avals, params)
        if decision.placement == "offload" and self.memory_kind == "device":
            return Decision("save", decision.rule.append("kept on the device"))
        return decision

    def _decide_tag(self, tag: Tag, nbytes: Callable[[], int | None]) -> Decision:
        if tag.mark == "not_offload":
            return Decision("save", Rule(RuleKind.MARK, "mark_not_offload"))
        if tag.label is not None:
            if pattern := self.find_pattern("recompute", tag.label):
                return Decision("recompute", _list_rule("recompute", pattern))
            if pattern := self.find_pattern("save", tag.label):
                return Decision("save", _list_rule("save", pattern))
            if pattern := self.find_pattern("offload", tag.label):
                return self._offload_if_large(nbytes(), _list_rule("offload", pattern))
        if tag.mark == "offload":
            return Decision("offload", Rule(RuleKind.MARK, "mark_offload"))
        if self.unmarked == "offload":
            return self._offload_if_large(nbytes(), self._default_rule)
        return Decision("save" if self.unmarked == "save" else "recompute", self._default_rule)

    def _decide_primitive(self, prim, in_avals, params) -> Decision:
        if self.unmarked == "save" and prim.name not in VIEWS:
            return Decision("save", self._default_rule)
        if self.unmarked == "dots" and prim.name in DOTS:
            return Decision("save", self._default_rule)
        if prim.name in _OFFLOADED_PRIMITIVES.get(self.unmarked, ()):
            nbytes = _count_nbytes(infer_out_avals(prim, in_avals, params))
            return self._offload_if_large(nbytes, self._default_rule)
        return Decision("recompute", self._default_rule)

    @property
    def _default_rule(self) -> Rule:
        return Rule(RuleKind.UNMARKED, f"unmarked={self.unmarked!r}")

    def _offload_if_large(self, nbytes: int | None, rule: Rule) -> Decision:
        if nbytes is not None and nbytes < self.min_bytes:
            return Decision("save", rule.append(f"{nbytes} < min_bytes={self.min_bytes}"))
        return Decision("offload", rule)

    def find_pattern(self, field: ListName, label: str) -> str | None:
        """Finds the first pattern of a list with a match for a name, or None."""
        return next((p for p in getattr(self, field) if matches(p, label)), None)

    def stores(self, label: str) -> bool:
        """Whether kept values with a name are stored in float8."""
        return any(matches(pattern, label) for pattern, _ in self.store)

    def on_device(self) -> Policy:
        """Returns the saved twin: the same policy with saves in place of offloads."""
        return dataclasses.replace(self, memory_kind="device")

    def __or__(self, other) -> Either:
        return Either(self, other)

    def __ror__(self, other) -> Either:
        return Either(other, self)

    def __repr__(self) -> str:
        default = Policy()
        shown = [repr(self.preset)] if self.preset else []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "store" and value:
                shown.append(f"store={dict(value)!r}")
            elif field.name != "preset" and value != getattr(default, field.name):
                shown.append(f"{field.name}={list(value) if isinstance(value, tuple) else value!r}")
        return f"jaxoff.policy({', '.join(shown)})"


def matches(pattern: str, label: str) -> bool:
    """Whether a name or glob covers a name."""
    return fnmatch.fnmatchcase(label, pattern)


def _list_rule(field: ListName, pattern: str) -> Rule:
    return Rule(RuleKind.LIST, f"{field}={pattern!r}", pattern)


def _count_nbytes(avals) -> int | None:
    """Counts the bytes of abstract arrays. None for a question without arrays, as in tests of policies."""
    return sum(map(compat.nbytes, avals)) if avals else None


def _sort_patterns(field: str, value: str | Iterable[str]) -> tuple[str, ...]:
    if not isinstance(value, Iterable):
        raise TypeError(f"{field} is a list of names or globs such as 'moe.*', got {value!r}.")
    items = (value,) if isinstance(value, str) else tuple(value)
    for item in items:
        if not isinstance(item, str) or not item:
            raise TypeError(
                f"{field} is a list of names or globs such as 'moe.*', got {item!r} in {items!r}."
            )
    return tuple(sorted(set(items)))


def _sort_store(value: Any) -> tuple[tuple[str, str], ...]:
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(pairs, (list, tuple)) or not all(isinstance(p, tuple) and len(p) == 2 for p in pairs):
        raise TypeError(f'store maps names or globs to a dtype, {{"mlp.*": "{_FLOAT8}"}}; got {value!r}.')
    _sort_patterns("store", [pattern for pattern, _ in pairs])
    for pattern, dtype in pairs:
        try:
            known = jnp.dtype(dtype) == DTYPE
        except TypeError:
            known = False
        if not known:
            raise ValueError(f"store={{{pattern!r}: ...}} takes {_FLOAT8!r}, the one format; got {dtype!r}.")
    return tuple(sorted((pattern, _FLOAT8) for pattern, _ in pairs))


def _check_disjoint(policy: Policy) -> None:
    for i, a in enumerate(LISTS):
        for b in LISTS[i + 1 :]:
            both = sorted(set(getattr(policy, a)) & set(getattr(policy, b)))
            if both:
                raise ValueError(
                    f"A name stands in one list only, got {', '.join(map(repr, both))} in both {a} and {b}. "
                    f"Remove it from one; a glob in the one and a name that it covers in the other is fine."
                )
    if both := sorted({pattern for pattern, _ in policy.store} & set(policy.recompute)):
        raise ValueError(
            f"A recomputed value is not stored; got {', '.join(map(repr, both))} in both lists. "
            "Remove it from one, and list it in save or offload where nothing else keeps it."
        )
