"""A finding: a problem of a program, found before or after its compilation."""

from __future__ import annotations

import dataclasses
import enum


class FindingCode(enum.StrEnum):
    """Every kind of finding; a code is stable, for scripts and for the reference page of findings."""

    # `explain`: names and marks
    RULE_MATCHED_NOTHING = "rule-matched-nothing"
    MARK_WITHOUT_RESIDUAL = "mark-without-residual"
    NAME_LOST_IN_CUSTOM_VJP = "name-lost-in-custom-vjp"
    NAME_LOST_IN_VMAP = "name-lost-in-vmap"
    UNNAMED_BESIDE_NAMED = "unnamed-beside-named"
    MOVED_TWICE = "moved-twice"
    EXEMPTION_LOST = "exemption-lost"
    # `explain`: placements
    OFFLOAD_IN_COND = "offload-in-cond"
    OFFLOAD_IN_UNROLLED_SCAN = "offload-in-unrolled-scan"
    OFFLOAD_IN_NESTED_SCAN = "offload-in-nested-scan"
    OFFLOAD_FOLDED_AWAY = "offload-folded-away"
    CHECKPOINT_OVERRIDDEN = "checkpoint-overridden"
    WRONG_MEMORY_KIND = "wrong-memory-kind"
    LARGE_UNNAMED_RESIDUAL = "large-unnamed-residual"
    ALREADY_DIFFERENTIATED = "already-differentiated"
    PINNED_POOL_TOO_SMALL = "pinned-pool-too-small"
    JAXLIB_COMPUTES_WRONGLY = "jaxlib-computes-wrongly"
    REMAT3 = "remat3"
    # `explain`: the link
    LINK_TOO_SLOW = "link-too-slow"
    OFFLOAD_LATE = "offload-late"
    DEVICE_NOT_KNOWN = "device-not-known"
    # `jit`: requests of the program, the call, and the recipe of the compiled program
    NOTHING_OFFLOADED = "nothing-offloaded"
    OFFLOAD_NOT_DONE = "offload-not-done"
    CALLED_INSIDE_TRANSFORM = "called-inside-transform"
    STORE_NOT_DONE = "store-not-done"
    UPDATES_LOST = "updates-lost"
    RECIPE_REPLACED = "recipe-replaced"
    RUNS_AS_WRITTEN = "runs-as-written"
    # `verify`: the compiled program
    OFFLOAD_VANISHED = "offload-vanished"
    DEVICE_MEMORY_NOT_LOWER = "device-memory-not-lower"
    KERNEL_TOUCHES_HOST = "kernel-touches-host"
    COPY_NOT_OVERLAPPED = "copy-not-overlapped"
    GRAPH_CUT = "graph-cut"
    VALUE_COPIED_TWICE = "value-copied-twice"
    COMPUTED_AGAIN = "computed-again"


@dataclasses.dataclass(frozen=True)
class Finding:
    """A problem of a program, and the remedy.

    Prints as `code: message [source]`.

    Attributes:
      code: the kind of finding, a string such as "rule-matched-nothing".
      message: the problem, then the remedy.
      source: `file:line (function)` of the code concerned, or ''.

    Example:
      >>> import jaxoff
      >>> print(jaxoff.Finding(jaxoff.FindingCode.REMAT3, "jax_remat3 is on.", "train.py:7 (main)"))
      remat3: jax_remat3 is on. [train.py:7 (main)]
    """

    code: FindingCode
    message: str
    source: str = ""

    def __str__(self) -> str:
        return f"{self.code}: {self.message}" + (f" [{self.source}]" if self.source else "")
