"""Calls replaced by their equations, so that the scheduler can order all equations of a program together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import Jaxpr, JaxprEqn, Literal, Var

type Renamed = dict[Var, Any]


def inline_calls(
    eqns: Iterable[JaxprEqn], renamed: Renamed, *, checkpoints: bool = True
) -> Iterator[JaxprEqn]:
    """Replaces `jax.checkpoint` and plain `jax.jit` calls by the equations in them, at any depth.

    A differentiated `jax.checkpoint` with `prevent_cse` puts a single barrier over all of its operands. Its
    first equation then waits for the last reload from the host. Here each operand gets a barrier of its own.

    Args:
      eqns: equations in program order.
      renamed: variable -> atom to read in its place. The results of inlined calls are added.
      checkpoints: whether `jax.checkpoint` calls are replaced, too.

    Yields:
      Equations with the same results.
    """
    for eqn in eqns:
        operands = [resolve(renamed, v) for v in eqn.invars]
        call = compat.inlinable_call(eqn)
        if call is None or (call.checkpoint and not checkpoints):
            yield eqn.replace(invars=operands)
            continue
        if call.prevent_cse:
            for i, operand in enumerate(operands):
                if isinstance(operand, Var) and not compat.is_host(operand.aval):
                    (operands[i],), barrier = compat.make_barrier([operand], like=eqn)
                    yield barrier
        body, values = instantiate(call.jaxpr, operands, like=eqn)
        results: Renamed = {}
        yield from inline_calls(body, results, checkpoints=checkpoints)
        for out, value in zip(eqn.outvars, values, strict=True):
            renamed[out] = resolve(results, value)


def inline_program(jaxpr: Jaxpr, *, checkpoints: bool = True) -> Jaxpr:
    """A program with its calls replaced by their equations; options as for `inline_calls`."""
    renamed: Renamed = {}
    eqns = list(inline_calls(jaxpr.eqns, renamed, checkpoints=checkpoints))
    return jaxpr.replace(eqns=eqns, outvars=[resolve(renamed, v) for v in jaxpr.outvars])


def split_scalars(eqns: Iterable[JaxprEqn]) -> tuple[list[JaxprEqn], list[JaxprEqn]]:
    """Moves scalars without operands, and the constants of filled arrays, out of a program.

    Each scalar becomes an argument of the remaining equations. A barrier over the argument can delay an array
    filled with the scalar.

    Returns:
      The remaining equations, and the equations of the scalars.
    """
    scalars, rest = [], []
    for eqn in eqns:
        operands = [v for v in eqn.invars if isinstance(v, Literal)]
        if eqn.primitive.name == "broadcast_in_dim" and len(operands) == len(eqn.invars) == 1:
            constant, barrier = compat.make_barrier(list(eqn.invars), like=eqn)
            scalars.append(barrier)
            rest.append(eqn.replace(invars=[*constant]))
        elif not eqn.invars and not any(compat.shape_of(v.aval) for v in eqn.outvars):
            scalars.append(eqn)
        else:
            rest.append(eqn)
    return rest, scalars


def delay_fills(eqns: Iterable[JaxprEqn], value: Var | None, large_nbytes: int) -> Iterator[JaxprEqn]:
    """Delays large arrays filled with a constant until a value is ready. XLA could fill them at any time."""
    for eqn in eqns:
        is_constant = eqn.primitive.name == "broadcast_in_dim" and isinstance(eqn.invars[0], Literal)
        if value is not None and is_constant and compat.nbytes_of(eqn.outvars) >= large_nbytes:
            (constant, _), barrier = compat.make_barrier([eqn.invars[0], value], like=eqn)
            yield barrier
            yield eqn.replace(invars=[constant])
        else:
            yield eqn


def instantiate(jaxpr: Jaxpr, operands: Sequence[Any], like: JaxprEqn) -> tuple[list[JaxprEqn], list[Any]]:
    """Copies the equations of a program for given operands, into the scopes of equation `like`.

    Each variable is replaced by a fresh variable, because a program may be called more than once.

    Returns:
      The equations, and the results of the program.
    """
    inner: Renamed = dict(zip(jaxpr.invars, operands, strict=True))
    eqns = []
    for eqn in jaxpr.eqns:
        outs = [Var(v.aval) for v in eqn.outvars]
        invars = [resolve(inner, v) for v in eqn.invars]
        eqns.append(_into_scopes_of(like, eqn).replace(invars=invars, outvars=outs))
        inner.update(zip(eqn.outvars, outs, strict=True))
    return eqns, [resolve(inner, v) for v in jaxpr.outvars]


def trace_call(
    fun: Callable[..., Any], operands: Sequence[Any], like: JaxprEqn
) -> tuple[list[JaxprEqn], list[Any]]:
    """Traces a function for given operands (pytrees) into the scopes of equation `like`.

    Returns:
      The equations, and the leaves of the function's results.
    """
    closed = compat.trace_like(like, fun, jax.tree.map(lambda v: v.aval, operands))
    return instantiate(closed.jaxpr, jax.tree.leaves(operands), like)


def resolve(renamed: Renamed, atom: Any) -> Any:
    """Looks up the atom to read in place of `atom`. An atom without an entry stays."""
    return atom if isinstance(atom, Literal) else renamed.get(atom, atom)


def _into_scopes_of(call: JaxprEqn, eqn: JaxprEqn) -> JaxprEqn:
    """Puts the scopes of a call ahead of the scopes of an equation in the called jaxpr.

    An equation of library code gets the source of the call: JAX traces its own functions once for all calls.
    """
    own, outer = eqn.source_info, call.source_info
    traceback = own.traceback if compat.has_user_code(own.traceback) else outer.traceback
    return eqn.replace(
        source_info=own.replace(name_stack=outer.name_stack + own.name_stack, traceback=traceback)
    )
