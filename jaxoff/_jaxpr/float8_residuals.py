"""Residuals of a differentiated program in float8: rounded where they are made, restored where they are read.

A residual is a value that the backward passes of `jax.checkpoint`s read: as an operand, or row by row from a
stack that a loop makes. The forward pass goes on with the exact value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jaxoff._jaxpr.dataflow import drop_dead, index_readers, map_makers, variables
from jaxoff._jaxpr.float8 import (
    DTYPE,
    block_of,
    can_compress,
    chooses,
    compress,
    compressed_nbytes,
    restore,
)
from jaxoff._jaxpr.inline import Renamed, inline_program, resolve, trace_call, trace_scan
from jaxoff._jaxpr.tag import Tag

type _Pair = tuple[Var, Var]  # numbers and scales
type OnRounding = Callable[[str, jax.Array, jax.Array], None]


@dataclasses.dataclass(frozen=True)
class Stored:
    """A named residual in float8.

    Attributes:
      label: its name.
      nbytes: its bytes in float8, of all iterations of the loops around.
    """

    label: str
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Narrowed:
    """A program with residuals in float8.

    Attributes:
      closed: the program.
      stored: these residuals.
      exact: name of a residual that stays exact -> the equation of a backward pass that chooses by it again.
    """

    closed: ClosedJaxpr
    stored: tuple[Stored, ...]
    exact: Mapping[str, JaxprEqn]


def store_in_float8(
    closed: ClosedJaxpr, chooses: Callable[[str], bool], on_rounding: OnRounding | None = None
) -> Narrowed:
    """Stores named residuals in float8, on the device and in host memory.

    Residuals stay as they are where another equation than a backward pass reads them from host memory or from
    a stack, and where their last axis has no whole blocks. They stay as well where a backward pass computes a
    choice from them again, such as the experts of a token: the choice by a rounded value may be another.

    Args:
      closed: a differentiated program.
      chooses: whether the residuals with a name are stored in float8.
      on_rounding: called at each run of a rounding, with the name and the sums of squares of the error and of
        the value.

    Returns:
      A program with the same arguments and results, and the residuals in float8.
    """
    writer = _Writer(chooses, on_rounding)
    jaxpr = writer.write_level(closed.jaxpr, count=1)
    program = closed if jaxpr is closed.jaxpr else closed.replace(jaxpr=jaxpr)
    return Narrowed(program, tuple(writer.stored), writer.exact)


class _Writer:
    def __init__(self, chooses: Callable[[str], bool], on_rounding: OnRounding | None):
        self.stored: list[Stored] = []
        self.exact: dict[str, JaxprEqn] = {}
        self._chooses, self._on_rounding = chooses, on_rounding
        self._bodies: dict[int, Jaxpr] = {}  # by id of a program, which `_held` keeps
        self._held: list[Jaxpr] = []

    def write_level(self, program: Jaxpr, count: int) -> Jaxpr:
        """A program with the residuals among its own values, and in its loops, in float8."""
        level = self._inline(program)
        if chosen := self._find_residuals(level):
            return self._write(level, {}, chosen, (), count, in_backward=False)
        written = compat.replace_equations(level, (self._write_inner(eqn, count) for eqn in level.eqns))
        return program if written is level else written

    def _write_inner(self, eqn: JaxprEqn, count: int) -> JaxprEqn:
        layout = compat.scan_in(eqn)
        runs = count * (layout.length if layout else 1)
        return compat.map_programs(eqn, lambda inner: self.write_level(inner, runs))

    def _inline(self, program: Jaxpr) -> Jaxpr:
        """A program without calls; the same object each time."""
        if id(program) not in self._bodies:
            self._held.append(program)
            self._bodies[id(program)] = inline_program(program, checkpoints=False)
        return self._bodies[id(program)]

    def _body(self, loop: JaxprEqn) -> Jaxpr | None:
        """The body of a scan without constants."""
        if compat.scan_in(loop) is None or loop.params["jaxpr"].consts:
            return None
        return self._inline(loop.params["jaxpr"].jaxpr)

    def _read_backward(self, eqn: JaxprEqn) -> Jaxpr | None:
        """The program of the backward pass of a `jax.checkpoint`; None for another equation."""
        is_known = compat.is_backward(eqn) and "jaxpr" in eqn.params
        return self._inline(eqn.params["jaxpr"]) if is_known else None

    def _find_label(self, v: Any, makers: Mapping[Var, JaxprEqn]) -> str | None:
        """The name of a value to store in float8, or of the rows of a stack; None for other values."""
        eqn = makers.get(v) if isinstance(v, Var) else None
        if eqn is None:
            return None
        text = compat.name_in(eqn)
        if text is not None:
            label = Tag.of(text).label
            return label if label and self._chooses(label) and can_compress(v.aval) else None
        if eqn.primitive.name == "reduce_precision" or compat.transfer_in(eqn) == "D2H":
            return self._find_label(eqn.invars[0], makers)
        body, layout = self._body(eqn), compat.scan_in(eqn)
        if body is None or layout is None or (i := eqn.outvars.index(v)) < layout.num_carry:
            return None
        return self._find_label(body.outvars[i], map_makers(body.eqns))

    def _find_residuals(self, level: Jaxpr) -> dict[Var, str]:
        """Values of a program to store in float8, with their names."""
        makers, readers, found = map_makers(level.eqns), index_readers(level.eqns), {}
        for v, eqn in makers.items():
            if (label := self._find_label(v, makers)) is None:
                continue
            reading = [level.eqns[i] for i in set(readers.get(v, ()))]
            taking = [reader for reader in reading if self._takes(reader, v, in_backward=False)]
            has_all = len(taking) == len(reading) and v not in level.outvars
            is_needed = compat.is_host(v.aval) or compat.scan_in(eqn) is not None
            if not taking or (is_needed and not has_all):
                continue
            if choice := self._find_choice(taking, {v})[0]:
                self.exact[label] = choice
            else:
                found[v] = label
        return found

    def _find_choice(
        self, eqns: Iterable[JaxprEqn], rounded: Collection[Any]
    ) -> tuple[JaxprEqn | None, set[Any]]:
        """The first equation with a choice by rounded values, if any, and all values that depend on these."""
        found = set(rounded)
        for eqn in eqns:
            read = [i for i, v in enumerate(eqn.invars) if isinstance(v, Var) and v in found]
            if not read:
                continue
            found.update(eqn.outvars)
            inner, layout = self._read_backward(eqn) or self._body(eqn), compat.scan_in(eqn)
            if inner is None:
                if chooses(eqn):
                    return eqn, found
                continue
            arguments = {inner.invars[i] for i in read}
            choice, reached = self._find_choice(inner.eqns, arguments)
            if layout is not None and choice is None:  # what an iteration hands on to the next
                carry = slice(layout.num_consts, layout.num_consts + layout.num_carry)
                pairs = zip(inner.invars[carry], inner.outvars[: layout.num_carry], strict=True)
                arguments |= {v for v, out in pairs if isinstance(out, Var) and out in reached}
                choice, _ = self._find_choice(inner.eqns, arguments)
            if choice is not None:
                return choice, found
        return None, found

    def _takes(self, eqn: JaxprEqn, v: Var, *, in_backward: bool) -> bool:
        """Whether an equation can read a value, or its rows, in float8."""
        if in_backward and (not compat.is_host(v.aval) or compat.transfer_in(eqn) == "H2D"):
            return True
        return self._takes_inside(eqn, v, in_backward=in_backward)

    def _takes_inside(self, eqn: JaxprEqn, v: Var, *, in_backward: bool) -> bool:
        """Whether a loop or a backward pass can take a value, or its rows, in float8 as an argument."""
        backward = self._read_backward(eqn)
        inner, in_backward = backward or self._body(eqn), in_backward or backward is not None
        if inner is None:
            return False
        layout, readers = compat.scan_in(eqn), index_readers(inner.eqns)
        for place, operand in enumerate(eqn.invars):
            if operand is not v:
                continue
            own = inner.invars[place]
            is_carried = layout and layout.num_consts <= place < layout.num_consts + layout.num_carry
            takes = [self._takes(inner.eqns[i], own, in_backward=in_backward) for i in readers.get(own, ())]
            if is_carried or own in inner.outvars or not all(takes):
                return False
        return True

    def _write(
        self,
        level: Jaxpr,
        given: Mapping[Var, _Pair],
        chosen: Mapping[Var, str],
        made: Collection[int],
        count: int,
        *,
        in_backward: bool,
    ) -> Jaxpr:
        """A program that reads some arguments in float8, and stores values in float8.

        Args:
          level: the program, its calls inlined.
          given: argument to read in float8 -> the arguments in its place.
          chosen: value to store in float8 -> its name.
          made: positions of results to store in float8, each replaced by two results.
          count: how often the program runs.
          in_backward: whether the program belongs to a backward pass.
        """
        pairs, renamed = dict(given), {}
        eqns: list[JaxprEqn] = []
        readers = index_readers(level.eqns)

        def passes_on(v: Var) -> bool:
            """Whether all readers take a value in float8 as an argument."""
            read = (level.eqns[i] for i in readers.get(v, ()))
            return all(self._takes_inside(eqn, v, in_backward=in_backward) for eqn in read)

        for eqn in level.eqns:
            narrow = [
                v
                for v in dict.fromkeys(variables(eqn))
                if v in pairs and v not in renamed and self._takes(eqn, v, in_backward=in_backward)
            ]
            if narrow and in_backward and compat.transfer_in(eqn) == "H2D":
                new, (renamed[eqn.outvars[0]],) = _restore(pairs[narrow[0]], eqn.outvars[0].aval, eqn)
                eqns += new
                continue
            if in_backward:
                for v in [v for v in narrow if not compat.is_host(v.aval) and not passes_on(v)]:
                    narrow.remove(v)
                    new, (renamed[v],) = _restore(pairs[v], v.aval, eqn)
                    eqns += new
            results = [v for v in eqn.outvars if v in chosen]
            here = eqn.replace(invars=[v if v in narrow else resolve(renamed, v) for v in eqn.invars])
            if compat.scan_in(eqn) is not None and (narrow or results):
                eqns += self._write_loop(here, narrow, chosen, pairs, renamed, count, in_backward=in_backward)
            elif narrow:
                eqns.append(self._write_backward(here, narrow, pairs, count))
            else:
                eqns.append(self._write_inner(here, count))
                leaving = {level.outvars[i] for i in made}
                for v in results:
                    eqns += self._round(v, chosen[v], pairs, here, count, leaves=v in leaving)
        invars = [w for v in level.invars for w in given.get(v, (v,))]
        outs: list[Any] = level.outvars
        outvars = [w for i, v in enumerate(outs) for w in (pairs[v] if i in made else (resolve(renamed, v),))]
        return drop_dead(level.replace(invars=invars, eqns=eqns, outvars=outvars))

    def _round(
        self, v: Var, label: str, pairs: dict[Var, _Pair], maker: JaxprEqn, count: int, *, leaves: bool
    ) -> list[JaxprEqn]:
        """The equations that round a value, which leaves the program or is read in it; adds to `pairs`."""
        is_host = compat.is_host(v.aval)
        source = maker.invars[0] if is_host else v

        def run(x):
            numbers, scales = compress(x)
            if not leaves and not is_host:  # XLA drops a rounding with the restoring in reach
                numbers = jax.lax.optimization_barrier(numbers)
            if self._on_rounding is not None:
                tell, exact = self._on_rounding, x.astype("float32")
                error = exact - restore(jax.lax.optimization_barrier(numbers), scales, "float32")
                jax.debug.callback(lambda *sums: tell(label, *sums), (error**2).sum(), (exact**2).sum())
            if not is_host:
                return numbers, scales
            # An equation for each copy, as orders of copies need it.
            return [jax.device_put(array, jax.memory.Space.Host) for array in (numbers, scales)]

        eqns, (numbers, scales) = trace_call(run, [source], like=maker)
        pairs[v] = numbers, scales
        self.stored.append(Stored(label, count * compressed_nbytes(v.aval)))
        return eqns

    def _write_backward(
        self, eqn: JaxprEqn, narrow: Sequence[Var], pairs: Mapping[Var, _Pair], count: int
    ) -> JaxprEqn:
        """A backward pass that reads values in float8."""
        inner, checkpoint = self._read_backward(eqn), compat.checkpoint_in(eqn)
        assert inner is not None
        assert checkpoint is not None
        given = _pair_arguments(inner, eqn.invars, narrow)
        body = self._write(inner, given, self._find_residuals(inner), (), count, in_backward=True)
        operands: list[Any] = eqn.invars
        groups, flags = [pairs[v] if v in narrow else (v,) for v in operands], checkpoint.prevent_cse
        if isinstance(flags, tuple):
            flags = tuple(flag for flag, group in zip(flags, groups, strict=True) for _ in group)
        params = eqn.params | {"jaxpr": body, "prevent_cse": flags}
        return eqn.replace(invars=[v for group in groups for v in group], params=params)

    def _write_loop(
        self,
        eqn: JaxprEqn,
        narrow: Sequence[Var],
        chosen: Mapping[Var, str],
        pairs: dict[Var, _Pair],
        renamed: Renamed,
        count: int,
        *,
        in_backward: bool,
    ) -> list[JaxprEqn]:
        """The equations of a loop with rows and stacks in float8; adds to `pairs` and to `renamed`."""
        body, layout = self._body(eqn), compat.scan_in(eqn)
        assert body is not None
        assert layout is not None
        runs = count * layout.length
        given = _pair_arguments(body, eqn.invars, narrow)
        labels = {i: chosen[v] for i, v in enumerate(eqn.outvars) if v in chosen}
        inside: dict[Any, str] = self._find_residuals(body) | {
            body.outvars[i]: label for i, label in labels.items()
        }
        written = self._write(body, given, inside, labels, runs, in_backward=in_backward)

        operands: list[Any] = eqn.invars
        groups = [pairs[v] if v in narrow else (v,) for v in operands]
        first, row = layout.num_consts, layout.num_consts + layout.num_carry
        consts, carry, rows = (
            [w for group in part for w in group] for part in (groups[:first], groups[first:row], groups[row:])
        )
        run = compat.jaxpr_as_fun(ClosedJaxpr(written, ()))
        eqns, results = trace_scan(
            run, (consts, carry, rows), like=eqn, length=layout.length, unroll=layout.unroll
        )
        left = iter(results)
        for i, v in enumerate(eqn.outvars):
            if i in labels:
                pairs[v] = next(left), next(left)
            else:
                renamed[v] = next(left)
        return eqns


def _pair_arguments(inner: Jaxpr, operands: Sequence[Any], narrow: Collection[Var]) -> dict[Var, _Pair]:
    """Arguments of a program whose operands are in float8, each with two in its place."""

    def pair(v: Var) -> _Pair:
        shape = compat.shape_of(v.aval)
        scales = v.aval.update(
            shape=(*shape[:-1], shape[-1] // block_of(shape)), dtype="float32", weak_type=False
        )
        return Var(v.aval.update(dtype=DTYPE, weak_type=False)), Var(scales)

    return {own: pair(own) for own, v in zip(inner.invars, operands, strict=True) if v in narrow}


def _restore(pair: _Pair, aval: Any, like: JaxprEqn) -> tuple[list[JaxprEqn], list[Any]]:
    """The equations behind a value in float8, and the value on the device."""

    def run(numbers, scales):
        if compat.is_host(pair[0].aval):
            numbers, scales = (jax.device_put(x, jax.memory.Space.Device) for x in (numbers, scales))
        return restore(numbers, scales, aval.dtype)

    return trace_call(run, list(pair), like)
