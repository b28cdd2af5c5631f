"""The optimizer: its schedule, clipping, decay mask and microbatches."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from models import optim
from models.options import Options
from models.program import Program


def test_the_schedule_warms_up_and_decays_to_a_tenth():
    rate = optim.schedule(2.0, warmup=4, steps=104)
    got = [float(np.asarray(rate(i))) for i in (0, 1, 2, 3, 4, 29, 54, 104)]
    quarter = 0.1 + 0.9 * (1 + np.cos(np.pi / 4)) / 2
    np.testing.assert_allclose(got, [0.4, 0.8, 1.2, 1.6, 2.0, 2 * quarter, 1.1, 0.2], rtol=1e-6)


def test_the_schedule_without_warm_up_starts_at_its_peak():
    assert np.asarray(optim.schedule(2.0, warmup=0, steps=10)(0)) == 2.0


def moments(state) -> Any:
    return optax.tree.get(state, "mu")


def test_gradients_are_clipped_by_their_global_norm():
    params = {"w": jnp.ones((2, 2)), "v": jnp.ones((2, 2))}
    optimizer = optim.adamw(lambda step: 1.0, weight_decay=0.0, clip=1.0)
    grads = {"w": jnp.full((2, 2), 30.0), "v": jnp.full((2, 2), 40.0)}  # norm 100
    _, state = optimizer.update(grads, optimizer.init(params), params)
    mu = moments(state)
    np.testing.assert_allclose(mu["w"], 0.1 * 0.3, rtol=1e-5)
    np.testing.assert_allclose(mu["v"], 0.1 * 0.4, rtol=1e-5)
    small = jax.tree.map(lambda g: g / 200, grads)
    _, state = optimizer.update(small, optimizer.init(params), params)
    np.testing.assert_allclose(moments(state)["w"], 0.1 * 30 / 200, rtol=1e-5)


def test_decay_applies_to_matrices_alone_stacked_or_not():
    params = Program(Options.of("tiny"), None).state_shapes["params"]
    flags = jax.tree_util.tree_leaves_with_path(optim.select_decayed(params))
    not_decayed = {jax.tree_util.keystr(path, simple=True, separator=".") for path, flag in flags if not flag}
    stacks = ("dense", "experts")
    assert not_decayed == {f"{s}.{n}.scale" for s in stacks for n in ("attn_norm", "mlp_norm")} | {
        "norm.scale"
    }


def test_decay_pulls_matrices_and_leaves_scales():
    params = {
        "w": jnp.ones((2, 2)),
        "norm": {"scale": jnp.ones((3, 2))},
        "bias": jnp.ones((3, 2)),
        "vector": jnp.ones(2),
    }
    optimizer = optim.adamw(lambda step: 0.5, weight_decay=0.1, clip=1.0)
    updates: Any
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    np.testing.assert_allclose(updates["w"], -0.05, rtol=1e-6)
    for leaf in (updates["norm"]["scale"], updates["bias"], updates["vector"]):
        np.testing.assert_array_equal(leaf, 0.0)


def loss(params, tokens):
    # Linear in the batch's rows, as the model's cross-entropy is, with gradients in a narrower type.
    value = jnp.mean(jnp.tanh(tokens.astype(jnp.float32) @ params["w"].astype(jnp.float32)))
    return value, {"twice": 2 * value}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_microbatches_give_the_big_batch(dtype):
    params = {"w": jax.random.normal(jax.random.key(0), (5, 3), dtype)}
    tokens = jax.random.randint(jax.random.key(1), (8, 5), 0, 3)
    whole, metrics = optim.mean_grads(loss, params, tokens[None])
    parts, metrics_of_parts = jax.jit(lambda p, t: optim.mean_grads(loss, p, t))(
        params, tokens.reshape(4, 2, 5)
    )
    assert whole["w"].dtype == parts["w"].dtype == jnp.float32
    tolerance = 1e-6 if dtype == "float32" else 1e-2
    np.testing.assert_allclose(parts["w"], whole["w"], rtol=tolerance, atol=tolerance / 10)
    assert set(metrics) == set(metrics_of_parts) == {"loss", "twice"}
    np.testing.assert_allclose(metrics_of_parts["twice"], metrics["twice"], rtol=1e-5)


@pytest.mark.long
def test_microbatches_of_the_model_give_the_big_batch():
    """In float32 and without the balancing loss, whose product of means is not a mean over microbatches."""
    overrides = dict(
        d_model=32,
        num_layers=1,
        first_k_dense=0,
        d_expert=32,
        d_shared=32,
        dtype="float32",
        aux_loss_coef=0.0,
    )
    tokens = np.random.default_rng(0).integers(0, 256, (4, 17), np.int32)

    def grads(accum):
        program = Program(
            Options.of("tiny", steps=2, batch=4, seq=16, accum=accum, overrides=overrides), None
        )
        params = program.init()["params"]
        return jax.jit(lambda p, t: optim.mean_grads(program.loss, p, t))(
            params, program.microbatches(tokens)
        )

    (whole, metrics), (parts, metrics_of_parts) = grads(1), grads(2)
    np.testing.assert_allclose(metrics_of_parts["loss"], metrics["loss"], rtol=1e-5)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-3, atol=1e-5 * float(jnp.abs(a).max()) + 1e-8)
