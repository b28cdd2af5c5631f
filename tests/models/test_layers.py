"""Norm, rotary embedding, attention and the dense MLP."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import Config
from models.layers import (
    MLP,
    Attention,
    RMSNorm,
    attention_implementation,
    causal_attention,
    fan_out,
    matmul,
    rope,
    squared_relu,
    swiglu,
)

EXACT = Config.preset("tiny", dtype="float32")


def normal(seed, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def test_rms_norm_and_its_gradients_equal_the_formula():
    norm = RMSNorm(EXACT)
    norm.scale[...] = scale = normal(0, EXACT.d_model)
    graph, params = nnx.split(norm)

    def plain(scale, x):
        return scale[None, None] * x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + EXACT.rms_eps)

    x = 3 * normal(1, 2, 5, EXACT.d_model)
    np.testing.assert_allclose(norm(x), plain(scale, x), rtol=1e-5, atol=1e-6)
    got = jax.grad(lambda p, x: jnp.sum(jnp.sin(nnx.merge(graph, p)(x))), (0, 1))(params, x)
    want = jax.grad(lambda s, x: jnp.sum(jnp.sin(plain(s, x))), (0, 1))(scale, x)
    for g, w in zip(jax.tree.leaves(got), want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5)


def test_rms_norm_computes_in_float32():
    x = jnp.full((1, EXACT.d_model), 300.0, jnp.bfloat16).at[0, 0].set(1.0)
    out = RMSNorm(Config.preset("tiny"))(x)
    assert out.dtype == jnp.bfloat16
    # In bfloat16 the sum of 128 squares of 300 would stall far below its value.
    np.testing.assert_allclose(out[0, 1].astype(jnp.float32), np.sqrt(128 / 127), rtol=4e-3)


def test_matmul_keeps_the_weight_gradient_in_float32():
    x, w = normal(0, 4096, 3, dtype=jnp.bfloat16), normal(1, 3, 2)
    dx, dw = jax.jit(jax.grad(lambda x, w: jnp.sum(matmul(x, w).astype(jnp.float32)), (0, 1)))(x, w)
    assert (dx.dtype, dw.dtype) == (jnp.bfloat16, jnp.float32)
    want = np.asarray(x, np.float64).sum(0)[:, None] * np.ones((1, 2))
    np.testing.assert_allclose(dw, want, rtol=1e-5, atol=1e-3)
    assert not (dw.astype(jnp.bfloat16).astype(jnp.float32) == dw).all()


def test_fan_out_rounds_the_sum_of_gradients_once():
    def loss(x):
        a, b, c = (v.astype(jnp.float32) for v in fan_out(x))
        return jnp.sum(a * 256.0 + b * 0.75 + c * 0.75)

    # 256.75 is no bfloat16 and rounds to 256, one by one; 257.5 rounds to 258.
    assert jax.grad(loss)(jnp.ones(3, jnp.bfloat16)).tolist() == [258.0] * 3


def test_squared_relu_and_its_gradient_from_the_result_alone():
    z = normal(0, 50)
    value, gradient = jax.vmap(jax.value_and_grad(lambda z: squared_relu(z, "mlp.act")))(z)
    np.testing.assert_allclose(value, np.maximum(z, 0) ** 2, rtol=1e-6)
    np.testing.assert_allclose(gradient, 2 * np.maximum(z, 0), rtol=1e-5)


def test_swiglu_and_its_gradient_equal_the_formula():
    z, da = normal(0, 5, 16), normal(1, 5, 8)

    def formula(z):
        gate, up = jnp.split(z, 2, axis=-1)
        return jax.nn.silu(gate) * up

    (a, pull), (want, pull_want) = jax.vjp(lambda z: swiglu(z, "act"), z), jax.vjp(formula, z)
    np.testing.assert_allclose(np.asarray(a), np.asarray(want), rtol=1e-6)
    np.testing.assert_allclose(pull(da)[0], pull_want(da)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("length", "chunk"), [(12, 4), (12, 5), (7, 4)])
@pytest.mark.some_cases(2)
def test_a_gated_mlp_in_chunks_equals_the_whole(length, chunk):
    config = Config.preset("tiny", d_model=16, dtype="float32")
    mlp, whole = (MLP(config, 24, "act", activation="swiglu", chunk=c, rngs=nnx.Rngs(0)) for c in (chunk, 0))
    x = normal(0, 2, length, 16)
    jaxpr = str(jax.make_jaxpr(mlp)(x))
    assert "scan" in jaxpr and f"{length},48" not in jaxpr  # no activation of the whole sequence
    np.testing.assert_allclose(mlp(x), whole(x), rtol=1e-5, atol=1e-6)
    grads, want = (nnx.grad(lambda m: jnp.sum(m(x) ** 2))(m) for m in (mlp, whole))
    for ours, theirs in zip(jax.tree.leaves(grads), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_mlp_equals_the_formula():
    mlp = MLP(EXACT, 40, "mlp.act", rngs=nnx.Rngs(0))
    x = normal(1, 2, 3, EXACT.d_model)
    want = np.maximum(np.asarray(x) @ np.asarray(mlp.w1[...]), 0) ** 2 @ np.asarray(mlp.w2[...])
    np.testing.assert_allclose(mlp(x), want, rtol=1e-4, atol=1e-5)


def test_rope_makes_scores_depend_on_distance_alone():
    q, k = normal(0, 16), normal(1, 16)
    at = jnp.broadcast_to(q, (1, 12, 1, 16)), jnp.broadcast_to(k, (1, 12, 1, 16))
    q, k = (rope(x, 10_000.0)[0, :, 0] for x in at)
    scores = np.asarray(q @ k.T)
    for distance in (0, 1, 5):
        diagonal = np.diagonal(scores, -distance)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-4, atol=1e-4)
    assert abs(scores[5, 0] - scores[0, 0]) > 1e-2


def test_rope_keeps_lengths_and_the_first_position():
    x = normal(0, 1, 6, 2, 8)
    turned = rope(x, 10_000.0)
    np.testing.assert_allclose(jnp.linalg.norm(turned, axis=-1), jnp.linalg.norm(x, axis=-1), rtol=1e-5)
    np.testing.assert_allclose(turned[:, 0], x[:, 0], rtol=1e-6)
    assert not np.allclose(turned[:, 1], x[:, 1])


def test_attention_is_causal_and_shares_key_value_heads():
    q, k, v = normal(0, 1, 5, 4, 8), normal(1, 1, 5, 2, 8), normal(2, 1, 5, 2, 8)
    out = np.asarray(causal_attention(q, k, v, "xla"))
    for head in range(4):
        scores = np.asarray(q)[0, :, head] @ np.asarray(k)[0, :, head // 2].T / np.sqrt(8)
        scores = np.where(np.tril(np.ones((5, 5))) > 0, scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        np.testing.assert_allclose(
            out[0, :, head], weights @ np.asarray(v)[0, :, head // 2], rtol=1e-4, atol=1e-5
        )


def test_a_later_token_changes_no_earlier_output():
    attention = Attention(EXACT, rngs=nnx.Rngs(0))
    x = normal(0, 1, 9, EXACT.d_model)
    apply = jax.jit(lambda x: attention(x))
    before, after = apply(x), apply(x.at[:, 6].add(1.0))
    assert (before[:, :6] == after[:, :6]).all()
    assert (before[:, 6:] != after[:, 6:]).any(axis=-1).all()


@pytest.mark.parametrize(
    ("overrides", "platform", "want"),
    [
        ({}, "gpu", "cudnn"),
        ({}, "cpu", "xla"),
        (dict(dtype="float32"), "gpu", "xla"),
        (dict(head_dim=256), "gpu", "xla"),
        (dict(head_dim=12), "gpu", "xla"),
        (dict(attention="xla"), "gpu", "xla"),
        (dict(attention="cudnn"), "cpu", "cudnn"),
    ],
)
def test_which_attention_runs_where(overrides, platform, want):
    assert attention_implementation(Config.preset("tiny", **overrides), platform) == want


@pytest.mark.parametrize(("platform", "want"), [("cuda", "cudnn"), ("gpu", "cudnn"), ("cpu", "xla")])
def test_attention_is_chosen_for_the_device_that_is_traced_for(platform, want):
    device = jax.sharding.AbstractDevice(device_kind="any", num_cores=1, platform=platform)
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        assert attention_implementation(Config.preset("tiny")) == want
