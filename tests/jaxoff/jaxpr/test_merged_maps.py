"""A `jax.shard_map` differentiated from outside: one with the pass that reads its residuals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoff
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import jaxpr_as_fun
from jaxoff._jaxpr.merged_maps import merge_shard_maps
from jaxoff._jaxpr.primitives import is_shard_map

DEVICES, LAYERS, WIDTH = 8, 3, 16
EQUAL = P()  # on all devices


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((DEVICES,), ("d",), axis_types=(AxisType.Auto,))


@pytest.fixture(scope="module")
def args():
    keys = jax.random.split(jax.random.key(0))
    shapes = (LAYERS, WIDTH, WIDTH), (DEVICES * DEVICES, WIDTH)
    return tuple(jax.random.normal(key, shape) / 4 for key, shape in zip(keys, shapes, strict=True))


def layer(x, w):
    return jnp.tanh(x @ lax.all_gather(w, "d", tiled=True)), None


def sum_and_count(ws, x):
    """A loss in parts: its sum over all devices, and how many numbers it counts."""
    x, _ = lax.scan(jax.checkpoint(layer, prevent_cse=False), x, ws)
    return lax.psum(jnp.sum(x**2), "d"), lax.psum(jnp.sum(x > 0), "d").astype(jnp.float32)


def map_over(mesh, fun=sum_and_count, out_specs=EQUAL):
    return jax.shard_map(fun, mesh=mesh, in_specs=(P(None, "d"), P("d")), out_specs=out_specs)


def mean(mapped, ws, x):
    total, count = mapped(ws, x)
    return total / count


def trace(loss, args):
    return jax.make_jaxpr(jax.value_and_grad(loss))(*args)


def count_maps(program):
    """The number of `jax.shard_map`s at all levels."""
    return sum(is_shard_map(eqn) + sum(map(count_maps, compat.sub_jaxprs(eqn))) for eqn in program.eqns)


def assert_same_numbers(program, other, args):
    for a, b in zip(*(jax.jit(jaxpr_as_fun(p))(*args) for p in (program, other)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


LOSSES = {
    "of sums": mean,
    "of a sum": lambda mapped, ws, x: 3 * mapped(ws, x)[0],
    "in a jit": lambda mapped, ws, x: mean(jax.jit(mapped), ws, x),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_forward_and_backward_pass_become_one(loss, mesh, args):
    closed = trace(functools.partial(LOSSES[loss], map_over(mesh)), args)
    merged = merge_shard_maps(closed)
    assert (count_maps(closed.jaxpr), count_maps(merged.jaxpr)) == (2, 1)
    assert_same_numbers(merged, closed, args)


def test_two_in_a_row_become_one(mesh, args):
    def half(ws, x):
        return lax.scan(layer, x, ws)[0]

    first = map_over(mesh, half, P("d"))
    closed = trace(lambda ws, x: mean(map_over(mesh), ws, first(ws, x)), args)
    merged = merge_shard_maps(closed)
    assert (count_maps(closed.jaxpr), count_maps(merged.jaxpr)) == (4, 1)
    assert_same_numbers(merged, closed, args)


def test_in_a_loop_over_batches(mesh, args):
    ws, x = args
    grad = jax.grad(functools.partial(mean, map_over(mesh)))

    def accumulate(ws, batches):
        return lax.scan(lambda total, x: (total + grad(ws, x), None), jnp.zeros_like(ws), batches)[0]

    batches = jnp.stack([x, 2 * x])
    closed = jax.make_jaxpr(accumulate)(ws, batches)
    merged = merge_shard_maps(closed)
    assert (count_maps(closed.jaxpr), count_maps(merged.jaxpr)) == (2, 1)
    assert_same_numbers(merged, closed, (ws, batches))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_scalars_of_the_step_go_inside(kind, args):
    mesh = jax.make_mesh((DEVICES,), ("d",), axis_types=(kind,))
    specs = P(None, "d"), P("d"), P()
    args = (*args, jnp.float32(3))
    args = tuple(jax.device_put(v, NamedSharding(mesh, spec)) for v, spec in zip(args, specs, strict=True))

    def scaled(ws, x, scale):
        total, count = map_over(mesh)(ws, x)
        return scale * total / (count + scale)

    with jax.set_mesh(mesh):
        closed = trace(scaled, args)
        merged = merge_shard_maps(closed)
        assert (count_maps(closed.jaxpr), count_maps(merged.jaxpr)) == (2, 1)
        assert_same_numbers(merged, closed, args)


def read_differently(mapped, ws, x):
    """The cotangent depends on an array outside that depends on the loss."""
    total, _ = mapped(ws, x)
    return total * jnp.sort(jnp.stack([total, total]))[0]


def test_what_an_array_lies_between_stays(mesh, args):
    closed = trace(functools.partial(read_differently, map_over(mesh)), args)
    assert merge_shard_maps(closed) is closed


def test_results_divided_otherwise_than_they_are_read_stay(mesh, args):
    def half(ws, x):
        return lax.all_gather(lax.scan(layer, x, ws)[0], "d", axis=1, tiled=True)[:, :WIDTH]

    def rest(x):
        return lax.psum(jnp.sum(x**2), "d")

    first = map_over(mesh, half, P(None, "d"))
    second = jax.shard_map(rest, mesh=mesh, in_specs=P("d"), out_specs=P())
    closed = jax.make_jaxpr(lambda ws, x: second(first(ws, x)))(*args)
    assert merge_shard_maps(closed) is closed


def test_what_prints_stays(mesh, args):
    def prints(ws, x):
        jax.debug.print("{}", x[0, 0])
        return sum_and_count(ws, x)

    closed = trace(functools.partial(mean, map_over(mesh, prints)), args)
    assert merge_shard_maps(closed) is closed


def test_a_program_without_one_is_the_same_object():
    closed = jax.make_jaxpr(jax.grad(lambda x: jnp.sin(x).sum()))(jnp.ones(3))
    assert merge_shard_maps(closed) is closed


@pytest.mark.parametrize("where", ["outside", "inside"])
def test_values_behind_collectives_are_placed(where, mesh, args):
    """Of a device's program, products of gathered weights are kept; the weights are gathered again."""
    fun = jax.value_and_grad(functools.partial(mean, map_over(mesh)))
    if where == "inside":
        specs = (P(), P(None, "d"))
        fun = map_over(mesh, jax.value_and_grad(functools.partial(mean, sum_and_count)), specs)
    step = jaxoff.jit(fun, device_bytes="1GB")
    for a, b in zip(step(*args), jax.jit(fun)(*args), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    kept = {v.shape for v in step.plan.values if v.placement == "save"}
    assert f"float32[{DEVICES}, {WIDTH}]" in kept
    assert f"float32[{WIDTH}, {WIDTH}]" not in kept  # of all devices
