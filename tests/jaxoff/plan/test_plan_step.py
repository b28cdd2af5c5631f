"""`jaxoff.plan` of whole train steps: their layers are those of the loss, the memory is the step's."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxoff
from jaxoff._plan.plan import Planner
from tests.jaxoff.plan.planned import DEVICE, LAYERS, W_NBYTES, X_NBYTES, arguments, layer, placed, scanned

NOTHING = jaxoff.policy()
WEIGHTS_NBYTES = LAYERS * 2 * W_NBYTES
CHOICES = [
    {},
    dict(x_in="save", act="save"),
    dict(x_in="offload", act="offload"),
    {"(dots)": "save"},
]


def one_after_the_other(policy):
    def loss(w, x):
        each = [jax.tree.map(lambda leaf, i=i: leaf[i], w) for i in range(LAYERS)]
        return jaxoff.layers(lambda w, x: layer(x, w)[0], x, each, policy=policy).sum()

    return loss


def loop(policy):
    return scanned(policy=policy)


def step_of(form, state=1, *, update=True):
    """A step with so many moments of each weight."""

    def step(w, moments, x, policy=NOTHING):
        value, (grads, dx) = jax.value_and_grad(form(policy), (0, 1))(w, x)
        moments = [jax.tree.map(lambda m, g: 0.9 * m + g, m, grads) for m in moments]
        if not update:
            return value, grads, dx
        scaled = jax.tree.map(lambda *leaves: sum(leaves), *moments)
        return jax.tree.map(lambda a, b: a - 0.1 * b, w, scaled), moments, value, dx

    return step, (arguments()[0], [arguments()[0]] * state, arguments()[1])


def planner(fun, args, **options):
    given = dict(resident_bytes=0, link=None, device=DEVICE, argnums=None, has_aux=False)
    return Planner.of(fun, args, {}, **(given | options))


@pytest.mark.parametrize("form", [loop, one_after_the_other])
@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_the_layers_of_a_step_are_those_of_its_loss(form, choice):
    step, args = step_of(form, update=False)
    whole = planner(jax.jit(step), args).model
    loss = planner(form(NOTHING), arguments()).model
    assert [kind.layer.backward for kind in whole.layers] == [kind.layer.backward for kind in loss.layers]
    found, expected = whole.cost(placed(choice)), loss.cost(placed(choice))
    state = WEIGHTS_NBYTES
    assert found.peak.nbytes - state == expected.peak.nbytes
    assert (found.peak.residuals, found.peak.working) == (expected.peak.residuals, expected.peak.working)
    assert found.host_nbytes == expected.host_nbytes
    assert found.times.recomputed == pytest.approx(expected.times.recomputed)
    assert found.times.total == pytest.approx(expected.times.total, rel=0.1)


@pytest.mark.parametrize("form", [loop, one_after_the_other])
def test_a_step_says_where_its_budget_goes(form):
    step, args = step_of(form, 2)
    given = jaxoff.jit(step, donate_argnums=(0, 1))
    found = jaxoff.plan(given, *args, device_bytes=1e9, device=DEVICE, fixed=dict(x_in="offload"))
    assert found.peak.arguments == 3 * WEIGHTS_NBYTES + X_NBYTES
    assert found.policy.offload == ("x_in",)
    with pytest.raises(jaxoff.BudgetError, match="the smallest budget is") as caught:
        jaxoff.plan(given, *args, device_bytes=1, device=DEVICE)
    assert (caught.value.smallest_bytes or 0) > 4 * WEIGHTS_NBYTES


def test_what_is_not_donated_is_there_twice():
    step, args = step_of(loop, 2)
    donated, kept = (
        planner(jax.jit(step, donate_argnums=which), args).model.cost(placed({})).peak
        for which in ((0, 1), ())
    )
    assert "backward pass" in donated.what
    assert kept.nbytes == 2 * 3 * WEIGHTS_NBYTES + 2 * X_NBYTES + 4
    half = planner(jax.jit(step, donate_argnums=1), args).model.cost(placed({})).peak.nbytes
    assert donated.nbytes <= half < kept.nbytes
    assert planner(step, args).model.cost(placed({})).peak == kept


def in_microbatches(number, policy=NOTHING, cast=False):
    def step(w, xs):
        def add(total, x):
            narrow = jax.tree.map(lambda a: a.astype(jnp.bfloat16), w) if cast else w
            grads = jax.grad(scanned(policy=policy))(narrow, x)
            return jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, grads), None

        total, _ = lax.scan(add, jax.tree.map(jnp.zeros_like, w), xs)
        return jax.tree.map(lambda a, g: a - 0.1 * g / number, w, total)

    w, x = arguments()
    return jax.jit(step, donate_argnums=0), (w, jax.ShapeDtypeStruct((number, *x.shape), x.dtype))


def test_microbatches_take_their_time_and_a_sum_of_gradients():
    choice = dict(x_in="offload")
    three, loss = planner(*in_microbatches(3)).model, planner(scanned(), arguments(), argnums=0).model
    (kind,) = three.layers
    assert (kind.runs, kind.iterations) == (3, 3 * LAYERS)
    found, expected = three.cost(placed(choice)), loss.cost(placed(choice))
    assert found.times.recomputed == pytest.approx(3 * expected.times.recomputed)
    # Each iteration of a loop hands a gradient on, though that of the rows is not asked for.
    assert kind.layer.backward_ms == loss.layers[0].layer.backward_ms
    assert found.times.slowed == pytest.approx(3 * expected.times.slowed)
    assert found.host_nbytes == expected.host_nbytes
    # The sum of gradients, and the rows of all microbatches beside those of one; no loss.
    assert found.peak.nbytes == expected.peak.nbytes + WEIGHTS_NBYTES + 3 * X_NBYTES - 4


def test_weights_of_another_type_are_there_whole():
    wide, narrow = (
        planner(*in_microbatches(2, cast=cast)).model.cost(placed(dict(x_in="save"))).peak
        for cast in (False, True)
    )
    # Narrow weights and narrow gradients of them, in place of wide gradients.
    assert narrow.alive - wide.alive == pytest.approx(0, abs=X_NBYTES)
    assert "backward pass" in narrow.what


def test_more_memory_is_never_slower():
    fun, args = in_microbatches(2)
    curve = jaxoff.frontier(fun, *args, device=DEVICE, points=5)
    times = [plan.step_ms for plan in curve.plans]
    assert len(times) > 1
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize(
    ("policy", "got"),
    [
        (jaxoff.policy(save=["act"]), r"jaxoff.policy\(save=\['act'\]\)"),
        (jaxoff.policy(offload=["act"]), r"jaxoff.policy\(offload=\['act'\]\)"),
        (jax.checkpoint_policies.dots_saveable, "(DotsSaveable|<function dots_saveable)"),
    ],
)
def test_a_policy_that_keeps_something_is_refused(policy, got):
    step, args = step_of(loop)
    with pytest.raises(ValueError, match=rf"which keeps nothing.* got layers under {got}.* as an argument"):
        planner(functools.partial(step, policy=policy), args)


def test_a_policy_of_jax_that_keeps_nothing_will_do():
    step, args = step_of(loop)
    names = planner(step, args).model.labels
    for policy in (None, jax.checkpoint_policies.nothing_saveable):
        assert planner(functools.partial(step, policy=policy), args).model.labels == names


def test_what_a_step_moves_itself_is_refused():
    def body(x, w):
        return layer(jaxoff.mark_offload(x), w)

    def step(w, x):
        return jax.grad(scanned(body))(w, x)

    with pytest.raises(ValueError, match=r"nothing on the host; got a value that jaxoff.mark_offload"):
        planner(step, arguments())


def test_layers_out_of_sight_are_refused():
    def step(w, x):
        return lax.cond(x.sum() > 0, jax.grad(scanned()), lambda w, x: w, w, x)

    with pytest.raises(ValueError, match="differentiates them only inside of cond"):
        planner(step, arguments())


def test_how_to_differentiate_is_for_a_loss():
    step, args = step_of(loop)
    for given in (dict(argnums=0), dict(has_aux=True)):
        with pytest.raises(ValueError, match="say how a loss is differentiated"):
            planner(lambda *args: (step(*args), 0), args, **given)
