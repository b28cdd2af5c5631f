"""The program of a single device, of a train step over a mesh."""

from __future__ import annotations

from typing import Any

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import Jaxpr, JaxprEqn, Literal, Var
from jaxoff._jaxpr.dataflow import variables
from jaxoff._jaxpr.inline import Renamed, inline_program, instantiate


def extract_device_program(jaxpr: Jaxpr) -> tuple[Jaxpr, int]:
    """Extracts the program of a single device.

    Each `jax.shard_map` is replaced by its equations. Every variable gets the shape of its share on a device.
    A variable outside of the shard_maps (a moment of an optimizer, for example) is divided like the variables
    of equal shape from which it is computed, or which are computed from it. A variable without a path to a
    shard_map counts as whole on each device.

    Args:
      jaxpr: a program; a program without a shard_map is returned unchanged.

    Returns:
      A program with the same inputs and results, in order, and the number of devices. The program is for
      analysis only: equations outside of the shard_maps keep their parameters.
    """
    inlined = inline_program(jaxpr, checkpoints=False)
    maps = [eqn for eqn in inlined.eqns if compat.is_shard_map(eqn)]
    if not maps:
        return jaxpr, 1
    local_avals = _LocalAvals(inlined.eqns)
    local: Renamed = {}

    def localize(atom: Any) -> Any:
        if isinstance(atom, Literal):
            return atom
        return local.setdefault(atom, Var(local_avals.find(atom)))

    inputs, found = [localize(v) for v in jaxpr.invars], []
    for eqn in inlined.eqns:
        operands = [localize(v) for v in eqn.invars]
        if compat.is_shard_map(eqn):
            body, results = instantiate(compat.as_open(eqn.params["jaxpr"]), operands, like=eqn)
            found += body
            local.update(zip(eqn.outvars, results, strict=True))
        else:
            found.append(eqn.replace(invars=operands, outvars=[localize(v) for v in eqn.outvars]))
    program = jaxpr.replace(invars=inputs, eqns=found, outvars=[localize(v) for v in inlined.outvars])
    return program, max(map(compat.num_shards, maps))


class _LocalAvals:
    """The abstract shares of a program's variables on a device, from the operands and results of shard_maps.

    Variables with equal division form a group with a root, as in a disjoint-set forest.
    """

    def __init__(self, eqns: list[JaxprEqn]):
        self._parents: dict[Var, Var] = {}  # variable -> the next variable of its group, towards the root
        known: list[tuple[Var, Any]] = []
        for eqn in eqns:
            if compat.is_shard_map(eqn):
                body = compat.as_open(eqn.params["jaxpr"])
                outer, inner = (*eqn.invars, *eqn.outvars), (*body.invars, *body.outvars)
                known += [(v, w.aval) for v, w in zip(outer, inner, strict=True) if isinstance(v, Var)]
            else:
                self._tie(eqn)
        self._avals = {self._find_root(v): aval for v, aval in known}

    def find(self, v: Var) -> Any:
        """Finds the abstract share of a variable on a device."""
        aval = self._avals.get(self._find_root(v), v.aval)
        return v.aval if aval is v.aval else aval.update(dtype=compat.struct_of(v.aval).dtype)

    def _tie(self, eqn: JaxprEqn) -> None:
        """Puts the results of an equation into the groups of its operands of equal shape."""
        for out in eqn.outvars:
            shape = compat.shape_of(out.aval)
            for v in variables(eqn) if shape else ():
                if compat.shape_of(v.aval) == shape:
                    self._parents[self._find_root(v)] = self._find_root(out)

    def _find_root(self, v: Var) -> Var:
        while self._parents.get(v, v) is not v:
            v = self._parents[v]
        return v
