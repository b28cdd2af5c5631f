"""Where each parameter of a divided model lives: its partition over the mesh, by name and shape.

A divided model's parameters are those of `models.LM`, but for the layers, whose leading axis is three:
virtual stages, pipe ranks, and layers of a stage. Layer `(v P + p) K + k` of the model, with P ranks and K
layers a stage, is at [v, p, k].
"""

from __future__ import annotations

import math
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from models.mesh import AXES, MeshShape

_STACKS = ("dense", "experts")
_STACK_AXES = 3


def names_of(path: tuple[Any, ...]) -> tuple[str, ...]:
    """The keys on the way to a leaf."""
    return tuple(str(getattr(key, "key", getattr(key, "name", key))) for key in path)


def spec_of(names: tuple[str, ...], shape: tuple[int, ...], mesh: MeshShape) -> P:
    """The partition of a parameter.

    Experts are divided by `expert`, layers by `pipe`; of the rest, the largest axis that `fsdp` divides.

    Args:
      names: the keys on the way to it.
      shape: of all of it.
      mesh: the mesh.
    """
    spec: list[str | None] = [None] * len(shape)
    free = list(range(len(shape)))
    if names[0] in _STACKS:
        spec[1], free = "pipe", free[_STACK_AXES:]
    if names[-1] in ("w1", "w2") and len(free) == 3:
        spec[free[0]], free = "expert", free[1:]
    fits = [axis for axis in free if shape[axis] % mesh.fsdp == 0]
    if mesh.fsdp > 1 and fits:
        spec[max(fits, key=lambda axis: shape[axis])] = "fsdp"
    return P(*spec)


def specs_of(params: Any, mesh: MeshShape) -> Any:
    """The partition of each of a model's parameters, arrays or their shapes."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x: spec_of(names_of(path), tuple(x.shape), mesh), params
    )


def shardings_of(state: Any, mesh: Mesh, shape: MeshShape) -> Any:
    """The sharding of each array of a training state: the optimizer's are divided as their parameters are.

    Args:
      state: {"params": ..., ...}; what lies elsewhere under a parameter's own keys goes with it.
      mesh: the devices.
      shape: the mesh's axes.
    """
    leaves = jax.tree.leaves_with_path(specs_of(state["params"], shape))
    known = {names_of(path): spec for path, spec in leaves}

    def of(path, leaf):
        names = names_of(path)
        ends = (names[i:] for i in range(len(names)))
        spec = next((known[end] for end in ends if end in known), P())
        return NamedSharding(mesh, spec if len(spec) == leaf.ndim else P())

    return jax.tree_util.tree_map_with_path(of, state)


def gathered(params: Any, specs: Any) -> Any:
    """Whole parameters from parts, inside `jax.shard_map`, where `fsdp` divides them.

    The gradient of that adds the devices' gradients, in the parameters' own float32, and leaves each its
    part.
    """

    def of(spec, x):
        axes = tuple(spec)
        return lax.all_gather(x, "fsdp", axis=axes.index("fsdp"), tiled=True) if "fsdp" in axes else x

    return jax.tree.map(of, specs, params)


def of_layer(specs: Any) -> Any:
    """The partitions of one layer, from those of its stack."""
    return jax.tree.map(lambda spec: P(*tuple(spec)[_STACK_AXES:]), specs)


def summed(grads: Any, specs: Any) -> Any:
    """Gradients added up over the devices that share a parameter."""
    return jax.tree.map(
        lambda spec, g: lax.psum(g, tuple(axis for axis in AXES if axis not in tuple(spec))), specs, grads
    )


def as_stages(params: dict[str, Any], pipe: int, virtual: int) -> dict[str, Any]:
    """A model's parameters, its layers divided into stages."""
    stages = pipe * virtual

    def divide(x):
        return x.reshape(virtual, pipe, x.shape[0] // stages, *x.shape[1:])

    return {key: jax.tree.map(divide, x) if key in _STACKS else x for key, x in params.items()}


def as_layers(params: dict[str, Any]) -> dict[str, Any]:
    """The same parameters, with their layers in one axis."""

    def merge(x):
        return x.reshape(math.prod(x.shape[:_STACK_AXES]), *x.shape[_STACK_AXES:])

    return {key: jax.tree.map(merge, x) if key in _STACKS else x for key, x in params.items()}
