"""Value numbering: equations that compute the same value from the same operands."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jaxoff._jaxpr.inline import Renamed, resolve
from jaxoff._jaxpr.split_maps import invert_division


class Numbering:
    """The values of equations by how they are computed.

    Attributes:
      known: the arguments and the values.
      aliases: value -> an earlier value that is computed in the same way.
    """

    def __init__(
        self, arguments: Iterable[Var], eqns: Iterable[JaxprEqn] = (), aliases: Renamed | None = None
    ):
        """`aliases`: argument -> an earlier argument of the same value."""
        self.known = set(arguments)
        self.aliases: Renamed = dict(aliases or {})
        self._by_key: dict[Any, list[Var]] = {}
        for eqn in eqns:
            self.add(eqn)

    def add(self, eqn: JaxprEqn) -> None:
        """Adds the values of an equation."""
        self.known.update(eqn.outvars)
        if compat.has_side_effects(eqn):
            return
        operands = [resolve(self.aliases, v) for v in eqn.invars]
        first = self._by_key.setdefault(self._key(eqn, operands), eqn.outvars)
        self.aliases.update((v, w) for v, w in zip(eqn.outvars, first, strict=True) if v is not w)
        if (back := invert_division(eqn)) is not None and isinstance(operands[0], Var):
            self._by_key.setdefault(self._key(back, [*first]), operands)

    def knows(self, eqn: JaxprEqn, operands: Iterable[Any]) -> bool:
        """Whether an equation computes values of known operands. A collective computes a value, too."""
        is_pure = not compat.has_side_effects(eqn)
        return is_pure and all(isinstance(v, Literal) or v in self.known for v in operands)

    def find(self, eqn: JaxprEqn, operands: list[Any]) -> list[Var] | None:
        """The values computed once more by an equation on known operands; None if nothing is repeated."""
        return self._by_key.get(self._key(eqn, [resolve(self.aliases, v) for v in operands]))

    def identify(self, operands: Iterable[Any]) -> Any:
        """A hashable key of operands: equal keys mean equal values."""
        return _identify_atoms(resolve(self.aliases, v) for v in operands)

    @staticmethod
    def _key(eqn: JaxprEqn, operands: list[Any]) -> Any:
        # A program among the parameters prints its equations; a function prints its address.
        params = ", ".join(f"{name}={eqn.params[name]}" for name in sorted(eqn.params))
        arrays = tuple(map(_identify, _list_arrays(eqn.params)))
        return eqn.primitive.name, params, arrays, _identify_atoms(operands)


def _identify_atoms(atoms: Iterable[Any]) -> Any:
    return tuple((_identify(v.val), str(v.aval)) if isinstance(v, Literal) else v for v in atoms)


def _list_arrays(value: Any) -> Iterator[Any]:
    """What the text of an equation's parameters abbreviates or leaves out: their arrays and functions."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    elif isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _list_arrays(item)
    elif isinstance(value, (Jaxpr, ClosedJaxpr)):
        yield from getattr(value, "consts", ())
        for eqn in value.eqns:
            yield from (v.val for v in eqn.invars if isinstance(v, Literal) and compat.shape_of(v.aval))
            yield from _list_arrays(eqn.params)
    elif isinstance(value, (np.ndarray, jax.Array)) or (callable(value) and not isinstance(value, type)):
        yield value


def _identify(value: Any) -> Any:
    """A hashable key of a number, an array or a function: equal keys mean equal values."""
    if callable(value) or isinstance(value, jax.Array | Tracer):  # a kernel's constants may be of its trace
        return "id", id(value)
    if hasattr(value, "tobytes"):  # of NumPy, or JAX's own for constants
        return str(value.dtype), value.shape, np.asarray(value).tobytes()
    return type(value), value
