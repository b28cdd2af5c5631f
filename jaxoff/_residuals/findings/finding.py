"""What a finding is, and what checks share: how they ask policies and call things."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os

from jaxoff._jaxpr import compat
from jaxoff._policy.policy import Decision, Either, Policy, as_given
from jaxoff._policy.policy import decide as decide_any
from jaxoff._residuals.residuals import Analysis, Row
from jaxoff._residuals.traced_function import Site
from jaxoff._runtime.pinned_pool import pinned_pool_bytes
from jaxoff._runtime.versions import parse_release


@dataclasses.dataclass(frozen=True)
class Runtime:
    """What findings need to know of the machine and its software.

    Attributes:
      jaxlib: version of jaxlib.
      pinned_pool_bytes: the most pinned host memory that XLA gives a process.
      remat3: whether `jax_remat3` is on.
    """

    jaxlib: tuple[int, ...]
    pinned_pool_bytes: int
    remat3: bool = False

    @classmethod
    def current(cls) -> Runtime:
        """The software and limits of this process."""
        jaxlib = parse_release(importlib.metadata.version("jaxlib"))
        return cls(jaxlib, pinned_pool_bytes(os.environ), compat.remat3_enabled())


def decide(site: Site, checkpoint: int = 0) -> Decision:
    """What a checkpoint around a site says of it, the outermost by default."""
    policy = site.checkpoints[checkpoint].policy
    return decide_any(policy, site.eqn.primitive, *(v.aval for v in site.eqn.invars), **site.eqn.params)


def called(site: Site) -> str:
    """How a message calls the value made at a site."""
    if site.tag is None:
        return f"the output of {site.eqn.primitive.name}"
    return repr(site.tag.label) if site.tag.label else f"the value under mark_{site.tag.mark}"


def row_name(row: Row) -> str:
    """How a message calls a residual."""
    residual = row.residual
    if residual.name:
        return repr(residual.name)
    return f"The value under mark_{residual.mark}" if residual.mark else f"The output of {residual.made_by}"


def host_rows(analysis: Analysis) -> list[Row]:
    """The residuals that go to the host."""
    return [row for row in analysis.rows if row.residual.placement == "host"]


def parts(policy) -> list[Policy]:
    """The jaxoff policies in a policy."""
    policy = as_given(policy)
    if isinstance(policy, Either):
        return [*parts(policy.first), *parts(policy.second)]
    return [policy] if isinstance(policy, Policy) else []
