"""A `jax.shard_map` split into one for each of its equations, and joined again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxoff._budget.placements import LayeredProgram
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.dataflow import variables
from jaxoff._jaxpr.merged_maps import merge_shard_maps
from jaxoff._jaxpr.primitives import holds, is_shard_map
from jaxoff._jaxpr.split_maps import look_inside, split_shard_maps

ROWS, WIDTH = 16, 8
DIVIDED = (P("data"), P(None, "model"), P("model"))


@pytest.fixture(params=[AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def mesh(request):
    if jax.device_count() < 4:
        pytest.skip(f"needs 4 devices, jax has {jax.device_count()}")
    types = (request.param,) * 2
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=types, devices=jax.devices()[:4])


def mlp(x, up, down):
    hidden = jax.ad_checkpoint.checkpoint_name(x @ up, "up")
    return jax.lax.psum(jax.nn.gelu(hidden) @ down, "model")


def scaled_by_scalars(x, up, down):
    """Scalars that differ between devices pass from equation to equation."""
    here = jax.lax.axis_index("data").astype(jnp.float32)
    largest = jnp.max(jnp.abs(x))
    return jax.lax.psum(jnp.sin(x @ up / (1 + largest)) @ down * (1 + here), "model")


def gathered(x, up, down):
    wide = jax.lax.all_gather(x, "data", axis=0, tiled=True)
    part = jax.lax.psum_scatter(jnp.tanh(wide @ up) @ down, "data", scatter_dimension=0, tiled=True)
    return jax.lax.psum(part, "model")


def exchanged(x, up, down):
    sent = jax.lax.all_to_all(x.reshape(2, -1, WIDTH), "data", 0, 0)
    done = jnp.sin(sent @ up) @ down
    return jax.lax.psum(jax.lax.all_to_all(done, "data", 0, 0).reshape(x.shape), "model")


def turned(x, up, down):
    """A loop with an exchange in each iteration."""

    def step(i, state):
        x, total = state
        return jax.lax.ppermute(x, "data", [(0, 1), (1, 0)]), total + jnp.cos(x @ up) @ down

    zeros = jax.lax.pcast(jnp.zeros_like(x), "model", to="varying")
    x = jax.lax.pcast(x, "model", to="varying")
    return jax.lax.psum(jax.lax.fori_loop(0, 2, step, (x, zeros))[1], "model")


def named(x, up, down):
    """Names of a view of an argument, of an argument, and of a scalar that differs between devices."""
    first = jax.ad_checkpoint.checkpoint_name(x.reshape(len(x), 2, -1), "first").reshape(x.shape)
    mean = jax.ad_checkpoint.checkpoint_name(jnp.mean(first @ up), "mean")
    weights = jax.ad_checkpoint.checkpoint_name(up, "weights")
    return jax.lax.psum(jnp.tanh(first @ weights - mean) @ down, "model")


def dropped(x, up, down):
    """Random numbers of a key that differs between devices."""
    key = jax.random.fold_in(jax.random.key(0), jax.lax.axis_index("data"))
    kept = jax.random.bernoulli(key, 0.5, x.shape)
    return jax.lax.psum(jnp.where(kept, jnp.sin(x), 0) @ up @ down, "model")


def in_parts(x, up, down):
    """A loop without a carry over parts of the rows, which are a view of an argument."""
    parts = jax.lax.map(lambda rows: jnp.tanh(rows @ up) @ down, x.reshape(4, -1, WIDTH))
    return jax.lax.psum(parts.reshape(x.shape), "model")


def counted(x, up, down):
    """A loop whose carry, rows and results are scalars that differ between devices, among others."""

    def step(carry, row):
        total, x = carry
        x = jnp.tanh(x @ up / (1 + total)) @ down * row
        return (total + jnp.mean(x**2), x), jnp.max(x)

    scales = 1 / (2 + jnp.arange(3.0) + jax.lax.axis_index("model"))
    start = jax.lax.pcast((jnp.float32(0.0), x), "model", to="varying")
    start = jax.lax.pcast(start[0], "data", to="varying"), start[1]
    (total, x), largest = jax.lax.scan(step, start, jax.lax.pcast(scales, "data", to="varying"))
    return jax.lax.psum(x * total + largest.sum(), "model")


def turned_back(x, up, down):
    """A loop inside of a loop, from the last row to the first."""

    def run(x, row):
        x, _ = jax.lax.scan(lambda x, _: (jnp.sin(x @ up @ down), None), x, None, length=2, unroll=2)
        return x, row * x

    x = jax.lax.pcast(x, "model", to="varying")
    x, rows = jax.lax.scan(run, x, jnp.stack([x, 2 * x]), reverse=True)
    return jax.lax.psum(x + rows.sum(0), "model")


LOOPS = [turned, in_parts, counted, turned_back]
BODIES = [mlp, scaled_by_scalars, gathered, exchanged, named, dropped, *LOOPS]


def trace(mesh, body, *, check_vma=True):
    inner = jax.shard_map(body, mesh=mesh, in_specs=DIVIDED, out_specs=P("data"), check_vma=check_vma)

    def loss(weights, x):
        def layer(x, w):
            return x + inner(jnp.sin(x), *w), None

        return jnp.sum(jax.lax.scan(layer, x, weights)[0] ** 2)

    keys = jax.random.split(jax.random.key(1), 3)
    shapes = {
        P("data"): (ROWS, WIDTH),
        P(None, None, "model"): (3, WIDTH, 32),
        P(None, "model"): (3, 32, WIDTH),
    }
    x, *weights = (
        jax.device_put(jax.random.normal(key, shape), NamedSharding(mesh, spec))
        for key, (spec, shape) in zip(keys, shapes.items(), strict=True)
    )
    with jax.set_mesh(mesh):
        return jax.make_jaxpr(jax.value_and_grad(loss))(weights, x), (*weights, x)


def list_maps(program):
    """The equations of a program and of those within, which are `jax.shard_map`s."""
    for eqn in program.eqns:
        if is_shard_map(eqn):
            yield eqn
        else:
            for inner in compat.sub_jaxprs(eqn):
                yield from list_maps(inner)


@pytest.mark.some_cases(5)
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("body", BODIES)
def test_split_and_joined_programs_give_the_same_results(mesh, body, check_vma):
    closed, args = trace(mesh, body, check_vma=check_vma)
    split = split_shard_maps(closed, lambda _: False)
    joined = merge_shard_maps(split)
    assert len([*list_maps(split.jaxpr)]) > len([*list_maps(closed.jaxpr)])
    assert len([*list_maps(joined.jaxpr)]) < len([*list_maps(split.jaxpr)])
    with jax.set_mesh(mesh):
        want, *others = (jax.jit(compat.jaxpr_as_fun(p))(*args) for p in (closed, split, joined))
    for got in others:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, want)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("body", LOOPS)
def test_loops_are_outside_in_both_passes(mesh, body, check_vma):
    """The backward loop reads the stacks of the forward loop, with residuals of their own placements."""
    closed, _ = trace(mesh, body, check_vma=check_vma)
    split = split_shard_maps(closed, lambda _: False)
    assert not any(holds(eqn.params["jaxpr"], compat.scan_in) for eqn in list_maps(split.jaxpr))
    (pair,) = LayeredProgram(split).list_joint_graphs()
    (inner,) = pair.nested
    stacks = [v for v in inner.forward.outvars if v in inner.residuals and v.aval.ndim > 1]
    assert stacks
    others = [v for eqn in pair.rest if compat.scan_in(eqn) is None for v in variables(eqn)]
    assert inner.residuals.isdisjoint(others)


def test_each_part_is_an_equation_of_the_layer(mesh):
    closed, _ = trace(mesh, mlp)
    split = split_shard_maps(closed, lambda _: False)
    forward, _ = (eqn for eqn in split.jaxpr.eqns if compat.scan_in(eqn))
    parts = [*list_maps(compat.as_open(forward.params["jaxpr"]))]
    shown = [look_inside(eqn) for eqn in parts]
    products = [eqn for eqn in shown if eqn.primitive.name == "dot_general"]
    assert [eqn.outvars[0].aval.shape for eqn in products] == [(2 * ROWS, 32 // 2), (2 * ROWS, WIDTH)]
    assert not any(is_shard_map(eqn) for eqn in shown)
    made = {v: eqn for part, eqn in zip(parts, shown, strict=True) for v in part.outvars}
    assert all(made[v].outvars == part.outvars for part in parts for v in part.outvars)


def test_names_are_outside(mesh):
    closed, _ = trace(mesh, mlp)

    def list_names(program):
        for eqn in program.eqns:
            yield compat.name_in(eqn)
            for inner in () if is_shard_map(eqn) else compat.sub_jaxprs(eqn):
                yield from list_names(inner)

    assert "up" not in list_names(closed.jaxpr)
    assert "up" in list_names(split_shard_maps(closed, lambda _: False).jaxpr)


def test_a_map_over_some_axes_is_split():
    """Over the other axis the compiler divides the parts."""
    mesh = jax.make_mesh(
        (2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4]
    )

    def loss(weights, x):
        def inner(x, up, down):
            return jax.nn.gelu(x @ up) @ down

        def layer(x, w):
            specs = {"in_specs": (P("data"), P(), P()), "out_specs": P("data")}
            inside = jax.shard_map(inner, mesh=mesh, axis_names={"data"}, **specs)
            return x + inside(x, *w), None

        return jnp.sum(jax.lax.scan(layer, x, weights)[0] ** 2)

    args = (jnp.ones((3, WIDTH, 32)), jnp.ones((3, 32, WIDTH))), jnp.ones((ROWS, WIDTH)) / 9
    closed = jax.make_jaxpr(jax.value_and_grad(loss))(*args)
    split = split_shard_maps(closed, lambda _: False)
    assert len([*list_maps(split.jaxpr)]) > len([*list_maps(closed.jaxpr)])
    want, got = (jax.jit(compat.jaxpr_as_fun(p))(*jax.tree.leaves(args)) for p in (closed, split))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, want)


def test_maps_with_layers_or_of_a_single_equation_stay(mesh):
    closed, _ = trace(mesh, mlp)
    assert split_shard_maps(closed, lambda _: True) is closed
    split = split_shard_maps(closed, lambda _: False)
    assert split_shard_maps(split, lambda _: False) is split
