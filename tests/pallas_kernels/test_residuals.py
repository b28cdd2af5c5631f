"""What the grouped MLP keeps: two named values, placed by a policy, of the same bits wherever they live."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import grouped_mlp

ROWS, WIDTH, HIDDEN, EXPERTS = 24, 16, 40, 3
BOTH = ("moe.dispatched", "moe.act")
policies = jax.checkpoint_policies


def offload(*names):
    return policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=names,
        offload_src="device",
        offload_dst="pinned_host",
    )


def layer(x, w1, w2, probs):
    # The input of the op is made here: it is an intermediate of the checkpointed function, as in a model.
    return grouped_mlp(jnp.sin(x), w1, w2, jnp.array([7, 0, 15], jnp.int32), probs=probs)


def inputs(dtype):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = ((ROWS, WIDTH), (EXPERTS, WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH))
    x, w1, w2 = (jax.random.normal(k, s, dtype) for k, s in zip(keys, shapes, strict=False))
    return x, w1, w2, jax.random.uniform(keys[3], (ROWS,))


def kept(function, dtype=jnp.bfloat16):
    """Shape and place of each value of R rows that the gradient's program carries over, the inputs aside."""
    closed = jax.make_jaxpr(lambda *a: jax.vjp(function, *a)[1])(*inputs(dtype))
    given = set(map(id, closed.jaxpr.invars))
    found = {
        id(v): (v.aval.shape, str(v.aval.memory_space).lower())
        for v in closed.jaxpr.outvars
        if id(v) not in given and v.aval.shape[:1] == (ROWS,) and v.aval.ndim == 2
    }
    return sorted(found.values())


def test_only_the_two_names_are_kept_when_saved():
    saved = kept(jax.checkpoint(layer, policy=policies.save_only_these_names(*BOTH)))
    assert [shape for shape, _ in saved] == [(ROWS, WIDTH), (ROWS, HIDDEN)]
    assert not any("host" in place for _, place in saved)


def test_each_name_is_offloaded_alone_and_together():
    for names, shapes in {
        BOTH: [(ROWS, WIDTH), (ROWS, HIDDEN)],
        BOTH[:1]: [(ROWS, WIDTH)],
        BOTH[1:]: [(ROWS, HIDDEN)],
    }.items():
        moved = kept(jax.checkpoint(layer, policy=offload(*names)))
        assert [shape for shape, _ in moved] == shapes
        assert all("host" in place for _, place in moved)


def test_nothing_is_kept_when_recomputed_and_two_values_without_a_checkpoint():
    assert kept(jax.checkpoint(layer, policy=policies.nothing_saveable)) == []
    plain = [shape for shape, _ in kept(layer)]
    assert plain.count((ROWS, HIDDEN)) == 1


def test_names_are_there_without_gradients():
    jaxpr = str(jax.make_jaxpr(layer)(*inputs(jnp.bfloat16)))
    for name in BOTH:
        assert f"name={name}" in jaxpr


@pytest.mark.parametrize(("dtype", "bits"), [(jnp.bfloat16, (8, 7)), (jnp.float32, (8, 23))])
def test_rounding_is_pinned_right_before_each_name(dtype, bits):
    """In the program without gradients and in that of the gradient's forward pass."""

    def formats(jaxpr, found):
        made = {id(v): eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "name":
                before = made[id(eqn.invars[0])]
                assert before.primitive.name == "reduce_precision"
                found[eqn.params["name"]] = (before.params["exponent_bits"], before.params["mantissa_bits"])
            for value in eqn.params.values():
                if hasattr(inner := getattr(value, "jaxpr", value), "eqns"):
                    formats(inner, found)
        return found

    for function in (layer, lambda *a: jax.vjp(layer, *a)[0]):
        assert formats(jax.make_jaxpr(function)(*inputs(dtype)).jaxpr, {}) == dict.fromkeys(BOTH, bits)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_saved_offloaded_and_recomputed_give_the_same_bits(dtype):
    def gradients(policy):
        function = jax.checkpoint(layer, policy=policy)
        value_and_grad = jax.value_and_grad(
            lambda *a: jnp.sum(jnp.sin(function(*a)).astype(jnp.float32)), (0, 1, 2, 3)
        )
        return jax.tree.leaves(jax.jit(value_and_grad)(*inputs(dtype)))

    saved = gradients(policies.save_only_these_names(*BOTH))
    assert all(np.asarray(g, np.float32).any() for g in saved)
    for policy in (
        offload(*BOTH),
        offload(BOTH[1]),
        policies.save_only_these_names(BOTH[0]),
        policies.nothing_saveable,
    ):
        for a, b in zip(saved, gradients(policy), strict=True):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
