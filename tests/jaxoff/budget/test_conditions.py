"""Budgets for layers with conditions: a switch between kinds of layers, and layers that are skipped."""

import jax
import jax.numpy as jnp
import pytest

from jaxoff._budget.estimated import find_estimated
from jaxoff._budget.fit import find_fitting
from jaxoff._budget.forms import NO_COPIES, Form
from jaxoff._budget.limits import Budget
from jaxoff._budget.memory import ESTIMATE_MARGIN, estimate_nbytes
from jaxoff._budget.placements import LayeredProgram
from jaxoff._device.kernel_time import program_ms
from jaxoff._device.profile import H200
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.primitives import is_condition
from tests.jaxoff.budget.checkpointed import check_fit
from tests.jaxoff.budget.layered import check_placed_whole

LAYERS, ROWS, WIDTH = 6, 512, 64
DOTS = jax.checkpoint_policies.dots_with_no_batch_dims_saveable


def mlp(x, w):
    return x + jax.nn.gelu(jnp.sin(x) @ w["up"]) @ w["down"]


def gated(x, w):
    wide = jnp.cos(x) @ w["up"]
    return x + (jnp.tanh(wide) * jax.nn.sigmoid(wide)) @ w["down"]


def skipped(x, _):
    return x


KINDS = {"kinds": [mlp, gated, skipped], "skipped": [skipped, mlp]}


ALL_FORMS = pytest.mark.parametrize(
    ("form", "kinds"),
    [
        ("loop", "kinds"),
        ("list", "skipped"),
        pytest.param("loop", "skipped", marks=pytest.mark.long),
        pytest.param("list", "kinds", marks=pytest.mark.long),
    ],
)


def make_step(form, kinds, layer=lambda f: f):
    @layer
    def run(x, w):
        return jax.lax.switch(w["kind"], KINDS[kinds], x, w)

    def loss(weights, kind, x):
        rows = weights | {"kind": kind}
        if form == "loop":
            x, _ = jax.lax.scan(lambda x, w: (run(x, w), None), x, rows)
        else:
            for i in range(len(kind)):
                x = run(x, jax.tree.map(lambda a, i=i: a[i], rows))
        return jnp.mean(x**2)

    def step(weights, kind, x):
        value, gradients = jax.value_and_grad(loss)(weights, kind, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value

    return step


def make_arguments(scale=1, layers=LAYERS):
    width, keys = scale * WIDTH, jax.random.split(jax.random.key(0), 3)
    weights = {
        "up": jax.random.normal(keys[0], (layers, width, 8 * width)) / width,
        "down": jax.random.normal(keys[1], (layers, 8 * width, width)) / width,
    }
    return weights, jnp.arange(layers) % 3, jax.random.normal(keys[2], (scale * ROWS, width))


@ALL_FORMS
def test_what_a_checkpoint_of_each_layer_takes_suffices(form, kinds):
    check_fit(lambda wrap: make_step(form, kinds, wrap), make_arguments(layers=4), 1.02)


@ALL_FORMS
def test_no_slower_than_kept_products_in_the_memory_that_they_take(form, kinds):
    args = jax.eval_shape(lambda: make_arguments(16))
    closed = jax.make_jaxpr(make_step(form, kinds))(*args)
    kept = jax.make_jaxpr(make_step(form, kinds, lambda f: jax.checkpoint(f, policy=DOTS)))(*args)
    donated = [False] * len(closed.in_avals)
    nbytes = estimate_nbytes(kept, donated)
    assert nbytes < 0.5 * estimate_nbytes(closed, donated)

    def estimate(program):
        return estimate_nbytes(program, donated), program

    found = find_fitting(closed, H200, Budget(1.02 * nbytes, NO_COPIES), donated, estimate)
    assert program_ms(found.program.jaxpr, H200) <= 1.01 * program_ms(kept.jaxpr, H200)
    assert all("test_conditions.py" in row.source for row in found.list_values())


def test_a_product_in_a_branch_is_kept_alone():
    """Of a branch's wide values the product is enough: the others are cheap to make again from it."""
    args = jax.eval_shape(lambda: make_arguments(16))
    closed = jax.make_jaxpr(make_step("list", "skipped"))(*args)
    wide = 16 * ROWS * 8 * 16 * WIDTH * 4
    budget = Budget(2 * LAYERS * wide / (1 - ESTIMATE_MARGIN), NO_COPIES)
    found = find_estimated(closed, H200, budget, [False] * len(closed.in_avals))
    rows = [row for row in found.list_values() if f"{16 * ROWS}, {8 * 16 * WIDTH}" in row.shape]
    assert {(row.value, row.placement) for row in rows} == {("dot_general", "save")}


@pytest.mark.parametrize("form", ["loop", "list"])
def test_the_parts_of_a_condition_are_joined(form):
    """One condition in a forward pass, and one in a backward pass, which makes values again."""
    closed = jax.make_jaxpr(make_step(form, "kinds"))(*jax.eval_shape(make_arguments))
    layers = 1 if form == "loop" else LAYERS
    form_of = Form.of(LayeredProgram.of(closed), (), H200, Budget(1e6, NO_COPIES))
    least_of = form_of.choose_least(NO_COPIES)
    assert least_of is not None
    assert count_conditions(form_of.layered.closed.jaxpr) > 10 * layers
    # The index of the first layer is computed before the backward pass, and there once more.
    assert 0 <= count_conditions(form_of.write(least_of[0]).jaxpr) - 2 * layers <= (form == "list")


def count_conditions(program):
    return sum(is_condition(eqn) + sum(map(count_conditions, compat.sub_jaxprs(eqn))) for eqn in program.eqns)


def test_a_condition_that_cannot_be_split_is_placed_whole(monkeypatch, caplog):
    closed = jax.make_jaxpr(make_step("loop", "kinds"))(*make_arguments())
    check_placed_whole(closed, "split_conditions", "a condition", monkeypatch, caplog)
