"""No silence of `jaxoff.jit`: rules without a match, offloads that do not happen, lost orders and updates."""

import functools
import types
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax
from jax.ad_checkpoint import Offloadable, checkpoint_name
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxoff
from jaxoff._schedule.vanished import find_vanished
from tests.jaxoff.policy.matrix import assert_close

W, X = jnp.ones((3, 8, 8)), jnp.ones((4, 8))
OFFLOAD_A = jaxoff.policy(offload=["a"])
POLICIES = {
    "lists of jaxoff": lambda offload, save: jaxoff.policy(offload=offload, save=save),
    "lists of jax": lambda offload, save: jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=save,
        names_which_can_be_offloaded=offload,
        offload_src="device",
        offload_dst="pinned_host",
    ),
}


def layer(x, w):
    a = jaxoff.name(jnp.tanh(x @ w), "a")
    return jnp.cos(a @ w) + jaxoff.name(jnp.sin(a) * 2, "unread")


def one_by_one(layer, policy):
    block = jax.checkpoint(layer, policy=policy)
    return lambda w, x: functools.reduce(lambda x, w: block(x, w), w, x).sum()


def in_a_scan(layer, policy):
    block = jax.checkpoint(layer, policy=policy, prevent_cse=False)
    return lambda w, x: lax.scan(lambda x, w: (block(x, w), None), x, w)[0].sum()


LOOPS = pytest.mark.parametrize("stack", [one_by_one, in_a_scan])
LISTS = pytest.mark.parametrize("lists", POLICIES.values(), ids=POLICIES.keys())


def findings_of(fun, *args):
    """The findings of a call, each of which is warned of once and at the caller's line."""
    step = jaxoff.jit(fun)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step(*args)
    assert [str(w.message) for w in caught] == list(map(str, step.findings))
    assert {w.filename for w in caught} <= {__file__}
    step(*args)
    step.lower(*args)
    return step.findings


def codes_of(fun, *args):
    return [str(finding.code) for finding in findings_of(fun, *args)]


@LOOPS
@LISTS
@pytest.mark.some_cases(2)
def test_a_misspelt_name_is_said_with_the_near_miss(stack, lists):
    fun = jax.grad(stack(layer, lists(["a", "unraed"], [])))
    (finding,) = findings_of(fun, W, X)
    assert finding.code is jaxoff.FindingCode.RULE_MATCHED_NOTHING
    assert "'unraed' matches no name in the program. Did you mean 'unread'?" in finding.message
    assert "The names there are a, unread." in finding.message
    assert codes_of(jax.grad(stack(layer, lists(["a"], ["b"]))), W, X) == ["rule-matched-nothing"]
    assert codes_of(jax.grad(stack(layer, lists(["a"], ["unread"]))), W, X) == []


@LOOPS
@LISTS
def test_a_policy_that_moves_nothing_is_said(stack, lists):
    (finding,) = findings_of(jax.grad(stack(layer, lists(["unread"], ["a"]))), W, X)
    assert finding.code is jaxoff.FindingCode.NOTHING_OFFLOADED
    assert "No backward pass of its checkpoints reads 'unread'" in finding.message
    codes = codes_of(jax.grad(stack(layer, lists(["b"], ["a"]))), W, X)
    assert codes == ["rule-matched-nothing", "nothing-offloaded"]


@LOOPS
@LISTS
@pytest.mark.some_cases(2)
def test_a_listed_name_that_stays_is_said_with_its_bytes(stack, lists):
    (finding,) = findings_of(jax.grad(stack(layer, lists(["a", "unread"], []))), W, X)
    assert finding.code is jaxoff.FindingCode.OFFLOAD_NOT_DONE
    assert "'unread' (384 B) is not offloaded, though " in finding.message
    assert "(layer)" in finding.source
    assert codes_of(jax.grad(stack(layer, jaxoff.policy(offload=["*"]))), W, X) == []


@LOOPS
def test_a_name_on_two_values_of_which_one_stays_is_said_with_the_bytes_of_that_one(stack):
    def layer(x, w):
        a = jaxoff.name(jnp.tanh(x @ w), "a")
        return jaxoff.name(jnp.cos(a @ w), "a")  # the next layer reads it: a result of the checkpoint

    (finding,) = findings_of(jax.grad(stack(layer, OFFLOAD_A)), W, X)
    assert finding.code is jaxoff.FindingCode.OFFLOAD_NOT_DONE
    assert "'a' (384 B) is not offloaded" in finding.message


def test_values_below_min_bytes_and_a_preset_without_marks_are_said_if_nothing_moves():
    (finding,) = findings_of(jax.grad(in_a_scan(layer, jaxoff.policy("te_v2"))), W, X)
    assert "Values smaller than min_bytes=524288 stay on the device" in finding.message
    assert codes_of(jax.grad(in_a_scan(layer, jaxoff.policy("te_v1"))), W, X) == ["nothing-offloaded"]


def test_marks_are_requests_too():
    def read(x, w):
        return jnp.tanh(jaxoff.mark_offload(jnp.tanh(x @ w)) @ w)

    def unread(x, w):
        return jaxoff.mark_offload(jnp.tanh(x @ w)) + jnp.cos(x) + jaxoff.name(x, "a")

    def both(x, w):
        return unread(read(x, w), w)

    assert codes_of(jax.grad(in_a_scan(read, jaxoff.policy())), W, X) == []
    assert codes_of(jax.grad(in_a_scan(unread, jaxoff.policy())), W, X) == ["nothing-offloaded"]
    (finding,) = findings_of(jax.grad(in_a_scan(both, jaxoff.policy())), W, X)
    assert finding.code is jaxoff.FindingCode.OFFLOAD_NOT_DONE
    assert finding.message.startswith("The value under mark_offload (384 B) is not offloaded")
    assert finding.source.endswith("unread)")


def test_an_offload_inside_a_checkpoint_that_decides_otherwise_is_said():
    inner = jax.checkpoint(layer, policy=OFFLOAD_A)
    (finding,) = findings_of(jax.grad(one_by_one(inner, None)), W, X)
    assert finding.code is jaxoff.FindingCode.CHECKPOINT_OVERRIDDEN


def test_groups_of_layers_may_offload_within_their_backward_pass():
    """Recomputed a group at a time, the layers' values wait on the host for the group's backward loop."""

    def group(x, w):
        return in_a_scan(layer, OFFLOAD_A)(w, x) + x

    outer = jax.checkpoint(group, policy=jax.checkpoint_policies.nothing_saveable)
    groups = jnp.stack([W, W])
    loss = lambda w, x: lax.scan(lambda x, w: (outer(x, w), None), x, w)[0].sum()  # noqa: E731
    assert codes_of(jax.grad(loss), groups, X) == []


def test_copies_within_the_backward_pass_of_another_checkpoint_are_said():
    outer = jax.checkpoint(
        jax.checkpoint(layer, policy=OFFLOAD_A), policy=jax.checkpoint_policies.nothing_saveable
    )
    (finding,) = findings_of(jax.grad(one_by_one(outer, None)), W, X)
    assert finding.code is jaxoff.FindingCode.CHECKPOINT_OVERRIDDEN
    assert "only then copied to the host and back" in finding.message


def test_an_offload_of_a_value_under_mark_not_offload_by_a_stock_policy_is_said():
    def marked(x, w):
        return jnp.tanh(jaxoff.mark_not_offload(checkpoint_name(jnp.tanh(x @ w), "a")) @ w)

    stock = POLICIES["lists of jax"](["a"], [])
    (finding,) = findings_of(jax.grad(in_a_scan(marked, stock)), W, X)
    assert finding.code is jaxoff.FindingCode.EXEMPTION_LOST
    assert finding.message.startswith("'a' is offloaded although it is under mark_not_offload")
    ours = jaxoff.policy(offload=["a"], unmarked="save")
    assert "exemption-lost" not in codes_of(jax.grad(in_a_scan(marked, ours)), W, X)


def test_a_memory_kind_that_is_the_device_is_said():
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["a"],
        offload_src="device",
        offload_dst="unpinned_host",
    )
    assert codes_of(jax.grad(in_a_scan(layer, policy)), W, X) == ["wrong-memory-kind", "nothing-offloaded"]


def test_a_policy_by_a_function_is_asked_about_the_program():
    def offload_unread(prim, *_, **params):
        if prim.name == "name" and params["name"] == "unread":
            return Offloadable(src="device", dst="pinned_host")
        return False

    (finding,) = findings_of(jax.grad(one_by_one(layer, offload_unread)), W, X)
    assert finding.code is jaxoff.FindingCode.NOTHING_OFFLOADED
    assert "offload_unread asks for it" in finding.message


@LOOPS
@pytest.mark.parametrize(
    "policy",
    [None, jaxoff.policy(save=["b"]), jaxoff.policy(offload=["b"]).on_device(), jaxoff.policy("dots")],
    ids=["none", "save", "twin", "dots"],
)
def test_a_policy_that_offloads_nothing_gives_no_finding(stack, policy):
    assert codes_of(jax.grad(stack(layer, policy)), W, X) == []


def test_a_program_without_gradients_has_rules_checked_alone():
    assert codes_of(in_a_scan(layer, jaxoff.policy(offload=["a", "unread"])), W, X) == []
    assert codes_of(in_a_scan(layer, jaxoff.policy(offload=["a", "b"])), W, X) == ["rule-matched-nothing"]


@pytest.mark.parametrize("count", [1, 3])
def test_a_layer_kept_on_the_device_by_keep_first_is_no_shortfall(count):
    def scanned(w, x):
        return jaxoff.scan(lambda x, w: (layer(x, w), None), x, w, policy=OFFLOAD_A, keep_first=True)[0].sum()

    def layered(w, x):
        return jaxoff.layers(lambda w, x: layer(x, w), x, list(w), policy=OFFLOAD_A, keep_first=True).sum()

    for loss in (scanned, layered):
        assert codes_of(jax.grad(loss), W[:count], X) == []


def test_sound_programs_of_many_forms_have_no_findings():
    loss = in_a_scan(layer, OFFLOAD_A)

    def accumulated(w, xs):
        return lax.scan(lambda g, x: (g + jax.grad(loss)(w, x), None), jnp.zeros_like(w), xs)[0]

    def by_name_of_jax(x, w):
        return jnp.tanh(checkpoint_name(jax.jit(jnp.tanh)(x @ w), "a") @ w)

    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    sharded = jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    first = jaxoff.FirstLayers(1, OFFLOAD_A, rest=OFFLOAD_A.on_device())

    def by_layer(w, x):
        return jaxoff.scan(lambda x, w: (layer(x, w), None), x, w, policy=first)[0].sum()

    assert codes_of(accumulated, W, jnp.stack([X, X])) == []
    assert codes_of(jax.grad(one_by_one(jax.jit(layer), OFFLOAD_A)), W, X) == []
    assert codes_of(jax.grad(in_a_scan(by_name_of_jax, OFFLOAD_A)), W, X) == []
    assert codes_of(sharded, W, X) == []
    assert codes_of(jax.grad(by_layer), W, X) == []


def compiled_with(*reloads: tuple[int, int]) -> Any:
    """A compiled program with copies from the host: (elements, number of copies) of float32 arrays."""
    lines = [
        f"  %h{n}.{k} = f32[{n}]{{0:S(5)}} parameter({k})\n  %d{n}.{k} = f32[{n}]{{0}} copy(%h{n}.{k})"
        for n, count in reloads
        for k in range(count)
    ]
    body = "\n".join([*lines, "  ROOT %out = f32[] constant(0)"])
    text = f"HloModule step, is_scheduled=true\n\nENTRY %main () -> f32[] {{\n{body}\n}}\n"
    return types.SimpleNamespace(as_text=lambda: text)


@pytest.mark.parametrize(("copies", "vanished"), [(3, False), (4, False), (2, True), (0, True)])
def test_a_compiled_program_that_reloads_less_is_said(copies, vanished):
    closed = jax.make_jaxpr(jax.grad(in_a_scan(layer, OFFLOAD_A)))(W, X)
    compiled = compiled_with((32, copies))  # 128 B of each of three layers
    found = list(find_vanished(closed, 1, compiled))
    assert [finding.code for finding in found] == [jaxoff.FindingCode.OFFLOAD_VANISHED] * vanished
    if vanished:
        assert found[0].is_most == (copies == 0)
        text = str(found[0])
        assert f"offloads 384 B, and the compiled program keeps {384 - 128 * copies} B of them" in text
        assert f"on the device: {'some of ' * bool(copies)}'a'. Outside" in text
    assert bool(list(find_vanished(closed, 4, compiled))) == (copies == 0)  # 96 B on each of 4 devices


def test_a_small_value_that_is_gone_is_said_by_its_name():
    policy = jaxoff.policy(offload=["large", "small"])

    def block(x, w):
        x = jnp.tanh(jaxoff.name(x @ w, "large"))
        return x * jnp.tanh(jaxoff.name(jnp.cos(x[:, :1]), "small"))

    closed = jax.make_jaxpr(jax.grad(lambda w, x: jax.checkpoint(block, policy=policy)(x, w).sum()))(W[0], X)
    assert not list(find_vanished(closed, 1, compiled_with((32, 1), (4, 1))))
    (finding,) = find_vanished(closed, 1, compiled_with((32, 2)))  # more in all, and not the small one
    assert "keeps 16 B of them on the device: 'small'." in finding.message


def test_only_what_was_to_be_offloaded_is_said_to_be_gone():
    policy = jaxoff.policy(offload=["moved"], save=["saved"])

    def block(x, w):
        x = jaxoff.name(jnp.tanh(x @ w), "saved")
        return jnp.cos(jaxoff.name(jnp.sin(x @ w), "moved") @ w)

    closed = jax.make_jaxpr(jax.grad(lambda w, x: jax.checkpoint(block, policy=policy)(x, w).sum()))(W[0], X)
    (finding,) = find_vanished(closed, 1, compiled_with())
    assert "on the device: 'moved'." in finding.message


INSIDE = {
    "jit": lambda step: jax.jit(step)(W, X),
    "grad": lambda step: jax.grad(lambda w, x: step(w, x)[0])(W, X),
    "vmap": lambda step: jax.vmap(step, (None, 0))(W, X[None]),
}


@pytest.mark.parametrize("around", INSIDE)
def test_a_call_inside_another_transformation_is_said_once(around):
    traces = []

    def step(w, x):
        traces.append(w)
        loss = in_a_scan(layer, OFFLOAD_A)
        return (loss(w, x), None) if around == "grad" else jax.value_and_grad(loss)(w, x)

    inner = jaxoff.jit(step)
    with pytest.warns(
        UserWarning, match="called-inside-transform: .*step was called inside another"
    ) as caught:
        got = INSIDE[around](inner)
    assert len(caught) == 1 and caught[0].filename == __file__
    assert len(traces) == 1  # the function is traced once
    INSIDE[around](inner)
    assert [f.code for f in inner.findings] == [jaxoff.FindingCode.CALLED_INSIDE_TRANSFORM]
    assert_close(got, INSIDE[around](step))


def test_a_budget_inside_another_transformation_is_said_to_be_lost():
    def loss(w, x):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0].sum()

    w, x = jnp.ones((2, 4, 4)), jnp.ones((3, 4))
    inner = jaxoff.jit(loss, device_bytes="1GB")
    with pytest.warns(UserWarning, match="called-inside-transform: .*its budget is not kept"):
        jax.grad(inner)(w, x)
    assert inner.plan is None


def test_calls_inside_traces_of_jaxoff_and_calls_without_copies_are_silent():
    loss = in_a_scan(layer, OFFLOAD_A)
    inner = jaxoff.jit(loss)
    jaxoff.jit(jax.grad(inner))(W, X)
    jaxoff.explain(inner, W, X)
    jaxoff.residuals(inner, W, X)
    assert inner.findings == ()
    saved = jaxoff.jit(in_a_scan(layer, jaxoff.policy(save=["a"])))
    jax.jit(jax.grad(saved))(W, X)
    assert saved.findings == ()


class Scaled(nnx.Module):
    def __init__(self):
        self.scale, self.calls = nnx.Param(jnp.ones(())), nnx.Variable(jnp.zeros((), int))

    def __call__(self, x):
        self.calls[...] += 1
        return self.scale[...] * x


def test_updates_of_nnx_objects_that_are_lost_are_said():
    model = Scaled()
    step = jaxoff.jit(lambda model, x: model(x))
    with pytest.warns(UserWarning, match=r"updates-lost: .*updates Scaled in place.*jaxoff\.nnx_jit"):
        step(model, X)
    assert int(model.calls[...]) == 0
    (finding,) = step.findings
    assert finding.code is jaxoff.FindingCode.UPDATES_LOST


def test_nnx_objects_that_are_read_or_returned_are_no_findings():
    def returned(model, x):
        return model(x), model

    _, model = jaxoff.jit(returned)(Scaled(), X)
    assert int(model.calls[...]) == 1
    jaxoff.jit(lambda model, x: model.scale[...] * x)(model, X)
