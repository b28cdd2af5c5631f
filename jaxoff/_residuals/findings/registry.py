"""All checks of `explain`, in the order of their findings."""

from __future__ import annotations

from jaxoff._report.finding import Finding
from jaxoff._residuals.findings import names, placements
from jaxoff._residuals.findings.runtime import Runtime, find_runtime_problems, find_what_remat3_recomputes
from jaxoff._residuals.residuals import Analysis

CHECKS = (
    names.find_unmatched_rules,
    names.find_marks_without_residual,
    names.find_lost_names,
    names.find_unnamed_originals,
    names.find_repeated_offloads,
    names.find_lost_exemptions,
    placements.find_refused_offloads,
    placements.find_foldable_offloads,
    placements.find_overridden_checkpoints,
    placements.find_wrong_memory_kinds,
    placements.find_large_unnamed,
    placements.find_inner_gradients,
)


def collect_findings(analysis: Analysis, runtime: Runtime) -> tuple[Finding, ...]:
    """Runs all checks on an analysed function, and drops repeats.

    Args:
      analysis: of the function.
      runtime: facts of the process, as from `Runtime.read`.
    """
    found = [finding for check in CHECKS for finding in check(analysis)]
    found += find_runtime_problems(analysis, runtime)
    found += find_what_remat3_recomputes(analysis, runtime)
    return tuple(dict.fromkeys(found))
