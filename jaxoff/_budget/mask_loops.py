"""Masks and fills, made inside of the loops that read them.

Attention over blocks of queries, with a mask by position, has a loop over the blocks in each layer.
Differentiation moves what depends on a block's number alone out of all loops: a loop of its own stacks the
masks of all blocks, which are as large as the scores of all blocks. Here the loop over the blocks makes each
mask itself, from the number. Likewise a loop makes a mask or a fill that depends on nothing, such as the
-1e9 of masked scores, which differentiation moves out of all loops, too.

Where a layer calls a `jax.shard_map`, the loop that makes the masks is in a `jax.shard_map` of its own, whose
equations move into those that read its results.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jaxoff._jaxpr.dataflow import drop_dead, map_makers, variables
from jaxoff._jaxpr.inline import (
    CHEAP,
    Renamed,
    inline_program,
    instantiate,
    make_masks_inside,
    make_program,
    resolve,
    share_scalars,
    trace_scan,
    write_otherwise,
)
from jaxoff._jaxpr.merged_maps import are_alike
from jaxoff._jaxpr.primitives import EMPTY, LEAVES, holds, is_condition, is_shard_map

# The least bytes of a loop's results, as a multiple of its operands'.
_LARGER = 8
# The least bytes of a mask or fill that a loop makes itself.
_FILL_NBYTES = 1 << 20
_CHEAP = CHEAP | EMPTY
# Equations of positions, numbers of blocks and numbers of devices, where their results are small.
_OF_INDICES = LEAVES | {"axis_index"}


def make_masks_in_readers(closed: ClosedJaxpr) -> ClosedJaxpr:
    """A program without the stacks of loops that make masks, where loops alone read the stacks, row by row.

    The loops are on the level of the readers, or around these. Nor do loops read large masks and fills.
    """
    needs = holds(closed.jaxpr, lambda eqn: _makes_masks(eqn) or _is_fill(eqn))
    return compat.map_open(closed, _write_level) if needs else closed


def _is_fill(eqn: JaxprEqn) -> bool:
    """Whether an equation makes a large mask or fill of a number, or of nothing."""
    is_small = compat.nbytes_of(variables(eqn)) * _LARGER <= compat.nbytes_of(eqn.outvars)
    return eqn.primitive.name in CHEAP and is_small and compat.nbytes_of(eqn.outvars) >= _FILL_NBYTES


def _makes_masks(eqn: JaxprEqn) -> bool:
    """Whether an equation is a loop without a carry, with results far larger than its operands, or small.

    The loop's equations are cheap, or loops of this kind: over blocks of queries, in which one runs over
    blocks of keys. So are the equations of a `jax.shard_map` which makes masks.
    """
    layout, nbytes = compat.scan_in(eqn), compat.nbytes_of(eqn.outvars)
    if layout is None and not (is_shard_map(eqn) and nbytes >= _FILL_NBYTES):
        return False
    if layout is not None and (layout.num_carry or eqn.params["jaxpr"].consts):
        return False
    if max(nbytes, _FILL_NBYTES) < _LARGER * compat.nbytes_of(variables(eqn)):
        return False
    body = inline_program(compat.as_open(eqn.params["jaxpr"]))
    return all(_is_cheap(inner) or _makes_masks(inner) for inner in body.eqns)


def _is_cheap(eqn: JaxprEqn) -> bool:
    if is_condition(eqn):
        return all(_is_cheap(e) for branch in compat.sub_jaxprs(eqn) for e in inline_program(branch).eqns)
    if eqn.primitive.name in _CHEAP:
        return True
    return eqn.primitive.name in _OF_INDICES and compat.nbytes_of(eqn.outvars) < _FILL_NBYTES


@dataclasses.dataclass(frozen=True)
class _Masks:
    """A stack of masks, or a mask of a `jax.shard_map`.

    Attributes:
      maker: the loop or `jax.shard_map` that makes the masks.
      place: of the masks among the results of `maker`.
      operands: of `maker`, by their names where the masks are read.
    """

    maker: JaxprEqn
    place: int
    operands: tuple[Any, ...]

    @property
    def body(self) -> Jaxpr:
        """The program in `maker`."""
        return compat.as_open(self.maker.params["jaxpr"])

    @property
    def layout(self) -> compat.ScanLayout | None:
        """The layout of the loop's operands; None of a `jax.shard_map`."""
        return compat.scan_in(self.maker)

    def moves_into(self, eqn: JaxprEqn, division: Any) -> bool:
        """Whether a `jax.shard_map` that reads the mask with a division can make it."""
        if not is_shard_map(self.maker) or not are_alike(eqn, self.maker):
            return False
        return self.maker.params["out_specs"][self.place] == division

    @staticmethod
    def list_of(eqn: JaxprEqn) -> dict[Var, _Masks]:
        """The masks that an equation makes; none of others than loops and `jax.shard_map`s."""
        if not _makes_masks(eqn):
            return {}
        return {v: _Masks(eqn, i, tuple(eqn.invars)) for i, v in enumerate(eqn.outvars)}


def _write_level(program: Jaxpr) -> Jaxpr:
    return _write_program(program, {})


def _write_program(program: Jaxpr, around: Mapping[Var, _Masks]) -> Jaxpr:
    """A program with masks made in their readers; the given one where no loop in it reads any.

    Args:
      program: the program.
      around: the stacks of masks among its arguments.
    """
    level, known = inline_program(program), dict(around)
    makers = map_makers(level.eqns)

    def write(eqn: JaxprEqn) -> JaxprEqn | tuple[list[JaxprEqn], list[Any]]:
        stacks = _Masks.list_of(eqn)
        known.update(stacks)
        if stacks:  # what makes masks is written where these are read
            return compat.map_programs(eqn, _write_level)
        if is_shard_map(eqn):
            return _write_map(eqn, known)
        layout = compat.scan_in(eqn)
        found = None if layout is None else _write_reader(eqn, layout, known, makers)
        return compat.map_programs(eqn, _write_level) if found is None else found

    written = write_otherwise(level, write)
    return program if written is level else drop_dead(written)


def _write_map(eqn: JaxprEqn, known: Mapping[Var, _Masks]) -> JaxprEqn:
    """A `jax.shard_map` that makes the masks which it reads of another; the given one where it reads none."""
    body, specs = eqn.params["jaxpr"], eqn.params["in_specs"]
    masks: dict[int, tuple[list[JaxprEqn], list[Any]]] = {}  # by id of the maker
    renamed: Renamed = {}
    arguments: list[tuple[Any, Any, Var]] = []  # operand, its division, argument
    for operand, spec, argument in zip(eqn.invars, specs, body.invars, strict=True):
        mask = known.get(operand) if isinstance(operand, Var) else None
        if mask is None or not mask.moves_into(eqn, spec):
            arguments.append((operand, spec, argument))
            continue
        if id(mask.maker) not in masks:
            new = [Var(v.aval) for v in mask.body.invars]
            arguments += zip(mask.operands, mask.maker.params["in_specs"], new, strict=True)
            masks[id(mask.maker)] = instantiate(mask.body, new, eqn)
        renamed[argument] = masks[id(mask.maker)][1][mask.place]
    if not renamed:
        return compat.map_programs(eqn, _write_level)
    eqns = [e.replace(invars=[resolve(renamed, v) for v in e.invars]) for e in body.eqns]
    eqns = [*(made for own, _ in masks.values() for made in own), *eqns]
    outs = [resolve(renamed, v) for v in body.outvars]
    written = _write_level(drop_dead(make_program(body, [v for _, _, v in arguments], eqns, outs)))
    return eqn.replace(
        invars=[v for v, _, _ in arguments],
        params=eqn.params | {"jaxpr": written, "in_specs": tuple(spec for _, spec, _ in arguments)},
    )


def _write_reader(
    eqn: JaxprEqn,
    layout: compat.ScanLayout,
    known: Mapping[Var, _Masks],
    makers: Mapping[Var, JaxprEqn],
) -> tuple[list[JaxprEqn], list[Any]] | None:
    """A loop that makes the masks and fills it reads, in it or in the loops inside; None of other loops.

    Args:
      eqn, layout: the loop, and the layout of its operands.
      known: the stacks of masks.
      makers: variable -> its equation on the level of the loop.
    """
    if eqn.params["jaxpr"].consts:
        return None
    body = compat.as_open(eqn.params["jaxpr"])
    pairs = list(zip(eqn.invars, body.invars, strict=True))  # operand, argument
    count = len(body.eqns)
    body = make_masks_inside(body, pairs[: layout.num_consts], makers, _FILL_NBYTES)
    has_fills = len(body.eqns) > count
    first = layout.num_consts + layout.num_carry
    consts, rows = pairs[: layout.num_consts], pairs[first:]
    masks: list[JaxprEqn] = []
    made: dict[int, list[Any]] = {}  # id of a maker -> its results
    renamed: Renamed = {}
    inside: dict[Var, _Masks] = {}
    for operand, argument in rows[:]:
        stack = known.get(operand) if isinstance(operand, Var) else None
        own = None if stack is None else stack.layout
        if stack is not None and own is not None and own.length == layout.length:
            if id(stack.maker) not in made:
                new = [Var(v.aval) for v in stack.body.invars]
                given = list(zip(stack.operands, new, strict=True))
                consts, rows = consts + given[: own.num_consts], rows + given[own.num_consts :]
                eqns, made[id(stack.maker)] = instantiate(stack.body, new, eqn)
                masks += eqns
            renamed[argument] = made[id(stack.maker)][stack.place]
    for operand, argument in pairs[: layout.num_consts]:
        if isinstance(operand, Var) and operand in known:
            new = [Var(v.aval) if isinstance(v, Var) else v for v in known[operand].operands]
            inside[argument] = dataclasses.replace(known[operand], operands=tuple(new))
            given = zip(known[operand].operands, new, strict=True)
            consts += [(v, w) for v, w in given if isinstance(w, Var)]
    if not (renamed or inside or has_fills):
        return None

    carry = [argument for _, argument in pairs[layout.num_consts : first]]
    eqns = [e.replace(invars=[resolve(renamed, v) for v in e.invars]) for e in body.eqns]
    shared: Renamed = {}
    for part in (consts, rows):  # the numbers of the iterations may be operands of several loops
        once = dict[Var, Var]()
        shared |= {w: once.setdefault(v, w) for v, w in part if isinstance(v, Var)}
    eqns = share_scalars([*masks, *eqns], shared)
    arguments = [*(w for _, w in consts), *carry, *(w for _, w in rows)]
    outs = [resolve(shared, resolve(renamed, v)) for v in body.outvars]
    body = body.replace(invars=arguments, eqns=eqns, outvars=outs)
    body = _write_program(body, inside)
    read = {v for e in body.eqns for v in variables(e)} | {v for v in body.outvars if isinstance(v, Var)}
    if not (renamed or has_fills) and not inside.keys().isdisjoint(read):  # by another equation than a loop
        return None
    consts, rows = ([pair for pair in part if pair[1] in read] for part in (consts, rows))
    body = body.replace(invars=[*(w for _, w in consts), *carry, *(w for _, w in rows)])
    operands = [v for v, _ in consts], eqn.invars[layout.num_consts : first], [v for v, _ in rows]
    run = compat.jaxpr_as_fun(ClosedJaxpr(body, ()))
    return trace_scan(run, operands, eqn, length=layout.length, unroll=layout.unroll)
