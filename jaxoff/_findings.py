"""Silent failures made loud: what is wrong with an offload, read from the program before it runs."""

from __future__ import annotations

import collections
import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any

from jaxoff import _compat
from jaxoff._origins import Scope, nbytes, trace_origin
from jaxoff._program import Site, sites_of
from jaxoff._errors import near_miss
from jaxoff._policy import DOTS, KERNELS, WRONG_KIND, Either, Policy, decide
from jaxoff._presets import DEFAULT_MIN_BYTES
from jaxoff._residuals import Analysis, Row, site_of

MIN_JAXLIB = (0, 11, 1)


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or soon will be.

    Attributes:
      code: what kind, e.g. "rule-matched-nothing".
      message: what is the case, and what to do.
      source: `file:line (function)` of the code concerned, or ''.
    """

    code: str
    message: str
    source: str = ""

    def __str__(self) -> str:
        return f"{self.code}: {self.message}" + (f" [{self.source}]" if self.source else "")


@dataclasses.dataclass(frozen=True)
class Environment:
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
    def current(cls) -> Environment:
        """The environment of this process."""
        return cls(_compat.version("jaxlib") or (0,), pinned_pool_bytes(), _compat.remat3_enabled())


def pinned_pool_bytes() -> int:
    """The most pinned host memory that XLA's GPU client gives a process: `XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB` GiB, 64 if unset."""
    text = os.environ.get("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "")
    return (int(text) if text.isdigit() else 64) << 30


def find(analysis: Analysis, environment: Environment) -> tuple[Finding, ...]:
    """All findings on an analysed function, without repeats."""
    checks: tuple[Callable[[Analysis], Iterator[Finding]], ...] = (
        rules_without_names,
        marks_without_residuals,
        lost_names,
        unnamed_beside_named,
        moved_twice,
        lost_exemptions,
        unrolled_scans,
        foldable_offloads,
        overridden_checkpoints,
        wrong_memory_kinds,
        large_unnamed,
        already_differentiated,
    )
    found = [f for check in checks for f in check(analysis)]
    found += environment_findings(analysis, environment)
    return tuple(dict.fromkeys(found))


def rules_without_names(analysis: Analysis) -> Iterator[Finding]:
    """A list entry of a policy that matches no name in any checkpoint with that policy."""
    inside = [s for s in analysis.program.sites if s.checkpoints]
    in_rules = {s.tag.label for s in _forward_tags(analysis)} - {s.tag.label for s in inside if s.tag}
    for policy in dict.fromkeys(s.policy for s in inside):
        labels = {s.tag.label for s in inside if s.tag and s.tag.label and s.policy == policy} | in_rules
        labels.discard(None)
        for part in _parts(policy):
            for field in ("offload", "save", "recompute"):
                for pattern in getattr(part, field):
                    if not any(part.matching(field, label) == pattern or _covers(pattern, label) for label in labels):
                        names = f"The names there are {', '.join(sorted(labels))}." if labels else "There are no names there."
                        yield Finding(
                            "rule-matched-nothing",
                            f"{field}={pattern!r} matches no name inside its jax.checkpoint.{near_miss(pattern, labels)} {names}",
                        )


def marks_without_residuals(analysis: Analysis) -> Iterator[Finding]:
    """A mark, or a name that a list offloads by its full text, whose value the backward pass does not read: nothing moves, nothing is kept."""
    rows = {(r.residual.name, r.residual.mark, key) for r in analysis.rows for key in (r.residual.source, r.residual.shape)}
    for site in analysis.program.sites:
        tag = site.tag
        if tag is None or not site.checkpoints or site.primal_only or _superseded(site):
            continue
        listed = any(tag.label in part.offload for part in _parts(site.policy))  # a glob may well cover what nothing reads
        if tag.mark is None and not listed:
            continue
        shape = tuple(site.eqn.outvars[0].aval.shape)
        if not {(tag.label, tag.mark, site.line), (tag.label, tag.mark, shape)} & rows:
            what = f"mark_{tag.mark}" + (f" on {tag.label!r}" if tag.label else "") if tag.mark else f"The name {tag.label!r}"
            yield Finding(
                "mark-without-residual",
                f"{what} has no effect: the backward pass does not read this value. Use the result of the mark, or mark the value that "
                f"the next operation keeps.",
                site.line,
            )


def lost_names(analysis: Analysis) -> Iterator[Finding]:
    """Names that JAX drops: those in the primal function of a custom_vjp, and under jax_remat3 those under vmap."""
    alive = {s.tag.label for s in _forward_tags(analysis)}
    primal = {s.tag.label for s in analysis.program.sites if s.tag}
    for site in analysis.program.sites:
        if site.primal_only and site.tag and site.tag.label and site.tag.label not in alive:
            yield Finding(
                "name-lost-in-custom-vjp",
                f"{site.tag.label!r} is named in a custom_vjp's primal function, which differentiation replaces by the forward rule. Name "
                f"the value in the forward rule, and keep the named value in its residuals.",
                site.line,
            )
    for label in sorted(analysis.program.labels_called - alive - primal):
        yield Finding(
            "name-lost-in-vmap",
            f"{label!r} was named while the function was traced, but its program has no such name: vmap under jax_remat3 drops names. "
            f"Switch jax_remat3 off, or batch without vmap.",
        )


def unnamed_beside_named(analysis: Analysis) -> Iterator[Finding]:
    """A named value whose un-named original the backward pass reads too."""
    wanted = {(r.residual.name, r.residual.mark) for r in analysis.rows if r.residual.name or r.residual.mark}
    tagged = [s for s in analysis.program.sites if s.tag and s.checkpoints and (s.tag.label, s.tag.mark) in wanted]
    originals = [trace_origin(s.scope, s.eqn.invars[0]) for s in tagged if _original_used(s)]
    if not originals:
        return
    kept = analysis.program.kept(_SaveNamesAnd(frozenset(_signature(o.eqn) for o in originals if o.kind == "op")))
    raw = {o.identity for o in (trace_origin(kept.live, var) for var in kept.values) if o.tag is None}
    for site in sites_of(kept.live):
        if site.tag is None or (site.tag.label, site.tag.mark) not in wanted:
            continue
        if trace_origin(site.scope, site.eqn.invars[0]).identity in raw:
            yield Finding(
                "unnamed-beside-named",
                f"The backward pass reads both {_called(site)} and the value before that tag, so both are kept or computed. Use only the "
                f"tagged value: x = jaxoff.name(x, ...).",
                site.line,
            )


@dataclasses.dataclass(frozen=True)
class _SaveNamesAnd:
    """A checkpoint policy that saves names and the outputs of some equations, so that what else is read shows."""

    signatures: frozenset[Any]

    def __call__(self, prim, *in_avals, **_):
        return _compat.is_name(prim) or (prim, tuple(map(str, in_avals))) in self.signatures


def _original_used(site: Site) -> bool:
    """Whether anything but the tag uses the value before it."""
    rounded = site.eqn.invars[0]
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
    for row in _host_rows(analysis):
        root = trace_origin(row.origin.scope, row.origin.var, through_views=True, through_names=True)
        groups[root.identity].append(row)
    for rows in groups.values():
        if len(rows) > 1:
            names = " and ".join(r.residual.name or r.residual.made_by for r in rows)
            yield Finding(
                "moved-twice",
                f"{names} are the same buffer, moved to the host {len(rows)} times ({sum(r.residual.nbytes for r in rows[1:]):,} bytes too "
                f"many). Keep one tag, and use its result for all that follows.",
                rows[-1].residual.source,
            )


def lost_exemptions(analysis: Analysis) -> Iterator[Finding]:
    """A value under mark_not_offload that moves because it was named again behind a jit, scan or checkpoint boundary."""
    for row in _host_rows(analysis):
        scope, atom = row.origin.scope, row.origin.eqn.invars[0] if row.origin.kind == "name" and row.origin.eqn else None
        while atom is not None:
            before = trace_origin(scope, atom, through_views=True)
            if before.tag is None or before.eqn is None:
                break
            if before.tag.mark == "not_offload":
                yield Finding(
                    "exemption-lost",
                    f"{row.residual.name!r} moves to the host although mark_not_offload was put on it outside the jit, scan or checkpoint "
                    f"that names it. Put mark_not_offload after the name, or inside.",
                    row.residual.source,
                )
                break
            scope, atom = before.scope, before.eqn.invars[0]


def unrolled_scans(analysis: Analysis) -> Iterator[Finding]:
    """An offload inside scan(unroll > 1), which XLA's GPU compiler refuses."""
    for row in _host_rows(analysis):
        scope: Scope | None = row.origin.scope
        while scope is not None:
            loop = _compat.scan_in(scope.eqn) if scope.eqn is not None else None
            if loop is not None and loop.unroll not in (1, False) and loop.length > 1:
                yield Finding(
                    "offload-in-unrolled-scan",
                    f"{_row_name(row)} is offloaded inside lax.scan(unroll={loop.unroll}), which does not compile on a GPU. Use unroll=1.",
                    row.residual.source,
                )
            scope = scope.parent


def foldable_offloads(analysis: Analysis) -> Iterator[Finding]:
    """An offload in a layer outside a scan with prevent_cse=False: XLA folds the two copies and the offload disappears."""
    for row in _host_rows(analysis):
        site = site_of(analysis.program, row.origin)
        if site is not None and not site.looped_checkpoint and site.checkpoints[0].prevent_cse is False:
            yield Finding(
                "offload-folded-away",
                f"{_row_name(row)} is offloaded by a jax.checkpoint(prevent_cse=False) that is not inside a scan: XLA folds the copy to the "
                f"host and back, and nothing moves. Leave prevent_cse at True there.",
                row.residual.source,
            )


def overridden_checkpoints(analysis: Analysis) -> Iterator[Finding]:
    """A jax.checkpoint inside another whose policy keeps what the outer policy does not: the outer one decides."""
    for site in analysis.program.sites:
        if len(site.checkpoints) < 2 or not (site.tag or site.eqn.primitive.name in DOTS | KERNELS):
            continue
        outer = _decide(site)
        for checkpoint in site.checkpoints[1:]:
            inner = _decide(site, checkpoint.policy)
            if inner.placement not in ("recompute", outer.placement):
                yield Finding(
                    "checkpoint-overridden",
                    f"An inner jax.checkpoint places {_called(site)} on the {inner.placement} ({inner.rule}), but the checkpoint around it "
                    f"decides: {outer.placement} ({outer.rule}). Give the outer one this rule, or drop one of the two.",
                    site.line,
                )


def wrong_memory_kinds(analysis: Analysis) -> Iterator[Finding]:
    """A stock policy that offloads to a memory kind that JAX takes for the device."""
    for site in analysis.program.sites:
        if site.tag and site.checkpoints and WRONG_KIND in (rule := _decide(site).rule):
            yield Finding("wrong-memory-kind", f"{_called(site)} does not move: {rule}. Only 'pinned_host' is the host.", site.line)


def large_unnamed(analysis: Analysis) -> Iterator[Finding]:
    """A value kept on the device past `min_bytes` that no list or mark speaks of, in a program that offloads."""
    policies = {s.policy for s in analysis.program.sites if s.checkpoints}
    if not any(policy is not None for policy in policies):
        return
    floors = [part.min_bytes for policy in policies for part in _parts(policy) if part.min_bytes]
    floor = min(floors, default=DEFAULT_MIN_BYTES)
    for row in analysis.rows:
        size = nbytes(row.origin.aval)
        if row.residual.placement == "device" and not row.explicit and row.origin.tag is None and size >= floor:
            yield Finding(
                "large-unnamed-residual",
                f"An un-named {row.residual.dtype}{list(row.residual.shape)} made by {row.residual.made_by} stays on the device: {size:,} bytes, "
                f"{row.residual.count} times ({row.residual.rule}). Name it and list the name, or recompute it.",
                row.residual.source,
            )


def already_differentiated(analysis: Analysis) -> Iterator[Finding]:
    """A function that takes gradients itself, so that its offloads are not residuals of the function given."""
    for site in analysis.program.sites:
        if site.eqn.primitive.name == "device_put" and any(_compat.is_host(v.aval) for v in site.eqn.outvars):
            yield Finding(
                "already-differentiated",
                "The function already takes gradients or moves values to the host itself; what it moves is not listed. Pass the loss "
                "function, not the training step.",
                site.line,
            )
            return


def environment_findings(analysis: Analysis, environment: Environment) -> Iterator[Finding]:
    """What is wrong with this machine or its software for this program."""
    host = sum(r.residual.nbytes for r in _host_rows(analysis))
    if not host:
        return
    if host > environment.pinned_pool_bytes:
        yield Finding(
            "pinned-pool-too-small",
            f"The residuals need {host:,} bytes of pinned host memory, and XLA's pool ends at {environment.pinned_pool_bytes:,}: the step "
            f"would die with RESOURCE_EXHAUSTED. Set XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB={-(-host // 2**30) + 1} or more.",
        )
    if environment.jaxlib < MIN_JAXLIB:
        yield Finding(
            "jaxlib-computes-wrongly",
            f"jaxlib {'.'.join(map(str, environment.jaxlib))} computes wrong gradients for offloaded scan residuals on a GPU "
            f"(openxla/xla#46231). Install jaxlib >= {'.'.join(map(str, MIN_JAXLIB))}.",
        )
    if environment.remat3:
        yield Finding(
            "remat3",
            "jax_remat3 is on: this JAX then asks policies about names only, and not about those in custom_vjp forward rules or under vmap.",
        )


def _decide(site: Site, policy=...):
    policy = site.policy if policy is ... else policy
    return decide(policy, site.eqn.primitive, *(v.aval for v in site.eqn.invars), **site.eqn.params)


def _called(site: Site) -> str:
    if site.tag is None:
        return f"the output of {site.eqn.primitive.name}"
    return repr(site.tag.label) if site.tag.label else f"the value under mark_{site.tag.mark}"


def _row_name(row: Row) -> str:
    residual = row.residual
    return repr(residual.name) if residual.name else f"The value under mark_{residual.mark}" if residual.mark else f"The output of {residual.made_by}"


def _host_rows(analysis: Analysis) -> list[Row]:
    return [row for row in analysis.rows if row.residual.placement == "host"]


def _forward_tags(analysis: Analysis) -> list[Site]:
    return [s for s in sites_of(analysis.kept.forward) if s.tag]


def _superseded(site: Site) -> bool:
    """Whether a tagged value is only tagged again, by a tag on it or by one that replaces it."""
    eqns = site.scope.jaxpr.eqns
    tags_after = [e for e in eqns[site.scope.positions[id(site.eqn)] + 1 :] if _compat.name_in(e) is not None]
    var, operand = site.eqn.outvars[0], site.eqn.invars[0]
    users = [e for e in eqns if any(v is var for v in e.invars)]
    if any(v is var for v in site.scope.jaxpr.outvars):
        return False
    return all(e in tags_after for e in users) if users else any(e.invars[0] is operand for e in tags_after)


def _parts(policy) -> list[Policy]:
    if isinstance(policy, Either):
        return [*_parts(policy.first), *_parts(policy.second)]
    return [policy] if isinstance(policy, Policy) else []


def _covers(pattern: str, label: str | None) -> bool:
    return label is not None and Policy(offload=(pattern,)).matching("offload", label) is not None
