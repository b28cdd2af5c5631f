"""Policies as text."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxoff
from models import policy_text
from models.errors import InputError

NAMES = st.from_regex(r"[a-z][a-z0-9_.*?]{0,9}", fullmatch=True)


@st.composite
def policies(draw):
    names = draw(st.lists(NAMES, unique=True, max_size=6))
    lists: dict[str, Any] = {"offload": [], "save": [], "recompute": []}
    for name in names:
        lists[draw(st.sampled_from(sorted(lists)))].append(name)
    unmarked = draw(st.sampled_from(["recompute", "save", "dots", "offload", "offload_dots"]))
    kept = [*lists["offload"], *lists["save"]]
    stored = draw(st.lists(st.sampled_from(kept), unique=True)) if kept else []
    return jaxoff.policy(
        **lists,
        unmarked=unmarked,
        min_bytes=draw(st.integers(0, 1 << 40)),
        store=dict.fromkeys(stored, "float8_e4m3fn"),
    )


def check_text_and_back(policy):
    assert policy_text.parse(policy_text.render(policy)) == policy


@settings(max_examples=20, deadline=None)
@given(policies())
def test_text_and_back(policy):
    check_text_and_back(policy)


@pytest.mark.long
@settings(max_examples=500, deadline=None)
@given(policies())
def test_any_policy_is_text_and_back(policy):
    check_text_and_back(policy)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 99), policies(), policies())
def test_two_policies_by_layer_are_text_and_back(count, first, rest):
    policy = jaxoff.FirstLayers(count, first, rest)
    assert policy_text.parse(policy_text.render(policy)) == policy
    spaced = policy_text.render(policy).replace("|", " | ")
    assert policy_text.parse(f" {spaced} ") == policy


@pytest.mark.parametrize(
    "text",
    [
        "first=8",
        "first=8|te_v2",
        "first=x|te_v2|te_v1",
        "first=|te_v2|te_v1",
        "first=1|first=2|te_v1",
        "first=1|a|b|c",
    ],
)
def test_two_policies_need_a_number(text):
    with pytest.raises(InputError, match=r"a number of first layers with two policies, .* got 'first="):
        policy_text.parse(text)


def test_each_of_two_policies_is_checked():
    with pytest.raises(InputError, match="--policy takes a preset"):
        policy_text.parse("first=8 | te_v2 | ofload=x")


@settings(deadline=None)
@given(st.text(st.sampled_from("offload=sve;,. \n\0te_v2min_bytes1KiB*"), max_size=40))
def test_any_text_gives_a_policy_or_one_line(text):
    try:
        policy = policy_text.parse(text)
    except InputError as error:
        message = str(error)
    else:
        message = repr(policy)
        assert policy_text.parse(policy_text.render(policy)).offload == policy.offload
    assert message and "\n" not in message


@pytest.mark.parametrize("preset", ["te_v1", "te_v2", "save_all", "recompute_all", "dots"])
def test_a_preset_by_name(preset):
    assert policy_text.parse(preset) == jaxoff.policy(preset)
    rendered = policy_text.parse(policy_text.render(jaxoff.policy(preset)))
    assert (rendered.unmarked, rendered.min_bytes) == (
        jaxoff.policy(preset).unmarked,
        jaxoff.policy(preset).min_bytes,
    )


def test_a_preset_with_changes():
    assert policy_text.parse("te_v2; min_bytes = 2 MiB ;") == jaxoff.policy("te_v2", min_bytes=2 << 20)
    assert policy_text.parse("megatron;modules=core_attn,moe_act") == jaxoff.policy(
        "megatron", modules=["core_attn", "moe_act"]
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["te_v1", "offload=moe.act"]),
        (" ; ", ["te_v1"]),
        ("te_v3", ["te_v3", "te_v2", "Did you mean"]),
        (
            "offlaod=x",
            [
                "offlaod",
                "offload, save, recompute, store, modules, unmarked, min_bytes",
                "Did you mean 'offload'?",
            ],
        ),
        ("save=x;te_v2", ["te_v2", "key=value"]),
        ("save=x;save=y", ["save", "twice"]),
        ("save=x,,y", ["one is empty"]),
        ("save=", ["one is empty"]),
        ("save=x;offload=x", ["'x'", "save", "offload"]),
        ("min_bytes=1.5", ["whole number", "1.5"]),
        ("min_bytes=3 KB", ["KiB", "3 KB"]),
        ("unmarked=keep", ["keep", "recompute"]),
        ("megatron;modules=core_atn", ["core_atn", "core_attn"]),
        ("megatron", ["megatron", "modules"]),
        ("modules=core_attn", ["modules"]),
    ],
)
def test_errors_are_one_line_and_name_the_choices(text, words):
    with pytest.raises(InputError) as raised:
        policy_text.parse(text)
    assert "\n" not in str(raised.value)
    for word in words:
        assert word in str(raised.value)


def test_what_text_cannot_say_is_refused():
    with pytest.raises(ValueError, match="no comma"):
        policy_text.render(jaxoff.policy(save=["a,b"]))
    with pytest.raises(ValueError, match="memory_kind='device'"):
        policy_text.render(jaxoff.policy(offload=["a"]).on_device())
