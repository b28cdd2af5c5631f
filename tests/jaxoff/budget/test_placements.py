"""Whole train steps written with other placements: the same results, the stacks that were asked for."""

import dataclasses
import functools
import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxoff
from bench.client_steps import PROGRAMS
from jaxoff._budget.choose import choose_placements, saved_nbytes
from jaxoff._budget.costs import Costs
from jaxoff._budget.joint_graph import Placements, list_recomputed
from jaxoff._budget.loop_pairs import LoopPair, find_loop_pairs
from jaxoff._budget.nested import write_nested
from jaxoff._budget.numbering import Numbering
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.inline import inline_program
from tests.clients.test_clients import ROUNDED
from tests.jaxoff.budget.layered import list_joint_graphs, write_placed

QUICK = {("decoder-scan", "all recomputed")}
STYLES = (
    "accumulation", "decoder-python", "decoder-scan", "equinox", "groups", "inner-jit", "layer-axis",
    "linen-scan", "nnx-list", "nnx-scan", "ssm-chunks", "vit",
)  # fmt: skip
# The model's own checkpoint: none at all, everything recomputed.
CHECKPOINTS = {"all saved": jax.checkpoint_policies.everything_saveable, "all recomputed": None}


def list_stacked(pair):
    """For each loop in a layer, the positions of the values of an iteration that may be kept."""
    loops = pair.nested
    return tuple(
        tuple(i for i, v in enumerate(loop.graph.values) if v in loop.stacks and v not in loop.graph.free)
        for loop in loops
    )


def list_values(pair):
    """The positions of the values of a layer without those that stacks of its loops replace."""
    residuals = {v for loop in pair.nested for v in loop.residuals}
    return [i for i, v in enumerate(pair.values) if v not in residuals]


def keep_all(pair):
    return Placements(tuple(list_values(pair)), nested=list_stacked(pair))


def offload_inputs(pair):
    nested = tuple(tuple(range(len(loop.graph.carried))) for loop in pair.nested)
    return Placements((), tuple(range(len(pair.carried))), nested=nested)


def count_recomputed(pair, kept):
    loops = zip(pair.nested, kept.nested, strict=True)
    inside = sum(len(list_recomputed(loop.graph, Placements(places))) for loop, places in loops)
    return len(list_recomputed(pair, kept)) + inside


def keep_some(pair):
    draw = random.Random(0)
    inputs = len(pair.carried)
    drawn = [i for i in list_values(pair)[inputs:] if draw.random() < 0.3]
    loops = zip(pair.nested, list_stacked(pair), strict=True)
    # The inputs of an iteration are kept, or nothing could be recomputed.
    nested = tuple(
        tuple(i for i in places if i < len(loop.graph.carried) or draw.random() < 0.3)
        for loop, places in loops
    )
    return Placements(tuple(drawn[::2]), (*range(inputs), *drawn[1::2]), nested=nested)


def count_host(closed):
    return len(re.findall(r"<host>.* = device_put|:\w+<host>\[", str(closed)))


@pytest.mark.parametrize(
    ("name", "checkpoint"),
    [
        pytest.param(name, checkpoint, marks=[pytest.mark.long] * ((name, checkpoint) not in QUICK))
        for name in STYLES
        for checkpoint in CHECKPOINTS
    ],
)
def test_a_step_with_other_placements_has_the_same_results(name, checkpoint):
    pytest.importorskip(PROGRAMS[name].package)
    program = dataclasses.replace(PROGRAMS[name].shrink(), offloads=CHECKPOINTS[checkpoint])
    step = program.build(dataclasses.replace(program.sizes, layers=4), attention="xla")
    closed = jax.make_jaxpr(step.fun)(step.state, step.batch)
    state = jax.jit(step.initialize)(jax.random.key(0))
    leaves = jax.tree.leaves((state, step.make_batch(jax.random.key(1))))
    expected = jax.jit(compat.jaxpr_as_fun(closed), compiler_options=ROUNDED)(*leaves)
    for decide in (keep_all, offload_inputs, keep_some):
        pairs: list[LoopPair] = []

        def place(pair, decide=decide, pairs=pairs):
            pairs.append(pair)
            return decide(pair)

        placed = write_placed(closed, place)
        assert len(pairs) == 1
        kept = decide(pairs[0])
        _, own = write_nested(pairs[0], kept)
        assert count_host(placed) >= 2 * len(own.offloaded)
        assert (count_recomputed(pairs[0], kept) < 25) == (decide is keep_all)
        got = jax.jit(compat.jaxpr_as_fun(placed), compiler_options=ROUNDED)(*leaves)
        for ours, theirs in zip(got, expected, strict=True):
            np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


def chain(x, ws):
    def layer(x, w):
        return jnp.sin(x @ w), None

    return lax.scan(jax.checkpoint(layer, prevent_cse=False), x, ws)[0].sum()


def arguments():
    return jnp.ones((4, 8)), jnp.full((3, 8, 8), 0.1)


def pairs_of(fun, *args):
    return list_joint_graphs(jax.make_jaxpr(fun)(*args))


def test_what_the_backward_loop_repeats_is_the_forward_value():
    (pair,) = pairs_of(jax.grad(chain), *arguments())
    assert [eqn.primitive.name for eqn in pair.body.eqns] == ["dot_general", "sin"]
    assert [eqn.primitive.name for eqn in pair.only_backward] == ["cos"]
    assert {eqn.primitive.name for eqn in pair.rest} >= {"mul", "dot_general"}
    assert not {"sin", "cos"} & {eqn.primitive.name for eqn in pair.rest}
    assert len(pair.carried) == 1
    product = pair.values[1]
    recomputed = list_recomputed(pair, Placements((0, 1)))
    assert product in pair.body.eqns[0].outvars
    assert [eqn.primitive.name for eqn in recomputed] == ["cos"]
    assert [e.primitive.name for e in list_recomputed(pair, Placements((0,)))] == ["dot_general", "cos"]


def rotating(x, ws):
    def layer(x, w):
        def rotate(x):
            angles = jnp.arange(4.0)[:, None] * 2.0 ** -jnp.arange(8.0)
            return x * jnp.cos(angles) + x[:, ::-1] * jnp.sin(angles)

        return jnp.sin(rotate(x @ w) * rotate(x)) @ w, None

    return lax.scan(jax.checkpoint(layer, prevent_cse=False), x, ws)[0].sum()


def test_constants_that_differentiation_moves_out_of_a_loop_are_found_again():
    closed = jax.make_jaxpr(jax.grad(rotating, 1))(*arguments())
    (pair,) = list_joint_graphs(closed)
    assert not {"sin", "dot_general", "add"} & {eqn.primitive.name for eqn in pair.only_backward}
    assert not any(len(eqn.outvars[0].aval.shape) == 1 for eqn in list_recomputed(pair, keep_all(pair)))
    expected = jax.grad(rotating, 1)(*arguments())
    for decide in (keep_all, offload_inputs, keep_some):
        (got,) = jax.jit(compat.jaxpr_as_fun(write_placed(closed, decide)))(*arguments())
        np.testing.assert_allclose(got, expected, rtol=1e-5)


def mapped(ws, x):
    def part(rows):
        for w in ws:
            rows = jnp.sin(rows @ w)
        return jnp.square(rows).sum(-1)

    return lax.map(jax.checkpoint(part, prevent_cse=False), x).mean()


def summed(ws, x):
    """The same, of a loop that carries a sum."""

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def add(total, rows):
        for w in ws:
            rows = jnp.sin(rows @ w)
        return total + jnp.square(rows).mean(), None

    return lax.scan(add, 0.0, x)[0] / len(x)


@pytest.mark.parametrize("loss", [mapped, summed])
def test_a_loop_over_parts_of_a_batch_keeps_what_it_would_recompute(loss):
    """Under `jax.checkpoint` the backward loop reads no stack of the forward loop, but the parts."""
    args = jnp.full((3, 8, 8), 0.1), jnp.linspace(0, 1, 5 * 4 * 8).reshape(5, 4, 8)
    fun = jax.value_and_grad(loss)
    closed = jax.make_jaxpr(fun)(*args)
    (pair,) = list_joint_graphs(closed)
    costs = Costs.of(pair, jaxoff.Device.of("h100"))
    products = [v for eqn in pair.eqns if eqn.primitive.name == "dot_general" for v in eqn.outvars]
    assert len(products) == 3
    assert costs.nbytes.keys() >= {*products}
    for decide, products_again in ((keep_all, 0), (lambda pair: Placements(), 3)):
        recomputed = [eqn.primitive.name for eqn in list_recomputed(pair, decide(pair))]
        assert recomputed.count("dot_general") == products_again
        placed = write_placed(closed, decide)
        for got, expected in zip(compat.jaxpr_as_fun(placed)(*args), fun(*args), strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_values_that_differ_in_a_long_constant_are_told_apart():
    """The text of a long array leaves out its middle."""
    first, second = np.arange(5000.0), np.arange(5000.0)
    second[2500] = 0
    assert str(first) == str(second)

    def scale(table):
        return jax.jit(lambda x: jnp.sin(x * table))

    def product(x):
        return scale(first)(x) * scale(second)(x) * scale(first)(x)

    x = jnp.linspace(0.1, 1.0, 5000)
    body = jax.make_jaxpr(jax.grad(lambda x: product(x).sum()))(x).jaxpr
    calls = [eqn for eqn in body.eqns if eqn.primitive.name == "jit" and eqn.invars == body.invars]
    assert len(calls) == 3
    numbering = Numbering(body.invars, body.eqns)
    same = [numbering.find(eqn, eqn.invars) for eqn in calls]
    assert same[0] == same[2] == calls[0].outvars
    assert same[1] == calls[1].outvars


def grouped(x, ws):
    """Groups of three layers."""

    def group(x, w):
        for i in range(3):
            x = x + jnp.tanh(jnp.sin(x @ w[i]) @ w[i])
        return x, None

    return jnp.square(lax.scan(group, x, ws)[0]).sum()


def test_layers_of_a_group_are_made_again_one_after_the_other_where_the_values_between_are_kept():
    args = jnp.full((4, 8), 0.5), jnp.full((2, 3, 8, 8), 0.1)
    fun = jax.value_and_grad(grouped, (0, 1))
    closed = jax.make_jaxpr(fun)(*args)
    (pair,) = list_joint_graphs(closed)
    costs = Costs.of(pair, jaxoff.Device.of("h100"))
    layer, *others = costs.segments.nbytes
    between = costs.segments.passed
    assert len(others) == len(between) == 2
    assert all(len(values) == 1 for values in between)
    inputs = {*pair.carried}.union(*between)
    held = []
    for kept in ({*pair.carried}, {*pair.carried} | between[0], inputs):
        placements = Placements(tuple(i for i, v in enumerate(pair.values) if v in kept))
        held.append(saved_nbytes([costs], [placements]) - 2 * 4 * 4 * 8 * len(kept))
        placed = write_placed(closed, lambda _, placements=placements: placements)
        assert str(placed).count("optimization_barrier") == len(kept) - 1
        for got, expected in zip(
            compat.jaxpr_as_fun(placed)(*args), jax.tree.leaves(fun(*args)), strict=True
        ):
            np.testing.assert_allclose(got, expected, rtol=1e-5)
    made = [layer + sum(others), sum(others), max(others)]
    assert held == [nbytes - costs.segments.largest_nbytes for nbytes in made]
    least = choose_placements([costs], jaxoff.Device.of("h100"), None, 0.0)
    assert least is not None
    assert {*pair.carried} <= {*least[0][0].list_kept(pair)}


def test_gradients_one_after_the_other_do_not_hold_their_values_at_once():
    def one_after_the_other(x, ws):
        return jax.grad(chain, 1)(x, ws - 0.1 * jax.grad(chain, 1)(x, ws))

    def at_once(x, ws):
        return jax.grad(lambda x, ws: chain(x, ws) + chain(2 * x, ws), 1)(x, ws)

    held = []
    for fun in (one_after_the_other, at_once):
        graphs = pairs_of(fun, *arguments())
        assert len(graphs) == 2
        costs = [Costs.of(graph, jaxoff.Device.of("h100")) for graph in graphs]
        # Of each layer its input and two values, float32 of 4 x 8.
        held.append(saved_nbytes(costs, [Placements((0, 1, 2))] * 2))
    assert held == [3 * 3 * 4 * 4 * 8, 2 * 3 * 3 * 4 * 4 * 8]


def test_an_input_of_the_layer_cannot_be_recomputed():
    (pair,) = pairs_of(jax.grad(chain), *arguments())
    with pytest.raises(ValueError, match=r"needs float32\[4,8\], an input of the layer, which is not kept"):
        list_recomputed(pair, Placements())


def test_a_stack_that_the_program_returns_stays():
    def layer(x, w):
        y = jnp.sin(x @ w)
        return y, y

    def loss(x, ws):
        y, ys = lax.scan(layer, x, ws)
        return y.sum() + (ys**2).sum(), ys

    fun = jax.grad(loss, has_aux=True)
    closed = jax.make_jaxpr(fun)(*arguments())
    placed = write_placed(closed, offload_inputs)
    for got, expected in zip(
        compat.jaxpr_as_fun(placed)(*arguments()), compat.jaxpr_as_fun(closed)(*arguments()), strict=True
    ):
        np.testing.assert_allclose(got, expected, rtol=1e-6)


@pytest.mark.parametrize("fills", [True, False])
def test_random_numbers_are_drawn_again(fills):
    def layer(carry, w):
        x, key = carry
        key, own = jax.random.split(key)
        return (jnp.sin(x @ w) * jax.random.bernoulli(own, 0.5, x.shape), key), None

    def loss(x, ws, key):
        return lax.scan(jax.checkpoint(layer, prevent_cse=False), (x, key), ws)[0][0].sum()

    fun, args = jax.value_and_grad(loss), (*arguments(), jax.random.key(3))
    closed = jax.make_jaxpr(fun)(*args)
    placed = write_placed(closed, lambda pair: Placements(tuple(range(len(pair.carried)))), fills=fills)
    for got, expected in zip(
        jax.jit(compat.jaxpr_as_fun(placed))(*args), compat.jaxpr_as_fun(closed)(*args), strict=True
    ):
        np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_stacks_are_allocated_without_a_fill():
    """In a while loop, with the bits of the scan, forward and in reverse."""

    def layer(x, w):
        return jnp.sin(x @ w), x.sum()

    def loss(x, ws):
        x, sums = lax.scan(layer, x, ws)
        return x.sum() + sums.sum()

    args = arguments()
    closed = jax.make_jaxpr(jax.value_and_grad(loss, (0, 1)))(*args)
    filled, allocated = (write_placed(closed, keep_all, fills=fills) for fills in (True, False))
    names = [[eqn.primitive.name for eqn in program.jaxpr.eqns] for program in (filled, allocated)]
    assert [n.count("scan") for n in names] == [2, 0]
    assert [n.count("while") for n in names] == [0, 2]
    assert names[1].count("unwritten") >= 2
    runs = (jax.jit(compat.jaxpr_as_fun(program)) for program in (allocated, filled))
    for got, expected in zip(*(run(*args) for run in runs), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_a_program_without_loops_over_layers_stays():
    closed = jax.make_jaxpr(jax.grad(lambda x: jnp.sin(x).sum()))(jnp.ones(3))
    assert str(write_placed(closed, keep_all)) == str(closed)
    assert jaxoff.jit(jax.grad(lambda x: jnp.sin(x).sum()), device_bytes="1GB")(jnp.ones(3)).shape == (3,)


def test_a_loop_is_in_one_pair_of_a_second_derivative():
    """The backward loop of the inner gradient has a backward loop itself."""

    def layer(x, w):
        return x + jnp.tanh(x @ w["a"]) @ w["b"], None

    def loss(w, x):
        return (lax.scan(layer, x, w)[0] ** 2).mean()

    def adapted(w, x):
        return loss(jax.tree.map(lambda w, g: w - 0.1 * g, w, jax.grad(loss)(w, x)), x + 1)

    keys = jax.random.split(jax.random.key(0), 3)
    w = {"a": jax.random.normal(keys[0], (3, 4, 8)), "b": jax.random.normal(keys[1], (3, 8, 4)) / 3}
    x = jax.random.normal(keys[2], (5, 4))
    given = jax.value_and_grad(adapted)(w, x)
    step = jaxoff.jit(jax.value_and_grad(adapted), device_bytes="1GB")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), step(w, x), given)


def test_a_layer_with_a_value_without_elements():
    def layer(x, w):
        head, tail = jnp.split(jnp.tanh(x @ w), [4], axis=-1)
        return x + jnp.concatenate([jnp.sin(head), jnp.sin(tail)], -1), None

    def loss(w, x):
        return (lax.scan(layer, x, w)[0] ** 2).mean()

    w, x = jnp.ones((3, 4, 4)) / 4, jnp.ones((5, 4))
    given = jax.value_and_grad(loss)(w, x)
    step = jaxoff.jit(jax.value_and_grad(loss), device_bytes="1GB")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), step(w, x), given)


def test_a_loop_without_iterations():
    def loss(w, x):
        return (lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, w)[0] ** 2).mean()

    w, x = jnp.ones((0, 4, 4)), jnp.ones((5, 4))
    value, grads = jaxoff.jit(jax.value_and_grad(loss), device_bytes="1GB")(w, x)
    assert value == 1 and grads.shape == w.shape


def test_a_backward_loop_belongs_to_the_loop_whose_stacks_it_reads():
    """The same layers run twice, first without a gradient: both loops read the rows of the weights."""

    def norm(x):
        return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(1 + x.var(-1, keepdims=True))

    def layer(x, w):
        return x + jnp.sin(norm(jnp.cos(norm(x) @ w)) @ w), None

    def twice(w, x):
        first = lax.stop_gradient(lax.scan(layer, x, w)[0])
        return lax.scan(layer, x + first, w)[0].sum()

    closed = jax.make_jaxpr(jax.value_and_grad(twice))(jnp.ones((3, 8, 8)), jnp.ones((4, 8)))
    jaxpr = inline_program(closed.jaxpr)
    (pair,) = find_loop_pairs(jaxpr)
    scans = [eqn for eqn in jaxpr.eqns if compat.scan_in(eqn) is not None]
    assert [scans.index(eqn) for eqn in (pair.forward, pair.backward)] == [1, 2]
    assert pair.residuals


@pytest.mark.parametrize(("rows", "pairs"), [(8, 0), (1 << 15, 1)])
def test_a_loop_is_placed_without_its_unrolling_where_its_iterations_are_long(rows, pairs):
    def loss(ws, x):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws, unroll=2)[0].sum()

    ws, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in [(4, 8, 8), (rows, 8)])
    assert len(pairs_of(jax.grad(loss), ws, x)) == pairs
