"""Warnings of rules that match no name in the layers of `scan` and `layers`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jaxoff._layers.keep_first import Block
from jaxoff._policy.marks import is_recording
from jaxoff._report.near_miss import near_miss
from jaxoff._report.warn import warn_of
from jaxoff._residuals.findings.finding import list_entries
from jaxoff._residuals.traced_function import collect_labels

# A wrong letter in five. Names of unlike values, such as "moe.act" and "mlp.act", are less alike.
_SLIP = 0.8


def warn_of_unmatched_rules(blocks: Iterable[Block]) -> None:
    """Warns of entries of policies without a match in layers, where `jaxoff.jit` does not see the program.

    Stacks of layers may share a policy, so an entry may be meant for layers elsewhere. An entry without a
    match is taken for a slip if no entry of its policy matches, or if it is a few letters from a name that no
    entry covers. `jaxoff.jit` and `explain` see the whole program and report every entry.

    Args:
      blocks: the layers, traced only outside of traces by jaxoff.
    """
    if is_recording():
        return
    names: dict[Any, set[str]] = {}  # policy -> the names in its layers
    for block in blocks:
        if next(list_entries(block.policy), None) is None:
            continue  # nothing to match, nothing to trace
        try:
            found = collect_labels(block.traced.sites) | block.kept.labels
        except (NotImplementedError, TypeError, ValueError):
            return  # a layer without a gradient has no residuals
        names.setdefault(block.policy, set()).update(found)
    for policy, labels in names.items():
        entries = list(list_entries(policy))
        unmatched = [entry for entry in entries if not any(map(entry.matches, labels))]
        uncovered = [label for label in labels if not any(entry.matches(label) for entry in entries)]
        for entry in unmatched:
            if len(unmatched) == len(entries) or near_miss(entry.pattern, uncovered, likeness=_SLIP):
                for finding in entry.find_unmatched(labels, "in these layers"):
                    warn_of(finding)
