"""Questions shared by the checks: decisions on a site, offloaded residuals, and names for messages."""

from __future__ import annotations

from typing import Any

from jaxoff._policy.combinators import Either, unwrap_keep_first
from jaxoff._policy.decision import Decision
from jaxoff._policy.policy import Policy
from jaxoff._policy.protocol import ask_policy
from jaxoff._residuals.residuals import Analysis, Row
from jaxoff._residuals.traced_function import Site


def decide_at(site: Site, checkpoint: int = 0) -> Decision:
    """Asks the policy of a checkpoint around a site, by default the outermost."""
    policy = site.checkpoints[checkpoint].policy
    return ask_policy(policy, site.eqn.primitive, *(v.aval for v in site.eqn.invars), **site.eqn.params)


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


def policies_in(policy: Any) -> list[Policy]:
    """Lists the policies of jaxoff inside a policy: the sides of an `Either`, or the policy."""
    policy = unwrap_keep_first(policy)
    if isinstance(policy, Either):
        return [*policies_in(policy.first), *policies_in(policy.second)]
    return [policy] if isinstance(policy, Policy) else []
