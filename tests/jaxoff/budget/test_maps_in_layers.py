"""Budgets for steps that the compiler divides, with a `jax.shard_map` within each layer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoff
from jaxoff._budget.estimated import find_estimated
from jaxoff._budget.forms import NO_COPIES
from jaxoff._budget.joint_graph import Placements
from jaxoff._budget.limits import Budget
from jaxoff._budget.memory import ESTIMATE_MARGIN
from jaxoff._budget.placements import LayeredProgram
from jaxoff._device.flops import product_flops
from jaxoff._device.profile import H200
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.joined_conditions import join_conditions
from jaxoff._jaxpr.merged_maps import merge_shard_maps
from jaxoff._jaxpr.split_maps import look_inside
from jaxoff._runtime.program_memory import program_nbytes
from tests.jaxoff.budget.checkpointed import check_fit
from tests.jaxoff.budget.layered import check_placed_whole

DEVICES, LAYERS, ROWS, WIDTH, PARTS = 4, 3, 512, 64, 8


@pytest.fixture
def mesh():
    if jax.device_count() < DEVICES:
        pytest.skip(f"needs {DEVICES} devices, jax has {jax.device_count()}")
    devices = jax.devices()[:DEVICES]
    return jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,), devices=devices)


def mlp(x, up, down):
    return jax.nn.gelu(x @ up) @ down


def make_step(mesh, form, *, in_maps, layer=lambda f: f, inside=mlp):
    """A step with layers in a list or in a loop, each with an MLP in a `jax.shard_map` or without."""
    own = jax.shard_map(inside, mesh=mesh, in_specs=(P("data"), P(), P()), out_specs=P("data"))
    inner = own if in_maps else inside

    @layer
    def run(x, w):
        x = x + jnp.sin(x @ w["mix"])
        return x + inner(x, w["up"], w["down"])

    def loss(params, x):
        if form == "list":
            for w in params:
                x = run(x, w)
        else:
            x, _ = jax.lax.scan(lambda x, w: (run(x, w), None), x, params)
        return jnp.mean(x**2)

    def step(params, x):
        value, gradients = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients), value

    return step


def make_arguments(mesh, form):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"mix": (WIDTH, WIDTH), "up": (WIDTH, 8 * WIDTH), "down": (8 * WIDTH, WIDTH)}
    stacks = {
        name: jax.random.normal(key, (LAYERS, *shape)) / WIDTH
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    params = stacks if form == "loop" else [{k: w[i] for k, w in stacks.items()} for i in range(LAYERS)]
    x = jnp.sin(jnp.arange(ROWS * WIDTH, dtype=jnp.float32)).reshape(ROWS, WIDTH)
    return jax.device_put(params, NamedSharding(mesh, P())), jax.device_put(x, NamedSharding(mesh, P("data")))


def test_layers_are_outside_of_the_maps_in_them(mesh):
    """The compiler divides the layers' values, though each layer calls a `jax.shard_map`."""
    closed = jax.make_jaxpr(make_step(mesh, "loop", in_maps=True))(*make_arguments(mesh, "loop"))
    assert not LayeredProgram(closed).is_manual
    own = jax.shard_map(
        lambda params, x: jax.lax.pmean(make_step(mesh, "loop", in_maps=False)(params, x), "data"),
        mesh=mesh,
        in_specs=(P(), P("data")),
        out_specs=P(),
    )
    assert LayeredProgram(jax.make_jaxpr(own)(*make_arguments(mesh, "loop"))).is_manual


@pytest.mark.long  # the least, below, is what that takes
def test_what_a_checkpoint_of_each_layer_takes_suffices(mesh):
    args = make_arguments(mesh, "list")
    recomputed = jax.jit(make_step(mesh, "list", in_maps=True, layer=jax.checkpoint)).lower(*args).compile()
    written = jax.jit(make_step(mesh, "list", in_maps=True)).lower(*args).compile()
    assert 1.02 * program_nbytes(recomputed) < 0.9 * program_nbytes(written)
    check_fit(lambda wrap: make_step(mesh, "list", in_maps=True, layer=wrap), args, 1.02)


def test_the_least_is_what_a_checkpoint_of_each_layer_takes(mesh):
    """A forward `jax.shard_map` that is made again hands none of its results to the backward one."""
    args = make_arguments(mesh, "list")
    recomputed = jax.jit(make_step(mesh, "list", in_maps=True, layer=jax.checkpoint)).lower(*args).compile()
    with pytest.raises(jaxoff.BudgetError) as raised:
        jaxoff.jit(make_step(mesh, "list", in_maps=True), device_bytes=1e6, host_bytes=1).lower(*args)
    least = raised.value.smallest_bytes
    assert least is not None
    assert least <= 1.02 * program_nbytes(recomputed)


@pytest.mark.parametrize("form", ["list", "loop"])
def test_a_product_in_a_map_is_kept_alone(mesh, form):
    """Of the wide values in a layer's map one is enough: the others are cheap to make again from it."""
    wide = 32
    args = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct([wide * n if n >= WIDTH else n for n in x.shape], x.dtype),
        jax.eval_shape(lambda: make_arguments(mesh, form)),
    )
    closed = jax.make_jaxpr(make_step(mesh, form, in_maps=True))(*args)
    hidden_nbytes = wide * ROWS * 8 * wide * WIDTH * 4
    others = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(args)) + 6 * LAYERS * hidden_nbytes / 8
    budget = Budget((2 * others + 2 * LAYERS * hidden_nbytes) / DEVICES / (1 - ESTIMATE_MARGIN), NO_COPIES)
    found = find_estimated(closed, H200, budget, [False] * len(closed.in_avals), devices=DEVICES)
    rows = [row for row in found.list_values() if f"{wide * ROWS}, {8 * wide * WIDTH}" in row.shape]
    products = [row for row in rows if row.value.endswith("dot_general")]
    assert [(row.placement, row.count) for row in products] == [("save", LAYERS)]
    assert all("test_maps_in_layers.py" in row.source for row in found.list_values())


def in_parts(wrap, x, up, down):
    """The rows of a layer in parts, one after the other."""
    rows = x.reshape(PARTS, -1, WIDTH)
    return jax.lax.map(wrap(lambda rows: mlp(rows, up, down)), rows).reshape(x.shape)


def in_ticks(wrap, x, up, down):
    """A pipeline over the devices: the first takes a part of the rows at each tick, the last stores one."""
    rows, number = x.reshape(PARTS, -1, WIDTH), jax.lax.axis_index("data")

    def tick(carry, t):
        part, done = carry
        part = mlp(jnp.where(number == 0, rows[jnp.clip(t, 0, PARTS - 1)], part), up, down)
        stored = jax.lax.dynamic_update_index_in_dim(done, part, jnp.clip(t - DEVICES + 1, 0, PARTS - 1), 0)
        done = jnp.where((number == DEVICES - 1) & (t >= DEVICES - 1), stored, done)
        return (jax.lax.ppermute(part, "data", [(i, (i + 1) % DEVICES) for i in range(DEVICES)]), done), None

    ticks = jnp.arange(PARTS + DEVICES - 1)
    (_, done), _ = jax.lax.scan(wrap(tick), (jnp.zeros_like(rows[0]), jnp.zeros_like(rows)), ticks)
    return done.reshape(x.shape)


def in_branches(wrap, x, up, down):
    """Parts of the rows, each by one of three branches: by its number, and by that of the device."""
    rows, number = x.reshape(PARTS, -1, WIDTH), jax.lax.axis_index("data")

    def half(y):
        return jnp.concatenate([y[:4], mlp(y[4:], up, down)])

    def part(args):
        y, j = args

        def of_others(y):
            return jax.lax.cond((j - number) % 3 > 1, lambda y: jnp.sin(y @ up) @ down, half, y)

        return jax.lax.cond(j == 0, lambda y: mlp(y, up, down), of_others, y)

    return jax.lax.map(wrap(part), (rows, jnp.arange(PARTS))).reshape(x.shape)


@pytest.mark.parametrize(
    ("form", "inside"),
    [
        ("list", in_parts),
        ("loop", in_ticks),
        ("loop", in_branches),
        pytest.param("list", in_ticks, marks=pytest.mark.long),
        pytest.param("loop", in_parts, marks=pytest.mark.long),
    ],
)
def test_a_loop_in_a_map_is_placed_by_iteration(mesh, form, inside):
    """Each layer takes its rows in parts; by hand, a checkpoint of the layer and another of each part."""

    def make(wrap):
        return make_step(mesh, form, in_maps=True, layer=wrap, inside=functools.partial(inside, wrap))

    args = make_arguments(mesh, form)
    written = jax.jit(make(lambda f: f)).lower(*args).compile()
    recomputed = jax.jit(make(jax.checkpoint)).lower(*args).compile()
    assert 1.03 * program_nbytes(recomputed) < 0.6 * program_nbytes(written)
    check_fit(make, args, 1.03)


@pytest.mark.parametrize("form", ["list", "loop"])
def test_layers_in_a_map_are_placed_where_the_loss_is_outside(mesh, form):
    """The forward pass of all layers is in one `jax.shard_map`, and their backward pass in another."""

    def make(wrap):
        def local(params, x):
            run = wrap(lambda x, w: x + mlp(x, w["up"], w["down"]))
            if form == "loop":
                return jax.lax.scan(lambda x, w: (run(x, w), None), x, params)[0]
            for w in params:
                x = run(x, w)
            return x

        layers = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))
        return jax.value_and_grad(lambda params, x: jnp.mean(layers(params, x) ** 2))

    params, x = make_arguments(mesh, form)
    written = jax.jit(make(lambda f: f)).lower(params, x).compile()
    recomputed = jax.jit(make(jax.checkpoint)).lower(params, x).compile()
    assert 1.03 * program_nbytes(recomputed) < 0.9 * program_nbytes(written)
    check_fit(make, (params, x), 1.03)


def test_branches_in_a_map_have_values_of_their_own(mesh):
    """Each device takes a branch: its products are parts of the layer."""

    def on_one(x, up, down):
        is_first = jax.lax.axis_index("data") == 0
        return jax.lax.cond(is_first, lambda: mlp(x, up, down), lambda: jnp.sin(x @ up) @ down)

    args = make_arguments(mesh, "loop")
    closed = jax.make_jaxpr(make_step(mesh, "loop", in_maps=True, inside=on_one))(*args)
    layered = LayeredProgram.of(closed)
    (pair,) = layered.list_joint_graphs()
    products = [eqn for eqn in map(look_inside, pair.eqns) if product_flops(eqn)]
    assert len(products) == 5  # one outside, two in each branch
    least = Placements(tuple(range(len(pair.carried))))
    written = join_conditions(merge_shard_maps(layered.write(lambda _: least)))
    want, got = (jax.jit(compat.jaxpr_as_fun(p))(*jax.tree.leaves(args)) for p in (closed, written))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)


def test_a_map_that_cannot_be_split_is_placed_whole(mesh, monkeypatch, caplog):
    closed = jax.make_jaxpr(make_step(mesh, "loop", in_maps=True))(*make_arguments(mesh, "loop"))
    check_placed_whole(closed, "split_shard_maps", "a jax.shard_map", monkeypatch, caplog)


def test_a_gathered_weight_may_be_kept(mesh):
    """A layer in a list gathers its weight from all devices: with room enough, once for both passes."""

    def local(weights, x):
        def loss(weights):
            h = x
            for w in weights:
                h = h + jnp.sin(h @ jax.lax.all_gather(w, "data", tiled=True))
            return jax.lax.pmean(jnp.mean(h**2), "data")

        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))

    step = jax.shard_map(local, mesh=mesh, in_specs=(P("data"), P("data")), out_specs=P("data"))
    width, rows = (NamedSharding(mesh, P("data")) for _ in range(2))
    weights = [jax.ShapeDtypeStruct((1024, 1024), jnp.float32, sharding=width)] * 4
    args = weights, jax.ShapeDtypeStruct((DEVICES * 64, 1024), jnp.float32, sharding=rows)
    written = program_nbytes(jax.jit(step, donate_argnums=0).lower(*args).compile())
    within = jaxoff.jit(step, donate_argnums=0, device_bytes=0.98 * written, host_bytes=1, device="h200")
    within.lower(*args)
    gathered = [v for v in within.plan.values if v.value.endswith("all_gather")]
    assert sum(v.count for v in gathered if v.placement == "save") >= 3
