"""Conditions whose branch is known, and unrolled loops with copies: the same values without them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxoff
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.settled import choose_known_branches, roll_loops_with_copies

W, X = jnp.ones((3, 8, 8)) * 0.1, jnp.ones((4, 8))
OFFLOAD = jaxoff.policy(offload=["act"])


def on_the_platform(x, w):
    return lax.platform_dependent(x, w, cpu=lambda x, w: jnp.tanh(x @ w), default=lambda x, w: jnp.sin(x @ w))


def by_a_constant(x, w):
    return lax.cond(True, lambda x, w: jnp.tanh(x @ w), lambda x, w: jnp.sin(x @ w), x, w)


def by_an_index(x, w):
    return lax.switch(jnp.int32(0), [lambda x, w: jnp.tanh(x @ w), lambda x, w: jnp.sin(x @ w)], x, w)


def by_a_value(x, w):
    return lax.cond(x[0, 0] > 0, lambda x, w: jnp.tanh(x @ w), lambda x, w: jnp.sin(x @ w), x, w)


def gradient(kernel, **options):
    layer = jax.checkpoint(lambda x, w: (jaxoff.name(kernel(x, w), "act") @ w.T, None), policy=OFFLOAD)
    return jax.grad(lambda w, x: lax.scan(layer, x, w, **options)[0].sum())


def list_primitives(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        for inner in compat.sub_jaxprs(eqn):
            yield from list_primitives(inner)


@pytest.mark.parametrize("kernel", [on_the_platform, by_a_constant, by_an_index])
def test_a_known_branch_takes_the_place_of_its_condition(kernel):
    closed = jax.make_jaxpr(gradient(kernel))(W, X)
    chosen = choose_known_branches(closed, "cpu")
    assert "cond" in list_primitives(closed.jaxpr)
    assert not {"cond", "platform_index", "sin"} & set(list_primitives(chosen.jaxpr))
    for a, b in zip(compat.jaxpr_as_fun(chosen)(W, X), jax.jit(gradient(kernel))(W, X)[None], strict=True):
        assert jnp.array_equal(a, b)


def test_the_branch_is_that_of_the_platform():
    closed = jax.make_jaxpr(gradient(on_the_platform))(W, X)
    assert "tanh" not in set(list_primitives(choose_known_branches(closed, "cuda").jaxpr))


def test_a_program_called_with_several_constants_has_several_branches():
    @jax.jit
    def call(index, x):
        return lax.switch(index, [jnp.sin, jnp.cos], x)

    closed = jax.make_jaxpr(lambda i, x: call(0, x) + call(1, x) + call(i, x))(1, 2.0)
    chosen = choose_known_branches(closed, "cpu")
    assert list(list_primitives(chosen.jaxpr)).count("cond") == 1
    assert jnp.array_equal(compat.jaxpr_as_fun(chosen)(1, 2.0)[0], compat.jaxpr_as_fun(closed)(1, 2.0)[0])


def test_a_branch_that_depends_on_values_stays():
    closed = jax.make_jaxpr(gradient(by_a_value))(W, X)
    assert choose_known_branches(closed, "cpu") is closed


@pytest.mark.parametrize("unroll", [2, 3, True])
def test_only_loops_with_copies_are_rolled(unroll):
    def unrolls(closed):
        return {layout.unroll for eqn in closed.jaxpr.eqns if (layout := compat.scan_in(eqn))}

    closed = jax.make_jaxpr(gradient(lambda x, w: jnp.tanh(x @ w), unroll=unroll))(W, X)
    assert unrolls(closed) == {3 if unroll is True else unroll}
    assert unrolls(roll_loops_with_copies(closed)) == {1}
    plain = jax.make_jaxpr(lambda w, x: lax.scan(lambda x, w: (x @ w, None), x, w, unroll=unroll)[0])(W, X)
    assert roll_loops_with_copies(plain) is plain


def test_a_linear_solve_keeps_its_programs():
    closed = jax.make_jaxpr(lambda w, x: jnp.linalg.solve(w + jnp.eye(8), x.T))(W[0], X)
    found = compat.rewrite_jaxprs(closed, lambda jaxpr: jaxpr.replace(eqns=list(jaxpr.eqns)))
    for a, b in zip(compat.jaxpr_as_fun(found)(W[0], X), compat.jaxpr_as_fun(closed)(W[0], X), strict=True):
        assert jnp.array_equal(a, b)


def test_control_flow_that_changes_a_mutable_array_stays():
    layer = jax.checkpoint(lambda x, w: (jaxoff.name(jnp.tanh(x @ w), "act") @ w.T, None), policy=OFFLOAD)

    def step(w, x):
        total = jax.new_ref(jnp.float32(0))

        def group(x, w):
            x, _ = lax.scan(layer, x, w)
            total[...] += lax.cond(True, lambda: total[...] + x.sum(), lambda: x.sum())
            return x, None

        def loss(w):
            return lax.scan(lambda x, w: lax.scan(layer, x, w), x, w)[0].sum()

        return jax.grad(loss)(w), lax.scan(group, x, w)[0], total[...]

    for a, b in zip(jaxoff.jit(step)(W[None], X), jax.jit(step)(W[None], X), strict=True):
        assert jnp.array_equal(a, b)
    closed = jax.make_jaxpr(step)(W[None], X)
    chosen = choose_known_branches(closed, "cuda")
    assert jnp.array_equal(compat.jaxpr_as_fun(chosen)(W[None], X)[2], jax.jit(step)(W[None], X)[2])


def test_the_index_of_a_branch_may_be_computed_from_constants():
    branches = [lambda x: x, lambda x: 2 * x, lambda x: 3 * x]

    def step(x, shift):
        index = lax.clamp(0, jnp.int32(7) - 6 * jnp.int32(2), 2) + lax.select(jnp.bool_(True), 1, 0)
        return lax.switch(index, branches, x) + lax.switch(jnp.clip(shift, 0, 2), branches, x)

    closed = jax.make_jaxpr(jax.jit(step))(3.0, 1)
    chosen = choose_known_branches(closed, "cpu")
    assert list(list_primitives(closed.jaxpr)).count("cond") == 2
    assert list(list_primitives(chosen.jaxpr)).count("cond") == 1
    assert compat.jaxpr_as_fun(chosen)(3.0, 2) == [6.0 + 9.0]


@pytest.mark.parametrize("call", [jax.pure_callback, jax.experimental.io_callback])
def test_nothing_of_a_program_runs_while_it_is_traced(call):
    calls = []

    def read(_):
        calls.append(None)
        return np.int32(3)

    def step(x):
        return x * call(read, jax.ShapeDtypeStruct((), jnp.int32), np.int32(0))

    chosen = choose_known_branches(jax.make_jaxpr(step)(2.0), "cpu")
    assert not calls
    assert compat.jaxpr_as_fun(chosen)(2.0) == [6.0]


def test_an_integer_beside_values_that_differ_by_device():
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("tp",))
    spec = jax.sharding.PartitionSpec

    def embed(table, tokens):
        local = tokens - lax.axis_index("tp") * len(table)
        mine = (local >= 0) & (local < len(table))
        rows = table[jnp.clip(local, 0, len(table) - 1)]
        return lax.psum(jnp.where(mine[:, None], rows, 0), "tp")

    step = jax.shard_map(embed, mesh=mesh, in_specs=(spec("tp"), spec()), out_specs=spec())
    table, tokens = jnp.arange(32.0).reshape(8, 4), jnp.array([0, 7, 3])
    closed = jax.make_jaxpr(step)(table, tokens)
    assert "pvary" in set(list_primitives(closed.jaxpr))
    chosen = choose_known_branches(closed, "cpu")
    (rows,) = jax.jit(compat.jaxpr_as_fun(chosen))(table, tokens)
    assert jnp.array_equal(rows, table[tokens])
