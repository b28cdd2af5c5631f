"""Attention over blocks of queries keeps no masks of all blocks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jaxoff._budget.mask_loops import make_masks_in_readers
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.primitives import holds
from tests.jaxoff.budget.checkpointed import check_fit

LAYERS, BATCH, TOKENS, WIDTH, BLOCKS = 3, 4, 256, 32, 8


def attend(q, k, v):
    blocks = q.reshape(BATCH, BLOCKS, -1, WIDTH).swapaxes(0, 1)

    @jax.checkpoint
    def attend_block(block, number):
        rows = number * block.shape[1] + jnp.arange(block.shape[1])
        scores = jnp.einsum("bqd,bkd->bqk", block, k)
        scores = jnp.where(rows[:, None] >= jnp.arange(TOKENS)[None], scores, -1e30)
        return jax.nn.softmax(scores) @ v

    out = lax.map(lambda args: attend_block(*args), (blocks, jnp.arange(BLOCKS)))
    return out.swapaxes(0, 1).reshape(q.shape)


def layer(x, w):
    x = x + attend(x @ w["q"], x @ w["k"], x @ w["v"])
    return x + jnp.tanh(x @ w["up"]) @ w["up"].T


def make_step(form):
    def make(wrap):
        block = wrap(layer)

        def loss(ws, x):
            if form == "scan":
                return lax.scan(lambda x, w: (block(x, w), None), x, ws)[0].var()
            for i in range(LAYERS):
                x = block(x, jax.tree.map(lambda w, i=i: w[i], ws))
            return x.var()

        return lambda ws, x: jax.tree.map(lambda w, g: w - 0.1 * g, ws, jax.grad(loss)(ws, x))

    return make


def make_arguments():
    keys = jax.random.split(jax.random.key(0), 5)
    ws = {n: jax.random.normal(k, (LAYERS, WIDTH, WIDTH)) / 6 for n, k in zip("qkv", keys[:3], strict=True)}
    ws["up"] = jax.random.normal(keys[3], (LAYERS, WIDTH, 2 * WIDTH)) / 6
    return ws, jax.random.normal(keys[4], (BATCH, TOKENS, WIDTH))


def is_mask_stack(eqn):
    rows = TOKENS // BLOCKS
    shapes = (compat.shape_of(v.aval) for v in eqn.outvars)
    return any(shape[:1] == (BLOCKS,) and shape[-2:] == (rows, TOKENS) for shape in shapes)


def test_each_loop_makes_its_masks():
    step, args = make_step("scan")(lambda layer: layer), make_arguments()
    closed = jax.make_jaxpr(step)(*args)
    assert holds(closed.jaxpr, is_mask_stack)
    written = make_masks_in_readers(closed)
    assert not holds(written.jaxpr, is_mask_stack)
    got = jax.jit(compat.jaxpr_as_fun(written))(*jax.tree.leaves(args))
    for a, b in zip(got, jax.tree.leaves(jax.jit(step)(*args)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_nest_of_loops_makes_its_masks():
    size = TOKENS // BLOCKS

    def attend_blocks(x, w):  # blocks of queries, in each of these blocks of keys
        blocks = jnp.tanh(x @ w).reshape(BLOCKS, size, WIDTH)

        def attend_query(query, i):
            def add_keys(total, row):
                keys, j = row
                mask = (i * size + jnp.arange(size))[:, None] >= j * size + jnp.arange(size)
                return total + jnp.where(mask, jnp.exp(query @ keys.T), 0.0) @ keys, None

            return lax.scan(add_keys, jnp.zeros_like(query), (blocks, jnp.arange(BLOCKS)))[0]

        out = lax.map(lambda row: attend_query(*row), (blocks, jnp.arange(BLOCKS)))
        return jnp.tanh(out.reshape(x.shape)), None

    step = jax.grad(lambda ws, x: lax.scan(attend_blocks, x, ws)[0].var())
    keys = jax.random.split(jax.random.key(0))
    args = jax.random.normal(keys[0], (LAYERS, WIDTH, WIDTH)) / 6, jax.random.normal(keys[1], (TOKENS, WIDTH))
    closed = jax.make_jaxpr(step)(*args)

    def is_stack(eqn):
        shapes = (compat.shape_of(v.aval) for v in eqn.outvars if v.aval.dtype == bool)
        return any(shape == (BLOCKS, BLOCKS, size, size) for shape in shapes)

    assert holds(closed.jaxpr, is_stack)
    written = make_masks_in_readers(closed)
    assert not holds(written.jaxpr, is_stack)
    got = jax.jit(compat.jaxpr_as_fun(written))(*args)[0]
    np.testing.assert_allclose(got, jax.jit(step)(*args), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("in_branch", [False, True])
def test_the_maps_of_layers_make_their_masks(in_branch):
    """Attention of divided queries: all masks are made in a `jax.shard_map` ahead of the layers."""
    if jax.device_count() < 2:
        pytest.skip(f"needs 2 devices, jax has {jax.device_count()}")
    mesh = jax.make_mesh((2,), ("data",), (AxisType.Auto,), devices=jax.devices()[:2])
    rows = TOKENS // 2

    def attend(queries, keys):
        first = lax.axis_index("data") * rows
        keys = lax.pcast(keys, "data", to="varying")  # their gradients are added up outside of branches

        def add_keys(total, j):
            at, here = jnp.arange(TOKENS), (first + jnp.arange(rows))[:, None]
            mask = here % (j + 2) >= at % (j + 2)
            if in_branch:
                return lax.cond(j > first, add, lambda total, _: total, total, mask), None
            return add(total, mask), None

        def add(total, mask):
            return total + jnp.where(mask, jnp.exp(queries @ keys.T), 0.0) @ keys

        return lax.scan(add_keys, jnp.zeros_like(queries), jnp.arange(8))[0]

    own = jax.shard_map(attend, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))

    def layer(x, w):
        return jnp.tanh(own(jnp.tanh(x @ w), x)), None

    step = jax.grad(lambda ws, x: lax.scan(layer, x, ws)[0].var())
    keys = jax.random.split(jax.random.key(0))
    args = jax.random.normal(keys[0], (LAYERS, WIDTH, WIDTH)) / 6, jax.random.normal(keys[1], (TOKENS, WIDTH))
    closed = jax.make_jaxpr(step)(*args)

    def is_stack(eqn):
        return any(compat.shape_of(v.aval) == (8, rows, TOKENS) and v.aval.dtype == bool for v in eqn.outvars)

    assert holds(closed.jaxpr, is_stack)
    written = make_masks_in_readers(closed)
    assert not holds(written.jaxpr, is_stack)
    got = jax.jit(compat.jaxpr_as_fun(written))(*args)[0]
    np.testing.assert_allclose(got, jax.jit(step)(*args), rtol=1e-5, atol=1e-6)


def test_masks_with_other_readers_stay():
    def both(x, numbers):
        masks = lax.map(lambda i: jnp.broadcast_to(i > jnp.arange(64), (64, 64)), numbers)
        rows = lax.scan(lambda c, m: (c + jnp.where(m, x, 0.0), None), x, masks)[0]
        return rows, masks.sum()

    args = jnp.ones((64, 64)), jnp.arange(4)
    closed = jax.make_jaxpr(both)(*args)
    got = jax.jit(compat.jaxpr_as_fun(make_masks_in_readers(closed)))(*args)
    jax.tree.map(np.testing.assert_array_equal, tuple(got), jax.jit(both)(*args))

    def sort(x, masks):  # a body that reads the stack otherwise than row by row
        return lax.scan(lambda x, _: (jnp.where(masks[0], x, 0.0) + masks.sum(), None), x, None, length=2)[0]

    def around(x, numbers):
        return sort(x, lax.map(lambda i: jnp.broadcast_to(i > jnp.arange(64), (64, 64)), numbers))

    closed = jax.make_jaxpr(around)(*args)
    assert str(make_masks_in_readers(closed)) == str(closed)
    plain = jax.make_jaxpr(lambda x: lax.scan(lambda c, _: (c * 2, c), x, None, length=3))(args[0])
    assert make_masks_in_readers(plain) is plain


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("form", ["scan", "list"])
def test_the_least_is_that_of_a_checkpoint_of_each_layer(form):
    check_fit(make_step(form), make_arguments(), 1.03)


def is_fill_read_by_loop(eqn):
    layout = compat.scan_in(eqn)
    sizes = (compat.nbytes(v.aval) for v in eqn.invars[: layout.num_consts]) if layout else ()
    return any(nbytes >= 1 << 20 for nbytes in sizes)


@pytest.mark.parametrize("form", ["plain", "shard_map"])
def test_a_loop_makes_its_fills(form):
    """Differentiation moves the fill of masked scores out of both loops, and the mask of all positions."""

    def attend(x, w):
        def turn(total, i):
            scores = x @ (w * i) @ x.T
            masked = jnp.where(jnp.arange(512)[:, None] >= jnp.arange(512), scores, -1e9)
            return total + jax.nn.softmax(masked) @ x, None

        return lax.scan(turn, jnp.zeros_like(x), jnp.arange(3, dtype=x.dtype))[0], None

    def step(ws, x):
        return jax.grad(lambda ws: lax.scan(attend, x, ws)[0].var())(ws)

    args = jax.random.normal(jax.random.key(0), (2, 16, 16)), jnp.linspace(-1, 1, 512 * 16).reshape(512, 16)
    if form == "shard_map":
        mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
        step = jax.shard_map(step, mesh=mesh, in_specs=(P("data"), P("data")), out_specs=P("data"))
    closed = jax.make_jaxpr(step)(*args)
    assert holds(closed.jaxpr, is_fill_read_by_loop)
    written = make_masks_in_readers(closed)
    assert not holds(written.jaxpr, is_fill_read_by_loop)
    got = jax.jit(compat.jaxpr_as_fun(written))(*args)[0]
    np.testing.assert_allclose(got, jax.jit(step)(*args), rtol=1e-5, atol=1e-6)
