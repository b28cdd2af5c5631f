"""A block under every transform of JAX and every kind of policy: its offloads, all else unchanged."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxoff._jaxpr import remat3
from tests.jaxoff.policy import placement
from tests.jaxoff.policy.matrix import (
    OFFLOAD_ALL,
    POLICIES,
    Cases,
    block,
    check_control,
    check_placement,
    check_values,
)

CASES = Cases()


@CASES.add()
def checkpoint_alone(remat, w, x):
    return remat(block)(w, x)


@CASES.add()
def jit_inside(remat, w, x):
    return remat(jax.jit(block))(w, x)


@CASES.add()
def jit_around(remat, w, x):
    return jax.jit(remat(block))(w, x)


@CASES.add()
def jit_nested(remat, w, x):
    return jax.jit(remat(jax.jit(lambda w, x: jax.jit(block)(w, x))))(w, x)


@CASES.add(count=2)
def unrolled(remat, w, x):
    return remat(block)(w, remat(block)(w, x))


@CASES.add(w=(3,), count=3)
def scan_around(remat, w, x):
    layer = remat(block, prevent_cse=False)
    return lax.scan(lambda x, w: (layer(w, x), None), x, w)[0]


@CASES.add(w=(3,), count=3)
def scan_inside(remat, w, x):
    return remat(lambda w, x: lax.scan(lambda x, w: (block(w, x), None), x, w)[0])(w, x)


@CASES.add(w=(2, 3), count=6)
def scan_of_scan(remat, w, x):
    layer = remat(block, prevent_cse=False)
    return lax.scan(lambda x, w: lax.scan(lambda x, w: (layer(w, x), None), x, w), x, w)[0]


@CASES.add(w=(2, 3), count=6)
def scan_of_checkpointed_scan(remat, w, x):
    layers = remat(lambda w, x: lax.scan(lambda x, w: (block(w, x), None), x, w)[0], prevent_cse=False)
    return lax.scan(lambda x, w: (layers(w, x), None), x, w)[0]


@CASES.add(count=3)
def scan_of_shared_weights(remat, w, x):
    layer = remat(block, prevent_cse=False)
    return lax.scan(lambda x, _: (layer(w, x), None), x, length=3)[0]


@CASES.add()
def cond_inside(remat, w, x):
    return remat(lambda w, x: lax.cond(x[0, 0] < 9, block, lambda w, x: x, w, x))(w, x)


@CASES.add()
def cond_around(remat, w, x):
    return lax.cond(x[0, 0] < 9, remat(block), lambda w, x: x, w, x)


@CASES.add()  # a single branch runs: both share the buffers of residuals
def cond_around_two(remat, w, x):
    return lax.cond(x[0, 0] < 9, remat(block), remat(lambda w, x: block(w, 2 * x)), w, x)


@CASES.add(w=(3,), count=3)
def cond_in_scan(remat, w, x):
    layer = remat(lambda w, x, i: lax.cond(i < 2, block, lambda w, x: x, w, x), prevent_cse=False)
    return lax.scan(lambda x, wi: (layer(*wi[:1], x, wi[1]), None), x, (w, jnp.arange(3)))[0]


@CASES.add()
def switch_around(remat, w, x):
    branches = [lambda w, x: x, remat(block), lambda w, x: 2 * x]
    return lax.switch((x[0, 0] < 9).astype(int), branches, w, x)


@CASES.add(x=(3, 4, 8), count=3)
def map_around(remat, w, x):
    return lax.map(functools.partial(remat(block, prevent_cse=False), w), x)


@CASES.add(x=(3, 4, 8), count=3)
def map_inside(remat, w, x):
    return remat(lambda w, x: lax.map(functools.partial(block, w), x))(w, x)


@CASES.add(x=(4, 4, 8), rows=(2, 4), count=2)
def map_batched(remat, w, x):
    return lax.map(functools.partial(remat(block, prevent_cse=False), w), x, batch_size=2)


@CASES.add(x=(5, 4, 8), rows=(5, 4))
def vmap_around(remat, w, x):
    return jax.vmap(remat(block), in_axes=(None, 0))(w, x)


@CASES.add(x=(5, 4, 8), rows=(5, 4))
def vmap_inside(remat, w, x):
    return remat(jax.vmap(block, in_axes=(None, 0)))(w, x)


@CASES.add(x=(5, 4, 8), w=(5,), rows=(5, 4))
def vmap_of_weights(remat, w, x):
    return jax.vmap(remat(block))(w, x)


@CASES.add(x=(5, 4, 8), w=(3,), rows=(5, 4), count=3)
def vmap_of_scan(remat, w, x):
    return jax.vmap(lambda x: scan_around(remat, w, x))(x)


@CASES.add(x=(5, 4, 8), w=(3,), rows=(5, 4), count=3)
def scan_of_vmap(remat, w, x):
    layer = remat(jax.vmap(block, in_axes=(None, 0)), prevent_cse=False)
    return lax.scan(lambda x, w: (layer(w, x), None), x, w)[0]


@CASES.add(x=(2, 5, 4, 8), rows=(2, 5, 4))
def vmap_of_vmap(remat, w, x):
    return jax.vmap(jax.vmap(remat(block), in_axes=(None, 0)), in_axes=(None, 0))(w, x)


@CASES.add(x=(5, 4, 8), rows=(5, 4))
def vmap_of_cond(remat, w, x):
    return jax.vmap(lambda x: cond_around(remat, w, x))(x)


@CASES.add()
def nested_same_policy(remat, w, x):
    return remat(lambda w, x: remat(block)(w, x))(w, x)


@CASES.add()
def nested_inner_plain(remat, w, x):
    return remat(lambda w, x: jax.checkpoint(block)(w, x))(w, x)


@CASES.add()
def fori_static(remat, w, x):
    layer = remat(block, prevent_cse=False)
    return lax.fori_loop(0, 1, lambda _, x: layer(w, x), x)


@jax.custom_vjp
def opaque_block(w, x):
    return block(w, x)


def _opaque_fwd(w, x):
    return jax.vjp(block, w, x)


opaque_block.defvjp(_opaque_fwd, lambda pull, ct: pull(ct))


@CASES.add()
def custom_vjp_rule(remat, w, x):
    return remat(opaque_block)(w, x)


@CASES.add()
def custom_vjp_in_jit(remat, w, x):
    return remat(jax.jit(lambda w, x: opaque_block(w, x)))(w, x)


@CASES.add(w=(3,), count=3)
def custom_vjp_in_scan(remat, w, x):
    layer = remat(opaque_block, prevent_cse=False)
    return lax.scan(lambda x, w: (layer(w, x), None), x, w)[0]


@jax.custom_jvp
def tangled_block(w, x):
    return block(w, x)


@tangled_block.defjvp
def _tangled_jvp(primals, tangents):
    return jax.jvp(block, primals, tangents)


@CASES.add()
def custom_jvp_rule(remat, w, x):
    return remat(tangled_block)(w, x)


@CASES.add()
def while_before(remat, w, x):
    x = (
        lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, jnp.cos(s[1])), (0, lax.stop_gradient(x)))[1]
        + x
    )
    return remat(block)(w, x)


def test_the_count_of_host_arrays_itself():
    """By hand: two copies in each of three iterations, a copy outside, a copy without a reader."""

    def copies(x):
        def body(x, _):
            up, up_too = (jax.device_put(y, jax.memory.Space.Host) for y in (x, x[0]))
            return x + jax.device_put(up, jax.memory.Space.Device), up_too

        x, stacked = jax.jit(lambda x: lax.scan(body, x, length=3))(x)
        jax.device_put(x + 1, jax.memory.Space.Host)
        return jax.device_put(x, jax.memory.Space.Host), stacked

    x = jnp.ones((4, 8), "bfloat16")
    found = placement.host_arrays(copies, x)
    assert found == placement.arrays({(4, 8): 4, (8,): 3}, "bfloat16")
    assert placement.nbytes(found) == 2 * (4 * 32 + 3 * 8)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.some_cases(33)
def test_moves_exactly_the_chosen_values(case, policy):
    if remat3.is_enabled() and case.startswith("custom_"):
        pytest.skip("jax_remat3 asks no policy about names in rules of derivatives")
    check_placement(CASES[case], *POLICIES[policy])


PLAIN = (
    "checkpoint_alone",
    "unrolled",
    "scan_around",
    "scan_inside",
    "map_around",
    "vmap_around",
    "custom_vjp_rule",
)


@pytest.mark.parametrize("case", [c for c in CASES if c not in PLAIN])
@pytest.mark.some_cases(5)
def test_keeps_loss_and_gradients(case):
    check_values(CASES[case])


@pytest.mark.parametrize("case", PLAIN)
@pytest.mark.some_cases(2)
def test_keeps_loss_and_gradients_and_the_bits_of_the_saved_twin(case):
    check_values(CASES[case], ("te_v1", "te_v2", "lists"), twins=True)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.some_cases(11)
def test_a_policy_that_moves_nothing_fails_the_check(case):
    check_control(CASES[case])


@pytest.mark.parametrize("case", CASES)
def test_a_call_without_gradients_moves_nothing(case):
    assert not placement.host_arrays(CASES[case].loss(OFFLOAD_ALL), *CASES[case].args)
