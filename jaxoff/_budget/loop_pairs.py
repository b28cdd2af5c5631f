"""Loops over layers with the loops of their backward passes, found in a differentiated program.

Differentiation turns a scan into two: the forward loop stacks the residuals of each layer, and the backward
loop reads the stacks. Under `jax.checkpoint` the backward loop repeats equations of the forward loop, and the
residuals of a loop without a carry may be its own operands: `jax.lax.map` over parts of a batch. Here
both bodies become one graph: an equation of the backward body repeating a forward equation, on the same
operands, stands for the forward value. So any value of the layer may be kept or recomputed, whatever was
kept before. The graph is the joint graph of forward and backward pass on which partitioners of other
frameworks work.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxoff._budget.inner_loops import InnerLoops, inline_body
from jaxoff._budget.joint_graph import JointGraph, find_needed
from jaxoff._budget.numbering import Numbering
from jaxoff._budget.segments import find_cuts
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import Jaxpr, JaxprEqn, Var
from jaxoff._jaxpr.dataflow import count_reads, map_makers, variables
from jaxoff._jaxpr.inline import Renamed, inline_program, make_masks_inside, resolve
from jaxoff._jaxpr.lowered import has_ordered_effects
from jaxoff._jaxpr.scopes import is_transposed

_LONG_NBYTES = 1 << 20  # of an iteration's rows: about 1 us of a GPU's time for each access to memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopPair(JointGraph):
    """A loop over layers and the loop of its backward pass, their bodies over common variables.

    Attributes:
      forward, backward: the scan equations.
      layout, backward_layout: of their operands and results.
      body: the forward body, its calls inlined; residuals are among its stacked results. The body
        makes masks and fills moved out of the loop by differentiation, as the backward body does.
      residuals: positions among the forward equation's results: stacks that only the backward loop reads.
      given: the arguments of the backward body with no counterpart in `body`.
    """

    forward: JaxprEqn
    backward: JaxprEqn
    layout: compat.ScanLayout
    backward_layout: compat.ScanLayout
    body: Jaxpr
    residuals: tuple[int, ...]
    given: tuple[Var, ...]

    @functools.cached_property
    def cuts(self) -> Sequence[int]:
        """The cuts of the body."""
        return find_cuts(self)


def find_loop_pairs(jaxpr: Jaxpr) -> list[LoopPair]:
    """The pairs of loops among the equations of a program, in program order. Calls have to be inlined.

    A loop is in one pair at most: in a gradient of a gradient, a backward loop has a backward loop itself.
    """
    found, scans = [], [eqn for eqn in jaxpr.eqns if compat.scan_in(eqn) is not None]
    positions = {id(eqn): i for i, eqn in enumerate(jaxpr.eqns)}
    reads, makers = count_reads(jaxpr.eqns, jaxpr.outvars), map_makers(jaxpr.eqns)
    taken: set[int] = set()
    of_backward, of_stacks, of_rows = [], [], []
    for forward in scans:
        others = [eqn for eqn in scans if eqn is not forward]
        readers = [eqn for eqn in others if _reads_stacks(eqn, forward)]
        if backward := [eqn for eqn in readers if is_transposed(eqn) and not is_transposed(forward)]:
            of_backward.append((forward, backward))
        elif readers:
            of_stacks.append((forward, readers))
        else:
            of_rows.append((forward, [eqn for eqn in others if _reads_rows(eqn, forward)]))
    # The state of layers, in a stack, goes on to the next call of the same layers, which is a reader, too. A
    # backward loop reads the rows of any loop over its weights: the loop with its stacks comes first.
    for forward, readers in (*of_backward, *of_stacks, *of_rows):
        if len(readers) != 1 or not taken.isdisjoint((id(forward), id(readers[0]))):
            continue
        between = positions[id(forward)], positions[id(readers[0])]
        if (pair := _pair(forward, readers[0], between, reads, makers)) is not None:
            taken |= {id(forward), id(readers[0])}
            found.append(pair)
    return sorted(found, key=lambda pair: pair.position)


def holds_loop_pairs(loop: JaxprEqn) -> bool:
    """Whether the body of a loop has pairs of loops."""
    return bool(find_loop_pairs(inline_program(compat.as_open(loop.params["jaxpr"]))))


def _reads_stacks(eqn: JaxprEqn, forward: JaxprEqn) -> bool:
    """Whether a loop over as many iterations reads stacks of another loop row by row."""
    layout, own = _layout(forward), _layout(eqn)
    stacks = set(forward.outvars[layout.num_carry :])
    rows = eqn.invars[own.num_consts + own.num_carry :]
    return own.length == layout.length and not stacks.isdisjoint(v for v in rows if isinstance(v, Var))


def _reads_rows(eqn: JaxprEqn, forward: JaxprEqn) -> bool:
    """Whether a backward loop over as many iterations reads rows that another loop reads."""
    layout, own = _layout(forward), _layout(eqn)
    rows = forward.invars[_first_row(layout) :]
    return (
        own.length == layout.length
        and is_transposed(eqn)
        and not is_transposed(forward)
        and any(v in rows for v in eqn.invars[_first_row(own) :] if isinstance(v, Var))
    )


def _is_unrolled_for_time(eqn: JaxprEqn) -> bool:
    """Whether a loop is unrolled whose iterations are short, by the bytes of their rows in stacks.

    The loops of a pair are written without unrolling, which costs a layer no time.
    """
    layout = _layout(eqn)
    stacks = [*eqn.invars[_first_row(layout) :], *eqn.outvars[layout.num_carry :]]
    return layout.unroll not in (1, False) and compat.nbytes_of(stacks) < _LONG_NBYTES * layout.length


def roll_loops(jaxpr: Jaxpr) -> Jaxpr:
    """A program whose short loops are not unrolled; the same object where none is."""

    def roll(jaxpr: Jaxpr) -> Jaxpr:
        return compat.replace_equations(jaxpr, map(roll_one, jaxpr.eqns))

    def roll_one(eqn: JaxprEqn) -> JaxprEqn:
        if compat.scan_in(eqn) is None or not _is_unrolled_for_time(eqn):
            return eqn
        return eqn.replace(params=eqn.params | {"unroll": 1})

    return compat.rewrite_jaxprs(jaxpr, roll)


def _layout(eqn: JaxprEqn) -> compat.ScanLayout:
    layout = compat.scan_in(eqn)
    assert layout is not None
    return layout


def _pair(
    forward: JaxprEqn,
    backward: JaxprEqn,
    between: tuple[int, int],
    reads: Mapping[Any, int],
    makers: Mapping[Var, JaxprEqn],
) -> LoopPair | None:
    """The pair of two loops; None if they share no value, or a body has constants, or effects with results.

    What prints in a body, such as `jax.debug.print`, has no results: it stays there and is not repeated.
    """
    layout, own = _layout(forward), _layout(backward)
    bodies = [eqn.params["jaxpr"] for eqn in (forward, backward)]
    if any(closed.consts or has_ordered_effects(closed) for closed in bodies):
        return None
    if _is_unrolled_for_time(forward) or _is_unrolled_for_time(backward):
        return None
    body, names = inline_body(bodies[0].jaxpr)
    first, arguments = _first_row(layout), list(zip(forward.invars, body.invars, strict=True))
    constants = _Constants(arguments[: layout.num_consts], makers)
    rows = {v: inner for v, inner in arguments[first:] if isinstance(v, Var)}
    body = make_masks_inside(body, constants.arguments.items(), makers)
    numbering = Numbering(body.invars, body.eqns, constants.aliases)
    theirs, _ = inline_body(bodies[1].jaxpr)
    if any(eqn.outvars and compat.has_side_effects(eqn) for eqn in (*body.eqns, *theirs.eqns)):
        return None

    carried = layout.num_carry
    stacks = dict(zip(forward.outvars[carried:], body.outvars[carried:], strict=True))
    known: Renamed = {}  # value of the backward body -> that of the forward body
    for i, (v, operand) in enumerate(zip(theirs.invars, backward.invars, strict=True)):
        counterpart = None
        if isinstance(operand, Var) and i < own.num_consts:
            counterpart = constants.arguments.get(operand)
        elif isinstance(operand, Var) and i >= _first_row(own):
            counterpart = stacks.get(operand, rows.get(operand))
        if isinstance(counterpart, Var):
            known[v] = numbering.aliases.get(counterpart, counterpart)
    given = [v for v in theirs.invars if v not in known]
    inner = InnerLoops(numbering)
    for eqn in body.eqns:
        inner.add(eqn)
    outside: Renamed = dict(zip(theirs.invars, backward.invars, strict=True))
    find_constant = functools.partial(constants.find, outside=outside)
    only_backward, rest = _part_backward(theirs, known, numbering, inner, find_constant)
    if stacks.keys().isdisjoint(variables(backward)) and len(only_backward) + len(rest) == len(theirs.eqns):
        return None
    body = body.replace(eqns=[inner.widened.get(id(eqn), eqn) for eqn in body.eqns])
    residuals = [
        i
        for i, v in enumerate(forward.outvars)
        if i >= layout.num_carry and reads[v] and reads[v] == sum(v is operand for operand in backward.invars)
    ]
    outs = tuple(resolve(known, v) for v in theirs.outvars)
    carry = tuple(body.invars[layout.num_consts : first])
    return LoopPair(
        count=layout.length,
        eqns=tuple(body.eqns),
        results=tuple(body.outvars),
        carried=carry,
        free={v: w for v, w in zip(body.invars, forward.invars, strict=True) if v not in carry},
        only_backward=tuple(only_backward),
        rest=tuple(rest),
        outs=outs,
        needed=find_needed((*body.eqns, *only_backward), carry, rest, outs),
        names=names,
        has_stacks=True,
        position=between[0],
        end=between[1],
        forward=forward,
        backward=backward,
        layout=layout,
        backward_layout=own,
        body=body,
        residuals=tuple(residuals),
        given=tuple(given),
    )


def _part_backward(
    body: Jaxpr,
    known: Renamed,
    numbering: Numbering,
    inner: InnerLoops,
    find_constant: Callable[[JaxprEqn], Sequence[Any] | None],
) -> tuple[list[JaxprEqn], list[JaxprEqn]]:
    """The equations of a backward body that repeat none of the forward body, first those without cotangents.

    Args:
      body: the body of the backward loop.
      known: value of `body` -> the same of the forward body; gets the values found.
      numbering: of the forward body; gets the values of the equations without cotangents.
      inner: the loops of the forward body.
      find_constant: an equation of constants -> their values in the forward body, or None.
    """
    only_backward, rest = [], []
    for eqn in body.eqns:
        operands = [resolve(known, v) for v in eqn.invars]
        same, is_known = find_constant(eqn), numbering.knows(eqn, operands)
        if is_known:
            same = numbering.find(eqn, operands) or same or inner.widen(eqn, operands)
        if same is not None:
            known.update(zip(eqn.outvars, same, strict=True))
        elif is_known:
            only_backward.append(eqn.replace(invars=operands))
            numbering.add(only_backward[-1])
        else:
            rest.append(eqn.replace(invars=operands))
    return only_backward, rest


class _Constants:
    """The constants of a forward loop, by how they are computed outside of the loop.

    Differentiation moves the values of a body that depend on neither carry nor rows out of the forward loop:
    angles of rotary positions, for example. Under `jax.checkpoint` the backward body repeats their equations.

    Attributes:
      arguments: operand of the loop -> its argument in the body.
      aliases: argument -> an earlier argument of equal value.
    """

    def __init__(self, operands: Sequence[tuple[Any, Var]], makers: Mapping[Var, JaxprEqn]):
        self.arguments = {v: inner for v, inner in operands if isinstance(v, Var)}
        ancestors, todo = set(), list(self.arguments)
        while todo:
            v = todo.pop()
            if v in makers and v not in ancestors and not compat.sub_jaxprs(makers[v]):
                ancestors.add(v)
                todo += variables(makers[v])
        leaves = {v for w in ancestors for v in variables(makers[w])}
        self._numbering = Numbering(leaves, (eqn for v, eqn in makers.items() if v in ancestors))
        self._first: dict[Var, Var] = {}
        self.aliases: Renamed = {}
        for v, inner in operands:
            if isinstance(v, Var):
                first = self._first.setdefault(self._numbering.aliases.get(v, v), inner)
                self.aliases.update({inner: first} if first is not inner else {})

    def find(self, eqn: JaxprEqn, outside: Renamed) -> list[Var] | None:
        """The arguments for values that an equation of the backward body computes once more, or None.

        Args:
          eqn: the equation.
          outside: variable of the backward body -> the equal value outside of the loops; the equation's
            results are added.
        """
        operands = [resolve(outside, v) for v in eqn.invars]
        if not self._numbering.knows(eqn, operands):
            return None
        made = self._numbering.find(eqn, operands)
        if made is None:
            return None
        outside.update(zip(eqn.outvars, made, strict=True))
        found = [self._first[v] for v in made if v in self._first]
        return found if len(found) == len(made) else None


def _first_row(layout: compat.ScanLayout) -> int:
    return layout.num_consts + layout.num_carry
