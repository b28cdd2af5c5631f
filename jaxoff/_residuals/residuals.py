"""`residuals`: the values kept for the backward pass; where, why, and from which source line."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.float8 import DTYPE, can_compress, compressed_nbytes
from jaxoff._jaxpr.float8_residuals import Narrowed, store_in_float8
from jaxoff._jaxpr.provenance import Origin, Scope, find_line, trace_origin
from jaxoff._jaxpr.statics import list_statics
from jaxoff._policy.combinators import stores_in_float8
from jaxoff._policy.decision import Decision, Placement, Rule, RuleKind
from jaxoff._policy.marks import key_of_tag
from jaxoff._policy.protocol import ask_about
from jaxoff._residuals.traced_function import KeptValues, Site, TracedFunction, collect_labels


@dataclasses.dataclass(frozen=True)
class Residual:
    """A value of a function's forward pass with a use in the backward pass.

    Attributes:
      name: the name from `jaxoff.name` or `checkpoint_name`, or None.
      mark: "offload", "not_offload" or None.
      shape, dtype: of an instance, such as the value of a single layer of a scan. A kept value that a policy
        stores in float8 has the dtype "float8_e4m3fn": under `jaxoff.jit`, not under `jax.jit`.
      count: the number of instances: the product of the lengths of the loops around the value.
      nbytes: bytes of all instances, in float8 with their scales; of sharded arrays, the bytes on all devices
        together.
      placement: "save", "offload", or "recompute" for a named value recomputed in the backward pass.
      rule: the mark, list entry or default behind the placement.
      made_by: the primitive behind the value; "name" for named values, "carry" for the carried input of a
        scanned body.
      source: `file:line (function)` of the code behind the value.
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
        """Returns the fields as JSON-ready values."""
        return {**dataclasses.asdict(self), "shape": list(self.shape)}


def residuals(
    fun: Callable[..., Any],
    /,
    *args,
    argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    **kwargs,
) -> tuple[Residual, ...]:
    """Lists the residuals of a function: values kept or recomputed for the backward pass.

    The function is traced, never run: arguments may be `jax.ShapeDtypeStruct`s of any size. Inputs of the
    function (weights, data) and constants of its closure are alive in any case, and left out.

    Args:
      fun: a function of arrays, not yet differentiated, with or without `jax.checkpoint` inside.
      *args, **kwargs: its arguments: pytrees of arrays or ShapeDtypeStructs.
      argnums: the positional arguments to differentiate, as for `jax.grad`. None: every floating-point
        argument.
      has_aux: whether `fun` returns `(output, auxiliary)`, as for `jax.grad`.
      static_argnums, static_argnames: arguments that are no arrays, as for `jax.jit`. Those of a given
        function of `jax.jit` or `jaxoff.jit` are known.

    Returns:
      A `Residual` for each value: kept values in program order, then recomputed values with a name.

    Raises:
      ValueError: for argnums out of range, and for a function without a gradient.
      TypeError: for an argument that is neither an array nor static.

    Example:
      >>> import jax, jax.numpy as jnp, jaxoff
      >>> def layer(x, w):
      ...     return jnp.tanh(jaxoff.name(x, "x_in") @ w), None
      >>> layer = jax.checkpoint(layer, policy=jaxoff.policy(offload=["x_in"]), prevent_cse=False)
      >>> x, w = jax.ShapeDtypeStruct((8, 64), "bfloat16"), jax.ShapeDtypeStruct((12, 64, 64), "bfloat16")
      >>> (r,) = jaxoff.residuals(lambda x, w: jax.lax.scan(layer, x, w)[0], x, w)
      >>> r.name, r.shape, r.count, r.nbytes, r.placement, r.rule
      ('x_in', (8, 64), 12, 12288, 'offload', "offload='x_in'")
    """
    statics = list_statics(static_argnums, static_argnames)
    function = TracedFunction.trace(fun, args, kwargs, argnums, has_aux, statics)
    function.check_gradient()
    return tuple(item.residual for item in analyse(function).rows)


@dataclasses.dataclass(frozen=True)
class Row:
    """A residual, with facts for the findings.

    Attributes:
      residual: the residual.
      origin: the equation behind the value.
      rule: the rule behind the placement.
    """

    residual: Residual
    origin: Origin
    rule: Rule


@dataclasses.dataclass(frozen=True)
class Analysis:
    """A traced function, its kept values, and the rows of its report: the input of every finding.

    Attributes:
      function: the function.
      kept: its kept values.
      rows: the rows of its report.
      narrowed: the function and its gradients, residuals in float8; None where no policy stores any so.
    """

    function: TracedFunction
    kept: KeptValues
    rows: tuple[Row, ...]
    narrowed: Narrowed | None = None


def analyse(function: TracedFunction) -> Analysis:
    """Finds the residuals of a traced function, kept and recomputed."""
    kept = function.trace_kept()
    rows, narrowed = list_kept(function, kept), _write_stored(function)
    stored = {s.label for s in narrowed.stored} if narrowed else set()
    shown = [_narrow_row(row) if row.residual.name in stored else row for row in rows]
    return Analysis(function, kept, (*shown, *_list_recomputed(function, rows)), narrowed)


def _write_stored(function: TracedFunction) -> Narrowed | None:
    chooses = functools.partial(stores_in_float8, function.policies)
    if not any(map(chooses, collect_labels(function.checkpointed_sites))):
        return None
    return store_in_float8(compat.ClosedJaxpr(function.step, ()), chooses)


def _narrow_row(row: Row) -> Row:
    """The row of a value in float8."""
    aval = row.origin.aval
    if not can_compress(aval):
        return row
    nbytes = row.residual.count * compressed_nbytes(aval)
    residual = dataclasses.replace(row.residual, dtype=jnp.dtype(DTYPE).name, nbytes=nbytes)
    return dataclasses.replace(row, residual=residual)


def list_kept(function: TracedFunction, kept: KeptValues) -> list[Row]:
    """Lists the kept values, in program order."""
    rows = [_make_kept_row(function, var, trace_origin(kept.live, var)) for var in kept.values]
    return sorted(rows, key=lambda row: _position_of(row.origin))


def _make_kept_row(function: TracedFunction, var, origin: Origin) -> Row:
    placement: Placement = "offload" if compat.is_host(var.aval) else "save"
    return _make_row(var, origin, placement, _find_decision(function, origin, placement))


def _make_row(var, origin: Origin, placement: Placement, decision: Decision) -> Row:
    total, each = compat.nbytes(var.aval), compat.nbytes(origin.aval)
    residual = Residual(
        name=origin.tag.label if origin.tag else None,
        mark=origin.tag.mark if origin.tag else None,
        shape=tuple(origin.aval.shape),
        dtype=str(origin.aval.dtype),
        count=total // each if each else 1,
        nbytes=total,
        placement=placement,
        rule=decision.rule.text,
        made_by=origin.eqn.primitive.name if origin.kind == "op" and origin.eqn is not None else origin.kind,
        source=line_of(origin),
    )
    return Row(residual, origin, decision.rule)


def _find_decision(function: TracedFunction, origin: Origin, placement: Placement) -> Decision:
    if origin.kind not in ("name", "op"):
        return Decision(placement, _INPUT)
    return _ask_policies(function, origin, placement) or Decision(placement, _AUTOGRAD)


_INPUT = Rule(RuleKind.INPUT, "input of a checkpointed or scanned function: name it inside to move it")
_AUTOGRAD = Rule(RuleKind.AUTOGRAD, "outside jax.checkpoint: autograd saves it")


def _ask_policies(function: TracedFunction, origin: Origin, placement: Placement) -> Decision | None:
    """Finds the decision with a placement, by the policies on the value's line, else by any other policy."""
    if origin.eqn is None:
        return None
    here, named = _find_sites_like(function, origin)
    for policy in dict.fromkeys((*(s.policy for s in (*here, *named)), *function.policies)):
        decision = ask_about(policy, origin.eqn)
        if decision.placement == placement:
            return decision
    return None


def _position_of(origin: Origin) -> tuple[int, ...]:
    """Sort key of a value: the positions of its equation and of the equations around, outermost first."""
    path: list[int] = []
    scope: Scope | None = origin.scope
    eqn = None if origin.kind == "carry" else origin.eqn
    while scope is not None:
        path.append(scope.positions.get(id(eqn), -1))
        scope, eqn = scope.parent, scope.eqn
    return tuple(reversed(path))


def keep(in_avals):
    """The answer of a checkpoint policy for a kept value, by the operands of its equation.

    Complex values are offloaded: `jax.checkpoint` cannot save them.
    """
    is_complex = any(jnp.issubdtype(aval.dtype, jnp.complexfloating) for aval in in_avals)
    return compat.Offloadable("device", "pinned_host") if is_complex else True


def keep_names(prim, *in_avals, **_):
    """A checkpoint policy: named values are kept, other values recomputed."""
    return compat.is_name(prim) and keep(in_avals)


def _list_recomputed(function: TracedFunction, kept: list[Row]) -> list[Row]:
    """Lists the recomputed values with a name.

    These are the kept values of the same function under a policy for all names, without the kept values of
    the function itself.
    """
    if not any(s.tag is not None and s.checkpoints for s in function.sites):
        return []
    already = collections.Counter(_key(row.origin) for row in kept)
    rows = []
    candidates = function.trace_kept(keep_names)
    for var in candidates.values:
        origin = trace_origin(candidates.live, var)
        if origin.tag is None or origin.eqn is None:
            continue
        if already[_key(origin)]:
            already[_key(origin)] -= 1
            continue
        decision = _ask_policies(function, origin, "recompute")
        if decision is not None and find_site(function, origin) is not None:
            rows.append(_make_row(var, origin, "recompute", decision))
    return rows


def _key(origin: Origin) -> tuple[Any, ...]:
    return key_of_tag(origin.tag), tuple(origin.aval.shape), str(origin.aval.dtype), line_of(origin)


def line_of(origin: Origin) -> str:
    """Returns the source line behind a value, `file:line (function)`, or ''."""
    return find_line(origin.scope, origin.eqn)


def find_site(function: TracedFunction, origin: Origin) -> Site | None:
    """Finds the checkpointed equation of the function behind a value of its gradients' program, or None."""
    here, named = _find_sites_like(function, origin)
    both = (s for s in here if s.tag is not None and key_of_tag(s.tag) == key_of_tag(origin.tag))
    return next(both, next(iter(named or here), None))


def _find_sites_like(function: TracedFunction, origin: Origin) -> tuple[list[Site], list[Site]]:
    """Finds the checkpointed sites on the source line of a value, and the checkpointed sites with its tag."""
    named = function.sites_by_tag.get(key_of_tag(origin.tag), []) if origin.tag else []
    return function.sites_by_line.get(line_of(origin), []), named
