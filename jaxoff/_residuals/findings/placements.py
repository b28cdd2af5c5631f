"""Checks of placements: offloads XLA refuses or removes, overridden policies, large residuals."""

from __future__ import annotations

from collections.abc import Iterator

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.primitives import DOTS, OPAQUE, is_condition
from jaxoff._jaxpr.provenance import Scope
from jaxoff._policy.decision import RuleKind
from jaxoff._policy.presets import DEFAULT_MIN_BYTES
from jaxoff._report.finding import Finding, FindingCode
from jaxoff._residuals.findings.finding import (
    decide_at,
    describe_row,
    describe_site,
    list_offloaded,
    policies_in,
)
from jaxoff._residuals.residuals import Analysis, Row, find_site


def find_refused_offloads(analysis: Analysis) -> Iterator[Finding]:
    """Finds offloads on which XLA's GPU compiler dies with INTERNAL.

    In a scan(unroll > 1), in a scan inside a scan, and in a branch of a cond, wherever it stands.
    """
    for row in list_offloaded(analysis):
        for code, where, fix in _find_refusals(row.origin.scope):
            yield Finding(
                code,
                f"{describe_row(row)} is offloaded {where}, which does not compile on a GPU{fix}",
                row.residual.source,
            )


def _find_refusals(scope: Scope | None) -> Iterator[tuple[FindingCode, str, str]]:
    around: list[compat.ScanLayout] = []
    while scope is not None and scope.eqn is not None:
        if (loop := compat.scan_in(scope.eqn)) is not None:
            around.append(loop)
        if is_condition(scope.eqn):
            yield (
                FindingCode.OFFLOAD_IN_COND,
                "from a branch of lax.cond",
                " in a loop, or if another branch offloads no such value. Put jax.checkpoint around "
                "the cond, and name the inputs or outputs of the cond.",
            )
        scope = scope.parent
    for loop in around:
        if loop.unroll not in (1, False) and loop.length > 1:
            yield (
                FindingCode.OFFLOAD_IN_UNROLLED_SCAN,
                f"inside lax.scan(unroll={loop.unroll})",
                ". Use unroll=1; jaxoff.jit does.",
            )
    if len(around) > 1:
        yield (
            FindingCode.OFFLOAD_IN_NESTED_SCAN,
            "in a scan inside another scan",
            ". Scan once over all layers, or offload in the outer body only.",
        )


def find_foldable_offloads(analysis: Analysis) -> Iterator[Finding]:
    """Finds offloads of layers with prevent_cse=False outside of a scan.

    XLA folds the copy to the host with the copy back, and the value stays on the device.
    """
    for row in list_offloaded(analysis):
        site = find_site(analysis.function, row.origin)
        if site is not None and not site.loops_around[0] and site.checkpoints[0].prevent_cse is False:
            yield Finding(
                FindingCode.OFFLOAD_FOLDED_AWAY,
                f"{describe_row(row)} is offloaded by a jax.checkpoint(prevent_cse=False) outside of a scan: "
                "XLA folds the copy to the host and back, and the value stays on the device. Leave "
                "prevent_cse at True there.",
                row.residual.source,
            )


def find_overridden_checkpoints(analysis: Analysis) -> Iterator[Finding]:
    """Finds a jax.checkpoint inside another, with a placement other than the placement of the outer policy.

    The outer policy decides. A scan between the two recomputes a group of layers at a time: the inner policy
    then places what the group's backward pass reads.
    """
    for site in analysis.function.sites:
        if len(site.checkpoints) < 2 or not (site.tag or site.eqn.primitive.name in DOTS | OPAQUE):
            continue
        outer = decide_at(site)
        for depth in range(1, len(site.checkpoints)):
            if site.loops_around[depth] > site.loops_around[0]:
                continue
            inner = decide_at(site, depth)
            if inner.placement not in ("recompute", outer.placement):
                yield Finding(
                    FindingCode.CHECKPOINT_OVERRIDDEN,
                    f"An inner jax.checkpoint answers {inner.placement!r} for {describe_site(site)} "
                    f"({inner.rule}), but the checkpoint around it decides: {outer.placement!r} "
                    f"({outer.rule}). The inner rule holds only within the backward pass, where an offload "
                    f"is a round trip for nothing. Give the outer one this rule, or drop one of the two.",
                    site.line,
                )


def find_wrong_memory_kinds(analysis: Analysis) -> Iterator[Finding]:
    """Finds stock policies with a memory kind other than pinned host: JAX leaves the value on the device."""
    for site in analysis.function.sites:
        if not (site.tag and site.checkpoints):
            continue
        if (rule := decide_at(site).rule).kind is RuleKind.WRONG_MEMORY_KIND:
            yield Finding(
                FindingCode.WRONG_MEMORY_KIND,
                f"{describe_site(site)} is not offloaded: {rule}. Only 'pinned_host' is the host.",
                site.line,
            )


def find_large_unnamed(analysis: Analysis) -> Iterator[Finding]:
    """Finds un-named values of at least `min_bytes` on the device, kept by a default of a policy."""
    policies = analysis.function.policies
    if not any(policy is not None for policy in policies):
        return
    floors = [part.min_bytes for policy in policies for part in policies_in(policy) if part.min_bytes]
    floor = min(floors, default=DEFAULT_MIN_BYTES)
    for row in analysis.rows:
        size = compat.nbytes(row.origin.aval)
        if (
            row.residual.placement == "save"
            and not row.rule.is_explicit
            and row.origin.tag is None
            and size >= floor
        ):
            yield Finding(
                FindingCode.LARGE_UNNAMED_RESIDUAL,
                f"An un-named {row.residual.dtype}{list(row.residual.shape)} made by {row.residual.made_by} "
                f"stays on the device: {size:,} bytes, {row.residual.count} times ({row.residual.rule}). "
                f"{_advise(row)}",
                row.residual.source,
            )


def _advise(row: Row) -> str:
    """The remedy for a large value without a name."""
    eqn = row.origin.eqn
    if row.origin.kind != "op" or eqn is None or compat.source_line(eqn):
        return "Name the value and list the name, or recompute the value."
    return (
        "Library code makes the value, where no name can be put: put the code around the call under "
        "jax.checkpoint, or give jaxoff.jit a budget (device_bytes=), which runs a model's head in parts."
    )


def find_inner_gradients(analysis: Analysis) -> Iterator[Finding]:
    """Finds a function with gradients inside: its offloads are no residuals of the function."""
    for site in analysis.function.sites:
        if site.eqn.primitive.name == "device_put" and any(compat.is_host(v.aval) for v in site.eqn.outvars):
            yield Finding(
                FindingCode.ALREADY_DIFFERENTIATED,
                "The function already takes gradients or copies values to the host itself; these values are "
                "not listed. Pass the loss function, not the training step.",
                site.line,
            )
            return
