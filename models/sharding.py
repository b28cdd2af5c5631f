"""The partition of each parameter of a divided model over the mesh, by name and shape.

A divided model has the parameters of `models.LM`. In a pipeline the layers are a list of the K layers of a
stage, each with two leading axes: virtual stages V and ranks P. Layer `(v P + p) K + k` of the model is entry
k of the list at [v, p]. With separate arrays for the K layers, no layer is a slice of a larger array, which
XLA would copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from models.mesh import AXES, MeshShape

_STACKS = ("dense", "experts")
_STAGE_AXES, _STACK_AXES = 2, 1


def names_of(path: tuple[Any, ...]) -> tuple[str, ...]:
    """Lists the keys on the path to a leaf."""
    kinds = ("key", "name", "idx")
    return tuple(str(next(getattr(key, kind) for kind in kinds if hasattr(key, kind))) for key in path)


def spec_of(names: tuple[str, ...], shape: tuple[int, ...], mesh: MeshShape) -> P:
    """Chooses the partition of a parameter.

    `expert` divides experts, `pipe` divides layers, and `fsdp` divides the first remaining axis with a
    divisible size: gathering along a later axis would need transposes.

    Args:
      names: keys on the path to the parameter.
      shape: shape of the whole parameter.
      mesh: sizes of the mesh's axes.
    """
    spec: list[str | None] = [None] * len(shape)
    free = list(range(len(shape)))
    if names[0] in _STACKS and names[1].isdigit():
        spec[1], free = "pipe", free[_STAGE_AXES:]
    elif names[0] in _STACKS:
        free = free[_STACK_AXES:]
    if names[-1] in ("w1", "w2") and len(free) == 3 and mesh.expert > 1:
        spec[free[0]], free = "expert", free[1:]
    fits = [axis for axis in free if shape[axis] % mesh.fsdp == 0]
    if mesh.fsdp > 1 and fits:
        spec[fits[0]] = "fsdp"
    return P(*spec)


def specs_of(params: Any, mesh: MeshShape) -> Any:
    """Chooses the partitions of a pytree of parameters, arrays or their shapes."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x: spec_of(names_of(path), tuple(x.shape), mesh), params
    )


def shardings_of(state: Any, mesh: Mesh, shape: MeshShape) -> Any:
    """Chooses the sharding of each array of a training state; moments are divided like their parameters.

    Args:
      state: {"params": ..., ...}; an array elsewhere whose path ends in a parameter's keys has its partition.
      mesh: mesh of devices.
      shape: sizes of the mesh's axes.
    """
    leaves = jax.tree.leaves_with_path(specs_of(state["params"], shape))
    known = {names_of(path): spec for path, spec in leaves}

    def of(path, leaf):
        names = names_of(path)
        ends = (names[i:] for i in range(len(names)))
        spec = next((known[end] for end in ends if end in known), P())
        return NamedSharding(mesh, spec if len(spec) == leaf.ndim else P())

    return jax.tree_util.tree_map_with_path(of, state)


def gather(params: Any, specs: Any) -> Any:
    """Gathers the parameters divided by `fsdp`, inside `jax.shard_map`.

    The gradient adds the devices' gradients, in the parameters' float32, and leaves each device its part.
    """

    def of(spec, x):
        axes = tuple(spec)
        return lax.all_gather(x, "fsdp", axis=axes.index("fsdp"), tiled=True) if "fsdp" in axes else x

    return jax.tree.map(of, specs, params)


def specs_of_layer(specs: Any) -> Any:
    """Derives the partitions of a layer from the partitions of a stack."""
    if isinstance(specs, list):
        return jax.tree.map(lambda spec: P(*tuple(spec)[_STAGE_AXES:]), specs[0])
    return jax.tree.map(lambda spec: P(*tuple(spec)[_STACK_AXES:]), specs)


def sum_shared(grads: Any, specs: Any) -> Any:
    """Adds each gradient over the devices with copies of the parameter."""
    return jax.tree.map(
        lambda spec, g: lax.psum(g, tuple(axis for axis in AXES if axis not in tuple(spec))), specs, grads
    )


def as_stages(tree: Any, pipe: int, virtual: int) -> Any:
    """Divides the layers of a model's parameters or a training state into stages, if there are several."""
    if pipe * virtual == 1:
        return tree

    def divide(stack):
        layers = jax.tree.leaves(stack)[0].shape[0] // (pipe * virtual)
        by_stage = jax.tree.map(lambda x: x.reshape(virtual, pipe, layers, *x.shape[1:]), stack)
        return [jax.tree.map(lambda x, k=k: x[:, :, k], by_stage) for k in range(layers)]

    return _map_stacks(divide, tree)


def as_layers(tree: Any) -> Any:
    """Merges stages into a single axis of layers, as in `models.LM`."""

    def merge(stack):
        if not isinstance(stack, list):
            return stack
        return jax.tree.map(lambda *layers: _merge_axes(jnp.stack(layers, axis=_STAGE_AXES)), *stack)

    return _map_stacks(merge, tree)


def _merge_axes(x: jax.Array) -> jax.Array:
    return x.reshape(-1, *x.shape[_STAGE_AXES + 1 :])


def layer_shardings_of(shardings: Any) -> Any:
    """Derives the shardings with layers in a single axis, divided by `pipe`, from the stages' shardings."""

    def of(sharding):
        return NamedSharding(sharding.mesh, P("pipe", *tuple(sharding.spec)[_STAGE_AXES:]))

    return _map_stacks(
        lambda stack: jax.tree.map(of, stack[0]) if isinstance(stack, list) else stack, shardings
    )


def _map_stacks(function: Callable[[Any], Any], tree: Any) -> Any:
    """Applies a function to the stacks of layers anywhere in a tree."""

    def holds_stacks(node):
        return isinstance(node, dict) and not set(_STACKS).isdisjoint(node)

    def of(node):
        if not holds_stacks(node):
            return node
        return {key: function(x) if key in _STACKS else x for key, x in node.items()}

    return jax.tree.map(of, tree, is_leaf=holds_stacks)
