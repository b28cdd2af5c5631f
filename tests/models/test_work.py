"""What a step costs, counted by formula and in the traced program."""

import math

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params

from models import LM, Config, loss_fn
from models.work import PEAK_BF16_FLOPS, Work, flops_per_token

BATCH, SEQ = 2, 16


def traced_flops(jaxpr, times=1):
    """Operations of all matrix products of a jaxpr, those of a loop as often as it turns."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contract, _), _ = eqn.params["dimension_numbers"]
            depth = math.prod(eqn.invars[0].aval.shape[i] for i in contract)
            total += 2 * times * depth * eqn.outvars[0].aval.size
        inner = times * eqn.params.get("length", 1) if eqn.primitive.name == "scan" else times
        for sub in jaxprs_in_params(eqn.params):
            total += traced_flops(sub, inner)
    return total


@pytest.mark.parametrize("changes", [{}, dict(num_layers=5, num_kv_heads=1), dict(vocab_size=300)])
def test_the_forward_pass_is_a_third(changes):
    config = Config.preset("tiny", **(dict(first_k_dense=changes.get("num_layers", 3)) | changes))
    graph, params = nnx.split(nnx.eval_shape(lambda: LM(config)))
    tokens = jax.ShapeDtypeStruct((BATCH, SEQ + 1), jnp.int32)
    program = jax.make_jaxpr(lambda p, t: loss_fn(nnx.merge(graph, p), t)[0])(params, tokens)
    # XLA's attention, which is traced here, multiplies with the keys after the query, too.
    keys_after = (SEQ - 1) / 2
    idle = config.num_layers * 4 * config.num_heads * config.head_dim * keys_after
    assert traced_flops(program.jaxpr) / (BATCH * SEQ) - idle == flops_per_token(config, SEQ) / 3


def test_experts_cost_what_a_token_meets():
    def experts(top_k):
        return Config.preset("nano", num_layers=2, top_k=top_k)

    one = 6 * 2 * 2 * 2688 * 1856  # two layers of two matrices
    assert flops_per_token(experts(6), 64) - flops_per_token(experts(5), 64) == one


def test_the_second_head_and_its_block_count():
    without = Config.preset("dsv3", mtp_layers=0)
    d, block = without.d_model, without.param_counts()
    attention = block.attention // without.num_layers
    rest = 8 * 2 * d * 2048 + 2 * d * 2048 + d * 8 + 2 * d * d + d * without.vocab_size
    keys = without.num_heads * without.head_dim * 65
    more = flops_per_token(Config.preset("dsv3"), 64) - flops_per_token(without, 64)
    assert more == 6 * (attention + rest + keys)


@pytest.mark.parametrize("kind", PEAK_BF16_FLOPS)
def test_utilization_is_the_share_of_the_peak(kind):
    config = Config.preset("nano", num_layers=4, vocab_size=256)
    work = Work.of(config, tokens=16384, seq=4096, device_kind=kind)
    assert work.flops == 16384 * flops_per_token(config, 4096)
    perfect_ms = work.flops / 989e12 * 1e3
    assert work.mfu(perfect_ms) == pytest.approx(1.0)
    assert work.mfu(4 * perfect_ms) == pytest.approx(0.25)
    assert work.rate(200.0) == f"81,920 tokens/s, MFU {perfect_ms / 200:.1%}"


@pytest.mark.parametrize(("dtype", "kind"), [("bfloat16", "cpu"), ("float32", "NVIDIA H200")])
def test_without_a_known_peak_there_is_no_utilization(dtype, kind):
    work = Work.of(Config.preset("tiny", dtype=dtype), tokens=2048, seq=128, device_kind=kind)
    assert work.mfu(10.0) is None
    assert work.rate(10.0) == "204,800 tokens/s"
