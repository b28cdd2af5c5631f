"""Products that a program with Explicit axes divides over devices only after it has added them up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxoff._jaxpr.compat import JaxprEqn, Var
from jaxoff._jaxpr.dataflow import index_readers, map_makers
from jaxoff._jaxpr.meshes import explicit_mesh


def divide_products(eqns: Sequence[JaxprEqn], read_after: Iterable[Any]) -> list[JaxprEqn]:
    """Divides each product whose only reader divides the whole result over devices by a `reshard`.

    The gradient of a weight which a layer gathers is such a product. XLA adds up the devices' products and
    takes a share of the sum, by one reduce-scatter. With a barrier between product and `reshard` XLA would
    send twice the bytes: an all-reduce, of which each device drops all but its share.

    Args:
      eqns: the equations, in program order.
      read_after: what is read after the equations.

    Returns:
      The equations. The type of a divided product has the sharding of its `reshard`, which is left out.
    """
    makers, readers = map_makers(eqns), index_readers(eqns)
    kept = {v for v in read_after if isinstance(v, Var)}
    replaced: dict[int, JaxprEqn | None] = {}  # id of an equation -> what takes its place
    for eqn in eqns:
        if eqn.primitive.name != "reshard" or not isinstance(eqn.invars[0], Var):
            continue
        path, v = [], eqn.invars[0]
        while v in makers and len(readers[v]) == 1 and v not in kept:
            path.append(makers[v])
            if makers[v].primitive.name not in ("transpose", "convert_element_type"):
                break
            v = makers[v].invars[0]
        if path and path[-1].primitive.name == "dot_general" and _is_whole(path[-1]):
            replaced[id(eqn)] = None
            replaced |= _divide(path, eqn.outvars[0])
    return [new for eqn in eqns if (new := replaced.get(id(eqn), eqn)) is not None]


def _is_whole(eqn: JaxprEqn) -> bool:
    """Whether each device has the whole result of an equation, by its type."""
    aval: Any = eqn.outvars[0].aval
    return explicit_mesh(aval) is not None and aval.sharding.is_fully_replicated


def _divide(path: Sequence[JaxprEqn], result: Var) -> dict[int, JaxprEqn]:
    """Divides the equations of a path, given from the last to the first, so that they make `result`."""
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
