"""Which values of a layer a budget may keep: masks of random numbers, and no statistic inside of a kernel."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxoff
from jaxoff._budget.choose import choose_placements
from jaxoff._budget.costs import Costs
from jaxoff._budget.row_statistics import find_row_statistics
from jaxoff._device.profile import Device
from jaxoff._jaxpr.compat import Var
from tests.jaxoff.budget.layered import list_joint_graphs
from tests.jaxoff.policy.matrix import inputs

LAYERS, ROWS, WIDTH = 3, 32, 16
H200 = Device.of("h200")


def attend(x, w, weigh):
    scores = (x @ w["q"]) @ (x @ w["k"]).T
    return jnp.sin(weigh(scores) @ x)


def softmax(scores):
    return jax.nn.softmax(scores, axis=-1)


def weights():
    return {name: inputs(LAYERS, WIDTH, WIDTH) for name in "qk"}


def trace(weigh):
    """The layer of a scan."""

    def loss(ws, x):
        return lax.scan(lambda x, w: (attend(x, w, weigh), None), x, ws)[0].sum()

    (pair,) = list_joint_graphs(jax.make_jaxpr(jax.grad(loss))(weights(), inputs(ROWS, WIDTH)))
    return pair


def reductions_of(pair):
    return [pair.pure[i].primitive.name for i in sorted(find_row_statistics(pair).reductions)]


def test_the_maximum_of_a_softmax_is_made_in_the_kernel_of_its_readers():
    pair = trace(softmax)
    assert reductions_of(pair) == ["reduce_max"]
    statistics, costs = find_row_statistics(pair), Costs.of(pair, H200)
    assert statistics.values.isdisjoint(costs.nbytes)
    assert [costs.equation_ms[i] for i in statistics.reductions] == [0.0]
    scores = H200.pass_ms(4 * ROWS * ROWS)
    assert [pair.pure[i].primitive.name for i in statistics.differences] == ["sub"]
    assert [costs.equation_ms[i] for i in statistics.differences] == [pytest.approx(scores)]
    sums = [v for eqn in pair.eqns if eqn.primitive.name == "reduce_sum" for v in eqn.outvars]
    assert sums and costs.nbytes.keys() >= set(sums)  # which the backward pass reads


def over_columns(scores):
    return jnp.exp(scores - lax.stop_gradient(scores.max(0, keepdims=True)))


def of_other_rows(scores):
    return jnp.exp(scores - lax.stop_gradient(scores.max(-1)))  # of square scores: along the other axis


def named(scores):
    return jnp.exp(scores - jaxoff.name(lax.stop_gradient(scores.max(-1, keepdims=True)), "max"))


def summed(scores):
    most = lax.stop_gradient(scores.max(-1, keepdims=True))
    return jnp.exp(scores - most) + lax.cumsum(most)


def read_backward(scores):
    return scores * lax.rsqrt(jnp.square(scores).mean(-1, keepdims=True))


def entropy(scores):
    """No kernel stores the logarithms of the softmax: one of a row is read."""
    chosen = jnp.arange(ROWS)[:, None]
    return scores * jnp.take_along_axis(jax.nn.log_softmax(scores), chosen, axis=-1)


def long(scores):
    return jax.nn.softmax(jnp.broadcast_to(scores[:, :1], (ROWS, 20_000)))[:, :ROWS]


@pytest.mark.parametrize("weigh", [over_columns, named, summed, read_backward, entropy, long])
def test_other_statistics_may_be_kept(weigh):
    assert reductions_of(trace(weigh)) == []


def test_a_statistic_may_be_broadcast_along_another_axis():
    assert reductions_of(trace(of_other_rows)) == ["reduce_max"]


def test_the_sum_of_a_softmax_is_kept_with_its_row_alone():
    pair = trace(softmax)
    costs, sums = Costs.of(pair, H200), find_row_statistics(pair).sums
    assert {row.aval.str_short() for row in sums.values()} == {f"float32[{ROWS},{ROWS}]"}
    assert any(v in pair.needed for v in sums)
    held = []
    for room in range(0, sum(costs.nbytes.values()) * LAYERS, 512):
        if (chosen := choose_placements([costs], H200, room, 0.0)) is not None:
            kept = set(chosen[0][0].list_kept(pair))
            held.append(kept & sums.keys())
            assert all(sums[v] in kept for v in held[-1])
    assert set() in held and any(held)


def in_float32(scores):
    """The softmax of a model in bfloat16."""
    narrow = scores.astype(jnp.bfloat16)
    return in_rows(jnp.sin(narrow @ narrow))


def masked(scores):
    narrow = scores.astype(jnp.bfloat16)
    return in_rows(jnp.where(jnp.tril(jnp.ones((ROWS, ROWS), bool)), narrow @ narrow, -1e30))


@pytest.mark.parametrize("weigh", [in_float32, masked])
def test_rows_in_float32_of_scores_in_bfloat16_are_made_in_their_readers(weigh):
    pair = trace(weigh)
    statistics, costs = find_row_statistics(pair), Costs.of(pair, H200)
    makers = {v: eqn.primitive.name for eqn in pair.pure for v in eqn.outvars}
    assert {"sub", "exp", "div"} <= {makers[v] for v in statistics.wide}
    assert {v.aval.dtype.name for v in statistics.wide} == {"float32"}
    assert statistics.wide.isdisjoint(costs.nbytes)
    assert {row in costs.nbytes for row in statistics.sums.values()} == {False}
    halves = [v for v in costs.nbytes if v.aval.str_short() == f"bfloat16[{ROWS},{ROWS}]"]
    assert {makers[v] for v in halves} >= {"dot_general", "convert_element_type"}  # scores and weights


def test_rows_as_wide_as_their_scores_may_be_kept():
    assert not find_row_statistics(trace(softmax)).wide
    both = find_row_statistics(trace(lambda scores: in_float32(scores) + softmax(scores)))
    assert both.wide and any(row not in both.wide for row in both.sums.values())


def of_two_columns(scores):
    left, right = (scores[:, i].astype(jnp.bfloat16) for i in range(2))
    return in_rows(left[:, None] + right[None, :])


def of_part(scores):
    return in_rows(jnp.concatenate([scores, scores], 1)[:, :ROWS])


def in_rows(scores):
    return jax.nn.softmax(scores.astype(jnp.float32), axis=-1).astype(jnp.bfloat16)


@pytest.mark.parametrize("weigh", [of_two_columns, of_part])
def test_weights_of_scores_that_are_no_product_may_be_kept(weigh):
    pair = trace(weigh)
    assert find_row_statistics(pair).reductions
    weights = [v for v in Costs.of(pair, H200).nbytes if v.aval.str_short() == f"bfloat16[{ROWS},{ROWS}]"]
    assert weights and find_row_statistics(pair).wide.isdisjoint(weights)


def test_a_named_row_may_be_kept_whatever_its_width():
    def weigh(scores):
        narrow = scores.astype(jnp.bfloat16)
        return jaxoff.name(softmax((narrow @ narrow).astype(jnp.float32)), "row")

    pair = trace(weigh)
    named = {v for v, name in pair.names.items() if "row" in name}
    assert {v.aval.dtype.name for v in named} == {"float32"}
    wide = find_row_statistics(pair).wide
    assert wide and named.isdisjoint(wide)


def test_a_norms_rows_are_made_in_their_readers():
    """XLA computes a mean in a kernel of its own, and its readers compute their rows again."""
    pair = trace(lambda scores: jnp.square(scores - scores.mean(-1, keepdims=True)))
    assert reductions_of(pair) == ["reduce_sum"] and not find_row_statistics(pair).differences


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("loop", ["scan", "python"])
def test_a_mask_of_random_numbers_may_be_kept_and_is_the_same_where_it_is_drawn_again(loop):
    def layer(x, w):
        mask = jax.random.bernoulli(w["key"], 0.8, (ROWS, ROWS))
        return attend(x, w, lambda scores: jnp.where(mask, softmax(scores), 0.0))

    def step(ws, x):
        def loss(arrays):
            both = arrays | {"key": ws["key"]}
            if loop == "scan":
                return lax.scan(lambda x, w: (layer(x, w), None), x, both)[0].sum()
            rows = (jax.tree.map(lambda leaf, i=i: leaf[i], both) for i in range(LAYERS))
            return functools.reduce(layer, rows, x).sum()

        return jax.grad(loss)({name: ws[name] for name in "qk"})

    args = weights() | {"key": jax.random.split(jax.random.key(1), LAYERS)}, inputs(ROWS, WIDTH)
    pairs = list_joint_graphs(jax.make_jaxpr(step)(*args))
    for pair in pairs:
        masks = [v for eqn in pair.eqns for v in eqn.outvars if v.aval.str_short() == f"bool[{ROWS},{ROWS}]"]
        assert masks and Costs.of(pair, H200).nbytes.keys() >= set(masks)
    want = jax.jit(step)(*args)
    for device_bytes in ("1GB", "60kB"):
        within = jaxoff.jit(step, device_bytes=device_bytes)
        try:
            got = within(*args)
        except jaxoff.BudgetError as error:
            within = jaxoff.jit(step, device_bytes=error.smallest_bytes)
            got = within(*args)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            # Sums round otherwise by CPU, up to 1e-4; with another mask gradients are five times as large.
            assert jnp.abs(a - b).max() < 1e-3 * jnp.abs(b).max()


def test_a_layer_may_pass_on_a_number():
    """A carried scalar that is the same after each layer is a literal among the layer's results."""

    def loss(ws, x):
        def layer(carry, w):
            return (jnp.tanh(carry[0] @ w["q"]) + carry[0], 0.0), None

        return lax.scan(layer, (x, 0.0), ws)[0][0].sum()

    (pair,) = list_joint_graphs(jax.make_jaxpr(jax.grad(loss))(weights(), inputs(ROWS, WIDTH)))
    assert any(not isinstance(v, Var) for v in pair.results)
    assert not find_row_statistics(pair).reductions
