"""Silent failures made loud: what is wrong with an offload, read from the program before it runs."""

from __future__ import annotations

from jaxoff._report.finding import Finding
from jaxoff._residuals.findings import names, placements
from jaxoff._residuals.findings.finding import Runtime
from jaxoff._residuals.residuals import Analysis

CHECKS = (
    names.rules_without_names,
    names.marks_without_residuals,
    names.lost_names,
    names.unnamed_beside_named,
    names.moved_twice,
    names.lost_exemptions,
    placements.refused_by_the_compiler,
    placements.foldable_offloads,
    placements.overridden_checkpoints,
    placements.wrong_memory_kinds,
    placements.large_unnamed,
    placements.already_differentiated,
)


def find(analysis: Analysis, runtime: Runtime) -> tuple[Finding, ...]:
    """All findings on an analysed function in a process, without repeats."""
    found = [finding for check in CHECKS for finding in check(analysis)]
    found += placements.runtime_findings(analysis, runtime)
    return tuple(dict.fromkeys(found))
