"""Loops in the layers of a loop: each value of an iteration has a placement of its own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoff
from jaxoff._budget.choose import choose_placements, saved_nbytes
from jaxoff._budget.costs import Costs
from jaxoff._budget.joint_graph import Placements, list_recomputed
from jaxoff._budget.nested import write_nested
from jaxoff._budget.placements import LayeredProgram
from jaxoff._jaxpr.merged_maps import merge_shard_maps
from tests.jaxoff.budget.checkpointed import check_fit
from tests.jaxoff.budget.test_placements import keep_all

GROUPS, LAYERS, ROWS, WIDTH, HIDDEN = 3, 4, 128, 32, 96
H200 = jaxoff.Device.of("h200")


def layer(x, w):
    h = checkpoint_name(x @ w["up"], "wave")
    return x + (jnp.sin(h) * h) @ w["down"]


def loss_of(block):
    def group(x, ws):
        x, _ = lax.scan(lambda x, w: (block(x, w), None), x, ws["inner"])
        return block(x, ws["last"]), None

    return lambda ws, x: lax.scan(group, x, ws)[0].var()


def step(ws, x, block=layer):
    grads = jax.grad(loss_of(block))(ws, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, ws, grads)


def structs(scale=1):
    def weights(*lead):
        shapes = {"up": (WIDTH * scale, HIDDEN * scale), "down": (HIDDEN * scale, WIDTH * scale)}
        return {n: jax.ShapeDtypeStruct((*lead, *s), "float32") for n, s in shapes.items()}

    ws = {"inner": weights(GROUPS, LAYERS), "last": weights(GROUPS)}
    return ws, jax.ShapeDtypeStruct((ROWS * scale, WIDTH * scale), "float32")


def arguments():
    leaves, tree = jax.tree.flatten(structs())
    keys = jax.random.split(jax.random.key(0), len(leaves))
    return tree.unflatten([jax.random.normal(key, s.shape) / 8 for key, s in zip(keys, leaves, strict=True)])


def test_a_value_of_an_inner_loop_is_kept_where_others_are_recomputed():
    """Neither are all stacks of the loop kept, nor is the loop repeated."""
    closed = jax.make_jaxpr(step)(*structs(scale=128))
    (pair,) = LayeredProgram.of(closed).list_joint_graphs()
    (inner,) = pair.nested
    costs = [Costs.of(pair, H200)]

    def choose(nbytes):
        chosen = choose_placements(costs, H200, nbytes, 0)
        assert chosen is not None
        return chosen

    (fastest,), _ = choose(np.inf)
    most = saved_nbytes(costs, [fastest])
    (placed,), added_ms = choose(0.6 * most)
    assert saved_nbytes(costs, [placed]) <= 0.6 * most
    stacks = list(inner.stacks.values())
    assert any(pair.values[i] in stacks for i in placed.saved)
    assert inner.forward not in list_recomputed(pair, placed)
    again = list_recomputed(inner.graph, Placements(placed.nested[0]))
    assert "dot_general" in {eqn.primitive.name for eqn in again}
    assert 0 < added_ms < costs[0].equation_ms[pair.pure.index(inner.forward)] * GROUPS
    # The least repeats the loop for the inputs of its iterations alone.
    (least,), _ = choose(None)
    assert inner.forward in list_recomputed(pair, least)
    assert least.nested == (tuple(range(len(inner.graph.carried))),)


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("checkpoint", [None, "layers", "groups"])
def test_budgets_of_groups_with_a_last_layer_of_their_own(checkpoint):
    ws, x = arguments()
    block = jax.checkpoint(layer, prevent_cse=False) if checkpoint == "layers" else layer
    loss = loss_of(block)
    if checkpoint == "groups":
        loss = jax.checkpoint(loss)

    def own(ws, x):
        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, jax.grad(loss)(ws, x))

    saved = jax.jit(step).lower(ws, x).compile().memory_analysis().temp_size_in_bytes
    fewest = jax.jit(lambda ws, x: step(ws, x, jax.checkpoint(layer, prevent_cse=False)))
    fewest = fewest.lower(ws, x).compile().memory_analysis().temp_size_in_bytes
    arrays = 2 * sum(a.nbytes for a in jax.tree.leaves(ws)) + x.nbytes
    want = jax.jit(own)(ws, x)
    for part in (0.2, 0.6):
        within = jaxoff.jit(own, device_bytes=arrays + fewest + part * (saved - fewest))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), within(ws, x), want)
        assert within.plan.programs  # not as it is written
        assert {v.count for v in within.plan.values} & {GROUPS * LAYERS}
        assert all(v.value != "scan" or v.placement == "save" for v in within.plan.values)


def test_the_least_is_that_of_a_checkpoint_of_each_layer():
    ws, x = arguments()
    check_fit(lambda wrap: lambda ws, x: step(ws, x, wrap(layer)), (ws, x), 1.03)


def test_names_in_an_inner_loop_are_found():
    ws, x = structs(scale=128)
    plan = jaxoff.plan(step, ws, x, device_bytes=1e12, compiled=False, device="h200")
    assert sum(v.count for v in plan.values if v.value == "wave") == GROUPS * (LAYERS + 1)


def test_a_carry_that_inner_loops_pass_through():
    """JAX takes the operand for such a result of a loop: two values of a layer are one in what is written."""

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def block(carry, w):
        x, shift = carry
        return (layer(x, w), shift), None

    def group(carry, ws):
        for _ in range(2):
            carry, _ = lax.scan(block, carry, ws["inner"])
        return carry, None

    def loss(ws, x):
        return sum(jnp.sum(a * a) for a in lax.scan(group, (x, jnp.zeros(())), ws)[0])

    closed = jax.make_jaxpr(jax.grad(loss))(*arguments())
    (pair,) = LayeredProgram.of(closed).list_joint_graphs()
    written, placed = write_nested(pair, keep_all(pair))
    kept = placed.list_kept(written)
    assert len(kept) == len(set(kept)) < len(keep_all(pair).saved)


def test_layers_of_a_pipeline_stage():
    """The stage runs its layers at each tick; the gradient is taken outside of the ticks."""
    mesh = jax.make_mesh((2,), ("stage",), (AxisType.Auto,), devices=jax.devices()[:2])
    ws = jax.tree.map(lambda a: a[:2], arguments()[0]["inner"])
    parts = jax.random.normal(jax.random.key(1), (4, ROWS, WIDTH))

    def run(ws, parts):
        ws = jax.tree.map(lambda a: a[0], ws)
        stage = lax.axis_index("stage")

        def tick(x, i):
            x = jnp.where(stage == 0, parts[jnp.minimum(i, 3)], x)
            x, _ = lax.scan(lambda x, w: (layer(x, w), None), x, ws)
            return lax.ppermute(x, "stage", [(0, 1), (1, 0)]), x

        start = lax.pcast(jnp.zeros_like(parts[0]), "stage", to="varying")
        _, outs = lax.scan(tick, start, jnp.arange(5))
        return lax.psum(jnp.where(stage == 1, outs[1:].var(), 0.0), "stage")

    def step(ws, parts):
        loss = jax.shard_map(run, mesh=mesh, in_specs=(P("stage"), P()), out_specs=P())
        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, jax.grad(loss)(ws, parts))

    (pair,) = LayeredProgram.of(merge_shard_maps(jax.make_jaxpr(step)(ws, parts))).list_joint_graphs()
    assert len(pair.nested) == 1
    with jax.set_mesh(mesh):
        places = NamedSharding(mesh, P("stage")), NamedSharding(mesh, P())
        ws, parts = jax.device_put((ws, parts), places)
        plain = jax.jit(step).lower(ws, parts).compile().memory_analysis()
        limit = plain.argument_size_in_bytes + plain.output_size_in_bytes + 0.7 * plain.temp_size_in_bytes
        within = jaxoff.jit(step, device_bytes=limit)
        got, want = within(ws, parts), jax.jit(step)(ws, parts)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)
    assert within.plan.programs
    assert {v.count for v in within.plan.values if v.placement == "save"} & {5 * LAYERS}


def test_a_recurrence_in_chunks_takes_no_more_than_with_a_checkpoint_of_each_chunk():
    """The body of the loop over chunks is a loop over steps: together they could be one loop."""
    layers, steps, batch, width = 2, 64, 16, 32

    def make_step(wrap):
        def cell(state, z):
            state = state + jnp.tanh(z @ jnp.eye(width) + state)
            return state, state * jax.nn.sigmoid(z)

        chunk = wrap(lambda state, zs: lax.scan(cell, state, zs))

        @wrap
        def layer(x, w):
            chunks = (x @ w).reshape(steps // 8, 8, batch, width)
            return x + lax.scan(chunk, jnp.zeros_like(x[0]), chunks)[1].reshape(x.shape)

        def loss(ws, x):
            return jnp.mean(lax.scan(lambda x, w: (layer(x, w), None), x, ws)[0] ** 2)

        return jax.value_and_grad(loss)

    keys = jax.random.split(jax.random.key(0))
    ws = jax.random.normal(keys[0], (layers, width, width)) / width
    check_fit(make_step, (ws, jax.random.normal(keys[1], (steps, batch, width))), 1.02)
