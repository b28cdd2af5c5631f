"""Policies made of policies: `Either`, `FirstLayers`, `KeepFirst` and `OnDevice`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.tag import Tag
from jaxoff._policy.decision import Decision, Rule, RuleKind
from jaxoff._policy.marks import TagKey, key_of_tag
from jaxoff._policy.protocol import DecidingPolicy, ask_policy, check_choice, read_answer


@dataclasses.dataclass(frozen=True)
class Either(DecidingPolicy):
    """Two policies in turn: the second decides where the first answers "recompute".

    A value under `mark_not_offload` stays on the device whichever policy answers.

    Attributes:
      first, second: policies of JAX's protocol, from jaxoff or elsewhere.
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
            check_choice("offload_dst", getattr(side, "offload_dst", "pinned_host"), ("pinned_host",))

    def __call__(self, prim, *in_avals, **params) -> Any:
        if _is_exempt(prim, params):
            return compat.Saveable
        answer = self.first(prim, *in_avals, **params)
        if read_answer(answer) == "recompute":
            answer = self.second(prim, *in_avals, **params)
        return answer if read_answer(answer) else compat.Recompute

    def decide(self, prim, *in_avals, **params) -> Decision:
        if _is_exempt(prim, params):
            return Decision("save", Rule(RuleKind.MARK, "mark_not_offload"))
        first = ask_policy(self.first, prim, *in_avals, **params)
        return first if first.placement != "recompute" else ask_policy(self.second, prim, *in_avals, **params)

    def on_device(self) -> Either:
        return Either(keep_on_device(self.first), keep_on_device(self.second))

    def __or__(self, other) -> Either:
        return Either(self, other)

    def __ror__(self, other) -> Either:
        return Either(other, self)

    def __repr__(self) -> str:
        return f"{self.first!r} | {self.second!r}"


def _is_exempt(prim, params) -> bool:
    return compat.is_name(prim) and Tag.of(params["name"]).mark == "not_offload"


@dataclasses.dataclass(frozen=True)
class FirstLayers:
    """Two policies for the layers of each `jaxoff.scan` or `jaxoff.layers`: the first `count`, and the rest.

    The residuals of the first layers wait longest for the backward pass. Two policies help where the link has
    time for the copies of some layers only, and where a budget lies between the memory of two placements.

    Attributes:
      count: the number of first layers, in the order of the forward pass. A loop of fewer layers has first
        layers only.
      policy: the policy of the first layers: a `jaxoff.policy`, or any policy of `jax.checkpoint`.
      rest: the policy of the other layers.

    Raises:
      ValueError: for a count other than an integer of at least 0.
      TypeError: for a policy of another type, or a `FirstLayers` inside a `FirstLayers`.

    Example:
      >>> import jaxoff
      >>> offloaded = jaxoff.policy(offload=["attn.core"], save=["mlp.act"])
      >>> policy = jaxoff.FirstLayers(8, offloaded, rest=offloaded.on_device())
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
        """Returns the policy of a layer, counted from 0."""
        return self.policy if layer < self.count else self.rest

    def on_device(self) -> FirstLayers:
        """Returns the saved twin: two policies with saves in place of offloads."""
        return FirstLayers(self.count, keep_on_device(self.policy), keep_on_device(self.rest))


@dataclasses.dataclass(frozen=True)
class OnDevice:
    """A policy from elsewhere, with saves in place of offloads."""

    policy: Callable[..., Any]

    def __call__(self, prim, *in_avals, **params) -> Any:
        answer = self.policy(prim, *in_avals, **params)
        return compat.Saveable if isinstance(answer, compat.Offloadable) else answer


@dataclasses.dataclass(frozen=True)
class EquationKind:
    """An equation as policies see equations. Two equations of a kind get the same decision.

    Attributes:
      prim: the primitive.
      operands: shape and dtype of each array among the inputs.
      tag: label and mark of the tag, if the equation binds a tag.
    """

    prim: Any
    operands: tuple[Any, ...]
    tag: TagKey | None

    @classmethod
    def of(cls, prim, *in_avals, **params) -> EquationKind:
        """Returns the kind of an equation, given the arguments of a policy."""
        tag = Tag.of(params["name"]) if compat.is_name(prim) else None
        operands = tuple((tuple(aval.shape), str(aval.dtype)) for aval in in_avals if hasattr(aval, "dtype"))
        return cls(prim, operands, key_of_tag(tag))


@dataclasses.dataclass(frozen=True)
class KeepFirst(DecidingPolicy):
    """A policy with an exception: the residual at the start of the backward pass stays on the device.

    Attributes:
      policy: the policy without the exception.
      kind: the kind of the equation behind the residual. Outputs of other equations of this kind stay, too.
    """

    policy: Callable[..., Any]
    kind: EquationKind

    def __call__(self, prim, *in_avals, **params) -> Any:
        answer = self.policy(prim, *in_avals, **params)
        offloads = isinstance(answer, compat.Offloadable)
        return compat.Saveable if offloads and self._covers(prim, in_avals, params) else answer

    def decide(self, prim, *in_avals, **params) -> Decision:
        decision = ask_policy(self.policy, prim, *in_avals, **params)
        if decision.placement != "offload" or not self._covers(prim, in_avals, params):
            return decision
        rule = decision.rule.append("kept by keep_first")
        return Decision("save", dataclasses.replace(rule, kind=RuleKind.KEEP_FIRST))

    def on_device(self) -> Callable[..., Any]:
        return keep_on_device(self.policy)

    def _covers(self, prim, in_avals, params) -> bool:
        return self.kind == EquationKind.of(prim, *in_avals, **params)


def unwrap_keep_first(policy: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """Returns the policy of the user: inside of a `KeepFirst`, or the given policy."""
    return policy.policy if isinstance(policy, KeepFirst) else policy


def stores_in_float8(policies: Iterable[Callable[..., Any] | None], label: str) -> bool:
    """Whether one of several policies stores kept values with a name in float8."""

    def stores(policy: Callable[..., Any] | None) -> bool:
        policy = unwrap_keep_first(policy)
        if isinstance(policy, Either):
            return stores(policy.first) or stores(policy.second)
        own = getattr(policy, "stores", None)
        return own is not None and own(label)

    return any(map(stores, policies))


def keep_on_device(policy: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the saved twin of any policy: a policy with saves in place of offloads."""
    return policy.on_device() if isinstance(policy, (DecidingPolicy, FirstLayers)) else OnDevice(policy)
