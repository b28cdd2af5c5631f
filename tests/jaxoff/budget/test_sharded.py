"""Budgets for steps over several devices: divided by the compiler, and by `jax.shard_map`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxoff
from bench.client_steps import PROGRAMS
from bench.clients import make_shardings

DEVICES = 8


@pytest.fixture
def mesh():
    if jax.device_count() < DEVICES:
        pytest.skip(f"needs {DEVICES} devices, jax has {jax.device_count()}")
    return jax.make_mesh((DEVICES,), ("devices",), axis_types=(AxisType.Auto,))


def test_a_loop_that_is_differentiated_in_a_shard_map(mesh):
    def layer(x, w):
        return jnp.tanh(x @ w), None

    def loss(ws, x):
        return jax.lax.scan(jax.checkpoint(layer, prevent_cse=False), x, ws)[0].sum()

    def local(ws, x):
        ws = jax.lax.pcast(ws, "devices", to="varying")
        return jax.lax.pmean(jax.value_and_grad(loss)(ws, x), "devices")

    fun = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("devices")), out_specs=P())
    ws, x = 0.1 * jax.random.normal(jax.random.key(0), (4, 64, 64)), jnp.ones((64, 64))
    expected = jax.jit(fun)(ws, x)
    step = jaxoff.jit(fun, device_bytes="1GB")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), step(ws, x), expected)
    assert step.plan.values
    assert all(row.shape == "float32[8, 64]" for row in step.plan.values)  # of one device


@pytest.mark.long  # compiles for eight devices
def test_a_step_that_the_compiler_divides(mesh):
    program = PROGRAMS["decoder-scan"].shrink()
    sizes = dataclasses.replace(program.sizes, layers=2, batch=DEVICES, vocabulary=512, width=512, hidden=512)
    step = dataclasses.replace(program, offloads=None).build(sizes, attention="xla")
    shardings, of_batch = make_shardings(step, mesh, "rows")
    batch = jax.device_put(step.make_batch(jax.random.key(1)), of_batch)
    state = jax.jit(step.initialize, out_shardings=shardings)(jax.random.key(0))
    _, expected = jax.jit(step.fun, out_shardings=(shardings, None))(state, batch)

    everything = jaxoff.jit(step.fun, out_shardings=(shardings, None), device_bytes="1GB")
    _, loss = everything(state, batch)
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    peak = everything.plan.peak_bytes
    less = jaxoff.jit(step.fun, out_shardings=(shardings, None), device_bytes=0.95 * peak)
    _, loss = less(state, batch)
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    assert less.plan.peak_bytes <= 0.95 * peak
