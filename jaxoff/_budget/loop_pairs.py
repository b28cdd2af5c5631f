"""Loops over layers with the loops of their backward passes, found in a differentiated program.

Differentiation turns a scan into two: the forward loop stacks the residuals of each layer, and the backward
loop reads the stacks. Under `jax.checkpoint` the backward loop repeats equations of the forward loop. Here
both bodies become one graph: an equation of the backward body repeating a forward equation, on the same
operands, stands for the forward value. So any value of the layer may be kept or recomputed, whatever was
kept before. The graph is the joint graph of forward and backward pass on which partitioners of other
frameworks work.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jaxoff._jaxpr.dataflow import count_reads, map_makers, variables
from jaxoff._jaxpr.inline import Renamed, inline_calls, resolve

# Equations of a mask or a fill: fused into the kernel that reads the mask.
_CHEAP = frozenset(
    {"add", "and", "broadcast_in_dim", "convert_element_type", "eq", "ge", "gt", "iota", "le",
     "lt", "mul", "ne", "neg", "not", "or", "reshape", "select_n", "squeeze", "sub", "transpose"}
)  # fmt: skip
# Equations whose results are their operands, value by value.
_ALIASES = frozenset({"name", "optimization_barrier"})


@dataclasses.dataclass(frozen=True)
class LoopPair:
    """A loop over layers and the loop of its backward pass, their bodies over common variables.

    Attributes:
      forward, backward: the scan equations.
      layout, backward_layout: of their operands and results.
      body: the forward body, its calls inlined; residuals are among its stacked results. The body
        makes masks and fills moved out of the loop by differentiation, as the backward body does.
      residuals: positions among the forward equation's results: stacks that only the backward loop reads.
      only_backward: equations of the backward body without cotangents among their ancestors, none repeated.
      rest: the equations of the backward body that depend on cotangents.
      outs: the results of the backward body.
      given: the arguments of the backward body with no counterpart in `body`.
      names: forward variable -> its name from `checkpoint_name`.
    """

    forward: JaxprEqn
    backward: JaxprEqn
    layout: compat.ScanLayout
    backward_layout: compat.ScanLayout
    body: Jaxpr
    residuals: tuple[int, ...]
    only_backward: tuple[JaxprEqn, ...]
    rest: tuple[JaxprEqn, ...]
    outs: tuple[Any, ...]
    given: tuple[Var, ...]
    names: Mapping[Var, str]

    @functools.cached_property
    def carried(self) -> tuple[Var, ...]:
        """The carried arguments of the forward body."""
        first = self.layout.num_consts
        return tuple(self.body.invars[first : first + self.layout.num_carry])

    @functools.cached_property
    def values(self) -> tuple[Var, ...]:
        """The carried arguments and the values of the forward body, in program order."""
        return (*self.carried, *(v for eqn in self.body.eqns for v in eqn.outvars))

    @functools.cached_property
    def free(self) -> dict[Var, Any]:
        """Arguments of the forward body that the backward loop can read, too: argument -> the operand."""
        operands = zip(self.body.invars, self.forward.invars, strict=True)
        return {v: operand for v, operand in operands if v not in self.carried}

    @functools.cached_property
    def pure(self) -> tuple[JaxprEqn, ...]:
        """The equations of the layer without cotangents among their ancestors."""
        return (*self.body.eqns, *self.only_backward)

    @functools.cached_property
    def needed(self) -> frozenset[Var]:
        """The values of `pure`, and carried arguments, that the equations in `rest` or the results read."""
        made = {v for eqn in self.pure for v in eqn.outvars}.union(self.carried)
        read = {v for eqn in self.rest for v in variables(eqn)}.union(
            v for v in self.outs if isinstance(v, Var)
        )
        return frozenset(made & read)


def find_loop_pairs(jaxpr: Jaxpr) -> list[LoopPair]:
    """The pairs of loops among the equations of a program, in program order. Calls have to be inlined."""
    found, scans = [], [eqn for eqn in jaxpr.eqns if compat.scan_in(eqn) is not None]
    reads, makers = count_reads(jaxpr.eqns, jaxpr.outvars), map_makers(jaxpr.eqns)
    for forward in scans:
        readers = [eqn for eqn in scans if eqn is not forward and _reads_stacks(eqn, forward)]
        if len(readers) == 1 and (pair := _pair(forward, readers[0], reads, makers)) is not None:
            found.append(pair)
    return found


def _reads_stacks(eqn: JaxprEqn, forward: JaxprEqn) -> bool:
    """Whether a loop over as many iterations reads stacks of another loop row by row."""
    layout, own = _layout(forward), _layout(eqn)
    stacks = set(forward.outvars[layout.num_carry :])
    rows = eqn.invars[own.num_consts + own.num_carry :]
    return own.length == layout.length and not stacks.isdisjoint(v for v in rows if isinstance(v, Var))


def _layout(eqn: JaxprEqn) -> compat.ScanLayout:
    layout = compat.scan_in(eqn)
    assert layout is not None
    return layout


def _pair(
    forward: JaxprEqn, backward: JaxprEqn, reads: Mapping[Any, int], makers: Mapping[Var, JaxprEqn]
) -> LoopPair | None:
    """The pair of two loops; None if a body has effects or constants of its own."""
    layout, own = _layout(forward), _layout(backward)
    bodies = [eqn.params["jaxpr"] for eqn in (forward, backward)]
    if any(closed.consts or compat.has_side_effects(closed.jaxpr) for closed in bodies):
        return None
    if layout.unroll not in (1, False) or own.unroll not in (1, False):
        return None
    body, names = _inline_body(bodies[0].jaxpr)
    first, arguments = _first_row(layout), list(zip(forward.invars, body.invars, strict=True))
    consts = {v: inner for v, inner in arguments[: layout.num_consts] if isinstance(v, Var)}
    rows = {v: inner for v, inner in arguments[first:] if isinstance(v, Var)}
    body = _repeat_constants(body, consts, makers)
    numbering = _Numbering(body)
    theirs, _ = _inline_body(bodies[1].jaxpr)

    # The backward body's arguments, as arguments and results of the forward body.
    carried = layout.num_carry
    stacks = dict(zip(forward.outvars[carried:], body.outvars[carried:], strict=True))
    known, given = {}, []
    for i, (v, operand) in enumerate(zip(theirs.invars, backward.invars, strict=True)):
        counterpart = None
        if isinstance(operand, Var) and i < own.num_consts:
            counterpart = consts.get(operand)
        elif isinstance(operand, Var) and i >= _first_row(own):
            counterpart = stacks.get(operand, rows.get(operand))
        if counterpart is None or not isinstance(counterpart, Var):
            given.append(v)
        else:
            known[v] = numbering.aliases.get(counterpart, counterpart)

    only_backward, rest = [], []
    for eqn in theirs.eqns:
        operands = [resolve(known, v) for v in eqn.invars]
        if not all(isinstance(v, Literal) or v in numbering.known for v in operands) or eqn.effects:
            rest.append(eqn.replace(invars=operands))
            continue
        same = numbering.find(eqn, operands)
        if same is None:
            only_backward.append(eqn.replace(invars=operands))
            numbering.add(only_backward[-1])
        else:
            known.update(zip(eqn.outvars, same, strict=True))
    residuals = [
        i
        for i, v in enumerate(forward.outvars)
        if i >= layout.num_carry and reads[v] and reads[v] == sum(v is operand for operand in backward.invars)
    ]
    return LoopPair(
        forward,
        backward,
        layout,
        own,
        body,
        tuple(residuals),
        tuple(only_backward),
        tuple(rest),
        tuple(resolve(known, v) for v in theirs.outvars),
        tuple(given),
        names,
    )


def _repeat_constants(body: Jaxpr, consts: Mapping[Any, Var], makers: Mapping[Var, JaxprEqn]) -> Jaxpr:
    """A body that makes the masks and fills among the loop's constants itself.

    As operands of a loop they would be arrays in memory.

    Args:
      body: the body of a loop.
      consts: an operand of the loop -> its argument in the body.
      makers: variable -> the equation outside of the loop.
    """
    done: Renamed = {}
    eqns: list[JaxprEqn] = []

    def can_make(v: Any) -> bool:
        if isinstance(v, Literal):
            return True
        eqn = makers.get(v)
        return eqn is not None and eqn.primitive.name in _CHEAP and all(map(can_make, eqn.invars))

    def make(v: Any) -> Any:
        if isinstance(v, Literal) or v in done:
            return resolve(done, v)
        operands = [make(w) for w in makers[v].invars]
        done.update((w, Var(w.aval)) for w in makers[v].outvars)
        eqns.append(makers[v].replace(invars=operands, outvars=[done[w] for w in makers[v].outvars]))
        return done[v]

    made: Renamed = {
        argument: make(v) for v, argument in consts.items() if isinstance(v, Var) and can_make(v)
    }
    renamed = (eqn.replace(invars=[resolve(made, v) for v in eqn.invars]) for eqn in body.eqns)
    return body.replace(eqns=[*eqns, *renamed], outvars=[resolve(made, v) for v in body.outvars])


def _first_row(layout: compat.ScanLayout) -> int:
    return layout.num_consts + layout.num_carry


def _inline_body(body: Jaxpr) -> tuple[Jaxpr, dict[Var, str]]:
    """A body with its calls inlined and without names and barriers; and the names, by variable."""
    renamed: Renamed = {}
    eqns, names = [], {}
    for eqn in inline_calls(body.eqns, renamed):
        operands = [_follow(renamed, v) for v in eqn.invars]
        if eqn.primitive.name in _ALIASES and len(operands) == len(eqn.outvars):
            renamed.update(zip(eqn.outvars, operands, strict=True))
            if (name := compat.name_in(eqn)) is not None and isinstance(operands[0], Var):
                names[operands[0]] = name
        else:
            eqns.append(eqn.replace(invars=operands))
            if eqn.primitive.name == "reduce_precision" and operands[0] in names:  # pins a rounding
                names[eqn.outvars[0]] = names[operands[0]]
    return body.replace(eqns=eqns, outvars=[_follow(renamed, v) for v in body.outvars]), names


def _follow(renamed: Renamed, atom: Any) -> Any:
    while (found := resolve(renamed, atom)) is not atom:
        atom = found
    return atom


class _Numbering:
    """The values of a body by how they are computed.

    Attributes:
      known: the arguments and the values.
      aliases: value -> an earlier value that is computed in the same way.
    """

    def __init__(self, body: Jaxpr):
        self.known = set(body.invars)
        self.aliases: Renamed = {}
        self._by_key: dict[Any, list[Var]] = {}
        for eqn in body.eqns:
            self.add(eqn)

    def add(self, eqn: JaxprEqn) -> None:
        """Adds the values of an equation."""
        self.known.update(eqn.outvars)
        if eqn.effects:
            return
        operands = [resolve(self.aliases, v) for v in eqn.invars]
        first = self._by_key.setdefault(self._key(eqn, operands), eqn.outvars)
        self.aliases.update((v, w) for v, w in zip(eqn.outvars, first, strict=True) if v is not w)

    def find(self, eqn: JaxprEqn, operands: list[Any]) -> list[Var] | None:
        """The values that an equation on known operands computes once more; None if it repeats nothing."""
        return self._by_key.get(self._key(eqn, [resolve(self.aliases, v) for v in operands]))

    @staticmethod
    def _key(eqn: JaxprEqn, operands: list[Any]) -> Any:
        # A program among the parameters prints its equations; a function prints its address.
        params = ", ".join(f"{name}={eqn.params[name]}" for name in sorted(eqn.params))
        arrays = tuple(map(_identify, _list_arrays(eqn.params)))
        atoms = ((_identify(v.val), str(v.aval)) if isinstance(v, Literal) else v for v in operands)
        return eqn.primitive.name, params, arrays, tuple(atoms)


def _list_arrays(value: Any) -> Iterator[Any]:
    """The arrays in parameters of an equation, which the text of the parameters abbreviates or leaves out."""
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _list_arrays(item)
    elif isinstance(value, (Jaxpr, ClosedJaxpr)):
        yield from getattr(value, "consts", ())
        for eqn in value.eqns:
            yield from (v.val for v in eqn.invars if isinstance(v, Literal) and compat.shape_of(v.aval))
            yield from _list_arrays(eqn.params)
    elif isinstance(value, (np.ndarray, jax.Array)):
        yield value


def _identify(value: Any) -> Any:
    """A hashable key of a number or an array: equal keys mean equal values."""
    if isinstance(value, jax.Array):
        return "id", id(value)
    if hasattr(value, "tobytes"):  # of NumPy, or JAX's own for constants
        return str(value.dtype), value.shape, np.asarray(value).tobytes()
    return type(value), value
