"""Checks of this machine and its software against the residuals of a program."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
from collections.abc import Iterator

from jaxoff._jaxpr import compat
from jaxoff._report.finding import Finding, FindingCode
from jaxoff._residuals.findings.finding import list_offloaded
from jaxoff._residuals.residuals import Analysis
from jaxoff._runtime.pinned_pool import POOL_VARIABLE, pinned_pool_bytes, pool_to_set
from jaxoff._runtime.versions import OLDEST_JAX, format_release, parse_release


@dataclasses.dataclass(frozen=True)
class Runtime:
    """Facts about the software and the limits of a process.

    Attributes:
      jaxlib: version of jaxlib.
      pinned_pool_bytes: the most pinned host memory XLA gives a process.
      remat3: whether `jax_remat3` is on.
    """

    jaxlib: tuple[int, ...]
    pinned_pool_bytes: int
    remat3: bool = False

    @classmethod
    def read(cls) -> Runtime:
        """Reads the facts of this process."""
        jaxlib = parse_release(importlib.metadata.version("jaxlib"))
        return cls(jaxlib, pinned_pool_bytes(os.environ), compat.is_remat3_enabled())


def find_runtime_problems(analysis: Analysis, runtime: Runtime) -> Iterator[Finding]:
    """Finds a pool too small for the offloads, a jaxlib with wrong gradients, and jax_remat3."""
    host = sum(r.residual.nbytes for r in list_offloaded(analysis))
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
            "jax_remat3 is on: this JAX then asks policies about names only, and about no name in a "
            "custom_vjp forward rule or under vmap.",
        )
