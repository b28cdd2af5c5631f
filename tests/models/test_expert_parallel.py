"""A layer of experts divided between devices against the same layer on one: values, gradients, overflow."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from models import Config, MoE
from models.mesh import BATCH, MeshShape
from models.moe import Division, plan_sends

PARTS, EXPERTS = 4, 8
CONFIG = Config.preset(
    "tiny", d_model=16, d_expert=24, d_shared=0, num_experts=EXPERTS, top_k=2, dtype="float32"
)
SPECS = {"router": P(), "w1": P("expert"), "w2": P("expert")}


@functools.cache
def weights(router="random"):
    params = nnx.to_pure_dict(nnx.state(MoE(CONFIG, rngs=nnx.Rngs(0)), nnx.Param))
    if router == "one":  # equal scores: the first ones win
        params["router"] = jnp.zeros_like(params["router"])
    return params


def rows(tokens):
    x, dy = jax.random.normal(jax.random.key(1), (2, PARTS * tokens, CONFIG.d_model))
    return x, dy


def layer(division, params, x):
    graph = nnx.graphdef(nnx.eval_shape(lambda: MoE(CONFIG, rngs=nnx.Rngs(0), division=division)))
    return nnx.merge(graph, params)(x)


@jax.jit
def on_one_device(params, x, dy):
    def total(params, x):
        out, stats = layer(None, params, x)
        return jnp.sum(out * dy) + stats.aux + stats.z, (out, stats)

    return jax.value_and_grad(total, (0, 1), has_aux=True)(params, x)


@functools.cache
def on_devices(capacity):
    """The same, divided: one function for a capacity, which compiles once for each number of tokens."""
    mesh = MeshShape(expert=PARTS).build(jax.devices()[:PARTS])
    division = Division(BATCH, "expert", capacity)

    def local(params, x, dy):
        def share(params, x):
            out, stats = layer(division, params, x)
            return jnp.sum(out * dy) + (stats.aux + stats.z) / PARTS, (out, stats)

        (value, (out, stats)), (grads, dx) = jax.value_and_grad(share, (0, 1), has_aux=True)(params, x)
        grads["router"] = lax.psum(grads["router"], "expert")
        stats = stats._replace(z=lax.pmean(stats.z, "expert"))
        return (lax.psum(value, "expert"), (out, lax.psum(stats.load, "expert"), stats.overflow[None])), (
            grads,
            dx,
        )

    given, tokens = (SPECS, P("expert"), P("expert")), P("expert")
    made = ((P(), (tokens, P(), tokens)), (SPECS, tokens))
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=given, out_specs=made, check_vma=False))


def check_as_on_one_device(tokens, router):
    params, (x, dy) = weights(router), rows(tokens)
    (value, (out, stats)), grads = on_one_device(params, x, dy)
    (got, (got_out, load, overflow)), got_grads = on_devices(PARTS)(params, x, dy)
    assert overflow.tolist() == [0] * PARTS
    assert load.tolist() == stats.load.tolist()
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, (got, got_out, got_grads), (value, out, grads))
    assert all(np.asarray(g).any() for g in jax.tree.leaves(got_grads))
    return stats.load.tolist()


def test_as_on_one_device():
    tokens = 5  # no divisor of anything
    check_as_on_one_device(tokens, "random")
    assert check_as_on_one_device(tokens, "one") == [PARTS * tokens] * 2 + [0] * 6


@pytest.mark.long
def test_experts_without_a_token_are_as_on_one_device():
    assert 0 in check_as_on_one_device(1, "random")


def test_what_has_no_room_is_counted_and_left_out():
    tokens = 5
    params, (x, dy) = weights("one"), rows(tokens)
    (_, (out, _)), _ = on_one_device(params, x, dy)
    # All 10 rows of a device are for the first device; there is room for twice 10 / 4.
    (_, (got, _, overflow)), _ = on_devices(2.0)(params, x, dy)
    assert overflow.tolist() == [5] * PARTS
    # The first five rows are for the first expert: each token lost its second.
    assert not np.allclose(got, out)
    assert np.asarray(got).any(axis=1).all()
    (_, (got, _, overflow)), (_, got_dx) = on_devices(1.0)(params, x, dy)
    assert overflow.tolist() == [7] * PARTS
    lost = np.tile(np.arange(tokens) >= 3, PARTS)  # both of their experts
    assert not np.asarray(got)[lost].any()
    assert np.asarray(got)[~lost].any(axis=1).all()
    assert np.isfinite(got_dx).all()


@pytest.mark.parametrize("room", [1, 3, 20])
def test_places_are_used_once_and_go_both_ways(room):
    rng = np.random.default_rng(0)
    chosen = jnp.asarray(rng.integers(0, EXPERTS, (10, 2)), jnp.int32)
    load = np.bincount(np.asarray(chosen).reshape(-1), minlength=EXPERTS)
    slots, kept = plan_sends(chosen, jnp.asarray(load, jnp.int32), PARTS, room)
    order, inverse = np.asarray(slots.order).reshape(PARTS, room), np.asarray(slots.inverse)
    flat, rows = np.asarray(chosen).reshape(-1), 0
    for part in range(PARTS):
        held = [copy for copy in order[part] if copy < 20]
        assert held == order[part][: len(held)].tolist()  # in front
        assert len(held) == min(room, (flat // 2 == part).sum()) == kept[part].sum()
        assert np.bincount([flat[c] % 2 for c in held], minlength=2).tolist() == kept[part].tolist()
        assert [inverse[copy] for copy in held] == list(range(part * room, part * room + len(held)))
        rows += len(held)
    assert (inverse == PARTS * room).sum() == 20 - rows
