"""A small stack of layers, alone and over the devices of a mesh."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import jaxoff
from tests.golden.steps import H200

WIDTH, HIDDEN, LAYERS = 16, 32, 4
SOME = jaxoff.policy(offload=["x_in"], save=["act"])


def small_layer(w, x):
    x = jaxoff.name(x, "x_in")
    act = jaxoff.name(jnp.tanh(x @ w["up"]), "act")
    return x + jaxoff.name(act @ w["down"], "out")


def small_shapes(rows=16, layers=LAYERS, scale=1, sharding=None, of_rows=None):
    lead = () if layers is None else (layers,)
    width, hidden = WIDTH * scale, HIDDEN * scale
    make = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    w = {
        "up": make((*lead, width, hidden), sharding=sharding),
        "down": make((*lead, hidden, width), sharding=sharding),
    }
    return w, make((rows * scale, width), sharding=of_rows)


def small_loss(policy=SOME, how="scan", layer=small_layer):
    def compute(w, x):
        if how == "scan":
            return jaxoff.scan(lambda x, w: (layer(w, x), None), x, w, policy=policy)[0].sum()
        each = [jax.tree.map(lambda leaf, i=i: leaf[i], w) for i in range(LAYERS)]
        return jaxoff.layers(layer, x, each, policy=policy).sum()

    return compute


def mesh_of(devices: int, kind: AxisType = AxisType.Auto):
    return jax.make_mesh((devices,), ("data",), (kind,), devices=jax.devices()[:devices])


def abstract_mesh_of(devices: int):
    return AbstractMesh((devices,), ("data",), (AxisType.Auto,), abstract_device=H200)


def data_parallel(mesh, policy=SOME, how="scan"):
    """Gradients of each device's rows, summed over the devices, of replicated weights."""

    def local(w, x):
        return jax.tree.map(lambda g: lax.psum(g, "data"), jax.grad(small_loss(policy, how))(w, x))

    return jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)


def gathering(mesh, policy=SOME, how="scan"):
    """Gradients of a loss whose layers gather their weights, and hand their rows on to the next device."""
    ring = [(i, (i + 1) % mesh.size) for i in range(mesh.size)]

    def layer(w, x):
        w = jax.tree.map(lambda part: lax.all_gather(part, "data", axis=0, tiled=True), w)
        return small_layer(w, lax.ppermute(x, "data", ring))

    def local(w, x):
        return jax.grad(small_loss(policy, how, layer))(w, x)

    specs = P(None, "data"), P("data")
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(None, "data"), check_vma=False)
