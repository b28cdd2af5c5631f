"""The user's function under the trace of a call."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import Tracer

from jaxoff._jaxpr import compat, meshes
from jaxoff._jaxpr.statics import drop_statics
from jaxoff._report.finding import Finding
from jaxoff._schedule.call import Place
from jaxoff._schedule.prepare import prepare
from jaxoff._schedule.requests import Watch


@dataclasses.dataclass(frozen=True)
class TracedArguments:
    """The arguments of a function that `jax.jit` traces.

    Attributes:
      args, kwargs: the arguments.
      leaves: their leaves: tracers, and static values.
      tree: their tree.
      positions: the indices of the tracers among the leaves.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: Sequence[Any]
    tree: Any
    positions: tuple[int, ...]

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> TracedArguments:
        """The arguments of a call."""
        leaves, tree = jax.tree.flatten((args, kwargs))
        positions = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tracer))
        return TracedArguments(args, kwargs, leaves, tree, positions)

    @property
    def signature(self) -> tuple[Any, ...]:
        """The tree, and by position the types of the tracers, as if on the device.

        A mesh of Auto axes is left out: the type of an array made in a `jax.shard_map` has its mesh, also on
        a single device, and JAX traces a step again for the state that the step returned.
        """
        return self.tree, self.positions, tuple(_describe_type(jax.typeof(v)) for v in self.tracers)

    @property
    def tracers(self) -> list[Any]:
        """The tracers among the leaves."""
        return [self.leaves[i] for i in self.positions]

    def trace(
        self, fun: Callable[..., Any], place: Place
    ) -> tuple[compat.ClosedJaxpr, Any, tuple[Finding, ...]]:
        """Traces a function for these arguments.

        Returns:
          Its program, structs of its results, and findings of its requests.
        """
        watch = Watch()

        @functools.wraps(fun, updated=())  # so that JAX's errors name the function and its arguments
        def of_tracers(*args, **kwargs):
            filled = list(self.leaves)  # static arguments stay as they are
            for i, value in zip(self.positions, jax.tree.leaves((args, kwargs)), strict=True):
                filled[i] = value
            positional, named = jax.tree.unflatten(self.tree, filled)
            return watch.call(fun, positional, named)

        with watch:
            shown, shown_named = drop_statics(self.args, self.kwargs)
            closed, shapes = jax.make_jaxpr(of_tracers, return_shape=True)(*shown, **shown_named)
        closed, findings = prepare(closed, watch, place)
        return closed, shapes, findings


def _describe_type(aval: Any) -> tuple[Any, ...]:
    dtype, weak_type = (getattr(aval, name, None) for name in ("dtype", "weak_type"))
    division = None if meshes.explicit_mesh(aval) is None else aval.sharding
    return type(aval), compat.shape_of(aval), dtype, weak_type, division
