"""The equations of a layer and of its backward pass, as one graph.

It is the joint graph on which the partitioners of other frameworks work: with it, any value of the layer may
be kept for the backward pass or recomputed there.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import JaxprEqn, Var
from jaxoff._jaxpr.dataflow import map_makers, variables


@dataclasses.dataclass(frozen=True)
class Nested:
    """A loop in a layer and the loop of its backward pass, in the layer's.

    Attributes:
      graph: their iterations.
      forward: the loop, an equation of the layer.
      residuals: its results that its backward loop alone reads.
      stacks: value of `graph` -> its stack of all iterations. Stacks of kept values replace the residuals.
    """

    graph: JointGraph
    forward: JaxprEqn
    residuals: frozenset[Var]
    stacks: Mapping[Var, Var]


@dataclasses.dataclass(frozen=True, kw_only=True)
class JointGraph:
    """A repeated layer and its backward pass, over common variables.

    Attributes:
      count: the number of layers.
      runs: how often the layers run in a step: the iterations of the loops around, such as over microbatches.
      eqns: the equations of the forward pass.
      results: the results of the forward pass.
      carried: the arguments from the layer before.
      free: arguments within reach of the backward pass: argument -> the operand outside of the layers.
      only_backward: equations of the backward pass without cotangents among their ancestors, none of which
        repeats an equation of the forward pass.
      rest: the equations of the backward pass with cotangents among their ancestors.
      outs: the results of the backward pass.
      needed: the values of the layer, and carried arguments, that the backward pass reads in `rest` or has as
        results.
      names: forward variable -> its name from `checkpoint_name`.
      has_stacks: whether a kept value is a row of a stack, as in a loop, and not an array of its own.
      position: index of the first equation of the forward pass among the equations around the layers.
      end: index of the equation with which the backward pass of the first layer begins; infinite where other
        layers are at other levels of the program.
      is_manual: whether the layers are in a `jax.shard_map`, where values are those of one device.
      nested: the loops in the layer whose values have placements of their own.
      is_section: whether this is a section of the forward pass without repeats, and no layer.
    """

    count: int
    eqns: tuple[JaxprEqn, ...]
    results: tuple[Any, ...]
    carried: tuple[Var, ...]
    free: Mapping[Var, Any]
    only_backward: tuple[JaxprEqn, ...]
    rest: tuple[JaxprEqn, ...]
    outs: tuple[Any, ...]
    needed: frozenset[Var]
    names: Mapping[Var, str]
    has_stacks: bool
    position: int
    end: float
    runs: int = 1
    is_manual: bool = False
    nested: tuple[Nested, ...] = ()
    is_section: ClassVar[bool] = False

    @functools.cached_property
    def cuts(self) -> Sequence[int]:
        """The indices of the equations with which segments begin (`segments.py`), but for the first."""
        return ()

    @functools.cached_property
    def values(self) -> tuple[Var, ...]:
        """The carried arguments and the values of the forward pass, in program order; stacks of `nested`."""
        made = (v for eqn in self.eqns for v in eqn.outvars)
        return (*self.carried, *made, *(v for inner in self.nested for v in inner.stacks.values()))

    @functools.cached_property
    def makers(self) -> Mapping[Var, JaxprEqn]:
        """Value of the layer -> its equation in `pure`."""
        stacks = {v: inner.forward for inner in self.nested for v in inner.stacks.values()}
        return map_makers(self.pure) | stacks

    @property
    def holds_loops(self) -> bool:
        """Whether the forward pass of the layer has loops."""
        return any(compat.scan_in(eqn) is not None for eqn in self.eqns)

    @functools.cached_property
    def pure(self) -> tuple[JaxprEqn, ...]:
        """The equations of the layer without cotangents among their ancestors."""
        return (*self.eqns, *self.only_backward)


@dataclasses.dataclass(frozen=True)
class Placements:
    """The kept values of a layer, by their positions in `JointGraph.values`.

    The backward pass recomputes all other values.

    Attributes:
      saved: on the device.
      offloaded: in pinned host memory.
      compressed: the positions of values in float8, among both.
      nested: for each loop of `JointGraph.nested`, the positions of the values of an iteration which its
        backward pass reads. Their stacks are kept as above, or the loop is repeated.
    """

    saved: tuple[int, ...] = ()
    offloaded: tuple[int, ...] = ()
    compressed: frozenset[int] = frozenset()
    nested: tuple[tuple[int, ...], ...] = ()

    def list_kept(self, graph: JointGraph) -> list[Var]:
        """The kept values of a layer, in the order of the placements."""
        return [graph.values[i] for i in self.saved + self.offloaded]

    def list_compressed(self) -> list[bool]:
        """Whether each kept value is compressed, in the order of the placements."""
        return [i in self.compressed for i in self.saved + self.offloaded]


def find_needed(
    pure: Iterable[JaxprEqn], carried: Iterable[Var], rest: Iterable[JaxprEqn], outs: Iterable[Any]
) -> frozenset[Var]:
    """The values of a layer that its backward pass needs; arguments and result as in `JointGraph`."""
    made = {v for eqn in pure for v in eqn.outvars}.union(carried)
    read = {v for eqn in rest for v in variables(eqn)}.union(v for v in outs if isinstance(v, Var))
    return frozenset(made & read)


def list_recomputed(graph: JointGraph, placements: Placements) -> list[JaxprEqn]:
    """The equations repeated in the backward pass, in program order.

    Raises:
      ValueError: if a carried value of the layer is needed and not kept.
    """
    makers = graph.makers
    have = {*placements.list_kept(graph), *graph.free}
    todo, found = [v for v in graph.needed if v not in have], set()
    for inner, places in zip(graph.nested, placements.nested, strict=True):
        todo += [inner.stacks[inner.graph.values[i]] for i in places]
    while todo:
        v = todo.pop()
        if v in have:
            continue
        have.add(v)
        if v not in makers:
            raise ValueError(f"the backward pass needs {v.aval}, an input of the layer, which is not kept.")
        found.add(id(makers[v]))
        todo += variables(makers[v])
    return [eqn for eqn in graph.pure if id(eqn) in found]
