"""How much pinned host memory a program needs, and the refusal of a pool that is too small for it."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxoff
from jaxoff._jaxpr import compat
from jaxoff._runtime.pinned_pool import POOL_VARIABLE, refuse_small_pool
from jaxoff._schedule.host_memory import peak_host_nbytes
from tests.jaxoff.policy import placement
from tests.jaxoff.schedule.test_order import BOTH, HIDDEN, LAYERS, ROWS, WIDTH, arguments, layer, loss_of

MOVED = LAYERS * ROWS * (WIDTH + HIDDEN) * 4
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
GIB = 2**30


def needed(fun, *args):
    return peak_host_nbytes(jax.make_jaxpr(fun)(*args))


@pytest.mark.parametrize("flat", [False, True], ids=["scan", "layers"])
def test_it_is_what_all_layers_move(flat):
    step = jax.value_and_grad(loss_of(BOTH, flat))
    assert placement.nbytes(placement.host_arrays(step, *arguments())) == MOVED
    assert needed(step, *arguments()) == MOVED
    assert needed(jax.jit(step), *arguments()) == MOVED


@pytest.mark.parametrize(
    ("dtype", "nbytes"),
    [
        *[(dtype, 12) for dtype in (jnp.int2, jnp.uint2)],  # 45 numbers
        *[(dtype, 23) for dtype in (jnp.int4, jnp.uint4, jnp.float4_e2m1fn)],
        *[(dtype, 45) for dtype in (jnp.int8, jnp.bool_, jnp.float8_e4m3fn)],
        (jnp.bfloat16, 90),
    ],
    ids=str,
)
def test_numbers_of_less_than_a_byte_share_bytes(dtype, nbytes):
    assert compat.nbytes(jax.core.ShapedArray((9, 5), dtype)) == nbytes
    assert needed(lambda x: jax.device_put(x.astype(dtype), HOST), jnp.ones((9, 5))) == nbytes


@pytest.mark.parametrize("block", [1, LAYERS])
def test_blocks_of_layers_need_as_much(block):
    def loss(w, x):
        twice = jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf]), w)
        return jaxoff.scan(layer, x, twice, policy=BOTH, block=block)[0].sum()

    assert needed(jax.grad(loss), *arguments()) == 2 * MOVED


def test_a_loop_over_microbatches_needs_that_of_one():
    w, x = arguments()
    loss = loss_of(BOTH)

    def step(w, batches):
        def add(total, x):
            return jax.tree.map(jnp.add, total, jax.grad(loss)(w, x)), None

        return lax.scan(add, jax.tree.map(jnp.zeros_like, w), batches)[0]

    batches = jnp.stack([x, x, x])
    assert placement.nbytes(placement.host_arrays(step, w, batches)) == 3 * MOVED
    assert needed(step, w, batches) == MOVED


@pytest.mark.parametrize(("flat", "steps"), [(False, 2), (True, 1)], ids=["scan", "layers"])
def test_memory_outside_of_loops_is_used_again(flat, steps):
    grad = jax.grad(loss_of(BOTH, flat))

    def step(w, x):
        return grad(jax.tree.map(lambda leaf, d: leaf - d, w, grad(w, x)), x)

    assert placement.nbytes(placement.host_arrays(step, *arguments())) == 2 * MOVED
    assert needed(step, *arguments()) == steps * MOVED


def test_parts_of_a_sharded_program_add_up():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    over_data = functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(jax.P(), jax.P("data")), out_specs=jax.P()
    )

    def loss(w, x):
        return lax.psum(loss_of(BOTH)(w, x), "data")

    assert needed(jax.grad(over_data(loss)), *arguments()) == MOVED
    assert needed(over_data(jax.grad(loss)), *arguments()) == MOVED


def test_arguments_and_results_count_and_dead_code_does_not():
    x = jax.ShapeDtypeStruct((256,), jnp.float32)

    def send(x):
        jax.device_put(x + 1, HOST)
        return jax.device_put(x, HOST)

    def forth_and_back(x):
        return jax.device_put(send(x), DEVICE)

    assert needed(send, x) == needed(forth_and_back, x) == 1024
    on_host = jax.device_put(
        jnp.ones(256), jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    )
    assert needed(lambda h: forth_and_back(jax.device_put(h, DEVICE)), on_host) == 2048
    assert needed(loss_of(BOTH), *arguments()) == 0


def test_of_branches_the_larger_counts_and_of_other_loops_a_turn():
    x = jax.ShapeDtypeStruct((256,), jnp.float32)

    def moves(x, times):
        sent = [jax.device_put(x + i, HOST) for i in range(times)]
        return functools.reduce(jnp.add, [jax.device_put(h, DEVICE) for h in sent])

    assert needed(lambda x: lax.cond(x[0] > 0, lambda x: moves(x, 3), lambda x: moves(x, 1), x), x) == 3072
    assert needed(lambda x: lax.while_loop(lambda x: x[0] < 9, lambda x: moves(x, 2), x), x) == 2048


def test_state_that_passes_through_loops_has_one_place():
    def grow(h):
        def body(h):
            row = jax.device_put(h[0], DEVICE) + 1
            return h.at[0].set(jax.device_put(row, HOST))

        for _ in range(3):
            h = lax.while_loop(lambda h: jax.device_put(h[0, 0], DEVICE) < 9, body, h)
        return h

    state = jax.device_put(jnp.zeros((256, 4)), HOST)
    assert 4096 <= needed(grow, state) < 4096 + 64


def test_a_pool_that_is_too_small_is_refused_with_what_to_set():
    with pytest.raises(RuntimeError) as caught:
        refuse_small_pool(80 * GIB + 1, {}, "gpu")
    text = str(caught.value)
    assert "puts 85,899,345,921 bytes into pinned host memory" in text
    assert "the step would die" in text
    assert f"{POOL_VARIABLE} is not set, which gives 64 GiB: set it to 82 or more" in text
    with pytest.raises(RuntimeError, match=f"{POOL_VARIABLE} is 2, which gives 2 GiB: set it to 5 or more"):
        refuse_small_pool(4 * GIB, {POOL_VARIABLE: "2"}, "gpu")


def test_a_pool_that_is_large_enough_passes_and_other_platforms_have_none():
    refuse_small_pool(64 * GIB, {}, "gpu")
    refuse_small_pool(80 * GIB, {POOL_VARIABLE: "80"}, "gpu")
    refuse_small_pool(80 * GIB, {}, "cpu")


def test_a_host_that_is_too_small_is_refused_whatever_the_pool():
    with pytest.raises(RuntimeError, match="this process may use 34,359,738,368 of the host's") as caught:
        refuse_small_pool(40 * GIB, {POOL_VARIABLE: "80"}, "gpu", 32 * GIB)
    assert "host_bytes= is the most" in str(caught.value)
    refuse_small_pool(40 * GIB, {POOL_VARIABLE: "80"}, "gpu", 64 * GIB)
    refuse_small_pool(40 * GIB, {}, "cpu", 32 * GIB)
