"""Budgets for steps over several devices: divided by the compiler, and by `jax.shard_map`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoff
from bench.client_steps import PROGRAMS
from bench.clients import make_shardings
from jaxoff._budget import regions
from jaxoff._budget.costs import Costs
from jaxoff._budget.narrow import narrow_stacks
from jaxoff._budget.parts import write_in_parts, write_layers_in_parts
from jaxoff._jaxpr.compat import jaxpr_as_fun
from tests.jaxoff.budget.checkpointed import check_fit
from tests.jaxoff.budget.layered import list_joint_graphs

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


WRITINGS = {
    "narrow stacks": lambda closed: (narrow_stacks(closed), True),
    "head in parts": lambda closed: write_in_parts(closed, 3e4, devices=2),
    "layers in parts": lambda closed: write_layers_in_parts(closed, 1e4, devices=2),
}


@pytest.mark.parametrize("in_loop", [True, False])
def test_a_constraint_behind_a_product_leaves_the_time_to_keep_the_product(in_loop, mesh):
    """A product writes a buffer of its own, and its constraint is that buffer."""

    def loss(constrain, ws, x):
        def layer(x, w):
            return x + jnp.sin(constrain(jnp.tanh(x) @ w)), None

        if in_loop:
            x, _ = jax.lax.scan(layer, x, ws)
        else:
            for w in ws:
                x, _ = layer(x, w)
        return jnp.square(x).sum()

    ws = jnp.ones((2, 64, 64))
    args = ws if in_loop else list(ws), jnp.ones((64, 64))

    def list_times(constrain, name):
        fun = jax.value_and_grad(functools.partial(loss, constrain), (0, 1))
        costs = [
            Costs.of(pair, jaxoff.Device.of("h100")) for pair in list_joint_graphs(jax.make_jaxpr(fun)(*args))
        ]
        made = {v for cost in costs for v, eqn in cost.pair.makers.items() if eqn.primitive.name == name}
        return [ms for cost in costs for v, ms in cost.saving_ms.items() if v in made]

    rows = NamedSharding(mesh, P("devices"))
    constrain = functools.partial(jax.lax.with_sharding_constraint, shardings=rows)
    without = list_times(lambda x: x, "dot_general")
    assert without
    for name in ("dot_general", "sharding_constraint"):
        assert list_times(constrain, name) == without


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("writing", WRITINGS)
def test_weights_gathered_by_reshard_keep_their_shardings(writing, monkeypatch):
    """Axes are Explicit: a stack and its rows have shardings in their types, and so have parts of values."""
    monkeypatch.setattr(regions, "_PART_ROWS", 8)
    mesh = jax.make_mesh((2,), ("fsdp",), (AxisType.Explicit,), devices=jax.devices()[:2])
    keys = iter(jax.random.split(jax.random.key(0), 5))

    def draw(spec, *shape):
        return jax.device_put(jax.random.normal(next(keys), shape) / 4, NamedSharding(mesh, spec))

    def gather(w):
        return jax.sharding.reshard(w.astype(jnp.bfloat16), P(None, None))

    def layer(x, w):
        return x + jax.nn.gelu(x @ gather(w["up"])) @ gather(w["down"]), None

    def loss(params, x):
        x, _ = jax.lax.scan(jax.checkpoint(layer, prevent_cse=False), x, params["layers"])
        logits = (x @ gather(params["head"])).astype(jnp.float32)
        return jax.nn.logsumexp(logits, -1).mean()

    def step(params, x):
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params, x))

    layers = {"up": draw(P(None, "fsdp"), 3, 16, 64), "down": draw(P(None, "fsdp"), 3, 64, 16)}
    args = {"layers": layers, "head": draw(P("fsdp"), 16, 256)}, draw(P("fsdp"), 4, 64, 16)
    with jax.set_mesh(mesh):
        args = args[0], args[1].astype(jnp.bfloat16)
        closed = jax.make_jaxpr(step)(*args)
        written, found = WRITINGS[writing](closed)
        assert found
        assert str(written) != str(closed)
        got, want = (jax.jit(jaxpr_as_fun(program))(*jax.tree.leaves(args)) for program in (written, closed))
    for a, b in zip(got, want, strict=True):
        assert a.sharding == b.sharding
        np.testing.assert_allclose(a, b, rtol=2e-2, atol=2e-3)


def test_rows_that_explicit_axes_divide_are_not_done_in_parts():
    """Attention with its heads over an axis, and a budget below every program."""
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)
    width, heads, batch, length = 16, 4, 16, 64

    def put(spec, *shape):
        value = jax.random.normal(jax.random.key(0), shape) / 8
        return jax.device_put(value, NamedSharding(mesh, spec))

    def layer(x, w):
        split = P("data", None, None, "tensor", None)
        qkv = jnp.einsum("btd,dce->btce", x, w["qkv"])
        qkv = jnp.reshape(qkv, (batch, length, 3, heads, width // heads), out_sharding=split)
        q, k, v = (qkv[:, :, i] for i in range(3))
        made = jnp.einsum("bhqk,bkhe->bqhe", jax.nn.softmax(jnp.einsum("bqhe,bkhe->bhqk", q, k)), v)
        made = jnp.reshape(made, (batch, length, width), out_sharding=P("data", None, "tensor"))
        return x + jnp.einsum("bte,ed->btd", made, w["out"], out_sharding=P("data", None, None)), None

    def step(w, x):
        gradients = jax.grad(lambda w: jnp.mean(jax.lax.scan(layer, x, w)[0] ** 2))(w)
        return jax.tree.map(jnp.subtract, w, gradients)

    w = {"qkv": put(P(None, None, None, "tensor"), 3, width, 3, width)}
    w["out"] = put(P(None, "tensor"), 3, width, width)
    with jax.set_mesh(mesh), pytest.raises(jaxoff.BudgetError) as raised:
        jaxoff.jit(step, donate_argnums=0, device_bytes=50e3).lower(w, put(P("data"), batch, length, width))
    assert "fault" not in str(raised.value)
    assert raised.value.least_bytes() < 1e6


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("is_manual", [False, True])
def test_a_divided_list_fits_what_a_checkpoint_of_each_layer_takes(is_manual):
    """XLA's order takes 1.24 to 1.30 times as much where values are pinned by names; jaxoff's does not.

    The compiler divides the step, or a `jax.shard_map` around the step does.
    """
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    whole, rows = (NamedSharding(mesh, spec) for spec in (P(), P("data")))
    count, batch, tokens, width = 2, 16, 64, 128
    optimizer = optax.adamw(1e-3)

    def layer(x, w):
        x = jaxoff.name(x, "x")
        x = x + jnp.tril(w["mix"]) @ x
        mean, var = jnp.mean(x, -1, keepdims=True), jnp.var(x, -1, keepdims=True)
        h = (x - mean) * jax.lax.rsqrt(jnp.maximum(var, 0.0) + 1e-5) * w["scale"] + w["shift"]
        h = jaxoff.name(h @ w["up"] + w["bias"], "up")
        return x + jax.nn.gelu(h) @ w["down"]

    def step_of(layer):
        def loss(layers, x):
            for w in layers:
                x = layer(x, w)
            labels = jnp.arange(tokens) % width
            return optax.softmax_cross_entropy_with_integer_labels(
                x, jnp.broadcast_to(labels, x.shape[:2])
            ).mean()

        def step(state, x):
            layers, moments = state
            if is_manual:
                layers = jax.lax.pcast(layers, "data", to="varying")
                gradients = jax.lax.pmean(jax.grad(loss)(layers, x), "data")
            else:
                gradients = jax.grad(loss)(layers, jax.lax.with_sharding_constraint(x, rows))
            updates, moments = optimizer.update(gradients, moments, state[0])
            return optax.apply_updates(state[0], updates), moments

        specs = {"in_specs": (P(), P("data")), "out_specs": P()}
        return jax.shard_map(step, mesh=mesh, **specs) if is_manual else step

    shapes = {"mix": (tokens, tokens), "up": (width, 4 * width), "down": (4 * width, width)}
    shapes |= {"scale": (width,), "shift": (width,), "bias": (4 * width,)}
    layers = [{k: jnp.full(s, 0.02, device=whole) for k, s in shapes.items()} for _ in range(count)]
    state = layers, jax.device_put(optimizer.init(layers), whole)
    args = state, jax.device_put(jax.random.normal(jax.random.key(0), (batch, tokens, width)), rows)
    check_fit(lambda wrap: step_of(wrap(layer)), args, 1.03, donate_argnums=0)
