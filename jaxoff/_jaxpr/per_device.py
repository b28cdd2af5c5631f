"""A train step over a mesh as one of its devices runs it."""

from __future__ import annotations

from typing import Any

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import Jaxpr, JaxprEqn, Literal, Var
from jaxoff._jaxpr.dataflow import variables
from jaxoff._jaxpr.inline import Renamed, inline_calls, instantiate, resolve


def of_one_device(jaxpr: Jaxpr) -> tuple[Jaxpr, int]:
    """The program of one device: `jax.shard_map`s in place, all else as large as it is there.

    A value outside of them, such as a moment of an optimizer, is divided as the ones of its shape are that it
    is computed with. What nothing ties to a shard_map is taken to be whole on each device.

    Args:
      jaxpr: a program; without a shard_map, it is returned as it is.

    Returns:
      A program with the same inputs and results, in order, and the number of devices. It is for looking at:
      equations outside of the shard_maps keep their parameters.
    """
    eqns, outvars = _flat(jaxpr)
    maps = [eqn for eqn in eqns if compat.is_shard_map(eqn)]
    if not maps:
        return jaxpr, 1
    divided = _Divided(eqns)
    local: Renamed = {}

    def here(atom: Any) -> Any:
        if isinstance(atom, Literal):
            return atom
        return local.setdefault(atom, Var(divided.aval(atom)))

    inputs, found = [here(v) for v in jaxpr.invars], []
    for eqn in eqns:
        operands = [here(v) for v in eqn.invars]
        if compat.is_shard_map(eqn):
            body, results = instantiate(compat.as_open(eqn.params["jaxpr"]), operands, like=eqn)
            found += body
            local.update(zip(eqn.outvars, results, strict=True))
        else:
            found.append(eqn.replace(invars=operands, outvars=[here(v) for v in eqn.outvars]))
    program = jaxpr.replace(invars=inputs, eqns=found, outvars=[here(v) for v in outvars])
    return program, max(map(compat.num_shards, maps))


def _flat(jaxpr: Jaxpr) -> tuple[list[JaxprEqn], list[Any]]:
    renamed: Renamed = {}
    eqns = list(inline_calls(jaxpr.eqns, renamed, checkpoints=False))
    return eqns, [resolve(renamed, v) for v in jaxpr.outvars]


class _Divided:
    """How the values of a program are divided, by what shard_maps take and return."""

    def __init__(self, eqns: list[JaxprEqn]):
        self._like: dict[Var, Var] = {}  # of values that are divided alike, the next one
        known: list[tuple[Var, Any]] = []
        for eqn in eqns:
            if compat.is_shard_map(eqn):
                body = compat.as_open(eqn.params["jaxpr"])
                outer, inner = (*eqn.invars, *eqn.outvars), (*body.invars, *body.outvars)
                known += [(v, w.aval) for v, w in zip(outer, inner, strict=True) if isinstance(v, Var)]
            else:
                self._tie(eqn)
        self._avals = {self._root(v): aval for v, aval in known}

    def aval(self, v: Var) -> Any:
        """What of a value is on a device."""
        aval = self._avals.get(self._root(v), v.aval)
        return v.aval if aval is v.aval else aval.update(dtype=compat.struct_of(v.aval).dtype)

    def _tie(self, eqn: JaxprEqn) -> None:
        """Values of one shape that are computed from each other are divided alike."""
        for out in eqn.outvars:
            shape = compat.shape_of(out.aval)
            for v in variables(eqn) if shape else ():
                if compat.shape_of(v.aval) == shape:
                    self._like[self._root(v)] = self._root(out)

    def _root(self, v: Var) -> Var:
        while self._like.get(v, v) is not v:
            v = self._like[v]
        return v
