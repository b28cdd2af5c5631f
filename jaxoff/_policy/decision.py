"""The decision of a policy: a placement, and the rule behind the placement."""

from __future__ import annotations

import dataclasses
import enum
from typing import Literal

Placement = Literal["save", "offload", "recompute"]
"""Between forward and backward: on the device, in pinned host memory, or recomputed."""


class RuleKind(enum.Enum):
    """The origin of a rule."""

    LIST = enum.auto()  # an entry of a policy's list
    MARK = enum.auto()  # `mark_offload` or `mark_not_offload`
    UNMARKED = enum.auto()  # a policy's default, `unmarked`
    KEEP_FIRST = enum.auto()  # `keep_first` of `jaxoff.scan` or `jaxoff.layers`
    OTHER_POLICY = enum.auto()  # a policy from elsewhere, such as `jax.checkpoint_policies`
    WRONG_MEMORY_KIND = enum.auto()  # such a policy, offloading to a memory kind other than pinned host
    NO_POLICY = enum.auto()  # `jax.checkpoint` without a policy
    INPUT = enum.auto()  # an input of a checkpointed or scanned function
    AUTOGRAD = enum.auto()  # no `jax.checkpoint` around the value


_EXPLICIT = frozenset({RuleKind.LIST, RuleKind.MARK, RuleKind.KEEP_FIRST})


@dataclasses.dataclass(frozen=True)
class Rule:
    """The reason for a placement.

    Attributes:
      kind: the origin of the rule.
      text: the rule as shown in tables, e.g. "offload='moe.*'".
      pattern: the entry of the list, for a rule of kind `LIST`, else None.
    """

    kind: RuleKind
    text: str
    pattern: str | None = None

    @property
    def is_explicit(self) -> bool:
        """Whether a mark, a list or `keep_first` chose the placement, rather than a default."""
        return self.kind in _EXPLICIT

    def append(self, note: str) -> Rule:
        """Returns the rule with a note at the end of its text."""
        return dataclasses.replace(self, text=f"{self.text}, {note}")

    def __str__(self) -> str:
        return self.text


@dataclasses.dataclass(frozen=True)
class Decision:
    """Where a value waits for the backward pass, and why.

    Attributes:
      placement: "save", "offload" or "recompute".
      rule: the reason.
    """

    placement: Placement
    rule: Rule
