"""Loops inside of checkpointed layers: their results and residuals are values that may be kept."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoff
from jaxoff._budget.joint_graph import Placements, list_recomputed
from jaxoff._jaxpr import compat
from tests.jaxoff.budget.checkpointed import check_fit
from tests.jaxoff.budget.layered import list_joint_graphs, write_placed
from tests.jaxoff.budget.test_placements import keep_all, keep_some, list_stacked, offload_inputs

LAYERS, STEPS, WIDTH = 4, 3, 8


def layer(x, w):
    def add_up(state, row):
        state = jnp.tanh(state @ w + row)
        return state, state * row

    _, y = lax.scan(add_up, jnp.zeros(WIDTH), x @ w)
    return x + jnp.sin(y @ w)


def loss(ws, x, *, loop):
    block = jax.checkpoint(layer, prevent_cse=loop == "python")
    if loop == "scan":
        return lax.scan(lambda x, w: (block(x, w), None), x, ws)[0].sum()
    for w in ws:
        x = block(x, w)
    return x.sum()


@pytest.mark.parametrize("loop", ["scan", "python"])
def test_a_loop_in_a_layer_runs_once_if_its_residuals_are_kept(loop):
    ws = 0.3 * jax.random.normal(jax.random.key(0), (LAYERS, WIDTH, WIDTH))
    x = jax.random.normal(jax.random.key(1), (STEPS, WIDTH))
    step = jax.grad(lambda ws, x: loss(ws, x, loop=loop))
    closed = jax.make_jaxpr(step)(ws, x)
    pairs = list_joint_graphs(closed)
    assert sum(pair.count for pair in pairs) == LAYERS
    for pair in pairs:
        assert not {"scan", "dot_general"} & {eqn.primitive.name for eqn in pair.only_backward}
        assert "scan" not in {eqn.primitive.name for eqn in list_recomputed(pair, keep_all(pair))}
        inputs = Placements(tuple(range(len(pair.carried))), nested=list_stacked(pair))
        assert "scan" in {eqn.primitive.name for eqn in list_recomputed(pair, inputs)}
    expected = step(ws, x)
    for decide in (keep_all, offload_inputs, keep_some):
        (got,) = jax.jit(compat.jaxpr_as_fun(write_placed(closed, decide)))(ws, x)
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_layers_with_most_of_their_compute_in_a_loop_without_residuals_are_found():
    """The loop has a gradient of its own, which goes back by another loop: no pair of loops is a layer."""

    @jax.custom_vjp
    def solve(y, w):
        return lax.scan(lambda y, _: (y + jnp.tanh(y @ w) / 8, None), y, None, length=8)[0]

    def go_back(kept, dy):
        y, w = kept

        def back(carry, _):
            y, dy, dw = carry
            y = y - jnp.tanh(y @ w) / 8
            more, dw_more = jax.vjp(lambda y, w: jnp.tanh(y @ w) / 8, y, w)[1](dy)
            return (y, dy + more, dw + dw_more), None

        (_, dy, dw), _ = lax.scan(back, (y, dy, jnp.zeros_like(w)), None, length=8)
        return dy, dw

    solve.defvjp(lambda y, w: ((y := solve(y, w)), (y, w)), go_back)

    def loss(ws, x):
        for w in ws:
            x = solve(x, w)
            x = x + jnp.sin(x @ w) @ w
        return x.sum()

    ws, x = jnp.full((LAYERS, WIDTH, WIDTH), 0.1), jnp.ones((STEPS, WIDTH))
    graphs = list_joint_graphs(jax.make_jaxpr(jax.grad(loss))(ws, x))
    assert sum(graph.count for graph in graphs if not graph.is_section) == LAYERS
    assert all("scan" in {eqn.primitive.name for eqn in graph.eqns} for graph in graphs)


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("devices", [1, 2])
def test_layers_in_a_loop_over_parts_of_a_batch_are_placed_where_memory_is_short(devices):
    """The backward pass of the loop over parts makes the layers of a part again one by one."""
    layers, rows, width = 4, 64 * devices, 32

    def layer(x, w):
        return x + jnp.sin(x @ w["up"]) @ w["down"], None

    def step(weights, parts):
        def loss(weights):
            def add(total, part):
                return total + lax.scan(layer, part, weights)[0].var(), None

            total = lax.scan(add, parts[0, 0, 0] * 0, parts)[0]
            return lax.pmean(total, "devices") if devices > 1 else total

        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))

    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"up": (layers, width, 4 * width), "down": (layers, 4 * width, width)}
    weights = {n: jax.random.normal(k, s) / 8 for (n, s), k in zip(shapes.items(), keys[:2], strict=True)}
    parts = jax.random.normal(keys[2], (3, rows, width))
    if devices > 1:
        mesh = jax.make_mesh((devices,), ("devices",), (AxisType.Auto,), devices=jax.devices()[:devices])
        specs = P(), P(None, "devices")
        step = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P())
        places = (NamedSharding(mesh, spec) for spec in specs)
        weights, parts = map(jax.device_put, (weights, parts), places)
    with pytest.raises(jaxoff.BudgetError) as raised:
        jaxoff.jit(step, device_bytes=1)(weights, parts)
    least = raised.value.smallest_bytes
    within = jaxoff.jit(step, device_bytes=least)
    got, want = within(weights, parts), jax.jit(step)(weights, parts)
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    outer = jaxoff.jit(step, device_bytes=10**9)
    outer(weights, parts)
    assert within.plan is not None and outer.plan is not None
    assert {value.count for value in outer.plan.values} == {len(parts), layers * len(parts)}
    assert {value.count for value in within.plan.values if value.placement == "save"} <= {layers, len(parts)}
    assert within.plan.peak_bytes < 0.9 * outer.plan.peak_bytes


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("checkpoints", [True, False])
def test_layers_of_attention_in_parts_of_the_queries(checkpoints):
    """Layers in a list whose time is mostly that of a loop over blocks of queries.

    Where each block is under `jax.checkpoint`, the loop keeps nothing, and the layers are placed. Else the
    iterations of the loops are, whose attention weights are the largest values.
    """
    width, tokens, count = 64, 256, 3

    def attend(q, k, v):
        def attend_from(q):
            return jax.nn.softmax(jnp.einsum("btd,bsd->bts", q, k)) @ v

        blocks = q.reshape(2, 4, tokens // 4, width).swapaxes(0, 1)
        out = jax.lax.map(jax.checkpoint(attend_from) if checkpoints else attend_from, blocks)
        return out.swapaxes(0, 1).reshape(q.shape)

    def layer(x, w):
        x = x + attend(x @ w["q"], x @ w["k"], jnp.tanh(x @ w["v"]))
        return x + (jax.nn.silu(x @ w["gate"]) * (x @ w["up"])) @ w["down"]

    def make_step(layer):
        def loss(layers, x):
            for w in layers:
                x = layer(x, w)
            return jnp.mean(x**2)

        def step(layers, x):
            return jax.tree.map(lambda w, g: w - 0.1 * g, layers, jax.grad(loss)(layers, x))

        return step

    shapes = dict.fromkeys("qkv", (width, width)) | dict.fromkeys(("gate", "up"), (width, 3 * width))
    shapes |= {"down": (3 * width, width)}
    layers = [
        {name: jnp.sin(jnp.arange(a * b)).reshape(a, b) / 8 for name, (a, b) in shapes.items()}
        for _ in range(count)
    ]
    args = layers, jnp.cos(jnp.arange(2 * tokens * width)).reshape(2, tokens, width)
    check_fit(lambda wrap: make_step(wrap(layer)), args, 1.03, donate_argnums=0)


def test_more_memory_is_no_slower_where_layers_in_a_list_hold_loops():
    """The loops in the backward passes of recomputed layers have placements of their own."""
    count, batch, tokens, width, keys, block = 3, 4, 2048, 512, 1024, 256

    def layer(x, w):
        q, k, v = jnp.split(x @ w["qkv"], 3, -1)

        def attend(total, rows):
            scores = jnp.einsum("bqd,bkd->bqk", rows, k[:, :keys]).astype(jnp.float32)
            scores = scores[:, None] * jnp.arange(1.0, 9.0)[:, None, None]
            return total + 1, jnp.einsum("bhqk,bkd->bqd", jax.nn.softmax(scores).astype(x.dtype), v[:, :keys])

        parts = q.reshape(batch, tokens // block, block, width).swapaxes(0, 1)
        out = lax.scan(attend, 0, parts)[1].swapaxes(0, 1).reshape(x.shape)
        x = x + out @ w["o"]
        return x + jax.nn.gelu(x @ w["up"]) @ w["up"].T

    def step(ws, x):
        def loss(ws):
            y = x
            for w in ws:
                y = layer(y, w)
            return jnp.mean(y.astype(jnp.float32) ** 2)

        return jax.tree.map(lambda w, g: w - 1e-3 * g, ws, jax.grad(loss)(ws))

    shapes = {"qkv": (width, 3 * width), "o": (width, width), "up": (width, 4 * width)}
    ws = [{n: jax.ShapeDtypeStruct(s, jnp.bfloat16) for n, s in shapes.items()} for _ in range(count)]
    args = ws, jax.ShapeDtypeStruct((batch, tokens, width), jnp.bfloat16)
    times = [
        jaxoff.plan(step, *args, device_bytes=b, host_bytes=1, device="h200", compiled=False).step_ms
        for b in (0.4e9, 0.6e9, 1.2e9)
    ]
    assert all(more <= 1.02 * less for less, more in itertools.pairwise(times))
