"""Checks of names and marks: lists without a match, marks without an effect, names lost by JAX."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator
from typing import Any

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.primitives import is_condition
from jaxoff._jaxpr.provenance import trace_origin
from jaxoff._policy.combinators import unwrap_keep_first
from jaxoff._policy.marks import key_of_tag
from jaxoff._report.finding import Finding, FindingCode
from jaxoff._residuals.findings.finding import (
    describe_site,
    list_entries,
    list_offloaded,
    policies_in,
)
from jaxoff._residuals.residuals import Analysis, Row, keep
from jaxoff._residuals.traced_function import Site, collect_labels, iterate_sites


def find_unmatched_rules(analysis: Analysis) -> Iterator[Finding]:
    """Finds entries of a policy's lists without a match among the names in the policy's checkpoints."""
    inside = analysis.function.checkpointed_sites
    in_rules = analysis.kept.labels - collect_labels(inside)
    for policy in dict.fromkeys(map(unwrap_keep_first, analysis.function.policies)):
        labels = collect_labels(s for s in inside if unwrap_keep_first(s.policy) == policy) | in_rules
        for entry in list_entries(policy):
            yield from entry.find_unmatched(labels, "inside its jax.checkpoint")


def find_marks_without_residual(analysis: Analysis) -> Iterator[Finding]:
    """Finds marks without an effect: the backward pass does not read the value.

    A name counts as a mark if an `offload` list has the full name. A glob may cover unread values.
    """
    rows = {
        (r.residual.name, r.residual.mark, key)
        for r in analysis.rows
        for key in (r.residual.source, r.residual.shape)
    }
    for site in analysis.function.sites:
        tag = site.tag
        if tag is None or not site.checkpoints or site.primal_only or _is_replaced(site) or _in_branch(site):
            continue
        if tag.mark is None and not any(tag.label in part.offload for part in policies_in(site.policy)):
            continue
        shape = compat.shape_of(site.eqn.outvars[0].aval)
        if not {(tag.label, tag.mark, site.line), (tag.label, tag.mark, shape)} & rows:
            subject = f"mark_{tag.mark}" if tag.mark else "The name"
            subject += f" {tag.label!r}" if tag.label else ""
            yield Finding(
                FindingCode.MARK_WITHOUT_RESIDUAL,
                f"{subject} has no effect: the backward pass does not read this value. Use the result of the "
                "mark, or mark the value that the next operation keeps.",
                site.line,
            )


def _in_branch(site: Site) -> bool:
    """Whether a site is in a branch of a cond: the branches share the buffers of their residuals."""
    scope = site.scope
    while scope is not None:
        if scope.eqn is not None and is_condition(scope.eqn):
            return True
        scope = scope.parent
    return False


def _is_replaced(site: Site) -> bool:
    """Whether further tags are the only readers of a tagged value, or another tag takes its place."""
    eqns = site.scope.jaxpr.eqns
    tags_after = [e for e in eqns[site.scope.positions[id(site.eqn)] + 1 :] if compat.name_in(e) is not None]
    var, operand = site.eqn.outvars[0], site.eqn.invars[0]
    users = [e for e in eqns if any(v is var for v in e.invars)]
    if any(v is var for v in site.scope.jaxpr.outvars):
        return False
    return all(e in tags_after for e in users) if users else any(e.invars[0] is operand for e in tags_after)


def find_lost_names(analysis: Analysis) -> Iterator[Finding]:
    """Finds names dropped by JAX: in the primal function of a custom_vjp, and under vmap with jax_remat3."""
    alive, primal = analysis.kept.labels, collect_labels(analysis.function.sites)
    for site in analysis.function.sites:
        if site.primal_only and site.tag and site.tag.label and site.tag.label not in alive:
            yield Finding(
                FindingCode.NAME_LOST_IN_CUSTOM_VJP,
                f"{site.tag.label!r} is named in a custom_vjp's primal function, which differentiation "
                "replaces by the forward rule. Name the value in the forward rule, and keep the named "
                "value in its residuals.",
                site.line,
            )
    for label in sorted(analysis.function.labels_called - alive - primal):
        yield Finding(
            FindingCode.NAME_LOST_IN_VMAP,
            f"{label!r} was named while the function was traced, but its program has no such name: vmap "
            "under jax_remat3 drops names. Switch jax_remat3 off, or batch without vmap.",
        )


def find_unnamed_originals(analysis: Analysis) -> Iterator[Finding]:
    """Finds named values read by the backward pass together with their un-named originals."""
    wanted = {(r.residual.name, r.residual.mark) for r in analysis.rows if r.residual.name or r.residual.mark}
    tagged = [s for s in analysis.function.sites if s.checkpoints and key_of_tag(s.tag) in wanted]
    originals = [trace_origin(s.scope, s.eqn.invars[0]) for s in tagged if _has_used_original(s)]
    if not originals:
        return
    kept = analysis.function.trace_kept(
        _KeepNamesAnd(frozenset(_signature(o.eqn) for o in originals if o.kind == "op"))
    )
    raw = {o.identity for o in (trace_origin(kept.live, var) for var in kept.values) if o.tag is None}
    for site in iterate_sites(kept.live):
        if key_of_tag(site.tag) not in wanted:
            continue
        if trace_origin(site.scope, site.eqn.invars[0]).identity in raw:
            yield Finding(
                FindingCode.UNNAMED_BESIDE_NAMED,
                f"The backward pass reads both {describe_site(site)} and the value before the tag, so both "
                "are kept or recomputed. Use only the tagged value: x = jaxoff.name(x, ...).",
                site.line,
            )


@dataclasses.dataclass(frozen=True)
class _KeepNamesAnd:
    """A checkpoint policy: names and the outputs of some equations are kept, other values recomputed.

    Attributes:
      signatures: primitive and input types of the equations.
    """

    signatures: frozenset[Any]

    def __call__(self, prim, *in_avals, **_):
        is_kept = compat.is_name(prim) or (prim, tuple(map(str, in_avals))) in self.signatures
        return is_kept and keep(in_avals)


def _has_used_original(site: Site) -> bool:
    """Whether the value before a tag has a reader besides the tag."""
    rounded: Any = site.eqn.invars[0]
    maker = site.scope.definitions.get(rounded)
    chain = {id(site.eqn)}
    if maker is not None and maker[0].primitive.name in ("reduce_precision", "optimization_barrier"):
        chain.add(id(maker[0]))
        rounded = maker[0].invars[maker[1]]
    return any(v is rounded for e in site.scope.jaxpr.eqns if id(e) not in chain for v in e.invars)


def _signature(eqn) -> Any:
    return eqn.primitive, tuple(str(v.aval) for v in eqn.invars)


def find_repeated_offloads(analysis: Analysis) -> Iterator[Finding]:
    """Finds buffers offloaded more than once, under several tags or as several views."""
    groups: dict[Any, list[Row]] = collections.defaultdict(list)
    for row in list_offloaded(analysis):
        root = trace_origin(row.origin.scope, row.origin.var, through_views=True, through_names=True)
        groups[root.identity].append(row)
    for rows in groups.values():
        if len(rows) > 1:
            names = " and ".join(r.residual.name or r.residual.made_by for r in rows)
            yield Finding(
                FindingCode.MOVED_TWICE,
                f"{names} are the same buffer, offloaded {len(rows)} times "
                f"({sum(r.residual.nbytes for r in rows[1:]):,} bytes too many). Keep one tag, and use its "
                "result for all that follows.",
                rows[-1].residual.source,
            )


def find_lost_exemptions(analysis: Analysis) -> Iterator[Finding]:
    """Finds offloaded values under mark_not_offload, with a name from behind a jit or scan boundary."""
    for row in list_offloaded(analysis):
        scope, atom = (
            row.origin.scope,
            row.origin.eqn.invars[0] if row.origin.kind == "name" and row.origin.eqn else None,
        )
        while atom is not None:
            before = trace_origin(scope, atom, through_views=True)
            if before.tag is None or before.eqn is None:
                break
            if before.tag.mark == "not_offload":
                yield Finding(
                    FindingCode.EXEMPTION_LOST,
                    f"{row.residual.name!r} is offloaded although mark_not_offload was put on the value "
                    "outside the jit, scan or checkpoint that names it. Put mark_not_offload after the "
                    "name, or inside.",
                    row.residual.source,
                )
                break
            scope, atom = before.scope, before.eqn.invars[0]
