"""Checks of names and marks: that each has the effect that its writer meant."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator
from typing import Any

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.provenance import trace_origin
from jaxoff._policy.policy import as_given, matches
from jaxoff._report.finding import Finding, FindingCode
from jaxoff._report.near_miss import near_miss
from jaxoff._residuals.findings.finding import called, host_rows, parts
from jaxoff._residuals.residuals import Analysis, Row
from jaxoff._residuals.traced_function import Site, labels_of, sites_of


def rules_without_names(analysis: Analysis) -> Iterator[Finding]:
    """A list entry of a policy that matches no name in any checkpoint with that policy."""
    inside = analysis.program.checkpointed
    in_rules = analysis.kept.labels - labels_of(inside)
    for policy in dict.fromkeys(map(as_given, analysis.program.policies)):
        labels = labels_of(s for s in inside if as_given(s.policy) == policy) | in_rules
        listed = (
            f"The names there are {', '.join(sorted(labels))}." if labels else "There are no names there."
        )
        for field, pattern in _rules(policy):
            if not any(matches(pattern, label) for label in labels):
                yield Finding(
                    FindingCode.RULE_MATCHED_NOTHING,
                    f"{field}={pattern!r} matches no name inside its "
                    f"jax.checkpoint.{near_miss(pattern, labels)} {listed}",
                )


def _rules(policy) -> Iterator[tuple[str, str]]:
    for part in parts(policy):
        for field in ("offload", "save", "recompute"):
            for pattern in getattr(part, field):
                yield field, pattern


def marks_without_residuals(analysis: Analysis) -> Iterator[Finding]:
    """A mark, or a name that a list offloads by its full text, whose value the backward pass does not read.

    Nothing moves, nothing is kept.
    """
    rows = {
        (r.residual.name, r.residual.mark, key)
        for r in analysis.rows
        for key in (r.residual.source, r.residual.shape)
    }
    for site in analysis.program.sites:
        tag = site.tag
        if tag is None or not site.checkpoints or site.primal_only or _superseded(site) or _in_branch(site):
            continue
        # A glob may well cover what nothing reads.
        if tag.mark is None and not any(tag.label in part.offload for part in parts(site.policy)):
            continue
        shape = compat.shape_of(site.eqn.outvars[0].aval)
        if not {(tag.label, tag.mark, site.line), (tag.label, tag.mark, shape)} & rows:
            what = f"mark_{tag.mark}" if tag.mark else "The name"
            what += f" {tag.label!r}" if tag.label else ""
            yield Finding(
                FindingCode.MARK_WITHOUT_RESIDUAL,
                f"{what} has no effect: the backward pass does not read this value. Use the result of the "
                "mark, or mark the value that the next operation keeps.",
                site.line,
            )


def _in_branch(site: Site) -> bool:
    """Whether a site is in a branch of a cond: the branches share the buffers of their residuals."""
    scope = site.scope
    while scope is not None:
        if scope.eqn is not None and scope.eqn.primitive.name == "cond":
            return True
        scope = scope.parent
    return False


def _superseded(site: Site) -> bool:
    """Whether a tagged value is only tagged again, by a tag on it or by one that replaces it."""
    eqns = site.scope.jaxpr.eqns
    tags_after = [e for e in eqns[site.scope.positions[id(site.eqn)] + 1 :] if compat.name_in(e) is not None]
    var, operand = site.eqn.outvars[0], site.eqn.invars[0]
    users = [e for e in eqns if any(v is var for v in e.invars)]
    if any(v is var for v in site.scope.jaxpr.outvars):
        return False
    return all(e in tags_after for e in users) if users else any(e.invars[0] is operand for e in tags_after)


def lost_names(analysis: Analysis) -> Iterator[Finding]:
    """Names that JAX drops.

    Those in the primal function of a custom_vjp, and under jax_remat3 those under vmap.
    """
    alive, primal = analysis.kept.labels, labels_of(analysis.program.sites)
    for site in analysis.program.sites:
        if site.primal_only and site.tag and site.tag.label and site.tag.label not in alive:
            yield Finding(
                FindingCode.NAME_LOST_IN_CUSTOM_VJP,
                f"{site.tag.label!r} is named in a custom_vjp's primal function, which differentiation "
                "replaces by the forward rule. Name the value in the forward rule, and keep the named "
                "value in its residuals.",
                site.line,
            )
    for label in sorted(analysis.program.labels_called - alive - primal):
        yield Finding(
            FindingCode.NAME_LOST_IN_VMAP,
            f"{label!r} was named while the function was traced, but its program has no such name: vmap "
            "under jax_remat3 drops names. Switch jax_remat3 off, or batch without vmap.",
        )


def unnamed_beside_named(analysis: Analysis) -> Iterator[Finding]:
    """A named value whose un-named original the backward pass reads too."""
    wanted = {(r.residual.name, r.residual.mark) for r in analysis.rows if r.residual.name or r.residual.mark}
    tagged = [
        s for s in analysis.program.sites if s.tag and s.checkpoints and (s.tag.label, s.tag.mark) in wanted
    ]
    originals = [trace_origin(s.scope, s.eqn.invars[0]) for s in tagged if _original_used(s)]
    if not originals:
        return
    kept = analysis.program.kept(
        _SaveNamesAnd(frozenset(_signature(o.eqn) for o in originals if o.kind == "op"))
    )
    raw = {o.identity for o in (trace_origin(kept.live, var) for var in kept.values) if o.tag is None}
    for site in sites_of(kept.live):
        if site.tag is None or (site.tag.label, site.tag.mark) not in wanted:
            continue
        if trace_origin(site.scope, site.eqn.invars[0]).identity in raw:
            yield Finding(
                FindingCode.UNNAMED_BESIDE_NAMED,
                f"The backward pass reads both {called(site)} and the value before that tag, so both are "
                "kept or computed. Use only the tagged value: x = jaxoff.name(x, ...).",
                site.line,
            )


@dataclasses.dataclass(frozen=True)
class _SaveNamesAnd:
    """A checkpoint policy that saves names and the outputs of some equations."""

    signatures: frozenset[Any]

    def __call__(self, prim, *in_avals, **_):
        return compat.is_name(prim) or (prim, tuple(map(str, in_avals))) in self.signatures


def _original_used(site: Site) -> bool:
    """Whether anything but the tag uses the value before it."""
    rounded: Any = site.eqn.invars[0]
    maker = site.scope.definitions.get(rounded)
    chain = {id(site.eqn)}
    if maker is not None and maker[0].primitive.name in ("reduce_precision", "optimization_barrier"):
        chain.add(id(maker[0]))
        rounded = maker[0].invars[maker[1]]
    return any(v is rounded for e in site.scope.jaxpr.eqns if id(e) not in chain for v in e.invars)


def _signature(eqn) -> Any:
    return eqn.primitive, tuple(str(v.aval) for v in eqn.invars)


def moved_twice(analysis: Analysis) -> Iterator[Finding]:
    """One buffer that goes to the host under two tags, or as two views."""
    groups: dict[Any, list[Row]] = collections.defaultdict(list)
    for row in host_rows(analysis):
        root = trace_origin(row.origin.scope, row.origin.var, through_views=True, through_names=True)
        groups[root.identity].append(row)
    for rows in groups.values():
        if len(rows) > 1:
            names = " and ".join(r.residual.name or r.residual.made_by for r in rows)
            yield Finding(
                FindingCode.MOVED_TWICE,
                f"{names} are the same buffer, moved to the host {len(rows)} times "
                f"({sum(r.residual.nbytes for r in rows[1:]):,} bytes too many). Keep one tag, and use its "
                "result for all that follows.",
                rows[-1].residual.source,
            )


def lost_exemptions(analysis: Analysis) -> Iterator[Finding]:
    """A value under mark_not_offload that moves: it was named again behind a jit or scan boundary."""
    for row in host_rows(analysis):
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
                    f"{row.residual.name!r} moves to the host although mark_not_offload was put on it "
                    "outside the jit, scan or checkpoint that names it. Put mark_not_offload after the "
                    "name, or inside.",
                    row.residual.source,
                )
                break
            scope, atom = before.scope, before.eqn.invars[0]
