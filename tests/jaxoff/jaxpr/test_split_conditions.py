"""Conditions of layers split into one for each equation of their branches, and joined again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.inline import resolve
from jaxoff._jaxpr.joined_conditions import join_conditions
from jaxoff._jaxpr.primitives import is_condition
from jaxoff._jaxpr.split_conditions import list_branches, look_inside_part, split_conditions

LAYERS, ROWS, WIDTH = 5, 4, 8


def mlp(x, w):
    return x + jnp.tanh(x @ w["up"]) @ w["down"]


def gated(x, w):
    return x + (jax.nn.gelu(x @ w["up"]) * jnp.sin(x @ w["up"])) @ w["down"]


def named(x, w):
    return x + jnp.sin(jax.ad_checkpoint.checkpoint_name(x @ w["up"], "up")) @ w["down"]


def dropped(x, w):
    key = jax.random.fold_in(jax.random.key(0), x[0, 0].astype(jnp.int32))
    return x + jnp.where(jax.random.bernoulli(key, 0.5, x.shape), jnp.sin(x @ w["up"] @ w["down"]), 0)


def looped(x, w):
    return jnp.sin(jax.lax.fori_loop(0, 2, lambda _, x: jnp.sin(x @ w["up"]) @ w["down"], x))


def skipped(x, _):
    return x


def nested(x, w):
    return jax.lax.cond(x[0, 0] > 0, gated, mlp, x, w)


def zeroed(x, _):
    return jnp.zeros_like(x)


CASES = {
    "skipped": [skipped, mlp],
    "three kinds": [mlp, skipped, gated],
    "named": [named, mlp],
    "dropped": [dropped, zeroed],
    "looped": [skipped, looped],
    "nested": [mlp, nested],
}


def make_arguments(key=0):
    keys = jax.random.split(jax.random.key(key), 3)
    w = {
        "up": jax.random.normal(keys[0], (LAYERS, WIDTH, 2 * WIDTH)) / 3,
        "down": jax.random.normal(keys[1], (LAYERS, 2 * WIDTH, WIDTH)) / 3,
        "kind": jnp.arange(LAYERS) % 3,
    }
    return w, jax.random.normal(keys[2], (ROWS, WIDTH))


def make_loss(branches, wrap=lambda f: f):
    def loss(weights, kind, x):
        def layer(x, row):
            w, kind = row
            return wrap(lambda x, w: jax.lax.switch(kind, branches, x, w))(x, w), None

        return jnp.sum(jax.lax.scan(layer, x, (weights, kind))[0] ** 2)

    def call(w, x):
        return loss({"up": w["up"], "down": w["down"]}, w["kind"], x)

    return call


def gradients(loss):
    def step(w, x):
        kind = w["kind"]
        weights = {"up": w["up"], "down": w["down"]}
        return jax.value_and_grad(lambda weights: loss(weights | {"kind": kind}, x))(weights)

    return step


def list_conditions(program):
    """The conditions of a program and of those within."""
    for eqn in program.eqns:
        if is_condition(eqn):
            yield eqn
        for inner in compat.sub_jaxprs(eqn):
            yield from list_conditions(inner)


def check_types(closed):
    """Checks that operands and results of conditions have the types of those of each branch, weak or not."""

    def list_types(values):
        return [v.aval.update(weak_type=False) for v in values]

    for eqn in list_conditions(closed.jaxpr):
        for branch in map(compat.as_open, eqn.params["branches"]):
            assert list_types(branch.outvars) == list_types(eqn.outvars)
            assert list_types(branch.invars) == list_types(eqn.invars[1:])


def run(closed, args):
    leaves = jax.tree.leaves(args)
    return jax.jit(compat.jaxpr_as_fun(closed))(*leaves)


@pytest.mark.some_cases(4)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint], ids=["saved", "recomputed"])
@pytest.mark.parametrize("branches", CASES.values(), ids=CASES)
def test_split_and_joined_programs_give_the_same_results(branches, wrap):
    args = make_arguments()
    closed = jax.make_jaxpr(gradients(make_loss(branches, wrap)))(*args)
    split = split_conditions(closed, lambda _: False)
    joined = join_conditions(split)
    count = len([*list_conditions(closed.jaxpr)])
    assert len([*list_conditions(split.jaxpr)]) > count + 2
    # A name stands between the parts before and behind it.
    assert len([*list_conditions(joined.jaxpr)]) <= count + (named in branches)
    want, *others = (run(program, args) for program in (closed, split, joined))
    for got in others:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5), got, want)


@pytest.mark.parametrize("kinds", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_values_divided_over_devices_keep_their_types(kinds):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(kinds,), devices=jax.devices()[:2])
    w, x = make_arguments()
    with jax.set_mesh(mesh):
        x = jax.device_put(x, NamedSharding(mesh, P("data")))
        w = jax.device_put(w, NamedSharding(mesh, P()))
        closed = jax.make_jaxpr(gradients(make_loss(CASES["three kinds"])))(w, x)
        split = split_conditions(closed, lambda _: False)
        assert split is not closed
        want, *others = (run(program, (w, x)) for program in (closed, split, join_conditions(split)))
    check_types(split)
    for got in others:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5), got, want)


def test_types_in_a_checked_shard_map_are_kept():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def loss(w, x):
        varying = {name: jax.lax.pcast(w[name], "data", to="varying") for name in ("up", "down")}
        return jax.lax.pmean(make_loss(CASES["three kinds"])(w | varying, x), "data")

    inner = jax.shard_map(loss, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    args = make_arguments()
    split = split_conditions(jax.make_jaxpr(gradients(inner))(*args), lambda _: False)
    for program in (split, join_conditions(split)):
        check_types(program)
    want = jax.jit(gradients(inner))(*args)
    got = run(join_conditions(split), args)
    for a, b in zip(got, jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5)


def test_conditions_with_collectives_in_a_shard_map_are_split():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def summed(x, w):
        return x + jax.lax.psum(jnp.sin(x @ w["up"]) @ w["down"], "data")

    inner = jax.shard_map(
        make_loss([skipped, summed]), mesh=mesh, in_specs=(P(), P()), out_specs=P(), check_vma=False
    )
    args = make_arguments()
    closed = jax.make_jaxpr(gradients(inner))(*args)
    split = split_conditions(closed, lambda _: False)
    assert split is not closed
    want, *others = (run(program, args) for program in (closed, split, join_conditions(split)))
    for got in others:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5), got, want)


def test_each_part_is_an_equation_of_the_layer():
    closed = jax.make_jaxpr(gradients(make_loss(CASES["skipped"])))(*make_arguments())
    split = split_conditions(closed, lambda _: False)
    forward, _ = (eqn for eqn in split.jaxpr.eqns if compat.scan_in(eqn))
    parts = [*list_conditions(compat.as_open(forward.params["jaxpr"]))]
    shown = {look_inside_part(eqn).primitive.name: eqn for eqn in parts}
    assert {"dot_general", "tanh", "add"} <= shown.keys()
    tanh = look_inside_part(shown["tanh"])
    assert tanh.outvars == shown["tanh"].outvars and tanh.invars == shown["tanh"].invars[1:]
    assert list_branches(shown["tanh"]) == [(shown["tanh"].invars[0], 1)]
    # An input of the layer that one branch alone keeps is no array of its own.
    assert len(forward.outvars) == len({*compat.as_open(forward.params["jaxpr"]).outvars})


def test_conditions_in_branches_are_split_and_joined_too():
    closed = jax.make_jaxpr(gradients(make_loss(CASES["nested"])))(*make_arguments())
    split = split_conditions(closed, lambda _: False)
    forward, _ = (eqn for eqn in split.jaxpr.eqns if compat.scan_in(eqn))
    body = compat.as_open(forward.params["jaxpr"])
    tanhs = [eqn for eqn in filter(is_condition, body.eqns) if look_inside_part(eqn).primitive.name == "tanh"]
    paths = [[branch for _, branch in list_branches(eqn)] for eqn in tanhs]
    assert sorted(paths) == [[0], [1, 0], [1, 1]]  # of the MLP, and of the two in the other branch
    joined = join_conditions(split)
    assert len(list(list_conditions(joined.jaxpr))) <= len(list(list_conditions(closed.jaxpr)))


def test_what_is_no_forward_pass_stays():
    def update(w, x):
        return jax.lax.cond(x[0, 0] > 0, lambda w: jax.tree.map(jnp.sin, w), lambda w: w, w["up"])

    for step in (update, make_loss(CASES["skipped"])):
        closed = jax.make_jaxpr(step)(*make_arguments())
        assert split_conditions(closed, lambda _: False) is closed
    closed = jax.make_jaxpr(gradients(make_loss(CASES["skipped"])))(*make_arguments())
    assert split_conditions(closed, lambda _: True) is closed
    split = split_conditions(closed, lambda _: False)
    again = split_conditions(split, lambda _: False)
    assert len([*list_conditions(again.jaxpr)]) == len([*list_conditions(split.jaxpr)])


def test_conditions_that_print_stay():
    def printed(x, w):
        jax.debug.print("{}", x[0, 0])
        return mlp(x, w)

    closed = jax.make_jaxpr(gradients(make_loss([skipped, printed])))(*make_arguments())
    assert split_conditions(closed, lambda _: False) is closed


def test_conditions_of_several_indices_and_values_between_stay_apart():
    def step(p, q, x):
        y = jax.lax.cond(p, jnp.sin, jnp.cos, x)
        z = jax.lax.cond(q, jnp.sin, jnp.cos, x)
        w = jax.lax.cond(p, jnp.tanh, jnp.exp, z)  # joins the first
        v = jax.lax.cond(p, jnp.tanh, jnp.exp, y * 2)  # reads what is made of the first
        return y + w + v

    args = True, False, jnp.arange(4.0)
    closed = jax.make_jaxpr(step)(*args)
    # JAX makes an index for each condition: those of the same operand are one here.
    first = {eqn.invars[0]: eqn.outvars[0] for eqn in reversed(closed.jaxpr.eqns) if not is_condition(eqn)}
    index = {eqn.outvars[0]: first[eqn.invars[0]] for eqn in closed.jaxpr.eqns if not is_condition(eqn)}
    eqns = [eqn.replace(invars=[resolve(index, v) for v in eqn.invars]) for eqn in closed.jaxpr.eqns]
    closed = compat.ClosedJaxpr(closed.jaxpr.replace(eqns=eqns), closed.consts)
    joined = join_conditions(closed)
    assert len([*list_conditions(closed.jaxpr)]) == 4
    assert len([*list_conditions(joined.jaxpr)]) == 3
    np.testing.assert_array_equal(run(joined, args)[0], run(closed, args)[0])
    assert join_conditions(joined) is joined
