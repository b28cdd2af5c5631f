"""State found in train steps of several optimizers, and updated in blocks from host memory."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.inline import inline_program
from jaxoff._state import updates
from jaxoff._state.stream import Blocks, list_streamable, plan_loops, stream_updates
from jaxoff._state.updates import find_updates

# XLA may leave out the rounding of a gradient to bfloat16 that it fuses with its reader.
ROUNDED = {"xla_allow_excess_precision": False}


@pytest.fixture(autouse=True)
def _small_arrays_may_rest(monkeypatch):
    monkeypatch.setattr(updates, "LEAST_NBYTES", 1 << 10)


def initialize():
    key = jax.random.key(0)
    return {
        "w": jax.random.normal(key, (4, 16, 16)),
        "e": jax.random.normal(key, (64, 16)),
        "b": jnp.zeros(16),
    }


def loss(params, x):
    h, _ = lax.scan(jax.checkpoint(lambda h, w: (h + jnp.tanh(h @ w), None)), params["e"][x], params["w"])
    return (h @ params["e"].T + params["b"].sum()).var()


def make_step(optimizer, cast=lambda params: params):
    def step(params, state, x):
        value, grads = jax.value_and_grad(lambda params: loss(cast(params), x))(params)
        changes, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, changes), state, value

    params = initialize()
    return step, (params, optimizer.init(params), jnp.arange(8))


def find(step, args, donated=(0, 1)):
    """The inlined program, its updates, and the paths of the arguments that may rest."""
    closed = compat.map_open(jax.make_jaxpr(step)(*args), inline_program)
    may = [i in donated for i, arg in enumerate(args) for _ in jax.tree.leaves(arg)]
    found = list_streamable(find_updates(closed.jaxpr, may))
    paths = [
        jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree.leaves_with_path(args)
    ]
    names = dict(zip(closed.jaxpr.invars, paths, strict=True))
    return closed, found, sorted(names[state] for update in found for state, _ in update.states)


MOMENTS = ["1/0/mu/e", "1/0/mu/w", "1/0/nu/e", "1/0/nu/w"]
SCHEDULE = optax.cosine_decay_schedule(1e-3, 100)
OPTIMIZERS = {
    "adamw": (optax.adamw(1e-3), MOMENTS),
    "bfloat16 moments": (optax.adamw(1e-3, mu_dtype=jnp.bfloat16), MOMENTS),
    "clipped by global norm": (
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(SCHEDULE)),
        [f"1/1{path[1:]}" for path in MOMENTS],
    ),
    "decay of matrices": (optax.adamw(SCHEDULE, mask={"w": True, "e": False, "b": False}), MOMENTS),
    "momentum": (optax.sgd(1e-2, momentum=0.9), ["1/0/trace/e", "1/0/trace/w"]),
    "lion": (optax.lion(1e-3), ["1/0/mu/e", "1/0/mu/w"]),
    "rmsprop": (optax.rmsprop(1e-3), ["1/0/nu/e", "1/0/nu/w"]),
}


# Their states are found as those of AdamW and momentum.
LONG = {"decay of matrices", "lion", "rmsprop"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in OPTIMIZERS]
)
@pytest.mark.some_cases(2)
def test_state_is_found_and_its_update_in_blocks_is_the_same(name):
    optimizer, expected = OPTIMIZERS[name]
    step, args = make_step(optimizer)
    closed, found, paths = find(step, args)
    assert paths == expected
    streamed = stream_updates(closed, found)
    on_host = [compat.is_host(v.aval) for v in streamed.jaxpr.invars]
    assert sum(on_host) == len(paths)
    assert sum(compat.is_host(v.aval) for v in streamed.jaxpr.outvars) == len(paths)
    leaves = jax.tree.leaves(args)
    sharding = leaves[0].sharding.with_memory_kind("pinned_host")
    given = [jax.device_put(x, sharding) if host else x for x, host in zip(leaves, on_host, strict=True)]
    run, plain = (jax.jit(compat.jaxpr_as_fun(program)) for program in (streamed, closed))
    for _ in range(3):
        results, others = run(*given), plain(*leaves)
        for ours, theirs in zip(results, others, strict=True):
            # The CPU's compiler contracts products and sums by the shapes of its loops; values are around 1.
            np.testing.assert_allclose(
                *(np.asarray(x, "float32") for x in (ours, theirs)), rtol=1e-5, atol=1e-6
            )
        given = [*results[: len(given) - 1], given[-1]]
        leaves = [*others[: len(leaves) - 1], leaves[-1]]
    assert [x.sharding.memory_kind == "pinned_host" for x in given] == on_host


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.lamb(1e-3),
        optax.adafactor(1e-3),
        optax.apply_if_finite(optax.adamw(1e-3), 3),
        optax.MultiSteps(optax.adamw(1e-3), 2),
    ],
    ids=["norm of the update", "factored", "condition", "every second step"],
)
def test_state_whose_update_is_not_elementwise_stays(optimizer):
    step, args = make_step(optimizer)
    assert find(step, args)[2] == []


def test_masters_of_weights_in_bfloat16_are_state():
    optimizer = optax.adamw(1e-3)

    def step(weights, masters, state, x):
        value, grads = jax.value_and_grad(loss)(weights, x)
        changes, state = optimizer.update(jax.tree.map(lambda g: g.astype("float32"), grads), state, masters)
        masters = optax.apply_updates(masters, changes)
        return jax.tree.map(lambda m: m.astype(jnp.bfloat16), masters), masters, state, value

    masters = initialize()
    weights = jax.tree.map(lambda m: m.astype(jnp.bfloat16), masters)
    args = weights, masters, optimizer.init(masters), jnp.arange(8)
    closed, found, paths = find(step, args, donated=(0, 1, 2))
    assert paths == ["1/e", "1/w", *(f"2{path[1:]}" for path in MOMENTS)]
    assert all(len(update.outs) == 4 for update in found)  # the weights, too
    assert all(len(update.replaced) == 1 for update in found)  # in the place of the old ones
    kept = [v for update in found for v, _ in update.replaced]
    assert kept == [closed.jaxpr.invars[i] for i in (1, 2)]
    streamed, leaves = stream_updates(closed, found), jax.tree.leaves(args)
    on_host = [compat.is_host(v.aval) for v in streamed.jaxpr.invars]
    sharding = leaves[0].sharding.with_memory_kind("pinned_host")
    given = [jax.device_put(x, sharding) if host else x for x, host in zip(leaves, on_host, strict=True)]
    results, others = (
        jax.jit(compat.jaxpr_as_fun(program), compiler_options=ROUNDED)(*values)
        for program, values in ((streamed, given), (closed, leaves))
    )
    for ours, theirs in zip(results, others, strict=True):
        a, b = (np.asarray(x, "float32") for x in (ours, theirs))
        np.testing.assert_allclose(a, b, rtol=1e-2 if ours.dtype == jnp.bfloat16 else 1e-5, atol=1e-7)


def test_results_that_stay_on_the_device_may_be_read():
    """Norms of the new parameters, and what is made of them, run after the loops over blocks."""
    step, args = make_step(optax.adamw(1e-3))

    def observed(params, state, x):
        params, state, value = step(params, state, x)
        norm = optax.tree.norm(params)
        return params, state, value, norm, jnp.isfinite(norm)

    closed, found, paths = find(observed, args)
    assert paths == MOMENTS
    assert all(update.late for update in found)
    streamed, leaves = stream_updates(closed, found), jax.tree.leaves(args)
    sharding = leaves[0].sharding.with_memory_kind("pinned_host")
    given = [
        jax.device_put(x, sharding) if compat.is_host(v.aval) else x
        for x, v in zip(leaves, streamed.jaxpr.invars, strict=True)
    ]
    results, others = (
        jax.jit(compat.jaxpr_as_fun(program))(*values)
        for program, values in ((streamed, given), (closed, leaves))
    )
    for ours, theirs in zip(results, others, strict=True):
        np.testing.assert_allclose(*(np.asarray(x, "float32") for x in (ours, theirs)), rtol=1e-5, atol=1e-7)

    def fed_back(params, state, x):
        """A second parameter moves by the norm of the first: its update needs what a late reader computes."""
        params, state, value = step(params, state, x)
        norm = jnp.linalg.norm(jax.tree.leaves(params)[-1])
        state = (state[0]._replace(nu=state[0].nu | {"e": state[0].nu["e"] * norm}), *state[1:])
        return params, state, value

    assert find(fed_back, args)[2] == ["1/0/mu/e", "1/0/nu/e"]


def test_what_is_not_donated_or_read_elsewhere_stays():
    step, args = make_step(optax.adamw(1e-3))
    assert find(step, args, donated=(0,))[2] == []

    def observed(params, state, x):
        params, state, value = step(params, state, x)
        return params, state, value + jnp.linalg.norm(state[0].mu["w"])

    assert find(observed, args)[2] == ["1/0/mu/e", "1/0/nu/e", "1/0/nu/w"]

    def returned_twice(params, state, x):
        params, state, value = step(params, state, x)
        return params, state, value, state[0].nu["w"]

    assert find(returned_twice, args)[2] == ["1/0/mu/e", "1/0/nu/e"]


@given(shape=st.lists(st.integers(1, 12), min_size=1, max_size=3).map(tuple), count=st.integers(2, 24))
@settings(max_examples=60, deadline=None)
def test_blocks_are_disjoint_and_whole(shape, count):
    blocks = Blocks.of(shape, count)
    if blocks is None:
        return
    x = np.arange(np.prod(shape), dtype="int32").reshape(shape)
    each = [(blocks, i) for i in range(count)]
    if (rest := blocks.get_rest()) is not None:
        assert np.prod(rest.shape) <= np.prod(blocks.shape)
        each.append((rest, 0))
    read = np.concatenate([np.asarray(part.read(x, i)).ravel() for part, i in each])
    np.testing.assert_array_equal(read, x.ravel())  # neighbouring elements, in order
    written = jnp.zeros(shape, "int32")
    for part, i in each:
        written = part.write(written, part.read(x, i), i)
    np.testing.assert_array_equal(written, x)


def test_a_rest_is_updated_behind_its_loop():
    optimizer = optax.adamw(1e-2)

    def step(params, state, grads):
        changes, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, changes), state

    params = {"odd": jnp.linspace(0, 1, 8191 * 64).reshape(8191, 64), "even": jnp.ones((1, 1, 1024, 512))}
    args = params, optimizer.init(params), jax.tree.map(jnp.sin, params)
    closed, found, _ = find(step, args)
    (loop,) = plan_loops(found)
    assert sorted(blocks.left > 0 for _, blocks in loop.updates) == [False, True]
    program = stream_updates(closed, found)
    host = [compat.is_host(v.aval) for v in program.jaxpr.invars]
    leaves = jax.tree.leaves(args)
    moved = [
        jax.device_put(x, jax.memory.Space.Host) if is_host else x
        for x, is_host in zip(leaves, host, strict=True)
    ]
    got = jax.jit(compat.jaxpr_as_fun(program))(*moved)
    for x, y in zip(got, jax.tree.leaves(jax.jit(step)(*args)), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-6)
    assert sum(host) == 6  # parameters, too: nothing else reads them here


@pytest.mark.parametrize(
    ("shape", "count"), [((1, 1, 512, 16), 64), ((3, 3, 64, 8), 72), ((51866, 8), 200), ((8351593, 2), 512)]
)
def test_kernels_of_convolutions_and_odd_vocabularies_are_divided(shape, count):
    blocks = Blocks.of(shape, count)
    assert blocks is not None
    assert np.prod(blocks.shape) * count <= np.prod(shape)


def test_arrays_of_several_shapes_share_a_loop_where_one_number_of_blocks_divides_them():
    step, args = make_step(optax.adamw(1e-3))
    _, found, _ = find(step, args)
    (loop,) = plan_loops(found)
    assert {update.shape for update, _ in loop.updates} == {(4, 16, 16), (64, 16)}


def test_state_keeps_the_place_of_its_argument_among_the_results():
    """A parameter may be read otherwise than as it is: its result is no place for the moments."""
    optimizer = optax.adamw(1e-3)

    def step(params, state, x):
        read = jax.tree.map(lambda p: p.T.T, params)  # as NNX reads stacked parameters
        changes, state = optimizer.update(jax.grad(loss)(read, x), state, read)
        return optax.apply_updates(read, changes), state

    params = initialize()
    args = params, optimizer.init(params), jnp.arange(8)
    closed, found, paths = find(step, args)
    places = dict(zip(closed.jaxpr.invars, closed.jaxpr.outvars, strict=False))
    assert paths == MOMENTS
    assert all(places[v] is out for update in found for v, out in (*update.states, *update.replaced))
    assert [len(update.replaced) for update in found] == [1, 1]

    def returned_in_another_order(params, state, x):
        params, state = step(params, state, x)
        return state, params

    assert find(returned_in_another_order, args)[2] == []


def test_gradients_are_clipped_in_blocks_and_stay_in_their_dtype():
    """`optax.clip_by_global_norm` reads a gradient twice: to scale it, and to choose it or the scaled one."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))

    def step(params, state, x):
        grads = jax.grad(loss)(jax.tree.map(lambda p: p.astype(jnp.bfloat16), params), x)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        changes, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, changes), state

    params = initialize()
    _, found, _ = find(step, (params, optimizer.init(params), jnp.arange(8)))
    read = [[str(v.aval) for v in update.read] for update in found]
    assert read == [["bfloat16[64,16]"], ["bfloat16[4,16,16]"]]


def test_no_loop_has_a_few_blocks_since_the_shapes_have_a_common_divisor():
    """Two blocks divide six layers as 5,120 rows, and all of them would be on the device at once."""
    shapes = [(6, 5120, 640), (5120, 4096)]
    params = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]

    def step(params, grads):
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    closed = jax.make_jaxpr(step)(params, params)
    loops = plan_loops(find_updates(closed.jaxpr, [True, True, False, False]))
    assert {update.shape for loop in loops for update, _ in loop.updates} == set(shapes)
    assert all(loop.count >= 8 for loop in loops)
    whole = sum(update.local_nbytes for loop in loops for update, _ in loop.updates)
    assert sum(loop.buffer_nbytes for loop in loops) < whole / 2
