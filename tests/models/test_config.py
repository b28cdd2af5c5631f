"""Configurations: presets, what is refused, and parameter counts against the real parameters."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from models import LM, Config
from models.config import ParamCounts

PRESETS = ("tiny", "nano", "mixtral", "dsv3", "llama3_8b", "llama3_1b")


def real_count(config):
    params = nnx.state(nnx.eval_shape(lambda: LM(config)), nnx.Param)
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize(
    ("preset", "overrides"),
    [
        ("tiny", {}),
        ("tiny", dict(mtp_layers=1, d_shared=0)),
        ("tiny", dict(first_k_dense=0)),
        ("tiny", dict(first_k_dense=3)),
        ("nano", {}),
        ("mixtral", {}),
        ("dsv3", {}),
        ("dsv3", dict(num_experts=64, num_layers=61, first_k_dense=3)),
        ("llama3_1b", {}),
        ("llama3_8b", dict(num_layers=3)),
    ],
)
def test_param_counts_equal_the_parameters(preset, overrides):
    config = Config.preset(preset, **overrides)
    assert config.param_counts().total == real_count(config)


def test_llama_has_its_published_parameters():
    assert Config.preset("llama3_8b").param_counts().total == 8_030_261_248


def test_active_parameters_leave_out_the_experts_not_chosen():
    config = Config.preset("tiny", num_experts=8, top_k=2)
    counts = config.param_counts()
    assert counts.total - counts.active == counts.experts * 6 // 8
    every = dataclasses.replace(config, top_k=8).param_counts()
    assert every.active == every.total == counts.total


def test_parts_add_up_and_print_one_a_line():
    counts = Config.preset("dsv3").param_counts()
    parts = {k: v for k, v in dataclasses.asdict(counts).items() if k not in ("total", "active")}
    assert sum(parts.values()) == counts.total
    lines = str(counts).splitlines()
    assert len(lines) == len(dataclasses.fields(ParamCounts))
    assert f"{counts.total:,}" in lines[-2]


def test_presets_have_the_published_widths():
    nano = Config.preset("nano", num_layers=7)
    assert (nano.d_model, nano.num_experts, nano.top_k, nano.d_expert, nano.d_shared) == (
        2688,
        128,
        6,
        1856,
        3712,
    )
    assert (nano.num_heads, nano.num_kv_heads, nano.head_dim, nano.num_layers) == (32, 2, 128, 7)
    mixtral = Config.preset("mixtral", num_layers=32)
    # Two matrices an expert here, three in the original of 46.7 billion.
    assert (mixtral.d_model, mixtral.num_experts, mixtral.top_k, mixtral.d_expert) == (4096, 8, 2, 14336)
    assert mixtral.param_counts().experts * 3 // 2 == pytest.approx(45.1e9, rel=0.01)
    dsv3 = Config.preset("dsv3")
    assert (dsv3.d_model, dsv3.top_k, dsv3.d_expert, dsv3.d_shared, dsv3.mtp_layers) == (
        7168,
        8,
        2048,
        2048,
        1,
    )


def test_tiny_mixes_dense_and_expert_layers_of_one_to_two_million_parameters():
    tiny = Config.preset("tiny")
    assert tiny.first_k_dense >= 1
    assert tiny.num_moe_layers >= 2
    assert tiny.vocab_size == 256
    assert 0.9e6 < tiny.param_counts().total < 2e6


@pytest.mark.parametrize("preset", PRESETS)
def test_configs_are_frozen_and_hash_by_value(preset):
    a, b = Config.preset(preset), Config.preset(preset)
    assert a == b
    assert hash(a) == hash(b)
    assert dataclasses.replace(a, num_layers=5).num_layers == 5
    with pytest.raises(dataclasses.FrozenInstanceError):
        a.d_model = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_dtypes_are_kept_as_text():
    config = Config.preset("tiny", dtype=jnp.float32, param_dtype=jnp.dtype("bfloat16"))
    assert (config.dtype, config.param_dtype) == ("float32", "bfloat16")
    assert config == Config.preset("tiny", dtype="float32", param_dtype="bfloat16")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (dict(top_k=9), "top_k must be from 1 to num_experts, got top_k=9 and num_experts=8"),
        (dict(top_k=0), "top_k must be from 1"),
        (dict(num_kv_heads=3), "num_heads must be a multiple of num_kv_heads"),
        (dict(head_dim=7), "head_dim must be even"),
        (dict(first_k_dense=4), "first_k_dense must be at most num_layers"),
        (dict(d_ff=0), "d_ff, the width of the dense layers' MLP, must be set"),
        (dict(mtp_layers=2), "mtp_layers must be 0 or 1"),
        (dict(d_expert=0), "num_experts and d_expert must be greater than 0"),
        (dict(num_layers=0), "num_layers must be greater than 0, got 0"),
        (dict(d_model=64.0), "d_model must be an integer, got 64.0"),
        (dict(z_loss_coef=-1.0), "z_loss_coef must be at least 0"),
        (dict(router="softmaxx"), "router must be one of 'sigmoid', 'softmax', .*did you mean 'softmax'"),
        (dict(attention="cudn"), "attention must be one of 'auto', 'cudnn', 'xla'.*did you mean 'cudnn'"),
        (dict(dtype="float16"), "dtype must be one of 'bfloat16', 'float32', got 'float16'"),
        (dict(param_dtype="nonsense"), "param_dtype must be one of"),
    ],
)
def test_what_does_not_fit_is_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        Config.preset("tiny", **overrides)


def test_unknown_preset_and_field_name_the_near_miss():
    with pytest.raises(
        ValueError, match="'dsv3', 'llama3_8b', 'llama3_1b', got 'mixtal'; did you mean 'mixtral'"
    ):
        Config.preset("mixtal")
    with pytest.raises(TypeError, match="no field 'n_layers'; did you mean 'num_layers'"):
        Config.preset("tiny", n_layers=3)
