"""The mixture-of-experts layer against a loop over tokens, and the router's losses at known points."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import Config, MoE
from models.moe import (
    choose_experts,
    combine,
    dispatch,
    dispatch_probs,
    experts_implementation,
    router_stats,
    sort_by_expert,
)

EXACT = Config.preset("tiny", dtype="float32", d_model=16, d_expert=24, d_shared=20, num_experts=5, top_k=3)
VARIANTS = {
    "sigmoid": {},
    "softmax": dict(router="softmax"),
    "raw_scores": dict(norm_topk_probs=False),
    "scaled": dict(routed_scaling=2.5),
    "no_shared": dict(d_shared=0),
    "top_1": dict(top_k=1),
    "all_experts": dict(top_k=5),
}


def layer(config, tokens=12):
    return MoE(config, rngs=nnx.Rngs(0)), jax.random.normal(jax.random.key(1), (tokens, config.d_model))


def loop(moe, x):
    """Token by token, expert by expert, in float64."""
    c = moe.config
    x, router, w1, w2 = (np.asarray(v, np.float64) for v in (x, moe.router[...], moe.w1[...], moe.w2[...]))
    out = np.zeros_like(x)
    for t, token in enumerate(x):
        logits = token @ router
        exp = np.exp(logits - logits.max())
        scores = 1 / (1 + np.exp(-logits)) if c.router == "sigmoid" else exp / exp.sum()
        chosen = np.argsort(-scores)[: c.top_k]
        total = scores[chosen].sum() if c.norm_topk_probs else 1.0
        for e in chosen:
            out[t] += c.routed_scaling * scores[e] / total * (np.maximum(token @ w1[e], 0) ** 2 @ w2[e])
        if moe.shared is not None:
            s1, s2 = (np.asarray(w[...], np.float64) for w in (moe.shared.w1, moe.shared.w2))
            out[t] += np.maximum(token @ s1, 0) ** 2 @ s2
    return out


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.some_cases(4)
def test_layer_equals_a_loop_over_tokens(variant):
    moe, x = layer(dataclasses.replace(EXACT, **VARIANTS[variant]))
    out, stats = jax.jit(lambda x: moe(x))(x)
    np.testing.assert_allclose(out, loop(moe, x), rtol=1e-4, atol=1e-5)
    assert int(stats.load.sum()) == x.shape[0] * moe.config.top_k


@pytest.mark.parametrize("router", ["sigmoid", "softmax"])
def test_no_sum_of_the_routing_can_be_merged_with_another(router):
    """XLA makes one sum of two that follow each other, in another order: other bits where it does so once."""
    config = dataclasses.replace(EXACT, router=router)
    eqns = jax.make_jaxpr(lambda z: choose_experts(z, config))(jnp.ones((12, config.num_experts))).eqns
    sums = [eqn for eqn in eqns if eqn.primitive.name == "reduce_sum"]
    assert len(sums) >= 2

    def only_reader(eqn):
        (reader,) = (e for e in eqns if any(v is eqn.outvars[0] for v in e.invars))
        return reader

    for eqn in sums:
        reader = only_reader(eqn)
        # Between the sum and its barrier only a shape may change.
        while reader.primitive.name == "broadcast_in_dim":
            reader = only_reader(reader)
        assert reader.primitive.name == "optimization_barrier"


def test_gradients_equal_those_of_a_dense_layer():
    """Every expert computes every token, and what was not chosen is multiplied by zero."""
    moe, x = layer(EXACT)
    graph, params = nnx.split(moe)

    def dense(params, x):
        m = nnx.merge(graph, params)
        routing = choose_experts(jnp.dot(x, m.router[...], precision="highest"), m.config)
        gates = jnp.sum(
            jax.nn.one_hot(routing.experts, m.config.num_experts) * routing.probs[:, :, None], axis=1
        )
        act = jnp.square(jnp.maximum(jnp.einsum("td,edi->tei", x, m.w1[...], precision="highest"), 0))
        out = jnp.einsum("tei,eid,te->td", act, m.w2[...], gates, precision="highest")
        return out + jnp.square(jnp.maximum(x @ m.shared.w1[...], 0)) @ m.shared.w2[...]

    def gradients(apply):
        return jax.jit(jax.grad(lambda p, x: jnp.sum(jnp.sin(apply(p, x))), (0, 1)))(params, x)

    got, want = gradients(lambda p, x: nnx.merge(graph, p)(x)[0]), gradients(dense)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("router", ["sigmoid", "softmax"])
def test_losses_of_a_uniform_router(router):
    config = dataclasses.replace(EXACT, router=router)
    logits = jnp.full((40, 5), 0.3)
    stats = router_stats(logits, choose_experts(logits, config))
    # Ties go to the first experts, so the load is not even; the mean score is 1/E, and the shares sum to 1.
    np.testing.assert_allclose(stats.aux, 1.0, rtol=1e-6)
    np.testing.assert_allclose(stats.z, (0.3 + np.log(5)) ** 2, rtol=1e-6)


@pytest.mark.parametrize("router", ["sigmoid", "softmax"])
def test_losses_of_a_router_that_sends_all_to_one(router):
    config = dataclasses.replace(EXACT, router=router, top_k=1)
    logits = jnp.full((40, 5), -30.0).at[:, 2].set(30.0)
    stats = router_stats(logits, choose_experts(logits, config))
    np.testing.assert_allclose(stats.aux, 5.0, rtol=1e-5)
    assert stats.load.tolist() == [0, 0, 40, 0, 0]


def test_load_balancing_loss_pushes_towards_the_idle_experts():
    config = dataclasses.replace(EXACT, top_k=1)
    logits = 0.1 * jax.random.normal(jax.random.key(0), (64, 5)).at[:, 2].add(20.0)
    push = jax.jit(jax.grad(lambda z: router_stats(z, choose_experts(z, config)).aux))(logits).sum(0)
    assert push[2] > 0
    assert (jnp.delete(push, 2) < 0).all()


def test_dispatch_and_combine_are_inverse_and_transpose_of_each_other():
    k, experts = 3, jnp.array([[2, 0, 1], [1, 2, 4], [0, 4, 2], [4, 3, 0]], jnp.int32)
    permutation = sort_by_expert(experts)
    x = jax.random.normal(jax.random.key(0), (4, 6))
    rows = dispatch(x, permutation)
    np.testing.assert_allclose(combine(rows, permutation, k), k * x, rtol=1e-6)
    sorted_ids = experts.reshape(-1)[permutation.order]
    assert (jnp.diff(sorted_ids) >= 0).all()
    assert (rows == x[permutation.order // k]).all()
    assert (dispatch_probs(experts, permutation) == sorted_ids).all()
    # <dispatch(x), y> = <x, combine(y)>, by their gradients.
    y = jax.random.normal(jax.random.key(1), rows.shape)
    pulled = jax.vjp(lambda x: dispatch(x, permutation), x)[1](y)[0]
    np.testing.assert_allclose(pulled, combine(y, permutation, k), rtol=1e-6)
    back = jax.vjp(lambda y: combine(y, permutation, k), y)[1](x)[0]
    np.testing.assert_allclose(back, dispatch(x, permutation), rtol=1e-6)


def test_tokens_for_one_expert_keep_their_order():
    permutation = sort_by_expert(jnp.array([[1, 0], [0, 1], [1, 0]], jnp.int32))
    assert permutation.order.tolist() == [1, 2, 5, 0, 3, 4]
    assert permutation.inverse[permutation.order].tolist() == list(range(6))


def test_gradient_has_no_scatter_add():
    moe, x = layer(EXACT)
    graph, params = nnx.split(moe)
    jaxpr = jax.make_jaxpr(jax.grad(lambda p, x: jnp.sum(nnx.merge(graph, p)(x)[0]), (0, 1)))(params, x)
    assert not re.search(r"scatter[-_]add", str(jaxpr))
    # The search finds it where it is.
    gather = jax.make_jaxpr(jax.grad(lambda x: jnp.sum(x[jnp.array([0, 0])])))(x)
    assert re.search(r"scatter[-_]add", str(gather))


def test_router_computes_in_float32_and_output_keeps_the_dtype():
    moe, x = layer(dataclasses.replace(EXACT, dtype="bfloat16"))
    out, stats = jax.jit(lambda x: moe(x))(x.astype(jnp.bfloat16))
    assert out.dtype == jnp.bfloat16
    assert stats.aux.dtype == stats.z.dtype == jnp.float32
    np.testing.assert_allclose(
        out.astype(jnp.float32), loop(moe, x.astype(jnp.bfloat16)), rtol=0.1, atol=0.05
    )


def test_the_kernels_serve_a_hopper_gpu_and_the_reason_is_told():
    nano = Config.preset("nano")
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="cuda")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        assert str(experts_implementation(nano, 64)) == "mosaic: the fused kernels run on NVIDIA H200"
        wide = experts_implementation(dataclasses.replace(nano, dtype="float32"), 64)
        assert wide is not None
        assert (wide.name, "got float32" in wide.reason) == ("reference", True)
    assert experts_implementation(Config.preset("tiny", first_k_dense=3), 64) is None


def test_on_hopper_a_step_runs_the_kernels_and_nothing_else_for_the_experts():
    """Lowered for an H200 that need not be there: six products, two sums of rows, and no loop over tiles."""
    config = Config.preset("tiny", d_shared=0)
    moe = MoE(config, rngs=nnx.Rngs(0))
    graph, params = nnx.split(moe)
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="cuda")
    step = jax.jit(jax.grad(lambda p, x: jnp.sum(jnp.square(nnx.merge(graph, p)(x)[0])), (0, 1)))
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        traced = step.trace(params, jnp.ones((64, config.d_model), jnp.bfloat16))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu") == 8
    assert "stablehlo.while" not in text


def test_leading_axes_are_kept():
    moe, x = layer(EXACT)
    apply = jax.jit(lambda x: moe(x))
    flat, stats = apply(x)
    nested, nested_stats = apply(x.reshape(3, 4, -1))
    assert (nested.reshape(flat.shape) == flat).all()
    assert (nested_stats.load == stats.load).all()
