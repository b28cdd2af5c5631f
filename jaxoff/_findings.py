"""Silent failures made loud: what is wrong with an offload, read from the program before it runs."""

from __future__ import annotations

from jaxoff import _name_checks, _placement_checks
from jaxoff._finding import Finding, Runtime
from jaxoff._residuals import Analysis

CHECKS = (
    _name_checks.rules_without_names,
    _name_checks.marks_without_residuals,
    _name_checks.lost_names,
    _name_checks.unnamed_beside_named,
    _name_checks.moved_twice,
    _name_checks.lost_exemptions,
    _placement_checks.refused_by_the_compiler,
    _placement_checks.foldable_offloads,
    _placement_checks.overridden_checkpoints,
    _placement_checks.wrong_memory_kinds,
    _placement_checks.large_unnamed,
    _placement_checks.already_differentiated,
)


def find(analysis: Analysis, runtime: Runtime) -> tuple[Finding, ...]:
    """All findings on an analysed function in a process, without repeats."""
    found = [finding for check in CHECKS for finding in check(analysis)]
    found += _placement_checks.runtime_findings(analysis, runtime)
    return tuple(dict.fromkeys(found))
