"""A Hopper GPU that need not be there: what is traced on it uses the kernels."""

import collections
import contextlib
from collections.abc import Iterator

import jax
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="cuda")


def lower(function, *arguments):
    """Lowers for the GPU: layouts, tiles and shared memory are checked."""
    with on_h200():
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))


@contextlib.contextmanager
def on_h200() -> Iterator[None]:
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=H200)):
        yield


def launches(function, *arguments) -> dict[str, int]:
    """Counts the kernels of a function's program by name, on an H200."""
    with on_h200():
        return dict(_launches(jax.make_jaxpr(function)(*arguments).jaxpr))


def _launches(jaxpr) -> collections.Counter[str]:
    found = collections.Counter()
    for eqn in jaxpr.eqns:
        name = str(eqn.params.get("name", ""))
        if name.startswith("grouped_mlp_"):
            found[name.removeprefix("grouped_mlp_")] += 1
            continue
        for value in jax.tree.leaves(tuple(eqn.params.values()), is_leaf=lambda v: hasattr(v, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                found += _launches(inner)
    return found
