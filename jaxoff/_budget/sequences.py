"""Layers in a row, left by a Python loop over layers in a differentiated program.

The forward pass repeats the equations of a layer, and the backward pass reads the values of the layers in
reverse order. As for loops, an equation of the backward pass that repeats a forward equation on the same
operands, under `jax.checkpoint`, stands for the forward value, and any value may be kept or recomputed.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Container, Mapping, Sequence
from typing import Any

from jaxoff._budget.inner_loops import InnerLoops
from jaxoff._budget.loop_pairs import LoopPair
from jaxoff._budget.numbering import Numbering
from jaxoff._budget.repeats import LayerRun, find_runs
from jaxoff._budget.sections import LEAST_NBYTES, cut_stretches, list_stretches
from jaxoff._budget.sequenced import Layer, LayerSequence, Section, Sequenced
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import Jaxpr, JaxprEqn, Literal, Var
from jaxoff._jaxpr.dataflow import index_makers, index_readers, mark_dependents, variables
from jaxoff._jaxpr.inline import Renamed, resolve
from jaxoff._jaxpr.scopes import is_recomputed, is_transposed

type _Place = tuple[LayerRun, int]  # a layer


def find_sequences(jaxpr: Jaxpr, loops: Sequence[LoopPair]) -> Sequenced | None:
    """The layers one after the other, and sections, in a program with its calls inlined; None without.

    Args:
      jaxpr: the program.
      loops: its pairs of loops, which are layers themselves.
    """
    eqns, outvars, names = _drop_names(jaxpr)
    if not any(map(is_pure_backward, eqns)):
        return None
    residuals = {
        pair.forward.outvars[0]: compat.nbytes_of(pair.forward.outvars[i] for i in pair.residuals)
        for pair in loops
    }
    runs, joint = _find_layers(jaxpr, eqns, names, residuals)
    sections: list[LayerRun] = []
    if stretches := list_stretches(eqns, runs):
        whole = _Joint(jaxpr, eqns, [*runs, *stretches])
        sections = cut_stretches(stretches, runs, whole.eqns, whole.list_needed())
    if sections:
        joint = _Joint(jaxpr, eqns, [*runs, *sections])
    sequences = [joint.make_sequence(run, names) for run in runs]
    sequences += [joint.make_section(section, names) for section in sections]
    outs = tuple(resolve(joint.renamed, v) for v in outvars)
    found = tuple(s for s in sequences if s)
    return Sequenced(tuple(joint.eqns), frozenset(joint.repeated), outs, found) if found else None


def _find_layers(
    jaxpr: Jaxpr, eqns: Sequence[JaxprEqn], names: Mapping[Var, str], paired: Mapping[Var, int]
) -> tuple[list[LayerRun], _Joint]:
    """The runs of layers whose values the backward pass reads in reverse order, and their joint program."""
    runs = find_runs(eqns, paired)
    while True:
        joint = _Joint(jaxpr, eqns, runs)
        good = [run for run in runs if joint.make_sequence(run, names)]
        if good == runs:
            return runs, joint
        runs = good


def _drop_names(jaxpr: Jaxpr) -> tuple[list[JaxprEqn], list[Any], dict[Var, str]]:
    """The equations without names, the results, and the names by variable."""
    renamed: Renamed = {}
    eqns, names = [], {}
    for eqn in jaxpr.eqns:
        here = eqn.replace(invars=[resolve(renamed, v) for v in eqn.invars])
        if (name := compat.name_in(eqn)) is not None:
            renamed[eqn.outvars[0]] = here.invars[0]
            names[here.invars[0]] = name
        else:
            eqns.append(here)
            if eqn.primitive.name == "reduce_precision" and here.invars[0] in names:  # pins a rounding
                names[eqn.outvars[0]] = names[here.invars[0]]
    return eqns, [resolve(renamed, v) for v in jaxpr.outvars], names


class _Joint:
    """The equations of a program with runs, in which the backward pass repeats no equation of a run.

    Attributes:
      eqns, repeated: as in `Sequenced`.
      renamed: result of an equation in `repeated` -> the value of the forward pass.
    """

    def __init__(self, jaxpr: Jaxpr, eqns: Sequence[JaxprEqn], runs: Sequence[LayerRun]):
        self.eqns = list(eqns)
        self.renamed: Renamed = {}
        self.repeated: set[int] = set()
        self._outs = {v for v in jaxpr.outvars if isinstance(v, Var)}
        self._numbering = Numbering([*jaxpr.invars, *jaxpr.constvars])
        self._only_backward: dict[_Place, list[JaxprEqn]] = {}
        self._owner: dict[Var, _Place] = {}  # value of a layer -> the layer
        self._passed_to: dict[Var, _Place | None] = {}  # value that a layer passes on -> the next layer
        self._arguments: dict[_Place, tuple[Any, ...]] = {}
        self._dependent: set[Var] = set()  # values of layers that depend on the layer's arguments
        self._loops = InnerLoops(self._numbering)
        self._index: dict[int, int] = {}  # id of an equation -> its place
        self._is_backward = [is_pure_backward(eqn) for eqn in eqns]
        for run in runs:
            if run.count > 1:
                self._find_arguments(run)
            else:
                self._find_section_arguments(run)
        layers = {i: (run, n) for run in runs for n in range(run.count) for i in run.layer(n)}
        read: set[Var] = set()
        for i, eqn in enumerate(eqns):
            here = self.eqns[i] = eqn.replace(invars=[resolve(self.renamed, v) for v in eqn.invars])
            self._index[id(here)] = i
            if i in layers:
                self._owner.update(dict.fromkeys(eqn.outvars, layers[i]))
                self._numbering.add(here)
                self._loops.add(here)
                read.update(variables(here))
            elif self._owner and self._is_backward[i]:
                self._follow(i, here, read)

    def _find_arguments(self, run: LayerRun) -> None:
        """Finds the values passed on by the layers of a run, by the reads of the layer in the middle."""
        makers = {v: (i, k) for i in range(run.start, run.end) for k, v in enumerate(self.eqns[i].outvars)}
        middle = run.layer(run.count // 2)
        # Argument -> its reader: equation in the layer, operand.
        operands: dict[Var, tuple[int, int]] = {}
        for j, i in enumerate(middle):
            for k, v in enumerate(self.eqns[i].invars):
                if isinstance(v, Var) and v in makers and makers[v][0] not in middle:
                    operands.setdefault(v, (j, k))
        for n in range(run.count):
            own = tuple(self.eqns[run.layer(n)[j]].invars[k] for j, k in operands.values())
            self._arguments[run, n] = own
            self._passed_to.update((v, (run, n)) for v in own if isinstance(v, Var) and v in makers)
            eqns = [self.eqns[i] for i in run.layer(n)]
            depends = mark_dependents(eqns, {v for v in own if isinstance(v, Var)})
            self._dependent.update(
                v for e, does in zip(eqns, depends, strict=True) if does for v in e.outvars
            )
        # The last layer makes values without readers among the layers, in the place of values passed on.
        for v in self._arguments[run, run.count - 1]:
            if isinstance(v, Var) and v in makers and makers[v][0] + run.length < run.end:
                i, k = makers[v]
                self._passed_to[self.eqns[i + run.length].outvars[k]] = None

    def _find_section_arguments(self, section: LayerRun) -> None:
        """Finds the values that a section reads of the forward pass ahead of it."""
        eqns = [self.eqns[i] for i in section.layer(0)]
        made = {v for eqn in eqns for v in eqn.outvars}
        read = dict.fromkeys(v for eqn in eqns for v in variables(eqn) if self._is_ahead(v, section.start))
        own = tuple(v for v in read if compat.nbytes_of([v]) >= LEAST_NBYTES)
        self._arguments[section, 0] = own
        self._passed_to.update(dict.fromkeys(own, (section, 0)))
        self._dependent |= made

    @functools.cached_property
    def _makers(self) -> dict[Var, int]:
        return index_makers(self.eqns)  # results stay: only operands change

    def _is_ahead(self, v: Var, start: int) -> bool:
        """Whether the forward pass makes a value ahead of an equation."""
        return (i := self._makers.get(v, start)) < start and not is_transposed(self.eqns[i])

    def list_needed(self) -> set[Var]:
        """The values that the backward pass reads, and repeats by no equation."""
        return {v for i in self._backward for v in variables(self.eqns[i])}

    @functools.cached_property
    def _backward(self) -> dict[int, None]:
        """The indices of the equations of the backward pass, without those of repeated values."""
        is_backward = enumerate(self._is_backward)
        return dict.fromkeys(i for i, does in is_backward if does and i not in self.repeated)

    @functools.cached_property
    def _readers(self) -> dict[Var, list[int]]:
        return index_readers(self.eqns)

    def _list_others(self, v: Var, own: Container[int]) -> list[int]:
        """The readers of a value that are neither among some equations nor of repeated values."""
        return [i for i in self._readers.get(v, ()) if i not in own and i not in self.repeated]

    def _is_result(self, v: Var, own: Container[int]) -> bool:
        """Whether a value is read elsewhere in the forward pass, or is a result of the program."""
        return v in self._outs or any(not self._is_backward[i] for i in self._list_others(v, own))

    def _follow(self, i: int, eqn: JaxprEqn, read: set[Var]) -> None:
        """Takes an equation of the backward pass out if it makes a value of a layer without cotangents."""
        owned = {v for v in variables(eqn) if v in self._owner}
        if not all(isinstance(v, Literal) or v in owned or v in read for v in eqn.invars):
            return
        if eqn.primitive.name == "optimization_barrier":
            v = eqn.invars[0]
            if len(eqn.invars) == 1 and isinstance(v, Var) and self._passed_to.get(v, ()) is not None:
                self.renamed[eqn.outvars[0]] = v
                self.repeated.add(i)
            return
        same = self._numbering.find(eqn, list(eqn.invars)) or self._widen(eqn)
        if same is not None and self._is_cotangent(eqn, same):
            return
        if same is not None:
            self.renamed.update(zip(eqn.outvars, same, strict=True))
            self.repeated.add(i)
            return
        if not owned and is_recomputed(eqn):
            read.update(eqn.outvars)  # of weights and constants alone
        inner = (owned & self._dependent) - self._passed_to.keys()
        owners = {self._owner[v] for v in inner}
        if len(owners) == 1:
            (owner,) = owners
            if all(v in self._arguments[owner] for v in owned & self._passed_to.keys()):
                self._owner.update(dict.fromkeys(eqn.outvars, owner))
                self._dependent.update(eqn.outvars)
                self._numbering.add(eqn)
                self._only_backward.setdefault(owner, []).append(eqn)
                self.repeated.add(i)

    def _is_cotangent(self, eqn: JaxprEqn, same: Sequence[Var]) -> bool:
        """Whether an equation without operands is the first cotangent, where a section makes its value, too.

        The loss is no part of a layer, but it may be part of a section: behind the cotangent, all of the
        backward pass would be equations of the section.
        """
        owner = self._owner.get(same[0])
        return not variables(eqn) and not is_recomputed(eqn) and owner is not None and owner[0].count == 1

    def _widen(self, eqn: JaxprEqn) -> list[Var] | None:
        """The results of the wider form of the loop repeated by an equation; None if no loop is repeated."""
        found = self._loops.find(eqn, eqn.invars)
        if found is None:
            return None
        loop, wide = found
        self.eqns[self._index[id(loop)]] = wide
        self._owner.update(dict.fromkeys(wide.outvars, self._owner[loop.outvars[0]]))
        if not self._dependent.isdisjoint(loop.outvars):
            self._dependent.update(wide.outvars)
        return list(wide.outvars)

    def make_sequence(self, run: LayerRun, names: Mapping[Var, str]) -> LayerSequence | None:
        """The layers of a run; None if the backward pass does not read their values in reverse order."""
        layers = [
            Layer(
                tuple(self.eqns[i] for i in run.layer(n)),
                self._arguments[run, n],
                tuple(self._only_backward.get((run, n), ())),
            )
            for n in range(run.count)
        ]
        first = self._find_first_reads(run, layers)
        if first is None or len({len(layer.values) for layer in layers}) > 1:
            return None
        number = run.count // 2
        layer, (start, end) = layers[number], (first[number], first[number - 1])
        rest = [self.eqns[i] for i in self._backward if start <= i < end]
        pure = (*layer.eqns, *layer.only_backward)
        made = {v for eqn in pure for v in eqn.outvars}
        passed_on = self._passed_to.keys() & {v for eqn in layer.eqns for v in eqn.outvars}
        own = set(run.layer(number))
        operands = {v for eqn in pure for v in variables(eqn)} - made - {*layer.arguments}
        mine = (made | {*layer.arguments}) - passed_on

        def is_read_later(v: Var) -> bool:
            return v in self._outs or any(i >= end for i in self._readers.get(v, ()))

        return LayerSequence(
            count=run.count,
            eqns=layer.eqns,
            results=tuple(v for eqn in layer.eqns for v in eqn.outvars if self._is_result(v, own)),
            carried=layer.arguments,
            free={v: v for v in operands},
            only_backward=layer.only_backward,
            rest=tuple(rest),
            outs=tuple(v for eqn in rest for v in eqn.outvars if is_read_later(v)),
            needed=frozenset(
                v for v in mine if not self._backward.keys().isdisjoint(self._readers.get(v, ()))
            ),
            names=names,
            has_stacks=False,
            position=run.start,
            end=first[0],
            layers=tuple(layers),
            first_reads=tuple(first),
        )

    def make_section(self, run: LayerRun, names: Mapping[Var, str]) -> Section | None:
        """A section, a run of a single layer; None if the backward pass reads none of its values."""
        arguments, only_backward = self._arguments[run, 0], tuple(self._only_backward.get((run, 0), ()))
        eqns = tuple(self.eqns[i] for i in run.layer(0))
        made = {v for eqn in (*eqns, *only_backward) for v in eqn.outvars}
        own = {v for v in (*arguments, *made) if self._passed_to.get(v, (run, 0)) == (run, 0)}
        reads = sorted({i for v in own for i in self._readers.get(v, ()) if i in self._backward})
        if not reads:
            return None
        is_own = set(run.layer(0))

        def is_read_by_loop(v: Var) -> bool:
            return any(compat.is_loop(self.eqns[i]) for i in self._list_others(v, is_own))

        forward = {v for eqn in eqns for v in eqn.outvars}
        small = {v for v in forward if compat.nbytes_of([v]) < LEAST_NBYTES}
        placed = own & {*arguments, *forward}
        fixed = small | {v for v in placed if v in self._outs or is_read_by_loop(v)}
        operands = {v for eqn in (*eqns, *only_backward) for v in variables(eqn)} - made - {*arguments}
        rest = [self.eqns[i] for i in reads]
        ends = (v for eqn in rest for v in eqn.outvars)
        return Section(
            count=1,
            eqns=eqns,
            results=tuple(v for eqn in eqns for v in eqn.outvars if self._is_result(v, is_own)),
            carried=arguments,
            free={v: v for v in operands | fixed},
            only_backward=only_backward,
            rest=tuple(rest),
            outs=tuple(v for v in ends if v in self._outs or self._list_others(v, is_own)),
            needed=frozenset(own & {v for eqn in rest for v in variables(eqn)}),
            names=names,
            has_stacks=False,
            position=run.start,
            end=reads[0],
            layers=(Layer(eqns, arguments, only_backward),),
            first_reads=(reads[0],),
            fixed=frozenset(fixed),
        )

    def _find_first_reads(self, run: LayerRun, layers: Sequence[Layer]) -> list[int] | None:
        """The index of the first equation of each layer's backward pass; None unless they descend."""
        of_layer: dict[Var, int] = {}
        for n, layer in enumerate(layers):
            own = (v for eqn in (*layer.eqns, *layer.only_backward) for v in eqn.outvars)
            own = (v for v in own if v in self._dependent and v not in self._passed_to)
            arguments = (v for v in layer.arguments if isinstance(v, Var))
            of_layer.update(dict.fromkeys((*arguments, *own), n))
        first: dict[int, int] = {}
        for i in self._backward:
            if i >= run.end:
                for v in variables(self.eqns[i]):
                    if v in of_layer:
                        first.setdefault(of_layer[v], i)
        found = [first.get(n, -1) for n in range(len(layers))]
        descend = all(a > b >= 0 for a, b in itertools.pairwise(found))
        return found if descend else None


def is_pure_backward(eqn: JaxprEqn) -> bool:
    """Whether an equation of the backward pass, without effects, may read values made again."""
    return is_transposed(eqn) and not compat.has_side_effects(eqn)
