"""Policies as values: construction, errors, equality, and the registry."""

import copy
import pickle

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxoff
from jaxoff._jaxpr.tag import Tag
from jaxoff._policy.presets import MEGATRON_MODULES
from tests.jaxoff import remat3

NAMES = st.lists(st.text("abc.*", min_size=1, max_size=4), max_size=4)


def test_equal_however_written():
    a = jaxoff.policy(offload=["b", "a", "a"], save="c")
    b = jaxoff.policy(save=("c",), offload=iter(["a", "b"]))
    assert a == b and hash(a) == hash(b) and len({a, b}) == 1
    assert a != jaxoff.policy(offload=["a", "b"]) and a != jaxoff.policy(
        offload=["a", "b"], save="c", min_bytes=1
    )
    assert (a | b) == (b | a) and hash(a | b) == hash(b | a)


def test_policies_are_frozen_and_copy():
    policy = jaxoff.policy("te_v2", save=["a"])
    with pytest.raises(AttributeError):
        policy.min_bytes = 3
    assert copy.deepcopy(policy) == policy == pickle.loads(pickle.dumps(policy))
    tag = pickle.loads(pickle.dumps(Tag("a", "offload")))
    assert (tag, tag.label, tag.mark) == ("a", "a", "offload")


@given(
    offload=NAMES,
    save=NAMES,
    recompute=NAMES,
    min_bytes=st.integers(0, 10),
    unmarked=st.sampled_from(["recompute", "save", "dots", "offload", "offload_dots"]),
)
def test_the_repr_makes_the_policy_again(offload, save, recompute, min_bytes, unmarked):
    save = [n for n in save if n not in offload]
    recompute = [n for n in recompute if n not in offload + save]
    policy = jaxoff.policy(
        offload=offload, save=save, recompute=recompute, min_bytes=min_bytes, unmarked=unmarked
    )
    assert eval(repr(policy)) == policy
    assert eval(repr(policy | policy.on_device())) == policy | policy.on_device()


def test_equal_policies_do_not_retrace():
    traces = []

    @jax.jit(static_argnames="policy")
    def step(w, policy):
        def block(w):
            traces.append(policy)
            return jnp.sin(jaxoff.name(w @ w, "a"))

        return jax.grad(lambda w: jax.checkpoint(block, policy=policy)(w).sum())(w)

    w = jnp.ones((4, 4))
    step(w, jaxoff.policy(offload=["a"], save=["b"]))
    count = len(traces)
    step(w, jaxoff.policy(save=["b"], offload=["a"]))
    assert count > 0 and len(traces) == count
    step(w, jaxoff.policy(offload=["a"]))
    assert len(traces) > count


PRESETS = "te_v1, te_v2, megatron, save_all, recompute_all, dots"


@pytest.mark.parametrize(
    ("make", "error", "parts"),
    [
        (lambda: jaxoff.policy("te_v3"), ValueError, [PRESETS, "'te_v3'", "Did you mean 'te_v2'?"]),
        (lambda: jaxoff.policy("qqq"), ValueError, [PRESETS, "'qqq'"]),
        (
            lambda: jaxoff.policy("megatron", modules=["core_atn"]),
            ValueError,
            [*MEGATRON_MODULES, "'core_atn'", "Did you mean 'core_attn'?"],
        ),
        (lambda: jaxoff.policy("megatron", modules=[]), ValueError, ["at least one module"]),
        (lambda: jaxoff.policy("megatron"), TypeError, ["'megatron'", "modules"]),
        (lambda: jaxoff.policy("te_v1", modules=["core_attn"]), TypeError, ["'te_v1'", "modules"]),
        (lambda: jaxoff.policy(ofload=["a"]), TypeError, ["'ofload'", "Did you mean 'offload'?"]),
        (lambda: jaxoff.policy(offload=["a", "b"], save=["b"]), ValueError, ["'b'", "both offload and save"]),
        (
            lambda: jaxoff.policy(offload=["a"], recompute=["a"]),
            ValueError,
            ["'a'", "both offload and recompute"],
        ),
        (lambda: jaxoff.policy(save=["a"], recompute=["a"]), ValueError, ["'a'", "both save and recompute"]),
        (
            lambda: jaxoff.policy(memory_kind="pinned"),
            ValueError,
            ["'pinned_host'", "'pinned'", "Did you mean"],
        ),
        (
            lambda: jaxoff.policy(unmarked="offlaod"),
            ValueError,
            ["'recompute'", "'offlaod'", "Did you mean 'offload'?"],
        ),
        (lambda: jaxoff.policy(min_bytes=-1), ValueError, ["at least 0", "-1"]),
        (lambda: jaxoff.policy(min_bytes="1"), ValueError, ["integer", "'1'"]),
        (lambda: jaxoff.policy(min_bytes=True), ValueError, ["integer", "True"]),
        (lambda: jaxoff.policy(offload=[3]), TypeError, ["offload", "3"]),
        (lambda: jaxoff.policy(offload=[""]), TypeError, ["offload", "''"]),
        (lambda: jaxoff.policy() | 3, TypeError, ["callable", "3"]),
        (lambda: jaxoff.name(jnp.ones(3), 3), TypeError, ["string", "3"]),
        (lambda: jaxoff.name(jnp.ones(3), ""), ValueError, ["empty"]),
        (
            lambda: jaxoff.register("te_v1", lambda: jaxoff.policy()),
            ValueError,
            ["'te_v1'", "taken", PRESETS],
        ),
        (lambda: jaxoff.register("", lambda: jaxoff.policy()), ValueError, ["empty"]),
        (lambda: jaxoff.register("x", 3), TypeError, ["function", "3"]),
        (lambda: jaxoff.register(3, lambda: jaxoff.policy()), TypeError, ["name", "3"]),
    ],
)
def test_errors_say_the_rule_what_was_got_and_the_choices(make, error, parts):
    with pytest.raises(error) as raised:
        make()
    for part in parts:
        assert part in str(raised.value)


def test_a_host_kind_other_than_pinned_host_is_refused():
    stock = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["a"],
        offload_src="device",
        offload_dst="unpinned_host",
    )

    def use():
        combined = jaxoff.policy() | stock  # refused here where the stock policy shows its destination
        block = jax.checkpoint(lambda x: jnp.sin(jaxoff.name(x, "a")), policy=combined)
        jax.grad(block)(1.0)  # and else at its first use

    with pytest.raises(ValueError, match="pinned_host"):
        use()


@remat3.differs
def test_an_answer_outside_the_protocol_is_refused():
    combined = jaxoff.policy() | (lambda *_, **__: "host")
    with pytest.raises(TypeError, match="'host'"):
        jax.grad(lambda x: jax.checkpoint(jnp.sin, policy=combined)(x))(1.0)


def test_globs_overlap_freely():
    policy = jaxoff.policy(offload=["moe.*"], save=["moe.act"], recompute=["moe.a*"])
    assert policy.find_pattern("offload", "moe.act") == "moe.*"
    assert policy.find_pattern("recompute", "moe.act") == "moe.a*"
    assert policy.find_pattern("offload", "MOE.act") is None
    assert policy.find_pattern("offload", "xmoe.act") is None


def test_lists_change_a_preset():
    policy = jaxoff.policy("megatron", modules=["core_attn", "moe_act"], save=["attn.core"], min_bytes=7)
    assert (policy.offload, policy.save, policy.min_bytes, policy.unmarked) == (
        ("moe.act",),
        ("attn.core",),
        7,
        "save",
    )
    assert jaxoff.policy("te_v2").min_bytes == 512 * 1024
    assert jaxoff.policy("te_v2", min_bytes=0).min_bytes == 0


def test_megatron_maps_every_module():
    policy = jaxoff.policy("megatron", modules=list(MEGATRON_MODULES))
    assert set(policy.offload) == {
        *("attn.norm_in", "attn.qkv_in", "attn.qkv", "attn.core", "attn.proj_in"),
        *("mlp.norm_in", "moe.router_logits", "moe.[di]*", "moe.act"),
        *("moe.shared_fc1_in", "moe.shared_act"),
    }
    assert jaxoff.policy("megatron", modules="moe_act") == jaxoff.policy("megatron", modules=["moe_act"])


def test_register_adds_a_preset_with_options():
    jaxoff.register("registered_here", lambda floor=3: jaxoff.policy(offload=["a"], min_bytes=floor))
    assert "registered_here" in jaxoff.policies()
    policy = jaxoff.policy("registered_here", floor=5)
    assert (policy.min_bytes, policy.preset) == (5, "registered_here")
    with pytest.raises(TypeError):
        jaxoff.policies()["other"] = lambda: None  # pyright: ignore[reportIndexIssue]
    jaxoff.register("registered_wrongly", lambda: 3)
    with pytest.raises(TypeError, match=r"returns a jaxoff\.Policy, got 3"):
        jaxoff.policy("registered_wrongly")


def test_tags_read_as_their_names():
    jaxpr = jax.make_jaxpr(lambda x: jaxoff.mark_offload(jaxoff.name(x, "a")))(1.0)
    assert str(jaxpr).count("name=a") >= 1
    assert "name=mark_not_offload" in str(jax.make_jaxpr(jaxoff.mark_not_offload)(1.0))


def test_stock_policies_select_jaxoffs_names():
    def block(x):
        return jnp.sin(jaxoff.name(jaxoff.mark_offload(jnp.cos(x)), "a"))

    stock = jax.checkpoint_policies.save_only_these_names("a")
    kept = jax.tree.leaves(jax.vjp(jax.checkpoint(block, policy=stock), jnp.ones(5))[1])
    assert any((leaf == jnp.cos(1.0)).all() for leaf in kept)
