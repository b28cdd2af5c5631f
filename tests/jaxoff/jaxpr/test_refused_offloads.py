"""Offloads out of two levels of control flow are saved; others stay as they are."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxoff
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.refused_offloads import save_refused
from jaxoff._jaxpr.saved_twin import build_saved_twin

W, X = jnp.ones((3, 8, 8)), jnp.ones((4, 8))


def layer(x, w):
    x = jaxoff.name(x, "outer")

    def inner(x, _):
        return x + jnp.sin(jaxoff.name(jnp.tanh(x @ w), "inner")), None

    return lax.scan(inner, x, None, length=2)[0] * jnp.cos(x), None


def trace(offload):
    body = jax.checkpoint(layer, policy=jaxoff.policy(offload=offload))
    return jax.make_jaxpr(jax.grad(lambda w, x: lax.scan(body, x, w)[0].sum()))(W, X)


def list_host_shapes(jaxpr):
    for eqn in jaxpr.eqns:
        yield from (v.aval.shape for v in eqn.outvars if compat.is_host(v.aval))
        for inner in compat.sub_jaxprs(eqn):
            yield from list_host_shapes(inner)


def list_passed_rows(jaxpr):
    """The results of scans that are rows which the scan takes, as they are, and that are read."""
    read = {v for eqn in jaxpr.eqns for v in eqn.invars if isinstance(v, compat.Var)} | set(jaxpr.outvars)
    for eqn in jaxpr.eqns:
        if (layout := compat.scan_in(eqn)) is not None:
            body = compat.as_open(eqn.params["jaxpr"])
            xs = body.invars[layout.num_consts + layout.num_carry :]
            ys = zip(body.outvars[layout.num_carry :], eqn.outvars[layout.num_carry :], strict=True)
            yield from (out for y, out in ys if y in xs and out in read)
        for inner in compat.sub_jaxprs(eqn):
            yield from list_passed_rows(inner)


@pytest.mark.parametrize("offload", [["inner"], ["outer", "inner"]])
def test_values_of_an_inner_loop_are_saved_and_results_stay(offload):
    closed = trace(offload)
    found, refused = save_refused(closed, one_device=True)
    assert len(refused) == 1
    shapes = set(list_host_shapes(found.jaxpr))
    assert shapes == ({(3, 4, 8), (4, 8)} if "outer" in offload else set())
    for a, b in zip(compat.jaxpr_as_fun(closed)(W, X), compat.jaxpr_as_fun(found)(W, X), strict=True):
        assert jnp.array_equal(a, b)


def test_values_of_an_outer_loop_stay_on_the_host():
    closed = trace(["outer"])
    found, refused = save_refused(closed, one_device=True)
    assert not refused
    assert found is closed


OFFLOAD_OUTER = jaxoff.policy(offload=["outer"])


def simple(x, w):
    return jnp.tanh(jaxoff.name(x @ w, "outer")), None


def loss(w, x):
    return lax.scan(jax.checkpoint(simple, policy=OFFLOAD_OUTER), x, w)[0].sum()


CALLED_TWICE = {
    "condition": lambda w, x, g: lax.cond(g.sum() > 0, lambda g: jax.grad(loss)(w + g, x), lambda g: g, g),
    "scan": lambda w, x, g: lax.scan(lambda g, x: (g + jax.grad(loss)(w, x), None), g, x[None])[0],
}


@pytest.mark.parametrize("second", CALLED_TWICE)
def test_a_loss_differentiated_twice_keeps_its_offloads(second):
    """JAX traces the backward pass once for both, at different levels of control flow."""
    closed = jax.make_jaxpr(lambda w, x: CALLED_TWICE[second](w, x, jax.grad(loss)(w, x)))(W, X)
    found, refused = save_refused(closed, one_device=True)
    assert not refused
    assert found is closed


def test_of_a_loss_differentiated_twice_only_the_refused_offload_is_saved():
    """The forward pass of the second is in a loop, and its backward pass behind the loop."""

    def later(w, x):
        def step(total, x):
            return total + loss(w, x), None

        return lax.scan(step, 0.0, x[None])[0]

    closed = jax.make_jaxpr(lambda w, x: jax.tree.map(jnp.add, jax.grad(loss)(w, x), jax.grad(later)(w, x)))(
        W, X
    )
    found, refused = save_refused(closed, one_device=True)
    assert len(refused) == 1
    assert set(list_host_shapes(found.jaxpr)) == {(3, 4, 8), (4, 8)}
    assert len([*list_host_shapes(found.jaxpr)]) < len([*list_host_shapes(closed.jaxpr)])
    for a, b in zip(compat.jaxpr_as_fun(closed)(W, X), compat.jaxpr_as_fun(found)(W, X), strict=True):
        assert jnp.array_equal(a, b)


def test_values_of_an_inner_loop_are_found_in_a_shard_map():
    body = jax.checkpoint(layer, policy=jaxoff.policy(offload=["outer", "inner"]))
    grads = jax.grad(lambda w, x: lax.scan(body, x, w)[0].sum())
    mesh = jax.make_mesh((1,), ("data",), (AxisType.Auto,), devices=jax.devices()[:1])
    mapped = jax.shard_map(grads, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)
    found, refused = save_refused(jax.make_jaxpr(mapped)(W, X), one_device=True)
    assert len(refused) == 1
    assert set(list_host_shapes(found.jaxpr)) == {(3, 4, 8), (4, 8)}


def checkpointed_loop(w, x):
    """A scan in one `jax.checkpoint`: the backward pass reloads all of its rows in a scan of their own."""

    def step(x, w):
        act = jaxoff.name(x @ w, "act")
        return act * jnp.sin(act), None

    def run(w, x):
        return lax.scan(step, x, w)[0]

    return jax.checkpoint(run, policy=jaxoff.policy(offload=["act"]), prevent_cse=False)(w, x)


def loop_of_loops(w, x):
    return lax.scan(lambda x, w: (checkpointed_loop(w, x), None), x, w[None])[0]


def without_refused(closed):
    return save_refused(closed, one_device=True)[0]


@pytest.mark.parametrize(
    ("run", "move"),
    [(loop_of_loops, without_refused), (checkpointed_loop, build_saved_twin)],
    ids=["refused", "twin"],
)
def test_stacks_without_copies_are_read_where_a_scan_returned_their_rows(run, move):
    w = W * jnp.linspace(0.1, 0.2, 8)
    closed = jax.make_jaxpr(jax.grad(lambda w, x: run(w, x).sum()))(w, X)
    found = move(closed)
    assert "<host>" not in str(found)
    assert not [*list_passed_rows(found.jaxpr)]
    for a, b in zip(compat.jaxpr_as_fun(closed)(w, X), compat.jaxpr_as_fun(found)(w, X), strict=True):
        assert jnp.array_equal(a, b)


def named(x, w):
    return x + jnp.sin(jaxoff.name(jnp.tanh(x @ w), "inner")) @ w


def named_otherwise(x, w):
    return x * jnp.cos(jaxoff.name(x @ w, "inner"))


def named_at_another_size(x, w):
    return x + jnp.sin(jaxoff.name(x @ w[:, :4], "inner")) @ w[:4]


def named_in_a_loop(x, w):
    return lax.scan(lambda x, _: (named(x, w), None), x, None, length=2)[0]


def unnamed(x, w):
    return x @ w


def either(*branches):
    def choose(x, w):
        return lax.switch(jnp.int32(x.sum()), branches, x, w)

    return choose


def over_layers(layer, w, x):
    layer = jax.checkpoint(layer, policy=jaxoff.policy(offload=["inner"]))
    for row in w:
        x = layer(x, row)
    return x.sum()


def scan_over_layers(layer, w, x):
    layer = jax.checkpoint(layer, policy=jaxoff.policy(offload=["inner"]))
    return lax.scan(lambda x, w: (layer(x, w), None), x, w)[0].sum()


def scan_over_steps(layer, w, x):
    return lax.scan(lambda total, x: (total + over_layers(layer, w, x), None), 0.0, x[None])[0]


def steps_with_gradients(layer, w, x):
    def step(w, x):
        return w - jax.grad(over_layers, argnums=1)(layer, w, x), None

    return lax.scan(step, w, x[None])[0].sum()


# Whether XLA's GPU compiler compiles the offloads: tests/aot/test_refused.py, and jax.jit with each of them.
CONDITIONS = [
    ("every branch", over_layers, either(named, named_otherwise, named), True),
    ("in a call", over_layers, either(jax.jit(named), jax.jit(named_otherwise)), True),
    ("nested", over_layers, either(named, either(named_otherwise, named)), True),
    ("of loops", over_layers, either(named_in_a_loop, named_in_a_loop), True),
    ("a branch without", over_layers, either(named, named_otherwise, unnamed), False),
    ("a nested branch without", over_layers, either(named, either(named_otherwise, unnamed)), False),
    ("other sizes", over_layers, either(named, named_at_another_size), False),
    ("of a loop", over_layers, either(named_in_a_loop, unnamed), False),
    ("in a loop", scan_over_layers, either(named, named_otherwise), False),
    ("out of a loop over steps", scan_over_steps, either(named, named_otherwise), False),
]


@pytest.mark.parametrize(("name", "run", "layer", "compiles"), CONDITIONS)
def test_values_of_a_condition_are_saved_where_xla_refuses_them(name, run, layer, compiles):
    closed = jax.make_jaxpr(jax.grad(functools.partial(run, layer)))(W, X)
    found, refused = save_refused(closed, one_device=True)
    assert (found is closed) == compiles
    assert bool(refused) == ("<host>" not in str(found)) == (not compiles)


def test_values_of_a_condition_within_a_step_of_a_loop_stay_on_the_host():
    closed = jax.make_jaxpr(functools.partial(steps_with_gradients, either(named, named_otherwise)))(W, X)
    assert save_refused(closed, one_device=True)[0] is closed


def test_of_a_condition_only_the_value_that_a_branch_lacks_is_saved():
    def twice(x, w):
        return jnp.sin(jaxoff.name(named(x, w)[:, :4], "inner")) @ w[:4]

    closed = jax.make_jaxpr(jax.grad(functools.partial(over_layers, either(named, twice))))(W, X)
    found, refused = save_refused(closed, one_device=True)
    assert len(refused) == len(W)
    assert set(list_host_shapes(closed.jaxpr)) == {(4, 8), (4, 4), ()}
    assert set(list_host_shapes(found.jaxpr)) == {(4, 8)}


@pytest.mark.parametrize("manual", [True, False])
def test_values_of_a_condition_stay_on_the_host_where_the_compiler_does_not_divide_them(manual):
    grads = jax.grad(functools.partial(over_layers, either(named, named_otherwise)))
    mesh = jax.make_mesh((2,), ("data",), (AxisType.Auto,), devices=jax.devices()[:2])
    specs = {"in_specs": (P(), P("data")), "out_specs": P(), "check_vma": False}
    closed = jax.make_jaxpr(jax.shard_map(grads, mesh=mesh, **specs) if manual else grads)(W, X)
    found, refused = save_refused(closed, one_device=False)
    assert (found is closed) == manual == (not refused)
