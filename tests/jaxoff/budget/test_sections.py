"""Sections: stretches of a forward pass outside of layers in a row."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax import lax

import jaxoff
from jaxoff._budget.choose import choose_placements, saved_nbytes
from jaxoff._budget.costs import Costs
from jaxoff._budget.fit import find_fitting
from jaxoff._budget.limits import Budget
from jaxoff._budget.parts import write_in_parts
from jaxoff._budget.repeats import LayerRun
from jaxoff._budget.sections import Stretch, cut_together
from jaxoff._device.profile import H200, Device
from jaxoff._jaxpr.compat import jaxpr_as_fun
from jaxoff._jaxpr.dataflow import variables
from jaxoff._jaxpr.inline import inline_program
from tests.jaxoff.budget.layered import list_joint_graphs, write_placed
from tests.jaxoff.budget.test_sequences import (
    CHECKPOINTS,
    assert_placed_alike,
    block,
    count,
    feed,
    keep_all,
    keep_inputs,
    make_drawing,
    make_step,
)

H100 = Device.of("h100")
WIDTHS = (16, 24, 40, 12, 32, 48, 20, 28)


@pytest.fixture(autouse=True)
def small_values_are_placed(monkeypatch):
    for module in ("sections", "sequences"):
        monkeypatch.setattr(f"jaxoff._budget.{module}.LEAST_NBYTES", 1)


def make_net(key, checkpoint="none", widths=WIDTHS):
    """Layers of different widths, and connections from the first half to the second, as in a U-Net."""
    keys = iter(jax.random.split(key, 3 * len(widths) + 1))

    def draw(*shape):
        return jax.random.normal(next(keys), shape) * 0.3

    ways = list(zip(widths, (*widths[1:], 8), strict=True))
    params = [{"in": draw(a, 2 * b), "out": draw(2 * b, b), "skip": draw(a, b)} for a, b in ways]

    def layer(w, x):
        return jnp.tanh(jax.nn.silu(x @ w["in"]) @ w["out"] + jnp.sin(x) @ w["skip"])

    if checkpoint != "none":
        layer = jax.checkpoint(layer, policy=CHECKPOINTS[checkpoint])

    def loss(params, x):
        sums = []
        for w in params:
            x = layer(w, x)
            sums.append(jnp.cumsum(x, -1)[:, -1:])
        return sum((x * s).mean() for s in sums[: len(sums) // 2]) + x.var()

    def step(params, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step, (params, draw(32, widths[0]))


def graphs_of(step, args):
    return list_joint_graphs(jax.make_jaxpr(step)(*args))


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.some_cases(1)
def test_layers_that_all_differ_are_sections(checkpoint):
    step, args = make_net(jax.random.key(0), checkpoint)
    graphs = graphs_of(step, args)
    assert len(graphs) >= 4
    assert all(graph.is_section and graph.count == 1 for graph in graphs)
    assert sorted(graph.position for graph in graphs) == [graph.position for graph in graphs]
    closed = jax.make_jaxpr(step)(*args)
    everything, inputs = write_placed(closed, keep_all), write_placed(closed, keep_inputs)
    assert count(everything, "dot_general") < count(inputs, "dot_general")
    assert count(everything, "dot_general") == 3 * 3 * len(WIDTHS) - 2  # of the data no gradient is taken


def test_the_first_layer_behind_the_data_is_a_section():
    """It has no gradient to pass on, so that its equations are not those of the other layers."""

    def loss(layers, x):
        for w in layers:
            x = feed(x, w)
        return x.var()

    _, (params, _) = make_step(feed)
    args = params["layers"], jax.random.normal(jax.random.key(1), (16, 8))
    layers, first = [], []
    for graph in graphs_of(jax.grad(loss), args):
        (first if graph.is_section else layers).append(graph)
    assert sum(graph.count for graph in layers) == len(params["layers"]) - 1
    (section,) = first
    assert section.position == 0
    assert not section.carried
    assert sum(eqn.primitive.name == "dot_general" for eqn in section.eqns) == 2


def test_a_layer_ahead_of_a_loop_over_layers_is_one_section():
    """Its values are not the peak: those of an iteration of the loop take as much memory."""

    def layer(x, w):
        h = jnp.sin(x @ w)
        x = x + jax.nn.softmax(h @ h.T) @ h
        return x + jnp.tanh(x @ w[:, :4]) @ w[:4]

    def loss(params, x):
        x = layer(x, params["first"])
        return lax.scan(lambda x, w: (layer(x, w), None), x, params["layers"])[0].var()

    params = {"first": jnp.eye(8), "layers": jnp.ones((4, 8, 8))}
    graphs = graphs_of(jax.value_and_grad(loss), (params, jnp.ones((16, 8))))
    assert sorted(graph.count for graph in graphs) == [1, 4]


@pytest.mark.long  # as the nets below, under drawn placements
@settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    checkpoint=st.sampled_from(sorted(CHECKPOINTS)),
    widths=st.lists(st.sampled_from(WIDTHS), min_size=3, max_size=6),
    seed=st.integers(0, 1 << 16),
)
def test_random_nets_have_the_same_results_under_random_placements(checkpoint, widths, seed):
    step, args = make_net(jax.random.key(1), checkpoint, widths)
    assert_placed_alike(step, args, make_drawing(seed), rtol=1e-3)  # XLA fuses, and so rounds, elsewhere


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.some_cases(1)
def test_one_layer_alone_and_layers_with_a_section_ahead_keep_their_results(layers):
    step, (params, tokens) = make_step(block, layers=layers)
    data = params["embed"][tokens]  # without an embedding the first layer is another

    def without_embedding(params, x):
        return step({**params, "embed": x}, jnp.arange(len(x)))

    assert_placed_alike(without_embedding, (params, data), keep_inputs, rtol=1e-3)


def test_a_differentiated_backward_pass_is_a_part_of_the_forward_pass():
    """A gradient penalty: the gradient by the data is differentiated by the weights."""

    def penalty(params, x):
        def loss(x):
            for w in params:
                x = jnp.tanh(x @ w)
            return (x**2).sum()

        return (jax.grad(loss)(x) ** 2).sum()

    keys = jax.random.split(jax.random.key(0), 4)
    ways = zip(keys, itertools.pairwise((8, 16, 24, 12)), strict=False)
    params = [jax.random.normal(key, shape) / 4 for key, shape in ways]
    args = params, jax.random.normal(keys[3], (32, 8))
    sections = [graph.eqns for graph in graphs_of(jax.grad(penalty), args)]
    scopes = {str(eqn.source_info.name_stack) for eqns in sections for eqn in eqns}
    assert any(scope.startswith("jvp(transpose(jvp(") for scope in scopes)
    assert not any(scope.startswith("transpose(") for scope in scopes)
    placed = assert_placed_alike(jax.grad(penalty), args, keep_inputs, rtol=1e-4)
    assert count(placed, "tanh") > len(params)


def test_what_a_loop_reads_stays_on_the_device():
    """A loop's operands are found in both of its passes: they are not made again."""

    def loss(params, x):
        for w in params[:-1]:
            x = jnp.tanh(x @ w["in"]) @ w["out"] + x @ w["skip"]
        scale = jnp.exp(x)
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x * scale + w.sum()), None), x, params[-1]["in"])
        return x.var()

    _, (params, x) = make_net(jax.random.key(0))
    graphs = graphs_of(jax.grad(loss), (params, x))
    sections = [graph for graph in graphs if graph.is_section]
    assert len(sections) < len(graphs)
    carried = {v for graph in sections for v in graph.carried}
    assert any(graph.fixed & {v for eqn in graph.eqns for v in eqn.outvars} - carried for graph in sections)
    assert_placed_alike(jax.grad(loss), (params, x), keep_inputs, rtol=1e-5)


def test_memory_is_counted_when_the_backward_pass_of_a_section_runs():
    step, args = make_net(jax.random.key(0))
    graphs = graphs_of(step, args)
    costs = [Costs.of(graph, H100) for graph in graphs]
    inner = [sum(cost.nbytes.get(v, 0) for v in cost.pair.needed) for cost in costs]
    everything = [keep_all(graph) for graph in graphs]
    nothing = [keep_inputs(graph) for graph in graphs]
    assert saved_nbytes(costs, nothing) < saved_nbytes(costs, everything)
    # A large section's values are there when its backward pass runs, kept or made again.
    sizes = [saved_nbytes([cost], [placed]) for cost, placed in zip(costs, nothing, strict=True)]
    assert saved_nbytes(costs, nothing) >= sum(sizes)
    found = choose_placements(costs, H100, 0.5 * saved_nbytes(costs, everything), 0.0)
    assert found is not None
    placements, ms = found
    assert ms > 0
    assert saved_nbytes(costs, placements) <= 0.5 * saved_nbytes(costs, everything)
    assert max(inner) < sum(inner) / 2


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_other_sections_have_a_lower_peak(data):
    """Beside all ways to cut one stretch or two, together of up to seven equations.

    What the sections of the first stretch pass on is there in the backward pass of the second.
    """
    lengths = data.draw(st.lists(st.integers(2, 4), min_size=1, max_size=2))
    sizes = st.integers(1, 40)
    nbytes = [np.array(data.draw(st.lists(sizes, min_size=n, max_size=n))) for n in lengths]
    reads = [[(i, data.draw(st.integers(i, n)), data.draw(sizes)) for i in range(n)] for n in lengths]
    floor = data.draw(st.integers(0, 60))

    def peak_of(ways):
        held, peaks = 0, []
        for ends, own, values in zip(ways, nbytes, reads, strict=True):
            for a, b in itertools.pairwise(ends):
                peaks.append(held + max(floor, own[a:b].sum()))
                held += sum(size for i, last, size in values if a <= i < b <= last)
        return max(peaks)

    stretches = zip(lengths, reads, nbytes, strict=True)
    measured = [Stretch.of(LayerRun(0, n, 1), values, own, floor) for n, values, own in stretches]
    sections = list(cut_together(measured, floor))
    count, found = len(sections), list[list[int]]()  # each counts LEAST_NBYTES, here one byte
    for n in lengths:
        found.append([0])
        while found[-1][-1] < n:
            section = sections.pop(0)
            assert section.start == found[-1][-1]
            found[-1].append(section.end)
    assert not sections
    ways = (
        [[0, *some, n] for k in range(n) for some in itertools.combinations(range(1, n), k)] for n in lengths
    )
    assert peak_of(found) <= min(map(peak_of, itertools.product(*ways))) + count + 1


def test_a_section_is_made_again_once_a_gradient_of_its_is_there():
    """A barrier that waits for a constant, as the zeros of a ReLU, lets XLA make values ahead of time."""

    def loss(params, x):
        for w in params:
            x = jax.nn.relu(jnp.tanh(x @ w["in"]) @ w["out"] + x @ w["skip"])
        return x.var()

    _, args = make_net(jax.random.key(0))
    closed = write_placed(jax.make_jaxpr(jax.grad(loss))(*args), keep_inputs)
    made = {v: eqn for eqn in closed.jaxpr.eqns for v in eqn.outvars}

    def is_constant(v):
        return v in made and all(map(is_constant, variables(made[v])))

    barriers = [eqn for eqn in closed.jaxpr.eqns if eqn.primitive.name == "optimization_barrier"]
    waiting = [eqn.invars[1] for eqn in barriers if len(eqn.invars) == 2]
    assert len(waiting) >= len(args[0]) - 1
    assert not any(map(is_constant, waiting))


def test_what_is_made_again_waits_for_no_widened_gradient():
    """XLA stores the operands of a barrier, of a widened value all of its bytes."""

    def normalize(x):
        x = x.astype("float32")
        return (x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1)).astype("bfloat16")

    def loss(params, x):
        for w in params:
            x = jax.nn.relu(x @ w["skip"] + normalize(jnp.tanh(x @ w["in"]) @ w["out"]))
        return x.astype("float32").var()

    _, args = make_net(jax.random.key(0))
    args = jax.tree.map(lambda x: x.astype("bfloat16"), args)
    closed = write_placed(jax.make_jaxpr(jax.grad(loss))(*args), keep_inputs)
    barriers = [eqn for eqn in closed.jaxpr.eqns if eqn.primitive.name == "optimization_barrier"]
    waiting = [eqn.invars[1] for eqn in barriers if len(eqn.invars) == 2]
    large = [v for v in waiting if v.aval.size > len(args[1])]
    assert len(large) >= len(args[0]) - 1
    assert {str(v.aval.dtype) for v in large} == {"bfloat16"}


def test_a_stretch_between_layers_is_a_section_however_few_its_products():
    """Behind the last layers, so few products are a head."""
    rows, narrow, wide = 512, 64, 128

    def block(x, w):
        return x + jnp.tanh(x @ w["up"]) @ w["down"]

    def loss(params, x):
        for w in params["narrow"]:
            x = block(x, w)
        x = jnp.sin(jnp.tanh(x @ params["between"]))
        for w in params["wide"]:
            x = block(x, w)
        return (jnp.tanh(x @ params["head"]) ** 2).sum()

    def weights(width, layers):
        return [{"up": jnp.ones((width, 4 * width)), "down": jnp.ones((4 * width, width))}] * layers

    params = {
        "narrow": weights(narrow, 4),
        "between": jnp.ones((narrow, wide)),
        "wide": weights(wide, 4),
        "head": jnp.ones((wide, wide)),
    }
    graphs = list_joint_graphs(jax.make_jaxpr(jax.grad(loss))(params, jnp.ones((rows, narrow))))
    layers = sum(graph.count for graph in graphs if not graph.is_section)
    sections = [graph for graph in graphs if graph.is_section]
    assert layers in (7, 8)
    assert any("sin" in {eqn.primitive.name for eqn in section.eqns} for section in sections)
    assert sum(eqn.primitive.name == "tanh" for section in sections for eqn in section.eqns) <= 2


def test_a_net_without_repeats_runs_within_its_budget():
    step, args = make_net(jax.random.key(0), widths=WIDTHS[:4])
    expected = jax.jit(step)(*args)
    most = jaxoff.plan(step, *args, device_bytes="1GB", compiled=False).peak_bytes
    plan = jaxoff.plan(step, *args, device_bytes=1.2 * most, compiled=False)  # a fifth stays free
    assert plan.peak_bytes < most
    assert any(value.placement == "recompute" for value in plan.values)
    got = jaxoff.jit(step, device_bytes=1.2 * most)(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert jnp.allclose(a, b, rtol=1e-5, atol=1e-5)


def test_a_head_behind_layers_that_all_differ_is_in_parts():
    """The section behind all others ends with the head's product."""
    vocabulary = 1024

    def step(params, x, labels):
        def loss(params):
            h = x
            for w in params["layers"]:
                h = jnp.tanh(h @ w)
            chosen = jnp.take_along_axis(logits := h @ params["head"], labels[:, None], -1)
            return (jax.nn.logsumexp(logits, -1) - chosen[:, 0]).mean()

        return jax.grad(loss)(params)

    keys = iter(jax.random.split(jax.random.key(0), 9))
    widths = [16, 24, 40, 20, 16]
    layers = [jax.random.normal(next(keys), pair) * 0.3 for pair in itertools.pairwise(widths)]
    params = {"layers": layers, "head": jax.random.normal(next(keys), (16, vocabulary))}
    args = params, jax.random.normal(next(keys), (64, 16)), jnp.arange(64)
    closed = jax.make_jaxpr(step)(*args)
    assert list_joint_graphs(closed)[-1].is_section
    written, (region,) = write_in_parts(closed, 1e4)
    assert region.nbytes == 4 * 64 * vocabulary
    assert all(graph.is_section for graph in list_joint_graphs(written))
    leaves = jax.tree.leaves(args)
    found, wanted = (jax.jit(jaxpr_as_fun(program))(*leaves) for program in (written, closed))
    assert jax.tree.all(jax.tree.map(lambda a, b: jnp.allclose(a, b, rtol=1e-4, atol=1e-6), found, wanted))


def waits_for_sums(program):
    """Whether values made again wait for a sum of two cotangents."""
    eqns = inline_program(program.jaxpr).eqns
    sums = {v for eqn in eqns if eqn.primitive.name == "add_any" for v in eqn.outvars}
    return any(
        not sums.isdisjoint(eqn.invars) for eqn in eqns if eqn.primitive.name == "optimization_barrier"
    )


def test_values_made_again_wait_for_a_sum_of_cotangents_only_where_they_are_to():
    step, args = make_step(block)
    closed = jax.make_jaxpr(step)(*args)
    plain, summed = (write_placed(closed, keep_inputs, waits_for_sums=where) for where in (False, True))
    assert not waits_for_sums(plain)
    assert waits_for_sums(summed)
    expected = jaxpr_as_fun(closed)(*jax.tree.leaves(args))
    for program in (plain, summed):
        for ours, theirs in zip(jaxpr_as_fun(program)(*jax.tree.leaves(args)), expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("spared", "fits"), [(0.1, True), (0.01, False)])
def test_a_search_waits_for_sums_where_nothing_fits_by_less_than_they_may_spare(spared, fits):
    step, args = make_step(block)
    closed = jax.make_jaxpr(step)(*args)
    tried = []

    def compile_program(program):
        tried.append(waits_for_sums(program))
        return 105.0 * (1 - spared * tried[-1]), None

    def search():
        return find_fitting(closed, H200, Budget(100.0), [False] * len(closed.jaxpr.invars), compile_program)

    if fits:
        assert search().nbytes == 94.5
    else:
        with pytest.raises(jaxoff.BudgetError):
            search()
    assert tried.count(True) >= 1
    assert not tried[0]
