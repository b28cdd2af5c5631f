"""What `explain` says of the model is what its differentiated program holds."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxoff
from models import LM, Config, loss_fn
from tests.jaxoff.policy import placement

SMALL = dict(d_model=32, num_heads=2, num_kv_heads=1, head_dim=16, d_expert=24, d_shared=40, d_ff=48)
POLICIES = {
    "all names": jaxoff.policy(offload=["*"]),
    "experts": jaxoff.policy(offload=["moe.in", "moe.act"], save=["attn.*"]),
    "te_v2": jaxoff.policy("te_v2", min_bytes=64),
    "megatron": jaxoff.policy("megatron", modules=["core_attn", "expert_fc1", "moe_act", "shared_experts"]),
    "saved": jaxoff.policy(save=["*"]),
}


KINDS = {"tiny": {}, "mtp": {"mtp_layers": 1, "router": "softmax"}}
# The default policy is like "experts", and test_lm.py has all names saved.
QUICK = {("megatron", "tiny")}
PAIRS = [
    pytest.param(policy, kind, marks=() if (policy, kind) in QUICK else pytest.mark.long)
    for policy in POLICIES
    for kind in KINDS
]


@pytest.mark.parametrize(("policy", "kind"), PAIRS)
def test_host_bytes_are_those_of_the_differentiated_program(policy, kind):
    config = Config.preset("tiny", **SMALL, **KINDS[kind])
    graph, params = nnx.split(nnx.eval_shape(lambda: LM(config, policy=POLICIES[policy])))
    batch = jax.ShapeDtypeStruct((2, 17), jnp.int32)

    def loss(params):
        return loss_fn(nnx.merge(graph, params), jnp.zeros(batch.shape, batch.dtype))[0]

    report = jaxoff.explain(loss, params)
    assert report.host_bytes == placement.nbytes(placement.grad_host_arrays(loss, params))
    assert (report.host_bytes > 0) == (policy != "saved")


def test_the_default_run_has_no_findings():
    from models.options import POLICY
    from models.policy_text import parse

    config = Config.preset("tiny")
    graph, params = nnx.split(nnx.eval_shape(lambda: LM(config, policy=parse(POLICY))))

    def loss(params, batch):
        return loss_fn(nnx.merge(graph, params), batch)

    report = jaxoff.explain(loss, params, jax.ShapeDtypeStruct((8, 257), jnp.int32), has_aux=True)
    assert report.findings == ()
    assert {r.name for r in report.residuals if r.placement == "offload"} == {"moe.in", "moe.act"}
