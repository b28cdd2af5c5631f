"""On a GPU: the model keeps its bits under every policy, and its residuals lie where explain says."""

import jax
import numpy as np
import pytest
from flax import nnx

import jaxoff
from models import LM, Config, loss_fn

pytestmark = pytest.mark.gpu

DETERMINISTIC = {"xla_gpu_deterministic_ops": True}
# These place named values (and kernels' and dots' outputs), and compute the rest again.
NAMED = {
    "offload all names": jaxoff.policy(offload=["*"]),
    "recompute all names": jaxoff.policy(recompute=["*"]),
    "experts offloaded": jaxoff.policy(offload=["moe.*"], save=["attn.*"]),
    "te_v2": jaxoff.policy("te_v2", min_bytes=1),
    "recompute_all": jaxoff.policy("recompute_all"),
    "dots": jaxoff.policy("dots"),
}
# This one saves un-named values too: its bits are those of its own saved twin.
MEGATRON = jaxoff.policy(
    "megatron", modules=["attn_norm", "core_attn", "expert_fc1", "moe_act", "shared_experts"]
)


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


def gradients(config, policy, batch):
    params, step = compiled(config, policy, batch, DETERMINISTIC)
    return jax.tree.map(np.asarray, step(params, batch))


def same(a, b):
    return all(jax.tree.leaves(jax.tree.map(np.array_equal, a, b)))


# One kind of layer at a time: with both, XLA loses one of two equal cuDNN graphs under deterministic options
# and the step ends in IndexError.
@pytest.mark.parametrize("dense", [0, 3], ids=["experts", "dense"])
def test_placing_named_values_changes_no_bit(dense):
    config, batch = Config.preset("tiny", first_k_dense=dense), tokens(4, 129)
    saved = gradients(config, jaxoff.policy(save=["*"]), batch)
    assert same(saved, gradients(config, jaxoff.policy(save=["*"]), batch))
    unequal = [name for name, policy in NAMED.items() if not same(saved, gradients(config, policy, batch))]
    assert unequal == []
    assert same(gradients(config, MEGATRON, batch), gradients(config, MEGATRON.on_device(), batch))


# Without cuDNN te_v2 moves un-named dots of the attention, which no name pins.
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_offloaded_and_saved_twins_give_the_same_bits_without_cudnn(dtype):
    config, batch = Config.preset("tiny", dtype=dtype, attention="xla"), tokens(4, 129)
    for policy in (NAMED["offload all names"], NAMED["experts offloaded"], MEGATRON):
        assert same(*(gradients(config, p, batch) for p in (policy, policy.on_device()))), policy


@pytest.mark.parametrize(
    "policy", [NAMED["experts offloaded"], NAMED["te_v2"], MEGATRON], ids=["lists", "te_v2", "megatron"]
)
def test_a_narrow_nano_holds_the_bytes_that_explain_reports(policy):
    config = Config.preset("nano", num_layers=3, num_experts=8, vocab_size=256)
    batch = tokens(2, 513)
    params, loss = program(config, policy)
    report = jaxoff.explain(loss, params, batch, has_aux=True)
    params, step = compiled(config, policy, batch)
    assert report.host_bytes > 0
    assert step.memory_analysis().host_temp_size_in_bytes == report.host_bytes
    (value, _), grads = step(params, batch)
    assert np.isfinite(value) and all(np.isfinite(np.asarray(g)).all() for g in jax.tree.leaves(grads))
