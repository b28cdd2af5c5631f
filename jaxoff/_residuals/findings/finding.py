"""Questions shared by the checks: decisions on a site, offloaded residuals, and names for messages."""

from __future__ import annotations

import dataclasses
import glob
from collections.abc import Collection, Iterator
from typing import Any

from jaxoff._policy.combinators import Either, unwrap_keep_first
from jaxoff._policy.decision import Decision
from jaxoff._policy.policy import LISTS, Policy, matches
from jaxoff._policy.protocol import ask_about
from jaxoff._report.finding import Finding, FindingCode
from jaxoff._report.near_miss import near_miss
from jaxoff._residuals.residuals import Analysis, Row
from jaxoff._residuals.traced_function import Site


def decide_at(site: Site, checkpoint: int = 0) -> Decision:
    """Asks the policy of a checkpoint around a site, by default the outermost."""
    return ask_about(site.checkpoints[checkpoint].policy, site.eqn)


def describe_site(site: Site) -> str:
    """Names the value of a site, for the middle of a sentence."""
    if site.tag is None:
        return f"the output of {site.eqn.primitive.name}"
    return repr(site.tag.label) if site.tag.label else f"the value under mark_{site.tag.mark}"


def describe_row(row: Row) -> str:
    """Names a residual, for the beginning of a sentence."""
    residual = row.residual
    if residual.name:
        return repr(residual.name)
    return f"The value under mark_{residual.mark}" if residual.mark else f"The output of {residual.made_by}"


def list_offloaded(analysis: Analysis) -> list[Row]:
    """Lists the offloaded residuals."""
    return [row for row in analysis.rows if row.residual.placement == "offload"]


def list_sides(policy: Any) -> list[Any]:
    """Lists the policies inside a policy: the sides of an `Either`, or the policy without its `KeepFirst`."""
    policy = unwrap_keep_first(policy)
    if isinstance(policy, Either):
        return [*list_sides(policy.first), *list_sides(policy.second)]
    return [] if policy is None else [policy]


def policies_in(policy: Any) -> list[Policy]:
    """Lists the policies of jaxoff inside a policy."""
    return [side for side in list_sides(policy) if isinstance(side, Policy)]


STOCK_OFFLOADED = "names_which_can_be_offloaded"
"""The list of offloaded names in `jax.checkpoint_policies.save_and_offload_only_these_names`."""

_STOCK_LISTS = (STOCK_OFFLOADED, "names_which_can_be_saved", "saveable_names")
"""Lists of names in policies of `jax.checkpoint_policies`: fields, or variables in a closure."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """An entry of a policy's lists of names.

    Attributes:
      field: the list.
      pattern: the name or glob.
      is_glob: whether the policy reads `pattern` as a glob.
    """

    field: str
    pattern: str
    is_glob: bool

    def matches(self, label: str) -> bool:
        """Whether the entry covers a name."""
        return matches(self.pattern, label) if self.is_glob else self.pattern == label

    def find_unmatched(self, labels: Collection[str], where: str) -> Iterator[Finding]:
        """Finds the entry without a match among names; `where` says which names these are."""
        if any(map(self.matches, labels)):
            return
        names = ", ".join(sorted(labels))
        listed = f"The names there are {names}." if labels else "There are no names there."
        near = near_miss(self.pattern, labels)
        if self.pattern in labels:  # whose brackets or stars the glob does not match
            near = f" Brackets are those of a glob: {glob.escape(self.pattern)!r} is the name itself."
        yield Finding(
            FindingCode.RULE_MATCHED_NOTHING,
            f"{self.field}={self.pattern!r} matches no name {where}.{near} {listed}",
        )


def list_entries(policy: Any) -> Iterator[Entry]:
    """Yields the entries of the lists of names in a policy: of jaxoff, or of `jax.checkpoint_policies`."""
    for side in list_sides(policy):
        if isinstance(side, Policy):
            for field in LISTS:
                for pattern in getattr(side, field):
                    yield Entry(field, pattern, is_glob=True)
            for pattern, _ in side.store:
                yield Entry("store", pattern, is_glob=True)
        else:
            held = read_attributes(side)
            for field in _STOCK_LISTS:
                for pattern in sorted(name for name in held.get(field, ()) if isinstance(name, str)):
                    yield Entry(field, pattern, is_glob=False)


def read_attributes(policy: Any) -> dict[str, Any]:
    """Attribute -> value of a policy from elsewhere; of a function, variable -> value of its closure."""
    cells = getattr(policy, "__closure__", None)
    if cells is None:
        return dict(getattr(policy, "__dict__", {}))
    return dict(zip(policy.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=True))
