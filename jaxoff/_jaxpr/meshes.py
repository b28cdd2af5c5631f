"""The meshes in force where a function is traced."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax

from jaxoff._jaxpr.compat import JaxprEqn

type Meshes = tuple[jax.sharding.AbstractMesh, jax.sharding.Mesh]


def current_mesh() -> Meshes:
    """The abstract and the concrete mesh in force."""
    return jax.sharding.get_abstract_mesh(), jax.sharding.get_mesh()


@contextlib.contextmanager
def under_mesh(meshes: Meshes) -> Iterator[None]:
    """A context with the meshes of `current_mesh` in force."""
    abstract, concrete = meshes
    with contextlib.ExitStack() as stack:
        if not concrete.empty:
            stack.enter_context(jax.set_mesh(concrete))
        stack.enter_context(jax.sharding.use_abstract_mesh(abstract))
        yield


def explicit_mesh(aval: Any) -> jax.sharding.AbstractMesh | None:
    """The mesh of a type with Explicit axes, whose sharding is a part of the type; None for other types."""
    mesh = getattr(getattr(aval, "sharding", None), "mesh", None)
    return mesh if mesh is not None and jax.sharding.AxisType.Explicit in mesh.axis_types else None


def divides_axis(aval: Any, axis: int) -> bool:
    """Whether Explicit axes of a mesh divide an axis of an array, by the array's type."""
    return explicit_mesh(aval) is not None and bool(aval.sharding.spec[axis])


def constrains_axis(eqn: JaxprEqn, axis: int) -> bool:
    """Whether an equation is a sharding constraint that divides an axis of its result."""
    sharding = eqn.params.get("sharding") if eqn.primitive.name == "sharding_constraint" else None
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return False
    axes = (*sharding.spec, *[None] * (1 + axis))[axis]
    return axes is not jax.sharding.PartitionSpec.UNCONSTRAINED and bool(list_axes(axes))


def is_partial_sum(aval: Any) -> bool:
    """Whether a value, or its gradient, is still to be added up over axes of a mesh, by its type."""
    kind = getattr(aval, "mat", None)
    return bool(getattr(kind, "unreduced", ()) or getattr(kind, "reduced", ()))


def list_axes(axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The names of the mesh axes that divide an axis of an array, from the entry in a `PartitionSpec`."""
    return () if axes is None else axes if isinstance(axes, tuple) else (axes,)


def list_dividing(sharding: jax.sharding.NamedSharding) -> list[tuple[str, ...]]:
    """For each axis in the spec of a sharding, the mesh axes of several devices which divide the axis."""
    sizes = sharding.mesh.shape
    return [tuple(name for name in list_axes(axes) if sizes[name] > 1) for axes in sharding.spec]


def is_partly_manual(eqn: Any) -> bool:
    """Whether an equation is in a `jax.shard_map` over some axes of its mesh, and not over all."""
    mesh = eqn.ctx.cur_abstract_mesh
    return bool(mesh.manual_axes) and not mesh.are_all_axes_manual
