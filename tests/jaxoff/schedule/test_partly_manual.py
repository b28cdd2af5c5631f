"""A `jax.shard_map` over some axes of a mesh: its loops stay as they are, and steps run as by `jax.jit`."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoff

WIDTH = 24


def layer(x, w):
    return x + jax.nn.gelu(jaxoff.name(x @ w["up"], "up")) @ w["down"], None


def loss(params, x):
    out, _ = lax.scan(jax.checkpoint(layer, policy=jaxoff.policy(offload=["up"])), x, params)
    return jnp.mean(out**2)


def make_arguments(mesh, spec, *rows):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"up": (3, WIDTH, 4 * WIDTH), "down": (3, 4 * WIDTH, WIDTH)}
    specs = {"up": P(None, None, "tp"), "down": P(None, "tp")}
    params = {
        name: jax.device_put(jax.random.normal(key, shape) / 8, NamedSharding(mesh, specs[name]))
        for key, (name, shape) in zip(keys, shapes.items(), strict=False)
    }
    return params, jax.device_put(jax.random.normal(keys[2], (*rows, WIDTH)), NamedSharding(mesh, spec))


def assert_like_jit(step, *args):
    for got, want in zip(
        jax.tree.leaves(jaxoff.jit(step)(*args)), jax.tree.leaves(jax.jit(step)(*args)), strict=True
    ):
        assert got.sharding.is_equivalent_to(want.sharding, got.ndim)
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)


def test_a_shard_map_over_some_axes_of_a_mesh():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("dp", "tp"))

    def local(params, x):
        value, gradients = jax.value_and_grad(loss)(lax.pcast(params, "dp", to="varying"), x)
        return lax.pmean(value, "dp"), lax.pmean(gradients, "dp")

    specs = (P(), P("dp")), (P(), P())
    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs[0], out_specs=specs[1], axis_names={"dp"})
    assert_like_jit(mapped, *make_arguments(mesh, P("dp"), 16))
