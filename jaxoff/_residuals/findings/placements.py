"""Checks of placements: that what is to move moves, compiles, and fits."""

from __future__ import annotations

from collections.abc import Iterator

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.primitives import DOTS, OPAQUE
from jaxoff._jaxpr.provenance import Scope
from jaxoff._policy.policy import WRONG_KIND
from jaxoff._policy.presets import DEFAULT_MIN_BYTES
from jaxoff._report.finding import Finding, FindingCode
from jaxoff._residuals.findings.finding import Runtime, called, decide, host_rows, parts, row_name
from jaxoff._residuals.residuals import Analysis, site_of
from jaxoff._runtime.pinned_pool import POOL_VARIABLE, pool_to_set
from jaxoff._runtime.versions import OLDEST_JAX, format_release


def refused_by_the_compiler(analysis: Analysis) -> Iterator[Finding]:
    """An offload where XLA's GPU compiler dies with INTERNAL.

    In scan(unroll > 1), in a scan inside a scan, in a branch of a cond.
    """
    for row in host_rows(analysis):
        for code, where, fix in _refusals(row.origin.scope):
            yield Finding(
                code,
                f"{row_name(row)} is offloaded {where}, which does not compile on a GPU. {fix}",
                row.residual.source,
            )


def _refusals(scope: Scope | None) -> Iterator[tuple[FindingCode, str, str]]:
    around: list[compat.ScanLayout] = []
    while scope is not None and scope.eqn is not None:
        if (loop := compat.scan_in(scope.eqn)) is not None:
            around.append(loop)
        if scope.eqn.primitive.name == "cond":
            yield (
                FindingCode.OFFLOAD_IN_COND,
                "from a branch of lax.cond",
                "Put jax.checkpoint around the cond, and name what goes into or out of it.",
            )
        scope = scope.parent
    for loop in around:
        if loop.unroll not in (1, False) and loop.length > 1:
            yield (
                FindingCode.OFFLOAD_IN_UNROLLED_SCAN,
                f"inside lax.scan(unroll={loop.unroll})",
                "Use unroll=1.",
            )
    if len(around) > 1:
        yield (
            FindingCode.OFFLOAD_IN_NESTED_SCAN,
            "in a scan inside another scan",
            "Scan once over all layers, or offload in the outer body only.",
        )


def foldable_offloads(analysis: Analysis) -> Iterator[Finding]:
    """An offload in a layer outside a scan with prevent_cse=False.

    XLA folds the two copies and the offload disappears.
    """
    for row in host_rows(analysis):
        site = site_of(analysis.program, row.origin)
        if site is not None and not site.looped_checkpoint and site.checkpoints[0].prevent_cse is False:
            yield Finding(
                FindingCode.OFFLOAD_FOLDED_AWAY,
                f"{row_name(row)} is offloaded by a jax.checkpoint(prevent_cse=False) that is not inside a "
                "scan: XLA folds the copy to the host and back, and nothing moves. Leave prevent_cse at "
                "True there.",
                row.residual.source,
            )


def overridden_checkpoints(analysis: Analysis) -> Iterator[Finding]:
    """A jax.checkpoint inside another whose policy keeps what the outer policy does not.

    The outer one decides.
    """
    for site in analysis.program.sites:
        if len(site.checkpoints) < 2 or not (site.tag or site.eqn.primitive.name in DOTS | OPAQUE):
            continue
        outer = decide(site)
        for depth in range(1, len(site.checkpoints)):
            inner = decide(site, depth)
            if inner.placement not in ("recompute", outer.placement):
                yield Finding(
                    FindingCode.CHECKPOINT_OVERRIDDEN,
                    f"An inner jax.checkpoint places {called(site)} on the {inner.placement} "
                    f"({inner.rule}), but the checkpoint around it decides: {outer.placement} "
                    f"({outer.rule}). The inner rule holds only within the backward pass, where an offload "
                    f"is a round trip for nothing. Give the outer one this rule, or drop one of the two.",
                    site.line,
                )


def wrong_memory_kinds(analysis: Analysis) -> Iterator[Finding]:
    """A stock policy that offloads to a memory kind that JAX takes for the device."""
    for site in analysis.program.sites:
        if site.tag and site.checkpoints and WRONG_KIND in (rule := decide(site).rule):
            yield Finding(
                FindingCode.WRONG_MEMORY_KIND,
                f"{called(site)} does not move: {rule}. Only 'pinned_host' is the host.",
                site.line,
            )


def large_unnamed(analysis: Analysis) -> Iterator[Finding]:
    """A value kept on the device past `min_bytes` that no list or mark speaks of, under some policy."""
    policies = analysis.program.policies
    if not any(policy is not None for policy in policies):
        return
    floors = [part.min_bytes for policy in policies for part in parts(policy) if part.min_bytes]
    floor = min(floors, default=DEFAULT_MIN_BYTES)
    for row in analysis.rows:
        size = compat.nbytes(row.origin.aval)
        if (
            row.residual.placement == "device"
            and not row.explicit
            and row.origin.tag is None
            and size >= floor
        ):
            yield Finding(
                FindingCode.LARGE_UNNAMED_RESIDUAL,
                f"An un-named {row.residual.dtype}{list(row.residual.shape)} made by {row.residual.made_by} "
                f"stays on the device: {size:,} bytes, {row.residual.count} times ({row.residual.rule}). "
                "Name it and list the name, or recompute it.",
                row.residual.source,
            )


def already_differentiated(analysis: Analysis) -> Iterator[Finding]:
    """A function that takes gradients itself, so that what it offloads is not its own residual."""
    for site in analysis.program.sites:
        if site.eqn.primitive.name == "device_put" and any(compat.is_host(v.aval) for v in site.eqn.outvars):
            yield Finding(
                FindingCode.ALREADY_DIFFERENTIATED,
                "The function already takes gradients or moves values to the host itself; what it moves is "
                "not listed. Pass the loss function, not the training step.",
                site.line,
            )
            return


def runtime_findings(analysis: Analysis, runtime: Runtime) -> Iterator[Finding]:
    """What is wrong with this machine or its software for this program."""
    host = sum(r.residual.nbytes for r in host_rows(analysis))
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
    if runtime.remat3:
        yield Finding(
            FindingCode.REMAT3,
            "jax_remat3 is on: this JAX then asks policies about names only, and not about those in "
            "custom_vjp forward rules or under vmap.",
        )
