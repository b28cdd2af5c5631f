"""Stacks of a loop in the narrow type of their rows.

A layer with float32 weights and bfloat16 compute makes the gradients of its weights in bfloat16 and widens
the gradients, so the loop stacks float32 rows. Here the loop stacks bfloat16 rows, and the stack's readers
widen the stack: the same numbers in half the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax.numpy as jnp

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jaxoff._jaxpr.dataflow import index_readers, map_makers
from jaxoff._jaxpr.inline import inline_program
from jaxoff._jaxpr.primitives import KernelClass, classify_kernel


def narrow_stacks(closed: ClosedJaxpr) -> ClosedJaxpr:
    """A program whose loops stack rows before they are widened, at each level of its loops.

    Stacks with other readers than elementwise equations and reductions stay wide: XLA computes the conversion
    inside of elementwise and reducing kernels only.
    """

    def write(program: Jaxpr) -> Jaxpr:
        level = inline_program(program)
        readers = index_readers(level.eqns)
        outs = {v for v in level.outvars if isinstance(v, Var)}

        def is_read_in_kernels(v: Var) -> bool:
            found = [level.eqns[i] for i in readers.get(v, ())]
            fused = all(classify_kernel(eqn) is not KernelClass.COMPUTE for eqn in found)
            return v not in outs and bool(found) and fused

        eqns: list[JaxprEqn] = []
        for eqn in level.eqns:
            eqns += _narrow_loop(compat.map_programs(eqn, write), is_read_in_kernels)
        return level.replace(eqns=eqns)

    return compat.map_open(closed, write)


def _narrow_loop(eqn: JaxprEqn, may_narrow: Callable[[Var], bool]) -> Sequence[JaxprEqn]:
    """A loop with narrow stacks and the conversions of the stacks; any other equation as it is."""
    layout = compat.scan_in(eqn)
    if layout is None:
        return [eqn]
    closed = eqn.params["jaxpr"]
    body, makers = closed.jaxpr, map_makers(closed.jaxpr.eqns)
    outs, results = list(body.outvars), list(eqn.outvars)
    conversions: list[JaxprEqn] = []
    for k in range(layout.num_carry, len(outs)):
        maker = makers.get(outs[k]) if isinstance(outs[k], Var) else None
        if maker is None or not _is_widening(maker) or not may_narrow(results[k]):
            continue
        outs[k] = maker.invars[0]
        narrow = results[k].aval.update(dtype=outs[k].aval.dtype)
        results[k] = Var(narrow)
        params = maker.params | {"sharding": None}  # the stack's own, with Explicit axes
        conversions.append(
            maker.replace(
                invars=[results[k]], outvars=[eqn.outvars[k]], params=params, source_info=eqn.source_info
            )
        )
    if not conversions:
        return [eqn]
    params = {**eqn.params, "jaxpr": closed.replace(jaxpr=body.replace(outvars=outs))}
    return [eqn.replace(params=params, outvars=results), *conversions]


def _is_widening(eqn: JaxprEqn) -> bool:
    """Whether an equation converts floating-point numbers to a type with more exponents and digits."""
    if eqn.primitive.name != "convert_element_type":
        return False
    before, after = compat.struct_of(eqn.invars[0].aval), compat.struct_of(eqn.outvars[0].aval)
    if not (jnp.issubdtype(before.dtype, jnp.floating) and jnp.issubdtype(after.dtype, jnp.floating)):
        return False
    a, b = jnp.finfo(before.dtype), jnp.finfo(after.dtype)
    return a.bits < b.bits and a.nmant <= b.nmant and a.nexp <= b.nexp and isinstance(eqn.invars[0], Var)
