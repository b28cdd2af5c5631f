"""Layers in a row and sections of the forward pass, as `find_sequences` finds them in a program."""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar

from jaxoff._budget.joint_graph import JointGraph
from jaxoff._budget.segments import find_cuts
from jaxoff._jaxpr.compat import JaxprEqn, Var


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer of a sequence.

    Attributes:
      eqns: the equations of the forward pass.
      arguments: the operands made by other layers, or by the equations ahead of the first layer.
      only_backward: as in `JointGraph`.
    """

    eqns: tuple[JaxprEqn, ...]
    arguments: tuple[Any, ...]
    only_backward: tuple[JaxprEqn, ...]

    @functools.cached_property
    def values(self) -> tuple[Any, ...]:
        """The arguments and the values of the forward pass, as in `JointGraph.values`."""
        return (*self.arguments, *(v for eqn in self.eqns for v in eqn.outvars))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerSequence(JointGraph):
    """Layers in a row; the layer in the middle stands for all in `eqns` and the like.

    Attributes:
      layers: the layers, or a group of the layers, in the order of the forward pass.
      first_reads: index of the first equation of the backward pass, for each layer of the whole sequence;
        descending.
    """

    layers: tuple[Layer, ...]
    first_reads: tuple[int, ...]

    @functools.cached_property
    def cuts(self) -> Sequence[int]:
        """The cuts of a layer; a section has none."""
        return () if self.is_section else find_cuts(self)

    def list_passed(self) -> list[Any]:
        """The values that stay on the device as they are not the layers' to place.

        Values passed on by the last layer have readers right behind, and are a single layer's.
        """
        before, last = self.layers[-2:]
        return [last.values[before.values.index(v)] for v in last.arguments if v in before.values]

    def split(self) -> list[LayerSequence]:
        """The sequence in groups of layers, each with placements of its own.

        Of three groups in the ratio 1 : 2 : 4, a value can be kept in any number of sevenths of the layers.
        """
        first, second = round(self.count / 7), round(3 * self.count / 7)
        groups = self.layers[:first], self.layers[first:second], self.layers[second:]
        return [dataclasses.replace(self, count=len(group), layers=group) for group in groups if group]

    def find_layer(self, i: int) -> int | None:
        """The number of the layer to whose backward pass equation `i` belongs; None ahead of all layers."""
        behind = bisect.bisect_right(self.first_reads[::-1], i)
        return None if behind == 0 else len(self.first_reads) - behind


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section(LayerSequence):
    """A section of the forward pass, as a sequence of one layer.

    Attributes:
      fixed: the values that stay on the device: small ones, results of the program, and values read by loops.
    """

    is_section: ClassVar[bool] = True
    fixed: frozenset[Any]

    def list_passed(self) -> list[Any]:
        """The fixed values."""
        return list(self.fixed)

    def split(self) -> list[LayerSequence]:
        """The section alone."""
        return [self]


@dataclasses.dataclass(frozen=True)
class Sequenced:
    """A program and its layers in a row.

    Attributes:
      eqns: the equations. Those of the backward pass have values of the forward pass as operands where they
        had the same value computed again.
      repeated: indices of the equations that repeat, or belong to, values of layers without their cotangents:
        the backward pass makes them where they are read.
      outvars: the results.
      sequences: the layers, then the sections.
    """

    eqns: tuple[JaxprEqn, ...]
    repeated: frozenset[int]
    outvars: tuple[Any, ...]
    sequences: tuple[LayerSequence, ...]

    @functools.cached_property
    def values(self) -> frozenset[Var]:
        """The values of the layers without cotangents among their ancestors, repeated ones included."""
        sequences = (sequence for sequence in self.sequences if not sequence.is_section)
        layers = (layer for sequence in sequences for layer in sequence.layers)
        eqns = [eqn for layer in layers for eqn in (*layer.eqns, *layer.only_backward)]
        eqns += [self.eqns[i] for i in self.repeated]
        return frozenset(v for eqn in eqns for v in eqn.outvars)

    @functools.cached_property
    def values_ahead_of_head(self) -> frozenset[Var]:
        """The values of the layers and sections, forward and backward, repeated ones included.

        A section behind all layers and sections is left out: the head may be a part of the section.
        """
        indices = set(self.repeated)
        last = min(self.sequences, key=lambda sequence: min(sequence.first_reads))
        in_sections: list[JaxprEqn] = []
        for sequence in self.sequences:
            if sequence.is_section:
                in_sections += () if sequence is last else (*sequence.eqns, *sequence.rest)
                continue
            first, second, *_ = sequence.first_reads
            # The backward pass of the first layer takes as many equations as the second layer's.
            end = min(2 * first - second, len(self.eqns))
            indices.update(range(sequence.first_reads[-1], end))
        eqns = (*in_sections, *(self.eqns[i] for i in indices))
        return self.values.union(v for eqn in eqns for v in eqn.outvars)
