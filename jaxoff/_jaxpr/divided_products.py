"""Products with Explicit axes whose sums over devices the program divides by a `reshard` behind."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxoff._jaxpr.compat import JaxprEqn, Var
from jaxoff._jaxpr.dataflow import index_readers, map_makers
from jaxoff._jaxpr.meshes import explicit_mesh


def divide_products(eqns: Sequence[JaxprEqn], read_after: Iterable[Any]) -> list[JaxprEqn]:
    """Gives a product the sharding of the `reshard` that alone reads the product, and drops the `reshard`.

    The gradient of a weight gathered by a layer is such a product: XLA makes a reduce-scatter of the sum over
    devices and the `reshard`. With a barrier between the two XLA sends twice the bytes, an all-reduce, and
    each device drops all but its share of the sum.

    Args:
      eqns: equations in program order.
      read_after: the variables read after the equations.

    Returns:
      The equations.
    """
    makers, readers = map_makers(eqns), index_readers(eqns)
    kept = {v for v in read_after if isinstance(v, Var)}
    replaced: dict[int, JaxprEqn | None] = {}  # by the id of the equation
    for eqn in eqns:
        if eqn.primitive.name != "reshard" or not isinstance(eqn.invars[0], Var):
            continue
        path, v = [], eqn.invars[0]
        while v in makers and len(readers[v]) == 1 and v not in kept:
            path.append(makers[v])
            if makers[v].primitive.name not in ("transpose", "convert_element_type"):
                break
            v = makers[v].invars[0]
        if path and path[-1].primitive.name == "dot_general" and _is_divided_later(path[-1], eqn):
            replaced[id(eqn)] = None
            replaced |= _divide(path, eqn.outvars[0])
    return [new for eqn in eqns if (new := replaced.get(id(eqn), eqn)) is not None]


def _is_divided_later(product: JaxprEqn, reshard: JaxprEqn) -> bool:
    """Whether each device has a whole product by its type, and a `reshard` over the same mesh divides it."""
    before: Any = product.outvars[0].aval
    after: Any = reshard.outvars[0].aval
    mesh = explicit_mesh(before)
    if mesh is None or explicit_mesh(after) != mesh or after.sharding.spec.unreduced:
        return False
    return before.sharding.is_fully_replicated and not after.sharding.is_fully_replicated


def _divide(path: Sequence[JaxprEqn], result: Var) -> dict[int, JaxprEqn]:
    """The equations of a path, from the last to the first, with the shardings to make `result`; by ids."""
    new: dict[int, JaxprEqn] = {}
    *others, product = path
    for eqn in others:
        sharding = _sharding_of(result)
        params, spec = dict(eqn.params), sharding.spec
        if eqn.primitive.name == "transpose":
            order = params["permutation"]
            spec = P(*(spec[order.index(i)] for i in range(len(order))))
        elif params["sharding"] is not None:
            params["sharding"] = sharding
        aval: Any = eqn.invars[0].aval
        operand = Var(aval.update(sharding=NamedSharding(sharding.mesh, spec)))
        new[id(eqn)] = eqn.replace(invars=[operand], outvars=[result], params=params)
        result = operand
    params = product.params | {"out_sharding": _sharding_of(result)}
    new[id(product)] = product.replace(outvars=[result], params=params)
    return new


def _sharding_of(v: Var) -> NamedSharding:
    aval: Any = v.aval
    return aval.sharding
