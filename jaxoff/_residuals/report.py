"""`explain`: the residuals of a function, bytes by placement and by name, copies, and findings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jaxoff._device.at_hand import AtHand, profile_at_hand
from jaxoff._device.profile import Device, find_device
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.statics import list_statics
from jaxoff._policy.decision import Placement
from jaxoff._report.finding import Finding
from jaxoff._report.tables import render_text
from jaxoff._residuals.findings.registry import collect_findings
from jaxoff._residuals.findings.runtime import Runtime
from jaxoff._residuals.residuals import Residual, analyse
from jaxoff._residuals.traced_function import TracedFunction
from jaxoff._residuals.traffic import Traffic, estimate_traffic, find_late_offloads, find_slow_links

PLACEMENTS: tuple[Placement, ...] = ("save", "offload", "recompute")

_JSON_KEYS: dict[Placement, str] = {"save": "device", "offload": "host", "recompute": "recompute"}
"""Placement -> key of its bytes in `Report.to_dict`: the memory of the bytes."""


@dataclasses.dataclass(frozen=True)
class Report:
    """The residuals of a function, and problems. Prints as a table; in colour on a terminal.

    Attributes:
      residuals: an entry for each value; see `Residual`.
      findings: problems of the program and of this machine; empty without a problem.
      traffic: the copies between device and host, by loop and direction, against the compute beside the
        copies.
    """

    residuals: tuple[Residual, ...]
    findings: tuple[Finding, ...]
    traffic: tuple[Traffic, ...] = ()

    @property
    def device_bytes(self) -> int:
        """Bytes of residuals on the device."""
        return self.nbytes("save")

    @property
    def host_bytes(self) -> int:
        """Bytes of residuals in pinned host memory."""
        return self.nbytes("offload")

    @property
    def recompute_bytes(self) -> int:
        """Bytes of recomputed values with a name."""
        return self.nbytes("recompute")

    def nbytes(self, placement: Placement, name: str | None = None) -> int:
        """Sums the bytes at a placement, of a name or of all values."""
        return sum(r.nbytes for r in self.residuals if r.placement == placement and name in (None, r.name))

    @property
    def by_name(self) -> dict[str, dict[Placement, int]]:
        """Name -> placement -> bytes, in order of appearance."""
        names = dict.fromkeys(r.name for r in self.residuals if r.name is not None)
        return {n: {p: b for p in PLACEMENTS if (b := self.nbytes(p, n))} for n in names}

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as JSON-ready values."""
        return {
            "residuals": [r.to_dict() for r in self.residuals],
            "bytes": {_JSON_KEYS[p]: self.nbytes(p) for p in PLACEMENTS},
            "bytes_by_name": {n: {_JSON_KEYS[p]: b for p, b in of.items()} for n, of in self.by_name.items()},
            "findings": [dataclasses.asdict(f) for f in self.findings],
            "traffic": [t.to_dict() for t in self.traffic],
        }

    def __str__(self) -> str:
        return render_text(self)

    def __rich_console__(self, console, options):
        from jaxoff._residuals.table import render

        yield from render(self, console.is_terminal)


def explain(
    fun: Callable[..., Any],
    /,
    *args,
    argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    device: Device | str | None = None,
    **kwargs,
) -> Report:
    """Reports the residuals of a function, their placements and rules, and problems, before anything runs.

    Host bytes are those of the arrays in host space in the differentiated program. `jaxoff.jit` may add a
    spare row to each stack of a loop. Times are estimates.

    Args:
      fun: a function of arrays, not yet differentiated; see `jaxoff.residuals`.
      *args, **kwargs: its arguments: pytrees of arrays or `jax.ShapeDtypeStruct`s. Nothing is allocated.
      argnums: the positional arguments to differentiate, as for `jax.grad`. None: every floating-point
        argument.
      has_aux: whether `fun` returns `(output, auxiliary)`, as for `jax.grad`.
      static_argnums, static_argnames: arguments that are no arrays, as for `jax.jit`. Those of a given
        function of `jax.jit` or `jaxoff.jit` are known.
      device: speeds of the accelerator and its link, for estimates of times, or the name of a profile that
        ships with jaxoff. None: the GPU at hand, by its profile or by the nearest with a finding; an H200
        without a GPU.

    Returns:
      A `Report`.

    Raises:
      ValueError: for argnums out of range, and for a function without a gradient.
      TypeError: for a device that is no `jaxoff.Device`, and an argument that is neither an array nor static.

    Example:
      >>> import jax, jax.numpy as jnp, jaxoff
      >>> def layer(x, w):
      ...     return jnp.tanh(jaxoff.name(x, "x_in") @ w), None
      >>> layer = jax.checkpoint(layer, policy=jaxoff.policy(offload=["x_inn"]), prevent_cse=False)
      >>> x, w = jax.ShapeDtypeStruct((8, 64), "bfloat16"), jax.ShapeDtypeStruct((12, 64, 64), "bfloat16")
      >>> report = jaxoff.explain(lambda x, w: jax.lax.scan(layer, x, w)[0], x, w)
      >>> report.host_bytes, report.device_bytes
      (0, 12288)
      >>> print(report.findings[0])
      rule-matched-nothing: offload='x_inn' matches no name inside its jax.checkpoint. Did you mean 'x_in'?
      The names there are x_in.
    """
    profile = find_device(device)
    statics = list_statics(static_argnums, static_argnames)
    function = TracedFunction.trace(fun, args, kwargs, argnums, has_aux, statics)
    function.check_gradient()
    analysis = analyse(function)
    report = Report(tuple(row.residual for row in analysis.rows), collect_findings(analysis, Runtime.read()))
    at_hand = profile_at_hand() if profile is None else AtHand(profile)
    has_copies = any(compat.transfer_in(site.eqn) for site in function.sites)
    if has_copies or not report.host_bytes:
        return report  # JAX cannot differentiate the copies of a gradient a second time
    step = analysis.narrowed.closed.jaxpr if analysis.narrowed else function.step
    traffic = estimate_traffic(step, at_hand.device)
    late = (*find_slow_links(traffic), *find_late_offloads(step, at_hand.device), *at_hand.findings)
    return dataclasses.replace(report, findings=(*report.findings, *late), traffic=traffic)
