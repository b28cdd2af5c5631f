"""Layers one after the other: found by their equations, and placed without a change to the step's results."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxoff
from jaxoff._budget.choose import choose_placements
from jaxoff._budget.costs import Costs
from jaxoff._budget.forms import Form
from jaxoff._budget.joint_graph import Placements, list_recomputed
from jaxoff._budget.limits import Budget
from jaxoff._budget.loop_pairs import find_loop_pairs
from jaxoff._budget.placements import LayeredProgram
from jaxoff._budget.sequenced import LayerSequence
from jaxoff._budget.sequences import find_sequences
from jaxoff._device.profile import H200
from jaxoff._jaxpr import compat, remat3
from jaxoff._jaxpr.inline import inline_program
from tests.clients.test_clients import ROUNDED
from tests.jaxoff.budget.layered import list_joint_graphs, write_placed

LAYERS, ROWS, WIDTH = 3, 16, 8
CHECKPOINTS = {
    "none": None,
    "recompute": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
}


def normalize(x):
    return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6)


def attend(x, w):
    h = normalize(x).astype("bfloat16")
    q, k, v = (h @ w[n].astype("bfloat16") for n in "qkv")
    mask = jnp.tril(jnp.ones((len(x), len(x)), bool))
    scores = jnp.where(mask, (q @ k.T).astype("float32"), -1e9)
    return x + (jax.nn.softmax(scores).astype("bfloat16") @ v).astype("float32")


def feed(x, w):
    h = normalize(x) @ w["up"]
    return x + (jax.nn.silu(h) * jnp.sin(h)) @ w["down"]


def block(x, w):
    return feed(attend(x, w), w)


def make_weights(key, layers=LAYERS, width=WIDTH):
    shapes = dict.fromkeys("qkv", (width, width)) | {"up": (width, 2 * width), "down": (2 * width, width)}
    keys = iter(jax.random.split(key, layers * len(shapes)))
    return [{n: jax.random.normal(next(keys), s) * 0.3 for n, s in shapes.items()} for _ in range(layers)]


def make_step(layer, checkpoint="none", layers=LAYERS):
    """A step of gradient descent through an embedding and layers in a Python loop."""
    if CHECKPOINTS[checkpoint] is not None:
        layer = jax.checkpoint(layer, policy=CHECKPOINTS[checkpoint])

    def loss(params, tokens):
        x = params["embed"][tokens]
        for w in params["layers"]:
            x = layer(x, w)
        return (normalize(x) @ params["head"]).astype("float32").var()

    def step(params, tokens):
        value, grads = jax.value_and_grad(loss)(params, tokens)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    keys = jax.random.split(jax.random.key(0), 3)
    embed, head = (jax.random.normal(k, (WIDTH * 4, WIDTH)) for k in keys[:2])
    params = {"embed": embed, "head": head.T, "layers": make_weights(keys[2], layers)}
    return step, (params, jnp.arange(ROWS))


def sequences_of(fun, *args):
    program = inline_program(jax.make_jaxpr(fun)(*args).jaxpr)
    found = find_sequences(program, find_loop_pairs(program))
    return list(found.sequences) if found else []


def assert_placed_alike(step, args, decide, rtol=0.0):
    """The placed program has the results of the step, by default to the bit; returns the program."""
    closed = jax.make_jaxpr(step)(*args)
    placed = write_placed(closed, decide)
    leaves = jax.tree.leaves(args)
    expected, got = (
        jax.jit(compat.jaxpr_as_fun(program), compiler_options=ROUNDED)(*leaves)
        for program in (closed, placed)
    )
    for ours, theirs in zip(got, expected, strict=True):
        ours, theirs = np.asarray(ours), np.asarray(theirs)
        np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=rtol * np.abs(theirs).max())
    return placed


def count(program, primitive):
    return sum(eqn.primitive.name == primitive for eqn in program.jaxpr.eqns)


def keep_inputs(graph):
    return Placements(tuple(range(len(graph.carried))))


def keep_all(graph):
    return Placements(tuple(range(len(graph.values))))


def offload_inputs(graph):
    return Placements((), tuple(range(len(graph.carried))))


def make_drawing(seed):
    """A function that draws the placements of each graph."""
    draw = random.Random(seed)

    def decide(graph):
        inputs = range(len(graph.carried))
        drawn = [i for i in range(len(inputs), len(graph.values)) if draw.random() < 0.3]
        return Placements((*(inputs if draw.random() < 0.5 else ()), *drawn[::2]), tuple(drawn[1::2]))

    return decide


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_the_layers_are_found_whatever_was_kept(checkpoint):
    step, args = make_step(block, checkpoint)
    (sequence,) = sequences_of(step, *args)
    assert sequence.count == LAYERS
    assert [v.aval.shape for v in sequence.carried] == [(ROWS, WIDTH)]
    assert sum(eqn.primitive.name == "dot_general" for eqn in sequence.eqns) == 7
    # No product of the forward pass is left in the backward pass: two for each of the layer's.
    assert sum(eqn.primitive.name == "dot_general" for eqn in sequence.rest) == 14


@pytest.mark.parametrize(
    "checkpoint",
    [pytest.param(name, marks=[pytest.mark.long] * (name != "recompute")) for name in CHECKPOINTS],
)
def test_products_are_recomputed_or_kept_and_copied_as_asked(checkpoint):
    step, args = make_step(block, checkpoint)
    everything = assert_placed_alike(step, args, keep_all)
    inputs = assert_placed_alike(step, args, keep_inputs)
    offloaded = write_placed(jax.make_jaxpr(step)(*args), offload_inputs)
    least = count(everything, "dot_general")
    assert least == 3 * (7 * LAYERS + 1)
    # The layer's last product has no reader in the backward pass, nor has the last of attention.
    assert count(inputs, "dot_general") == count(offloaded, "dot_general") == least + 6 * LAYERS
    assert count(everything, "device_put") == 0
    # Each layer's input there and back; the last layer's result stays.
    assert count(offloaded, "device_put") == 2 * LAYERS


STAGES = (
    attend,
    feed,
    lambda x, w: x + jnp.tanh(x) @ w["q"],
    lambda x, w: jnp.where(x > 0, x, 0.1 * x) * jnp.cumsum(w["k"], 0)[0],
    lambda x, w: normalize(x) + jax.nn.one_hot(jnp.argmax(x, -1), WIDTH) @ w["v"],
    jax.jit(lambda x, w: x * jax.nn.sigmoid(x @ w["v"])),
)


@pytest.mark.long  # test_sections.py draws nets whose layers are placed by the same code
@settings(max_examples=3, deadline=None)
@given(
    stages=st.lists(st.sampled_from(STAGES), min_size=1, max_size=3),
    checkpoint=st.sampled_from(sorted(CHECKPOINTS)),
    layers=st.integers(2, 5),
    seed=st.integers(0, 1 << 16),
)
def test_random_layers_have_the_same_results_under_random_placements(stages, checkpoint, layers, seed):
    def layer(x, w):
        for stage in stages:
            x = stage(x, w)
        return x

    step, args = make_step(layer, checkpoint, layers)
    assert_placed_alike(step, args, make_drawing(seed), rtol=1e-3)  # XLA fuses, and so rounds, elsewhere


def test_layers_of_two_kinds_in_turn_are_one_layer_of_both():
    def loss(ws, x):
        for i, w in enumerate(ws):
            x = (attend if i % 2 else feed)(x, w)
        return x.var()

    step = jax.grad(loss, argnums=(0, 1))
    args = make_weights(jax.random.key(1), 6), jnp.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH)
    (sequence,) = sequences_of(step, *args)
    assert sequence.count == 3
    assert_placed_alike(step, args, keep_inputs)


@pytest.mark.long
def test_two_stacks_of_layers_and_two_microbatches_are_sequences_of_their_own():
    def loss(params, x):
        for w in params["first"]:
            x = attend(x, w)
        x = jnp.concatenate([x, x], axis=1)
        for w in params["second"]:
            x = feed(x, w)
        return x.var()

    def step(params, x):
        grads = [jax.grad(loss)(params, x + i) for i in range(2)]
        return jax.tree.map(jnp.add, *grads)

    keys = jax.random.split(jax.random.key(2))
    params = {"first": make_weights(keys[0], 4), "second": make_weights(keys[1], 3, 2 * WIDTH)}
    args = params, jnp.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH)
    # The first layer of all is another one: nothing is differentiated with respect to its input.
    assert [s.count for s in sequences_of(step, *args)] == [3, 3, 3, 3]
    assert_placed_alike(step, args, keep_inputs)
    assert_placed_alike(step, args, offload_inputs)


def test_parts_of_a_batch_in_one_loss_are_no_layers():
    """Two parts repeat each other, but pass nothing on."""

    def loss(ws, x):
        total = 0.0
        for part in jnp.split(x, 2):
            for w in ws:
                part = feed(part, w)
            total = total + part.var()
        return total

    args = make_weights(jax.random.key(4), 5), jnp.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH)
    step = jax.value_and_grad(loss, argnums=(0, 1))
    assert [s.count for s in sequences_of(step, *args)] == [5, 5]
    assert_placed_alike(step, args, keep_inputs)


def test_what_a_layer_hands_to_the_loss_is_not_made_again():
    def loss(params, tokens):
        x, total = params["embed"][tokens], 0.0
        for w in params["layers"]:
            x = block(x, w)
            total = total + jax.nn.logsumexp(x @ w["q"])
        return x.var() + total

    step, (_, (params, tokens)) = jax.value_and_grad(loss), make_step(block)
    args = {k: params[k] for k in ("embed", "layers")}, tokens
    (sequence,) = sequences_of(step, *args)
    assert sequence.count == LAYERS
    placed = assert_placed_alike(step, args, keep_inputs)
    first = next(
        i for i, eqn in enumerate(placed.jaxpr.eqns) if "transpose(" in str(eqn.source_info.name_stack)
    )
    forward = placed.jaxpr.eqns[:first]
    assert sum(eqn.primitive.name == "dot_general" for eqn in forward) == 8 * LAYERS


def test_a_value_that_all_layers_read_is_an_operand_and_no_argument():
    def loss(params, tokens):
        first = x = params["embed"][tokens]
        for w in params["layers"]:
            x = block(x, w) + jnp.sin(first) * w["q"].mean()
        return x.var()

    _, (params, tokens) = make_step(block)
    args = {k: params[k] for k in ("embed", "layers")}, tokens
    (sequence,) = sequences_of(jax.grad(loss), *args)
    assert sequence.count == LAYERS
    assert len(sequence.carried) == 1
    assert_placed_alike(jax.grad(loss), args, keep_inputs)


def attend_in_blocks(x, w):
    """Attention with a running maximum over blocks of keys, as a loop within the layer."""

    def add_block(carry, keys):
        top, total, weighted = carry
        scores = x @ w["q"] @ keys.T
        new = jnp.maximum(top, scores.max(-1))
        parts = jnp.exp(scores - new[:, None])
        shrunk = jnp.exp(top - new)
        return (new, total * shrunk + parts.sum(-1), weighted * shrunk[:, None] + parts @ keys), None

    blocks = (x @ w["k"]).reshape(4, -1, WIDTH)
    initial = jnp.full(len(x), -1e9), jnp.zeros(len(x)), jnp.zeros_like(x)
    (_, total, weighted), _ = jax.lax.scan(add_block, initial, blocks)
    return feed(x + (weighted / total[:, None]) @ w["v"], w)


@pytest.mark.parametrize("checkpoint", [pytest.param("none", marks=pytest.mark.long), "recompute"])
def test_a_loop_within_a_layer_is_an_equation_of_the_layer(checkpoint):
    step, args = make_step(attend_in_blocks, checkpoint)
    (sequence,) = sequences_of(step, *args)
    assert sequence.count == LAYERS
    assert sum(eqn.primitive.name == "scan" for eqn in sequence.eqns) == 1
    kept = (2 if checkpoint == "none" else 3) * LAYERS  # under a checkpoint it makes no residuals
    rtol = 1e-5 if remat3.is_enabled() else 0.0  # whose backward pass adds in another order
    assert count(assert_placed_alike(step, args, keep_all, rtol), "scan") == kept
    assert count(assert_placed_alike(step, args, keep_inputs, rtol), "scan") == 3 * LAYERS


def test_loops_over_layers_one_after_the_other_are_loops():
    def loss(params, x):
        for w in params:
            x = jax.lax.scan(lambda x, w: (feed(x, w), None), x, w)[0]
        return x.var()

    stacks = [jax.tree.map(lambda *ws: jnp.stack(ws), *make_weights(jax.random.key(i))) for i in range(3)]
    graphs = list_joint_graphs(jax.make_jaxpr(jax.grad(loss))(stacks, jnp.ones((ROWS, WIDTH))))
    assert [type(graph).__name__ for graph in graphs] == ["LoopPair"] * 3


@pytest.mark.parametrize(
    "layers", [pytest.param(layers, marks=[pytest.mark.long] * (layers != 3)) for layers in (2, 3, 4, 5)]
)
def test_groups_of_layers_are_placed_each_on_its_own(layers):
    step, args = make_step(feed, "none", layers)
    groups = list_joint_graphs(jax.make_jaxpr(step)(*args))
    assert all(isinstance(group, LayerSequence) for group in groups)
    assert sum(group.count for group in groups) == layers
    assert len(groups) == (2 if layers < 4 else 3)
    left = iter([keep_all, *[keep_inputs] * 2])
    placed = assert_placed_alike(step, args, lambda group: next(left)(group))
    # Two products for each that the forward pass makes, and one again in all layers but those of a group.
    assert count(placed, "dot_general") == 3 * (2 * layers + 1) + layers - groups[0].count


def test_layers_with_effects_are_left():
    def talking(x, w):
        jax.debug.print("{}", x.mean())
        return feed(x, w)

    step, args = make_step(talking)
    assert sequences_of(step, *args) == []


def test_less_memory_is_more_recomputed_and_names_are_told():
    def named(x, w):
        h = jaxoff.name(x @ w["up"], "up")
        return x + jaxoff.mark_not_offload(jnp.sin(h) * jnp.cos(h)) @ w["down"]

    def loss(ws, x):
        for w in ws:
            x = named(x, w)
        return x.var()

    w = jax.tree.map(
        lambda v: (
            jax.ShapeDtypeStruct((512, v.shape[1] * 64), v.dtype)
            if v.shape[0] == WIDTH
            else jax.ShapeDtypeStruct((1024, 512), v.dtype)
        ),
        make_weights(jax.random.key(0)),
    )
    x = jax.ShapeDtypeStruct((4096, 512), "float32")
    (sequence,) = sequences_of(jax.grad(loss, argnums=(0, 1)), w, x)
    assert "up" in sequence.names.values()
    costs, times = Costs.of(sequence, H200), []
    for room in (1e9, 1e8, 5e7):
        found = choose_placements([costs], H200, room)
        assert found is not None
        list_recomputed(sequence, found[0][0])
        times.append(found[1])
    assert times == sorted(times)
    assert times[0] == 0.0 or times[0] < times[-1]


def test_a_step_with_layers_in_a_python_loop_runs_within_its_budget():
    step, args = make_step(block, "recompute")
    expected = jax.jit(step)(*args)
    planned = jaxoff.jit(step, device_bytes="1GB")
    got = planned(*args)
    for ours, theirs in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-2, atol=1e-3)
    assert {v.count % LAYERS for v in planned.plan.values} == {0}  # some rows are of several alike
    assert "recompute" not in {v.placement for v in planned.plan.values}


def test_the_least_of_layers_of_two_kinds_makes_one_at_a_time():
    """Two neighbouring layers are one group; between the two, the least memory keeps what is passed on."""

    def pairs_of(weights, x):
        for i, w in enumerate(weights):
            x = (attend if i % 2 else feed)(x, w)
        return x.sum()

    weights = make_weights(jax.random.key(0), layers=16, width=128)
    closed = jax.make_jaxpr(jax.grad(pairs_of))(weights, jnp.ones((64, 128)))
    pair = max(list_joint_graphs(closed), key=lambda pair: pair.count)
    assert pair.count == 4
    costs = Costs.of(pair, H200)
    assert len(costs.segments.nbytes) == 2
    least = choose_placements([costs], H200, None, 0)
    assert least is not None
    kept = {pair.values[i] for i in least[0][0].saved}
    assert costs.segments.excess_nbytes(kept) == 0
    form = Form.of(LayeredProgram(closed), (), H200, Budget(0))
    whole = form.settle_segments(lambda form: len(form.costs[0].segments.passed))
    assert form.settle_segments(lambda form: -len(form.costs[0].segments.passed)) is form
    assert [len(cost.segments.nbytes) for cost in whole.costs] == [1] * len(whole.costs)
    fewest, _ = whole.choose_least(0) or pytest.fail("the inputs of layers may be saved")
    assert len(fewest[0].saved) < len(least[0][0].saved)


def test_what_placements_add_counts_for_each_run_of_the_layers():
    def step(weights, xs):
        def one(weights, x):
            grads = jax.grad(lambda ws: _stack(ws, x).sum())(weights)
            return jax.tree.map(lambda w, g: w - g, weights, grads), None

        return jax.lax.scan(one, weights, xs)[0]

    def _stack(ws, x):
        return jax.lax.scan(lambda x, w: (feed(x, w), None), x, ws)[0]

    shapes = {"up": (LAYERS, 512, 2048), "down": (LAYERS, 2048, 512)}
    weights = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}

    def added_ms(runs):
        xs = jax.ShapeDtypeStruct((runs, 4096, 512), "float32")
        (pair,) = list_joint_graphs(jax.make_jaxpr(step)(weights, xs))
        assert pair.runs == runs
        found = choose_placements([Costs.of(pair, H200)], H200, None, 0)
        assert found is not None
        return found[1]

    assert added_ms(4) == pytest.approx(4 * added_ms(1), rel=1e-3)


def test_a_loss_in_chunks_around_a_loop_over_layers_has_a_plan():
    def step(weights, x):
        def loss(weights):
            def chunk(total, part):
                return total + jax.lax.scan(lambda x, w: (feed(x, w), None), part, weights)[0].var(), None

            return jax.lax.scan(chunk, 0.0, x)[0]

        return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights))

    shapes = {"up": (LAYERS, 64, 256), "down": (LAYERS, 256, 64)}
    weights = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}
    x = jax.ShapeDtypeStruct((4, 128, 64), "float32")
    jitted = jaxoff.jit(step, donate_argnums=0)
    assert jaxoff.plan(jitted, weights, x, device_bytes=10**9, compiled=False).peak_bytes < 10**9
