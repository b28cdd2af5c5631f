"""What runs within a budget: the placements found, or the step as its user wrote it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoff
from jaxoff._budget.joint_graph import Placements
from jaxoff._budget.placements import LayeredProgram
from jaxoff._budget.tried import Tried
from jaxoff._jaxpr.primitives import holds_copies
from jaxoff._runtime.program_memory import program_nbytes
from jaxoff._schedule import within_budget


@pytest.mark.parametrize(("plan_ms", "is_written"), [(1e6, True), (0.0, False)])
def test_the_step_as_written_runs_where_it_fits_and_is_faster_than_placements_with_copies(
    monkeypatch, plan_ms, is_written
):
    def find_with_copies(closed, device, budget, donated, compile_program, **options):
        layered = LayeredProgram(closed)
        (pair,) = layered.list_joint_graphs()
        placed = Placements((), tuple(range(len(pair.carried))))
        nbytes, program = compile_program(layered.write(lambda _: placed))
        times = {"added_ms": plan_ms, "is_fastest": False, "base_ms": 0.0}
        return Tried((pair,), (placed,), (), nbytes=nbytes, programs=1, program=program, **times)

    monkeypatch.setattr(within_budget, "find_fitting", find_with_copies)
    layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None), policy=jax.checkpoint_policies.dots_saveable)

    def loss(w, x):
        return lax.scan(layer, x, w)[0].sum()

    w, x = jnp.full((3, 8, 8), 0.1), jnp.ones((4, 8))
    step = jaxoff.jit(jax.grad(loss), device_bytes="1GB")
    np.testing.assert_allclose(step(w, x), jax.jit(jax.grad(loss))(w, x), rtol=1e-6)
    assert (step.plan.host_bytes == 0) == is_written
    assert holds_copies(step.trace(w, x).jaxpr.jaxpr) != is_written


def test_short_loops_are_written_without_their_unrolling_where_nothing_fits():
    def layer(x, w):
        return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None

    def step(w, x):
        gradients = jax.grad(lambda w: jnp.mean(lax.scan(layer, x, w, unroll=2)[0] ** 2))(w)
        return jax.tree.map(jnp.subtract, w, gradients)

    w = {"up": jnp.full((8, 16, 32), 0.1), "down": jnp.full((8, 32, 16), 0.1)}
    x = jax.random.normal(jax.random.key(0), (512, 16))
    as_written = program_nbytes(jax.jit(step).lower(w, x).compile())
    fitted = jaxoff.jit(step, device_bytes=0.6 * as_written)
    assert program_nbytes(fitted.lower(w, x).compile()) <= 0.6 * as_written
    got, wanted = fitted(w, x), jax.jit(step)(w, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, wanted)


def test_a_step_with_arguments_of_host_memory_runs_as_written_if_it_fits():
    mesh = jax.make_mesh((2,), ("d",), devices=jax.devices()[:2])
    rows = NamedSharding(mesh, P("d"))
    host = NamedSharding(mesh, P(), memory_kind="pinned_host")

    def layer(x, w):
        return jnp.tanh(x @ jax.device_put(w, jax.memory.Space.Device)), None

    def step(w, x):
        gradient = jax.grad(lambda w: jnp.mean(lax.scan(layer, x, w)[0] ** 2))(w)
        return jax.device_put(gradient, jax.memory.Space.Host)

    args = jax.device_put(jnp.full((3, 16, 16), 0.1), host), jax.device_put(jnp.ones((64, 16)), rows)
    keywords = {"in_shardings": (host, rows), "out_shardings": host}
    with pytest.warns(UserWarning, match="arguments or results in host memory. The step fits"):
        got = jaxoff.jit(step, device_bytes="1GB", **keywords)(*args)
    assert got.sharding == host
    np.testing.assert_allclose(got, jax.jit(step, **keywords)(*args), rtol=1e-6)
    with pytest.raises(jaxoff.BudgetError, match="As it is written, the step takes"):
        jaxoff.jit(step, device_bytes="1kB", **keywords)(*args)


def test_an_error_says_what_is_counted_whole():
    mesh = jax.make_mesh((2,), ("d",), devices=jax.devices()[:2])

    def local(w, x):
        loss = jnp.mean(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0] ** 2)
        return lax.pmean(loss, "d")

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("d")), out_specs=P())
    w, x = jnp.ones((6, 16, 16)), jax.device_put(jnp.ones((512, 16)), NamedSharding(mesh, P("d")))
    with pytest.raises(jaxoff.BudgetError) as raised:
        jaxoff.jit(jax.grad(mapped), device_bytes="10kB")(w, x)
    assert "values outside of jax.shard_map are counted whole; 2 devices divide them" in str(raised.value)


def test_a_state_whose_type_names_a_mesh_is_within_the_budget_too():
    """JAX traces a step again for the state that it returned: with the mesh of a map in its type."""
    mesh = jax.make_mesh((1,), ("data",), (AxisType.Auto,), devices=jax.devices()[:1])

    def mlp(x, up, down):
        return jnp.tanh(jnp.sin(x @ up)) @ down

    inner = jax.shard_map(mlp, mesh=mesh, in_specs=(P("data"), P(), P()), out_specs=P("data"))

    def layer(x, w):
        return x + inner(x, w["up"], w["down"]), None

    def step(w, x):
        gradients = jax.grad(lambda w: jnp.mean(lax.scan(layer, x, w)[0] ** 2))(w)
        return jax.tree.map(lambda w, g: w - 0.1 * g, w, gradients)

    w = {"up": jnp.full((8, 16, 32), 0.1, "float32"), "down": jnp.full((8, 32, 16), 0.1, "float32")}
    x = jax.random.normal(jax.random.key(0), (512, 16))
    limit = 0.6 * program_nbytes(jax.jit(step).lower(w, x).compile())
    fitted = jaxoff.jit(step, device_bytes=limit)
    assert program_nbytes(fitted.lower(w, x).compile()) <= limit
    want = jax.jit(step)(jax.jit(step)(w, x), x)
    for _ in range(2):
        w = fitted(jax.device_put(w, jax.devices()[0]), x)
        assert program_nbytes(fitted.lower(w, x).compile()) <= limit
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), w, want)
