"""Policies: a pure function from a value's tag and kind to where it lives between forward and backward."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
from collections.abc import Callable, Iterable
from typing import Any, Literal, get_args

import jax

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.primitives import DOTS, OPAQUE, VIEWS
from jaxoff._jaxpr.tag import Tag
from jaxoff._report.near_miss import near_miss

Placement = Literal["device", "host", "recompute"]
Unmarked = Literal["recompute", "save", "dots", "offload", "offload_dots"]

WRONG_KIND = "JAX keeps on the device what goes to the memory kind"
UNMARKED = get_args(Unmarked)
MEMORY_KINDS = ("pinned_host", "device")

_MOVED = {"offload": DOTS | OPAQUE, "offload_dots": DOTS}


@dataclasses.dataclass(frozen=True)
class Decision:
    """Where a value lives between forward and backward, and the rule that said so."""

    placement: Placement
    rule: str
    explicit: bool = False  # a mark or a list entry said so, not a default


@dataclasses.dataclass(frozen=True)
class Policy:
    """Decides for each value of a `jax.checkpoint`ed function whether it is saved, offloaded or recomputed.

    Make one with `jaxoff.policy`. It is hashable, and equal policies hit the same entry of JAX's trace
    caches.

    Precedence: `mark_not_offload` > the lists, `recompute` before `save` before `offload` > `mark_offload`
      > `unmarked`.

    Attributes:
      offload, save, recompute: names or globs (`fnmatch`, case-sensitive), sorted.
      unmarked: what happens to a value that no list and no mark decides: "recompute" all; "save" what
        autograd would save (views are made again from the value that they view); "dots" saves the outputs
        of dots and convolutions and recomputes the rest, and "offload_dots" moves those of at least
        `min_bytes`; "offload" moves every anchor (names, dots, ragged dots, convolutions, Pallas and FFI
        calls) of at least `min_bytes` and recomputes the rest.
      min_bytes: a smaller value that a glob or `unmarked` would move stays on the device. A
        `mark_offload`ed value always goes.
      memory_kind: "pinned_host", or "device" for the twin that keeps on the device what the original moves.
      preset: the name of the preset that this came from, if any.
    """

    offload: tuple[str, ...] = ()
    save: tuple[str, ...] = ()
    recompute: tuple[str, ...] = ()
    unmarked: Unmarked = "recompute"
    min_bytes: int = 0
    memory_kind: str = "pinned_host"
    preset: str | None = None

    def __post_init__(self):
        for field in ("offload", "save", "recompute"):
            object.__setattr__(self, field, _patterns(field, getattr(self, field)))
        _check_disjoint(self)
        _check_choice("unmarked", self.unmarked, UNMARKED)
        _check_choice("memory_kind", self.memory_kind, MEMORY_KINDS)
        if isinstance(self.min_bytes, bool) or not isinstance(self.min_bytes, int) or self.min_bytes < 0:
            raise ValueError(
                f"min_bytes is a count of bytes, an integer of at least 0, got {self.min_bytes!r}."
            )

    def __call__(self, prim, *in_avals, **params) -> Any:
        """Answers JAX: `Saveable`, `Recompute` or `Offloadable`."""
        placement = self.decide(prim, *in_avals, **params).placement
        if placement == "host":
            return compat.Offloadable(src="device", dst="pinned_host")
        return compat.Saveable if placement == "device" else compat.Recompute

    def decide(self, prim, *in_avals, **params) -> Decision:
        """The placement of the output of an equation, and the rule that decided it."""
        if compat.is_name(prim):
            decision = self.decide_tag(Tag.of(params["name"]), functools.partial(_nbytes_of, in_avals))
        else:
            decision = self._decide_primitive(prim, in_avals, params)
        if decision.placement == "host" and self.memory_kind == "device":
            return Decision("device", f"{decision.rule}, kept on the device", decision.explicit)
        return decision

    def decide_tag(self, tag: Tag, nbytes: Callable[[], int | None]) -> Decision:
        if tag.mark == "not_offload":
            return Decision("device", "mark_not_offload", explicit=True)
        if tag.label is not None:
            if pattern := self.matching("recompute", tag.label):
                return Decision("recompute", f"recompute={pattern!r}", explicit=True)
            if pattern := self.matching("save", tag.label):
                return Decision("device", f"save={pattern!r}", explicit=True)
            if pattern := self.matching("offload", tag.label):
                return self._move(nbytes(), f"offload={pattern!r}", explicit=True)
        if tag.mark == "offload":
            return Decision("host", "mark_offload", explicit=True)
        if self.unmarked == "offload":
            return self._move(nbytes(), "unmarked='offload'")
        return Decision("device" if self.unmarked == "save" else "recompute", f"unmarked={self.unmarked!r}")

    def _decide_primitive(self, prim, in_avals, params) -> Decision:
        rule = f"unmarked={self.unmarked!r}"
        if self.unmarked == "save" and prim.name not in VIEWS:
            return Decision("device", rule)
        if self.unmarked == "dots" and prim.name in DOTS:
            return Decision("device", rule)
        if prim.name in _MOVED.get(self.unmarked, ()):
            return self._move(_nbytes_of(out_avals(prim, in_avals, params)), rule)
        return Decision("recompute", rule)

    def _move(self, nbytes: int | None, rule: str, explicit: bool = False) -> Decision:
        if nbytes is not None and nbytes < self.min_bytes:
            return Decision("device", f"{rule}, {nbytes} < min_bytes={self.min_bytes}", explicit)
        return Decision("host", rule, explicit)

    def matching(self, field: Literal["offload", "save", "recompute"], label: str) -> str | None:
        """The first pattern of a list that matches a name."""
        return next((p for p in getattr(self, field) if matches(p, label)), None)

    def on_device(self) -> Policy:
        """The saved twin: keeps on the device exactly what this policy moves to the host."""
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
            if field.name != "preset" and value != getattr(default, field.name):
                shown.append(f"{field.name}={list(value) if isinstance(value, tuple) else value!r}")
        return f"jaxoff.policy({', '.join(shown)})"


@dataclasses.dataclass(frozen=True)
class Either:
    """Two policies, asked one after the other: the first answer that is not "recompute" wins.

    Either side may be any callable of JAX's policy protocol. A value under `mark_not_offload` stays on the
    device whichever answers.
    """

    first: Callable[..., Any]
    second: Callable[..., Any]

    def __post_init__(self):
        for side in (self.first, self.second):
            if not callable(side):
                raise TypeError(
                    "A policy combines with another policy: a callable (prim, *avals, **params), got "
                    f"{side!r}."
                )
            _check_choice("offload_dst", getattr(side, "offload_dst", "pinned_host"), ("pinned_host",))

    def __call__(self, prim, *in_avals, **params) -> Any:
        if compat.is_name(prim) and Tag.of(params["name"]).mark == "not_offload":
            return compat.Saveable
        answer = self.first(prim, *in_avals, **params)
        if _placement(answer) == "recompute":
            answer = self.second(prim, *in_avals, **params)
        return answer if _placement(answer) else compat.Recompute

    def decide(self, prim, *in_avals, **params) -> Decision:
        """The placement of the output of an equation, and the rule that decided it."""
        if compat.is_name(prim) and Tag.of(params["name"]).mark == "not_offload":
            return Decision("device", "mark_not_offload", explicit=True)
        first = decide(self.first, prim, *in_avals, **params)
        return first if first.placement != "recompute" else decide(self.second, prim, *in_avals, **params)

    def on_device(self) -> Either:
        """The saved twin: keeps on the device exactly what this policy moves to the host."""
        return Either(on_device(self.first), on_device(self.second))

    def __or__(self, other) -> Either:
        return Either(self, other)

    def __ror__(self, other) -> Either:
        return Either(other, self)

    def __repr__(self) -> str:
        return f"{self.first!r} | {self.second!r}"


@dataclasses.dataclass(frozen=True)
class FirstLayers:
    """Two policies for the layers of each `jaxoff.scan` or `jaxoff.layers`: the first ones, and the others.

    What the first layers keep waits longest for its backward pass. With copies that not all layers have the
    time for, or more memory than one placement for all needs and less than the next, this is between.

    Attributes:
      count: how many layers are first ones, in the order of the forward pass; all, where there are fewer.
      policy: theirs: a `jaxoff.policy`, or any policy of `jax.checkpoint`.
      rest: that of the others.

    Example:
      >>> import jaxoff
      >>> moved = jaxoff.policy(offload=["attn.core"], save=["mlp.act"])
      >>> policy = jaxoff.FirstLayers(8, moved, rest=moved.on_device())
      >>> policy.rest.memory_kind
      'device'
    """

    count: int
    policy: Callable[..., Any]
    rest: Callable[..., Any]

    def __post_init__(self):
        if isinstance(self.count, bool) or not isinstance(self.count, int) or self.count < 0:
            raise ValueError(
                f"count is how many layers are first, an integer of at least 0, got {self.count!r}."
            )
        for policy in (self.policy, self.rest):
            if not callable(policy) or isinstance(policy, FirstLayers):
                raise TypeError(
                    f"FirstLayers takes two policies, callables (prim, *avals, **params), got {policy!r}."
                )

    def __call__(self, prim, *in_avals, **params) -> Any:
        raise TypeError(
            "A policy by layer goes to jaxoff.scan or jaxoff.layers, which know the number of the layer; "
            f"jax.checkpoint does not, and got {self!r}. Hand it .policy or .rest."
        )

    def of(self, layer: int) -> Callable[..., Any]:
        """The policy of a layer."""
        return self.policy if layer < self.count else self.rest

    def on_device(self) -> FirstLayers:
        """The saved twin: keeps on the device exactly what this policy moves to the host."""
        return FirstLayers(self.count, on_device(self.policy), on_device(self.rest))


@dataclasses.dataclass(frozen=True)
class OnDevice:
    """A policy of any origin with its offloads turned into saves."""

    policy: Callable[..., Any]

    def __call__(self, prim, *in_avals, **params) -> Any:
        answer = self.policy(prim, *in_avals, **params)
        return compat.Saveable if isinstance(answer, compat.Offloadable) else answer


@dataclasses.dataclass(frozen=True)
class Kind:
    """What a policy sees of an equation: its primitive, what it reads, and the tag that it gives."""

    prim: Any
    operands: tuple[Any, ...]
    tag: tuple[str | None, str | None] | None

    @classmethod
    def of(cls, prim, *in_avals, **params) -> Kind:
        """The kind of the equations that a policy is asked about so."""
        tag = Tag.of(params["name"]) if compat.is_name(prim) else None
        operands = tuple((tuple(aval.shape), str(aval.dtype)) for aval in in_avals if hasattr(aval, "dtype"))
        return cls(prim, operands, None if tag is None else (tag.label, tag.mark))


@dataclasses.dataclass(frozen=True)
class KeepFirst:
    """A policy of any origin that does not move what the backward pass needs first.

    Attributes:
      policy: the policy.
      kind: of the equation that makes that value; what others of this kind make stays, too.
    """

    policy: Callable[..., Any]
    kind: Kind

    def __call__(self, prim, *in_avals, **params) -> Any:
        answer = self.policy(prim, *in_avals, **params)
        moves = isinstance(answer, compat.Offloadable)
        return compat.Saveable if moves and self.kind == Kind.of(prim, *in_avals, **params) else answer

    def decide(self, prim, *in_avals, **params) -> Decision:
        """The placement of the output of an equation, and the rule that decided it."""
        decision = decide(self.policy, prim, *in_avals, **params)
        if decision.placement != "host" or self.kind != Kind.of(prim, *in_avals, **params):
            return decision
        return Decision("device", f"{decision.rule}, kept by keep_first", explicit=True)

    def on_device(self) -> Callable[..., Any]:
        """The saved twin: keeps all on the device."""
        return on_device(self.policy)


def as_given(policy: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """The policy that a user gave, under what `keep_first` made of it."""
    return policy.policy if isinstance(policy, KeepFirst) else policy


def on_device(policy: Callable[..., Any]) -> Callable[..., Any]:
    """The saved twin of any policy: keeps on the device exactly what it moves to the host."""
    return (
        policy.on_device()
        if isinstance(policy, (Policy, Either, FirstLayers, KeepFirst))
        else OnDevice(policy)
    )


def decide(policy: Callable[..., Any] | None, prim, *in_avals, **params) -> Decision:
    """The placement that any policy of JAX's protocol gives the output of an equation."""
    if policy is None:
        return Decision("recompute", "jax.checkpoint without a policy")
    if isinstance(policy, (Policy, Either, KeepFirst)):
        return policy.decide(prim, *in_avals, **params)
    answer = policy(prim, *in_avals, **params)
    if isinstance(answer, compat.Offloadable) and answer.dst != "pinned_host":
        return Decision("device", f"{_name_of(policy)}: {WRONG_KIND} {answer.dst!r}")
    return Decision(_placement(answer), _name_of(policy))


def _placement(answer) -> Placement:
    if isinstance(answer, bool):
        return "device" if answer else "recompute"
    if isinstance(answer, compat.Offloadable):
        _check_choice("the host memory kind of Offloadable(dst=)", answer.dst, ("pinned_host",))
        return "host"
    if isinstance(answer, type(compat.Saveable)):
        return "device"
    if isinstance(answer, type(compat.Recompute)):
        return "recompute"
    raise TypeError(
        f"A checkpoint policy answers a bool, Saveable, Recompute or Offloadable(src, dst), got {answer!r} "
        f"of type {type(answer).__name__}."
    )


def _name_of(policy) -> str:
    return getattr(policy, "__name__", None) or repr(policy)


def out_avals(prim, in_avals, params) -> tuple[Any, ...]:
    """The abstract outputs of an equation, which JAX does not show to a policy."""
    for key in ("out_avals", "result_avals"):
        if key in params:
            return tuple(params[key])
    out = jax.eval_shape(lambda *xs: prim.bind(*xs, **params), *in_avals)
    return tuple(jax.tree.leaves(out))


def _nbytes_of(avals) -> int | None:
    """Bytes of abstract arrays, or None where a policy was asked without them."""
    if not avals:
        return None
    return sum(map(compat.nbytes, avals))


def matches(pattern: str, label: str) -> bool:
    """Whether a name or glob covers a name."""
    return fnmatch.fnmatchcase(label, pattern)


def _patterns(field: str, value: str | Iterable[str]) -> tuple[str, ...]:
    items = (value,) if isinstance(value, str) else tuple(value)
    for item in items:
        if not isinstance(item, str) or not item:
            raise TypeError(
                f"{field} is a list of names or globs such as 'moe.*', got {item!r} in {items!r}."
            )
    return tuple(sorted(set(items)))


def _check_disjoint(policy: Policy) -> None:
    fields = ("offload", "save", "recompute")
    for i, a in enumerate(fields):
        for b in fields[i + 1 :]:
            both = sorted(set(getattr(policy, a)) & set(getattr(policy, b)))
            if both:
                raise ValueError(
                    f"A name stands in one list only, got {', '.join(map(repr, both))} in both {a} and {b}. "
                    f"Remove it from one; a glob in the one and a name that it covers in the other is fine."
                )


def _check_choice(what: str, got, choices: tuple[str, ...]) -> None:
    if got not in choices:
        raise ValueError(
            f"{what} is one of {', '.join(map(repr, choices))}, got {got!r}.{near_miss(got, choices)}"
        )
