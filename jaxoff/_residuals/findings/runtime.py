"""Checks of this machine and its software against the residuals of a program."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
from collections.abc import Iterator

from jaxoff._jaxpr import compat, remat3
from jaxoff._report.finding import Finding, FindingCode
from jaxoff._residuals.findings.finding import decide_at, list_offloaded
from jaxoff._residuals.residuals import Analysis
from jaxoff._residuals.traced_function import Site
from jaxoff._runtime.pinned_pool import POOL_VARIABLE, pinned_pool_bytes, pool_to_set
from jaxoff._runtime.versions import OLDEST_JAX, format_release, parse_release


@dataclasses.dataclass(frozen=True)
class Runtime:
    """Facts about the software and the limits of a process.

    Attributes:
      jaxlib: version of jaxlib.
      pinned_pool_bytes: the most pinned host memory XLA gives a process.
      remat3: whether `jax_remat3` is on.
    """

    jaxlib: tuple[int, ...]
    pinned_pool_bytes: int
    remat3: bool = False

    @classmethod
    def read(cls) -> Runtime:
        """Reads the facts of this process."""
        jaxlib = parse_release(importlib.metadata.version("jaxlib"))
        return cls(jaxlib, pinned_pool_bytes(os.environ), remat3.is_enabled())


def find_what_remat3_recomputes(analysis: Analysis, runtime: Runtime) -> Iterator[Finding]:
    """Finds values that a policy would keep, and about which JAX asks no policy under jax_remat3."""
    if runtime.remat3 and (lost := [*filter(_is_lost, analysis.function.checkpointed_sites)]):
        kinds = list(dict.fromkeys(site.eqn.primitive.name for site in lost))
        more = f" and {len(kinds) - 3} more" if len(kinds) > 3 else ""
        yield Finding(
            FindingCode.REMAT3,
            "jax_remat3 is on: this JAX asks policies about names and products alone, and recomputes what "
            f"the policy would keep of {', '.join(kinds[:3])}{more}. Name the results (jaxoff.name).",
            lost[0].line,
        )


def _is_lost(site: Site) -> bool:
    eqn = site.eqn
    if site.tag or site.primal_only or compat.is_asked_under_remat3(eqn.primitive) or compat.sub_jaxprs(eqn):
        return False
    return decide_at(site).placement != "recompute"


def find_runtime_problems(analysis: Analysis, runtime: Runtime) -> Iterator[Finding]:
    """Finds a pool too small for the offloads, and a jaxlib with wrong gradients."""
    host = sum(r.residual.nbytes for r in list_offloaded(analysis))
    if not host:
        return
    if host > runtime.pinned_pool_bytes:
        yield Finding(
            FindingCode.PINNED_POOL_TOO_SMALL,
            f"The residuals need {host:,} bytes of pinned host memory, and XLA's pool ends at "
            f"{runtime.pinned_pool_bytes:,}: the step would die with RESOURCE_EXHAUSTED. Set "
            f"{POOL_VARIABLE}={pool_to_set(host)} or more.",
        )
    if runtime.jaxlib < OLDEST_JAX:
        yield Finding(
            FindingCode.JAXLIB_COMPUTES_WRONGLY,
            f"jaxlib {format_release(runtime.jaxlib)} computes wrong gradients for offloaded scan "
            f"residuals on a GPU (openxla/xla#46231). Install jaxlib >= {format_release(OLDEST_JAX)}.",
        )
