"""Divisions over devices that JAX names differently inside of jaxoff: steps run as by `jax.jit`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoff
from jaxoff._jaxpr import shares

LAYERS, WIDTH, HEADS = 3, 24, 6
OFFLOAD = jaxoff.policy(offload=["up"])


def make_array(mesh, spec, *shape):
    return jax.device_put(jax.random.normal(jax.random.key(0), shape) / 8, NamedSharding(mesh, spec))


def assert_like_jit(step, *args):
    got, want = (jax.tree.leaves(jitted(step)(*args)) for jitted in (jaxoff.jit, jax.jit))
    for a, b in zip(got, want, strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def test_a_shard_map_over_some_axes_of_a_mesh_keeps_its_loops():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("dp", "tp"))

    def layer(x, w):
        return x + jax.nn.gelu(jaxoff.name(x @ w["up"], "up")) @ w["down"], None

    def loss(params, x):
        return jnp.mean(lax.scan(jax.checkpoint(layer, policy=OFFLOAD), x, params)[0] ** 2)

    def step(params, x):
        value, gradients = jax.value_and_grad(loss)(lax.pcast(params, "dp", to="varying"), x)
        return lax.pmean(value, "dp"), lax.pmean(gradients, "dp")

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("dp")), out_specs=(P(), P()), axis_names={"dp"})
    up = make_array(mesh, P(None, None, "tp"), LAYERS, WIDTH, 4 * WIDTH)
    down = make_array(mesh, P(None, "tp"), LAYERS, 4 * WIDTH, WIDTH)
    assert_like_jit(mapped, {"up": up, "down": down}, make_array(mesh, P("dp"), 16, WIDTH))


def test_devices_that_do_not_divide_the_heads():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("tp",))

    def layer(x, w):
        up = jaxoff.name((x @ w["up"]).reshape(*x.shape[:-1], HEADS, -1), "up")
        up = lax.with_sharding_constraint(up, NamedSharding(mesh, P(None, None, "tp", None)))
        return x + jax.nn.gelu(up).reshape(*x.shape[:-1], -1) @ w["down"], None

    def loss(params, x):
        return jnp.mean(lax.scan(jax.checkpoint(layer, policy=OFFLOAD), x, params)[0] ** 2)

    def step(params, x):
        value, gradients = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients), value

    up = make_array(mesh, P(None, "tp"), LAYERS, WIDTH, 3 * WIDTH)
    down = make_array(mesh, P(None, None, "tp"), LAYERS, 3 * WIDTH, WIDTH)
    assert_like_jit(step, {"up": up, "down": down}, make_array(mesh, P(), 4, 16, WIDTH))


def test_a_program_that_jax_cannot_divide_in_another_order_runs_as_given(monkeypatch):
    def refuse(value):
        raise ValueError(f"no sharding for a share of {value.shape}")

    monkeypatch.setattr(shares, "_find_shares", refuse)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("tp",))

    def layer(x, w):
        return x + jax.nn.gelu(jaxoff.name(x @ w["up"], "up")) @ w["down"], None

    def step(params, x):
        def loss(params):
            return jnp.mean(lax.scan(jax.checkpoint(layer, policy=OFFLOAD), x, params)[0] ** 2)

        return jax.value_and_grad(loss)(params)

    up = make_array(mesh, P(None, None, "tp"), LAYERS, WIDTH, 4 * WIDTH)
    down = make_array(mesh, P(None, "tp"), LAYERS, 4 * WIDTH, WIDTH)
    args = {"up": up, "down": down}, make_array(mesh, P(), 16, WIDTH)
    with pytest.warns(UserWarning, match="no sharding for a share") as warned:
        assert_like_jit(step, *args)
    assert "recipe 'stock'" in str(warned[0].message)
