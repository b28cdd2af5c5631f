"""On a GPU: the model keeps its bits under every policy, and its residuals lie where explain says."""

import jax
import numpy as np
import pytest
from flax import nnx

import jaxoff
from models import LM, Config, loss_fn

pytestmark = pytest.mark.gpu

DETERMINISTIC = {"xla_gpu_deterministic_ops": True}
MEGATRON = ["attn_norm", "core_attn", "expert_fc1", "moe_act", "shared_experts"]
POLICIES = {
    "offload all names": jaxoff.policy(offload=["*"]),
    "recompute all names": jaxoff.policy(recompute=["*"]),
    "experts offloaded": jaxoff.policy(offload=["moe.*"], save=["attn.*"]),
    "te_v1": jaxoff.policy("te_v1"),
    "te_v2": jaxoff.policy("te_v2", min_bytes=1),
    "megatron": jaxoff.policy("megatron", modules=MEGATRON),
    "save_all": jaxoff.policy("save_all"),
    "recompute_all": jaxoff.policy("recompute_all"),
    "dots": jaxoff.policy("dots"),
}


def program(config, policy):
    """The parameters, and the loss as a function of them and a batch."""
    graph, params = nnx.split(LM(config, policy=policy, rngs=nnx.Rngs(0)))
    return params, lambda params, batch: loss_fn(nnx.merge(graph, params), batch)


def compiled(config, policy, batch, options=None):
    params, loss = program(config, policy)
    step = jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=options)
    return params, step.lower(params, batch).compile()


def tokens(batch, length):
    return jax.random.randint(jax.random.key(1), (batch, length), 0, 256)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_policy_gives_the_same_bits(dtype):
    config, batch = Config.preset("tiny", dtype=dtype), tokens(4, 129)
    params, step = compiled(config, jaxoff.policy(save=["*"]), batch, DETERMINISTIC)
    saved = jax.tree.map(np.asarray, step(params, batch))
    again = jax.tree.map(np.asarray, step(params, batch))
    jax.tree.map(np.testing.assert_array_equal, saved, again)
    unequal = []
    for name, policy in POLICIES.items():
        params, step = compiled(config, policy, batch, DETERMINISTIC)
        got = jax.tree.map(np.asarray, step(params, batch))
        if not all(jax.tree.leaves(jax.tree.map(np.array_equal, saved, got))):
            unequal.append(name)
    assert unequal == []


@pytest.mark.parametrize("policy", ["experts offloaded", "te_v2", "megatron"])
def test_a_narrow_nano_holds_the_bytes_that_explain_reports(policy):
    config = Config.preset("nano", num_layers=3, num_experts=8, vocab_size=256)
    batch = tokens(2, 513)
    params, loss = program(config, POLICIES[policy])
    report = jaxoff.explain(loss, params, batch, has_aux=True)
    params, step = compiled(config, POLICIES[policy], batch)
    assert report.host_bytes > 0
    assert step.memory_analysis().host_temp_size_in_bytes == report.host_bytes
    (value, _), grads = step(params, batch)
    assert np.isfinite(value) and all(np.isfinite(np.asarray(g)).all() for g in jax.tree.leaves(grads))
