import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxoff._jaxpr.divided_products import divide_products
from jaxoff._jaxpr.inline import inline_program


def make_mesh(axis_type):
    return jax.make_mesh((2,), ("rows",), (axis_type,), devices=jax.devices()[:2])


def gather(w):
    return jax.sharding.reshard(w.astype(jnp.bfloat16), P(None, None))


def gradient(w, x):
    """The gradient of a gathered weight: product, transpose, `reshard`, cast."""
    return jax.grad(lambda w: (x @ gather(w)).astype(jnp.float32).sum())(w)


def divided(fun, *args):
    """The program of `fun`, its products divided."""
    closed = jax.make_jaxpr(fun)(*args)
    jaxpr = inline_program(closed.jaxpr)
    return closed.replace(jaxpr=jaxpr.replace(eqns=divide_products(jaxpr.eqns, jaxpr.outvars)))


def arguments(mesh):
    w = jax.random.normal(jax.random.key(0), (8, 16))
    x = jax.random.normal(jax.random.key(1), (4, 8)).astype(jnp.bfloat16)
    return jax.device_put((w, x), NamedSharding(mesh, P("rows")))


def products(closed):
    return [eqn.outvars[0].aval.sharding.spec for eqn in closed.eqns if eqn.primitive.name == "dot_general"]


def test_the_product_for_a_gathered_weight_is_divided_like_the_weight():
    mesh = make_mesh(AxisType.Explicit)
    with jax.set_mesh(mesh):
        args = arguments(mesh)
        closed = divided(gradient, *args)
        found = jax.jit(jax.extend.core.jaxpr_as_fun(closed))(*args)[0]
        wanted = jax.jit(gradient)(*args)
    assert products(closed) == [P("rows", None), P(None, "rows")]  # the layer's, and the gradient's
    assert found.sharding == wanted.sharding
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("reader", ["result", "product"])
def test_a_product_with_a_reader_of_the_whole_stays_whole(reader):
    mesh = make_mesh(AxisType.Explicit)

    def fun(x, y):
        sums = jax.lax.dot_general(x, y, (((0,), (0,)), ((), ())), out_sharding=NamedSharding(mesh, P()))
        return jax.sharding.reshard(sums, P("rows")), sums if reader == "result" else sums @ sums

    with jax.set_mesh(mesh):
        args = jax.device_put((jnp.ones((4, 8)), jnp.ones((4, 8))), NamedSharding(mesh, P("rows")))
        assert products(divided(fun, *args))[0] == P(None, None)


def test_a_division_by_the_compiler_is_left_to_the_compiler():
    mesh = make_mesh(AxisType.Auto)

    def fun(x, y):
        return jax.lax.with_sharding_constraint(x.T @ y, NamedSharding(mesh, P("rows")))

    args = jnp.ones((4, 8)), jnp.ones((4, 6))
    before = inline_program(jax.make_jaxpr(fun)(*args).jaxpr)
    after = divide_products(before.eqns, before.outvars)
    assert [eqn.primitive for eqn in after] == [eqn.primitive for eqn in before.eqns]
