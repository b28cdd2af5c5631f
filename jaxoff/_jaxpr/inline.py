"""Calls in a program put in place, so that their equations can be ordered together."""

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

    A differentiated `jax.checkpoint` that prevents CSE hides its operands from the rest of the program behind
    one barrier over all of them, so that its first equation waits for the last reload from the host. Here
    each operand gets a barrier of its own.

    Args:
      eqns: equations in program order.
      renamed: what stands for a variable of theirs, filled with the results of the calls.
      checkpoints: whether `jax.checkpoint` calls are replaced, too.

    Yields:
      Equations that compute the same.
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
                    (operands[i],), barrier = compat.barrier([operand], like=eqn)
                    yield barrier
        body, values = instantiate(call.jaxpr, operands, like=eqn)
        results: Renamed = {}
        yield from inline_calls(body, results, checkpoints=checkpoints)
        for out, value in zip(eqn.outvars, values, strict=True):
            renamed[out] = resolve(results, value)


def split_scalars(eqns: Iterable[JaxprEqn]) -> tuple[list[JaxprEqn], list[JaxprEqn]]:
    """Takes scalars that depend on nothing out of a program, and makes arrays of one constant from such.

    As arguments of the rest, they can be made to wait, and arrays made from them with them.

    Returns:
      The rest, and the equations that make the scalars.
    """
    scalars, rest = [], []
    for eqn in eqns:
        operands = [v for v in eqn.invars if isinstance(v, Literal)]
        if eqn.primitive.name == "broadcast_in_dim" and len(operands) == len(eqn.invars) == 1:
            constant, barrier = compat.barrier(list(eqn.invars), like=eqn)
            scalars.append(barrier)
            rest.append(eqn.replace(invars=[*constant]))
        elif not eqn.invars and not any(compat.shape_of(v.aval) for v in eqn.outvars):
            scalars.append(eqn)
        else:
            rest.append(eqn)
    return rest, scalars


def delay_fills(eqns: Iterable[JaxprEqn], value: Var | None, large_nbytes: int) -> Iterator[JaxprEqn]:
    """Makes large arrays of one constant wait for a value: XLA would fill them at any time before."""
    for eqn in eqns:
        is_constant = eqn.primitive.name == "broadcast_in_dim" and isinstance(eqn.invars[0], Literal)
        if value is not None and is_constant and compat.nbytes_of(eqn.outvars) >= large_nbytes:
            (constant, _), barrier = compat.barrier([eqn.invars[0], value], like=eqn)
            yield barrier
            yield eqn.replace(invars=[constant])
        else:
            yield eqn


def instantiate(jaxpr: Jaxpr, operands: Sequence[Any], like: JaxprEqn) -> tuple[list[JaxprEqn], list[Any]]:
    """The equations of a program for given operands, in the scope of another equation, and the results.

    Its variables get fresh ones, since a program may be called more than once.
    """
    inner: Renamed = dict(zip(jaxpr.invars, operands, strict=True))
    eqns = []
    for eqn in jaxpr.eqns:
        outs = [Var(v.aval) for v in eqn.outvars]
        invars = [resolve(inner, v) for v in eqn.invars]
        eqns.append(compat.inside(eqn, like).replace(invars=invars, outvars=outs))
        inner.update(zip(eqn.outvars, outs, strict=True))
    return eqns, [resolve(inner, v) for v in jaxpr.outvars]


def trace_call(
    fun: Callable[..., Any], operands: Sequence[Any], like: JaxprEqn
) -> tuple[list[JaxprEqn], list[Any]]:
    """The equations of a function for given operands, pytrees, in the scope of another equation.

    And the leaves of its results.
    """
    closed = compat.trace_like(like, fun, jax.tree.map(lambda v: v.aval, operands))
    return instantiate(closed.jaxpr, jax.tree.leaves(operands), like)


def resolve(renamed: Renamed, atom: Any) -> Any:
    """What stands for an atom."""
    return atom if isinstance(atom, Literal) else renamed.get(atom, atom)
