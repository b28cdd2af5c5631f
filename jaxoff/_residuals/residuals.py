"""What a function's backward pass keeps from its forward pass, where, why, and from which source line."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.provenance import Origin, Scope, trace_origin
from jaxoff._policy.policy import Decision, Placement, decide
from jaxoff._residuals.traced_function import Kept, Program, Site


@dataclasses.dataclass(frozen=True)
class Residual:
    """A value that the backward pass of a function needs from its forward pass.

    Attributes:
      name: the name that `jaxoff.name` or `checkpoint_name` gave it, or None.
      mark: "offload", "not_offload" or None.
      shape, dtype: of one instance (one layer of a scan).
      count: how many instances there are: scan trip counts multiplied.
      nbytes: bytes of all instances: of whole arrays, where they are sharded over devices.
      placement: "device", "host", or "recompute" for a named value that is computed again.
      rule: the mark, list entry or default that decided the placement.
      made_by: the primitive that makes the value; "name" for named values, "carry" for the carried input
        of a scanned body.
      source: `file:line (function)` of the code that makes it.
    """

    name: str | None
    mark: str | None
    shape: tuple[int, ...]
    dtype: str
    count: int
    nbytes: int
    placement: Placement
    rule: str
    made_by: str
    source: str

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON-ready values."""
        return {**dataclasses.asdict(self), "shape": list(self.shape)}


def residuals(
    fun: Callable[..., Any],
    /,
    *args,
    argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
    **kwargs,
) -> tuple[Residual, ...]:
    """Lists what the backward pass of a function keeps, or computes again, from the forward pass.

    The function is traced, never run: arguments may be `jax.ShapeDtypeStruct`s of any size. The function's
    own inputs (weights, data) and the constants that it closes over live anyway and are not listed.

    Args:
      fun: a function of arrays, not yet differentiated, with `jax.checkpoint` where its user wants it.
      *args, **kwargs: its arguments: pytrees of arrays or ShapeDtypeStructs.
      argnums: the positional arguments to differentiate, as for `jax.grad`. None: every floating-point
        argument.
      has_aux: whether `fun` returns `(output, auxiliary)`, as for `jax.grad`.

    Returns:
      One `Residual` a value: those kept, in the order in which they are made, then named values that are
        recomputed.

    Raises:
      ValueError: for argnums out of range.

    Example:
      >>> import jax, jax.numpy as jnp, jaxoff
      >>> def layer(x, w):
      ...     return jnp.tanh(jaxoff.name(x, "x_in") @ w), None
      >>> layer = jax.checkpoint(layer, policy=jaxoff.policy(offload=["x_in"]), prevent_cse=False)
      >>> x, w = jax.ShapeDtypeStruct((8, 64), "bfloat16"), jax.ShapeDtypeStruct((12, 64, 64), "bfloat16")
      >>> (r,) = jaxoff.residuals(lambda x, w: jax.lax.scan(layer, x, w)[0], x, w)
      >>> r.name, r.shape, r.count, r.nbytes, r.placement, r.rule
      ('x_in', (8, 64), 12, 12288, 'host', "offload='x_in'")
    """
    return tuple(item.residual for item in analyse(Program.trace(fun, args, kwargs, argnums, has_aux)).rows)


@dataclasses.dataclass(frozen=True)
class Row:
    """A residual with what findings need to know of it.

    Where its value was made, and whether a mark or a list chose its place.
    """

    residual: Residual
    origin: Origin
    explicit: bool


@dataclasses.dataclass(frozen=True)
class Analysis:
    """A traced program, what it keeps, and the rows of its report."""

    program: Program
    kept: Kept
    rows: tuple[Row, ...]


def analyse(program: Program) -> Analysis:
    """Lists the residuals of a traced program."""
    kept = program.kept()
    rows = kept_rows(program, kept)
    return Analysis(program, kept, (*rows, *_recomputed_rows(program, rows)))


def kept_rows(program: Program, kept: Kept) -> list[Row]:
    """The rows of what is kept, in the order in which it is made."""
    rows = [_kept_row(program, var, trace_origin(kept.live, var)) for var in kept.values]
    return sorted(rows, key=lambda row: _made_at(row.origin))


def _kept_row(program: Program, var, origin: Origin) -> Row:
    placement: Placement = "host" if compat.is_host(var.aval) else "device"
    return _row(var, origin, placement, _decision(program, origin, placement))


def _row(var, origin: Origin, placement: Placement, decision: Decision) -> Row:
    total, each = compat.nbytes(var.aval), compat.nbytes(origin.aval)
    residual = Residual(
        name=origin.tag.label if origin.tag else None,
        mark=origin.tag.mark if origin.tag else None,
        shape=tuple(origin.aval.shape),
        dtype=str(origin.aval.dtype),
        count=total // each if each else 1,
        nbytes=total,
        placement=placement,
        rule=decision.rule,
        made_by=origin.eqn.primitive.name if origin.kind == "op" and origin.eqn is not None else origin.kind,
        source=line_of(origin),
    )
    return Row(residual, origin, decision.explicit)


def _decision(program: Program, origin: Origin, placement: Placement) -> Decision:
    if origin.kind not in ("name", "op"):
        return Decision(placement, "input of a checkpointed or scanned function: name it inside to move it")
    return _policy_decision(program, origin, placement) or Decision(
        placement, "outside jax.checkpoint: autograd saves it"
    )


def _policy_decision(program: Program, origin: Origin, placement: Placement) -> Decision | None:
    """The rule behind a placement: that of the checkpoint whose code made the value, else of any."""
    if origin.eqn is None:
        return None
    here, named = _sites_like(program, origin)
    avals = [v.aval for v in origin.eqn.invars]
    for policy in dict.fromkeys((*(s.policy for s in (*here, *named)), *program.policies)):
        decision = decide(policy, origin.eqn.primitive, *avals, **origin.eqn.params)
        if decision.placement == placement:
            return decision
    return None


def _made_at(origin: Origin) -> tuple[int, ...]:
    """The position of a value's making in program order."""
    path: list[int] = []
    scope: Scope | None = origin.scope
    eqn = None if origin.kind == "carry" else origin.eqn
    while scope is not None:
        path.append(scope.positions.get(id(eqn), -1))
        scope, eqn = scope.parent, scope.eqn
    return tuple(reversed(path))


def save_names(prim, *_, **__) -> bool:
    """A checkpoint policy that saves every named value and nothing else."""
    return compat.is_name(prim)


def _recomputed_rows(program: Program, kept: list[Row]) -> list[Row]:
    """Named values that the backward pass needs and computes again.

    Those that would be kept if all names were.
    """
    if not any(s.tag is not None and s.checkpoints for s in program.sites):
        return []
    already = collections.Counter(_key(row.origin) for row in kept)
    rows = []
    candidates = program.kept(save_names)
    for var in candidates.values:
        origin = trace_origin(candidates.live, var)
        if origin.tag is None or origin.eqn is None:
            continue
        if already[_key(origin)]:
            already[_key(origin)] -= 1
            continue
        decision = _policy_decision(program, origin, "recompute")
        if decision is not None and site_of(program, origin) is not None:
            rows.append(_row(var, origin, "recompute", decision))
    return rows


def _key(origin: Origin) -> tuple[Any, ...]:
    mark = origin.tag.mark if origin.tag else None
    return origin.tag, mark, tuple(origin.aval.shape), str(origin.aval.dtype), line_of(origin)


def line_of(origin: Origin) -> str:
    """The source line that made a value."""
    return "" if origin.eqn is None else compat.source_line(origin.eqn)


def site_of(program: Program, origin: Origin) -> Site | None:
    """The checkpointed site of the function at which a value of its differentiated program was made."""
    here, named = _sites_like(program, origin)
    both = (s for s in here if s.tag is not None and s.tag == origin.tag)
    return next(both, next(iter(named or here), None))


def _sites_like(program: Program, origin: Origin) -> tuple[list[Site], list[Site]]:
    """The checkpointed sites on the line where a value was made, and those with its tag."""
    named = program.checkpointed_as.get(origin.tag, []) if origin.tag else []
    return program.checkpointed_at.get(line_of(origin), []), named
