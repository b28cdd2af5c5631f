"""Every finding: a program with the failure, and its neighbour without."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxoff
from jaxoff._residuals.findings.registry import collect_findings
from jaxoff._residuals.findings.runtime import Runtime, find_what_remat3_recomputes
from jaxoff._residuals.residuals import analyse
from jaxoff._residuals.traced_function import TracedFunction
from tests.jaxoff import remat3

W = jnp.ones((4, 8, 8))
X = jnp.ones((3, 8))
OFFLOAD_A = jaxoff.policy(offload=["a"])


def layer(x, w):
    return jnp.tanh(jaxoff.name(x, "a") @ w)


def stack(layer, policy, **checkpoint):
    """Layers in a scan, each under the policy."""
    block = jax.checkpoint(layer, policy=policy, **{"prevent_cse": False, **checkpoint})
    return lambda w, x: lax.scan(lambda x, w: (block(x, w), None), x, w)[0].sum()


def codes(fun, *args, **kwargs):
    return {f.code for f in jaxoff.explain(fun, *args, **kwargs).findings}


def message(code, fun, *args):
    (finding,) = [f for f in jaxoff.explain(fun, *args).findings if f.code == code]
    return finding.message


def test_a_sound_program_has_no_findings():
    assert jaxoff.explain(stack(layer, OFFLOAD_A), W, X).findings == ()


@pytest.mark.parametrize("field", ["offload", "save", "recompute"])
def test_rule_matched_nothing(field):
    policy = jaxoff.policy(**{"offload": ["a"], field: ["aa"]})
    text = message("rule-matched-nothing", stack(layer, policy), W, X)
    assert f"{field}='aa'" in text and "The names there are a." in text
    assert "rule-matched-nothing" not in codes(stack(layer, jaxoff.policy(**{field: ["a"]})), W, X)
    assert "rule-matched-nothing" not in codes(stack(layer, jaxoff.policy(**{field: ["[ab]"]})), W, X)


def test_rule_matched_nothing_names_the_near_miss():
    def layer(x, w):
        return jnp.tanh(jaxoff.name(x, "moe.act") @ w)

    assert "Did you mean 'moe.act'?" in message(
        "rule-matched-nothing", stack(layer, jaxoff.policy(offload=["moe.atc"])), W, X
    )


def test_rule_is_looked_for_in_every_checkpoint_with_an_equal_policy():
    def other(x, w):
        return jnp.tanh(jaxoff.name(x, "b") @ w)

    def loss(w, x):
        policy = jaxoff.policy(offload=["a", "b"])
        return stack(layer, policy)(w, x) + stack(other, jaxoff.policy(offload=["b", "a"]))(w, x)

    assert codes(loss, W, X) == set()


@remat3.differs
def test_rule_matches_a_name_in_a_custom_vjp_forward_rule():
    @jax.custom_vjp
    def act(x):
        return jnp.sin(x)

    def fwd(x):
        x = jaxoff.name(x, "in_rule")
        return jnp.sin(x), x

    act.defvjp(fwd, lambda x, g: (g * jnp.cos(x),))

    def layer(x, w):
        return act(x @ w)

    assert codes(stack(layer, jaxoff.policy(offload=["in_rule"])), W, X) == set()


@pytest.mark.parametrize("mark", [jaxoff.mark_offload, jaxoff.mark_not_offload])
def test_mark_without_residual(mark):
    def linear_in_x(x, w):
        return mark(x) + jnp.tanh(w).sum(0)

    assert "has no effect" in message(
        "mark-without-residual", stack(linear_in_x, jaxoff.policy("te_v1")), W, X
    )

    def used(x, w):
        return jnp.tanh(mark(x) @ w)

    assert "mark-without-residual" not in codes(stack(used, jaxoff.policy("te_v1")), W, X)


def test_mark_whose_result_is_dropped():
    def dropped(x, w):
        jaxoff.mark_offload(x)
        return jnp.tanh(x @ w)

    assert "mark-without-residual" in codes(stack(dropped, jaxoff.policy("te_v1")), W, X)


def test_offloaded_name_without_residual():
    def linear_in_x(x, w):
        return jaxoff.name(x, "a") + jnp.tanh(w).sum(0)

    assert "The name 'a'" in message("mark-without-residual", stack(linear_in_x, OFFLOAD_A), W, X)
    assert codes(stack(linear_in_x, jaxoff.policy(save=["a"])), W, X) == set()


def test_unnamed_beside_named():
    def both(x, w):
        return jnp.tanh(jaxoff.name(x, "a") @ w) * jnp.sin(x)

    def only_the_named(x, w):
        x = jaxoff.name(x, "a")
        return jnp.tanh(x @ w) * jnp.sin(x)

    assert "unnamed-beside-named" in codes(stack(both, OFFLOAD_A), W, X)
    assert codes(stack(only_the_named, OFFLOAD_A), W, X) == set()


def test_unnamed_beside_named_leaves_linear_uses_alone():
    def residual_connection(x, w):
        return x + jnp.tanh(jaxoff.name(x, "a") @ w)

    assert codes(stack(residual_connection, OFFLOAD_A), W, X) == set()


@remat3.differs
def test_name_lost_in_custom_vjp():
    @jax.custom_vjp
    def act(x):
        return jnp.sin(jaxoff.name(x, "primal"))

    act.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x),))

    def layer(x, w):
        return act(x @ w)

    found = codes(stack(layer, jaxoff.policy(offload=["primal"])), W, X)
    assert "name-lost-in-custom-vjp" in found

    def fwd(x):
        x = jaxoff.name(x, "primal")
        return jnp.sin(x), x

    act.defvjp(fwd, lambda x, g: (g * jnp.cos(x),))
    assert codes(stack(lambda x, w: act(x @ w), jaxoff.policy(offload=["primal"])), W, X) == set()


@remat3.differs
def test_name_lost_in_vmap():
    def loss(w, x):
        return jax.vmap(jax.checkpoint(layer, policy=OFFLOAD_A), in_axes=(None, 0))(x, w).sum()

    assert codes(loss, W, X) == set()  # JAX's default keeps the name
    jax.config.update("jax_remat3", True)
    try:
        lost = jax.__version_info__ < (0, 12)  # from 0.12 on the rewrite keeps the name, too
        assert codes(loss, W, X) == ({"name-lost-in-vmap", "rule-matched-nothing"} if lost else set())
    finally:
        jax.config.update("jax_remat3", False)


def test_offload_in_unrolled_scan():
    def loss(unroll):
        block = jax.checkpoint(layer, policy=OFFLOAD_A, prevent_cse=False)
        return lambda w, x: lax.scan(lambda x, w: (block(x, w), None), x, w, unroll=unroll)[0].sum()

    assert "unroll=2" in message("offload-in-unrolled-scan", loss(2), W, X)
    assert codes(loss(1), W, X) == set()


def test_offload_in_nested_scan():
    inner = jax.checkpoint(layer, policy=OFFLOAD_A, prevent_cse=False)

    def scanned(x, w):
        return lax.scan(lambda x, w: (inner(x, w), None), x, w)[0]

    def nested(w, x):
        return lax.scan(lambda x, w: (scanned(x, w), None), x, jnp.stack([w, w]))[0].sum()

    assert "offload-in-nested-scan" in codes(nested, W, X)
    assert codes(lambda w, x: scanned(scanned(x, w), w).sum(), W, X) == set()


def test_offload_in_cond():
    def in_a_branch(x, w):
        return lax.cond(x[0, 0] > 0, layer, lambda x, w: x, x, w)

    def around_the_branches(x, w):
        x = jaxoff.name(x, "a")
        return lax.cond(x[0, 0] > 0, lambda x, w: jnp.tanh(x @ w), lambda x, w: x, x, w)

    assert "offload-in-cond" in codes(stack(in_a_branch, OFFLOAD_A), W, X)
    assert codes(stack(around_the_branches, OFFLOAD_A), W, X) == set()


def test_branches_that_share_a_buffer_are_not_taken_for_marks_without_residual():
    policy = jaxoff.policy(offload=["a", "b"])

    def loss(w, x):
        one = jax.checkpoint(lambda x: jnp.sin(jaxoff.name(x @ w[0], "a")), policy=policy)
        two = jax.checkpoint(lambda x: jnp.cos(jaxoff.name(x @ w[1], "b")), policy=policy)
        return lax.cond(x[0, 0] > 0, one, two, x).sum()

    assert codes(loss, W, X) == {"offload-in-cond"}


def test_offload_folded_away():
    def loss(prevent_cse):
        block = jax.checkpoint(layer, policy=OFFLOAD_A, prevent_cse=prevent_cse)

        def unrolled(w, x):
            for i in range(3):
                x = block(x, w[i])
            return x.sum()

        return unrolled

    assert "offload-folded-away" in codes(loss(False), W, X)
    assert codes(loss(True), W, X) == set()


@pytest.mark.parametrize(
    "again", [lambda x: jaxoff.name(x, "b"), lambda x: jaxoff.name(x.reshape(8, 3), "b").reshape(3, 8)]
)
def test_moved_twice(again):
    policy = jaxoff.policy(offload=["a", "b"])

    def twice(x, w):
        x = jaxoff.name(x, "a")
        return jnp.sin(x) @ w + jnp.cos(again(x)) @ w

    def once(x, w):
        x = again(jaxoff.name(x, "a"))
        return jnp.sin(x) @ w + jnp.cos(x) @ w

    assert "moved-twice" in codes(stack(twice, policy), W, X)
    assert "moved-twice" not in codes(stack(once, policy), W, X)


def test_exemption_lost_behind_a_jit():
    def outside(x, w):
        return jax.jit(lambda x, w: jnp.tanh(jaxoff.name(x, "a") @ w))(jaxoff.mark_not_offload(x), w)

    def inside(x, w):
        return jax.jit(lambda x, w: jnp.tanh(jaxoff.mark_not_offload(jaxoff.name(x, "a")) @ w))(x, w)

    assert "exemption-lost" in codes(stack(outside, OFFLOAD_A), W, X)
    assert codes(stack(inside, OFFLOAD_A), W, X) == set()


def test_checkpoint_overridden():
    inner = jax.checkpoint(layer, policy=OFFLOAD_A)
    assert "checkpoint-overridden" in codes(stack(inner, jaxoff.policy("recompute_all")), W, X)
    assert codes(stack(inner, OFFLOAD_A), W, X) == set()
    assert codes(stack(jax.checkpoint(layer), OFFLOAD_A), W, X) == set()


def test_wrong_memory_kind():
    def stock(kind):
        return jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=["a"],
            offload_src="device",
            offload_dst=kind,
        )

    assert "wrong-memory-kind" in codes(stack(layer, stock("pinned")), W, X)
    assert codes(stack(layer, stock("pinned_host")), W, X) == set()


def test_large_unnamed_residual():
    def layer(x, w):
        return jnp.tanh(jaxoff.name(x, "a") @ w)

    policy = jaxoff.policy(offload=["a"], unmarked="dots", min_bytes=64)
    assert "made by dot_general" in message("large-unnamed-residual", stack(layer, policy), W, X)
    assert (
        codes(stack(layer, dataclasses.replace(policy, min_bytes=97)), W, X) == set()
    )  # the dot makes 3 * 8 * 4 bytes


def test_large_unnamed_input():
    def unnamed_input(x, w):
        return jnp.tanh(x @ w)

    policy = jaxoff.policy("recompute_all", min_bytes=96)
    assert "name it inside to move it" in message(
        "large-unnamed-residual", stack(unnamed_input, policy), W, X
    )
    assert codes(stack(layer, jaxoff.policy("recompute_all", save=["a"], min_bytes=96)), W, X) == set()


def test_a_value_of_library_code_is_shown_at_the_line_of_its_call():
    def loss(w, x):
        x = jax.checkpoint(layer, policy=OFFLOAD_A)(x, w[0])
        logits = jnp.tile(x, 1 << 14)
        return jax.nn.log_softmax(logits)[:, 0].sum() + lax.sin(logits).sum()

    report = jaxoff.explain(loss, W, X)
    rows = {r.made_by: r.source for r in report.residuals if "test_findings.py" in r.source}
    assert rows["exp"].endswith("loss)") and len(rows) == len(report.residuals)
    found = {f.message.split("made by ")[1].split()[0]: f for f in report.findings}
    assert "budget (device_bytes=)" in found["exp"].message and found["exp"].source == rows["exp"]
    assert "Name the value and list the name" in found["cos"].message


def test_already_differentiated():
    loss = stack(layer, OFFLOAD_A)
    assert codes(lambda w, x: jax.grad(loss)(w, x).sum(), W, X) == {"already-differentiated"}
    assert codes(loss, W, X) == set()


def findings_with(**runtime):
    program = TracedFunction.trace(stack(layer, OFFLOAD_A), (W, X), {}, None, False)
    sound = Runtime(jaxlib=(0, 11, 2), pinned_pool_bytes=64 << 30)
    return {f.code for f in collect_findings(analyse(program), dataclasses.replace(sound, **runtime))}


def test_pinned_pool_too_small():
    moved = 4 * 3 * 8 * 4
    assert findings_with(pinned_pool_bytes=moved - 1) == {"pinned-pool-too-small"}
    assert findings_with(pinned_pool_bytes=moved) == set()


def test_jaxlib_computes_wrongly():
    assert findings_with(jaxlib=(0, 11, 0)) == {"jaxlib-computes-wrongly"}
    assert findings_with(jaxlib=(0, 10, 2)) == {"jaxlib-computes-wrongly"}
    assert findings_with(jaxlib=(0, 11, 1)) == set()
    assert findings_with(jaxlib=(0, 12, 0, 1)) == set()


def test_what_remat3_recomputes_is_said_by_kind_and_line():
    runtime = dataclasses.replace(Runtime.read(), remat3=True)

    def find(layer, policy):
        function = TracedFunction.trace(stack(layer, policy), (W, X), {}, None, False)
        return list(find_what_remat3_recomputes(analyse(function), runtime))

    def by_experts(x, w):
        return jnp.sin(jax.lax.ragged_dot(x, w[None], jnp.array([x.shape[0]], jnp.int32)))

    (found,) = find(by_experts, jaxoff.policy("te_v2", min_bytes=1))
    assert found.code == "remat3"
    assert "recomputes what the policy would keep of ragged_dot" in found.message
    assert "test_findings.py" in found.source
    assert find(by_experts, jaxoff.policy(offload=["a"])) == []
    assert find(lambda x, w: jnp.sin(x @ w), jaxoff.policy("te_v2", min_bytes=1)) == []


def test_the_pool_is_read_from_the_variable(monkeypatch):
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "3")
    assert Runtime.read().pinned_pool_bytes == 3 << 30
    monkeypatch.delenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB")
    assert Runtime.read().pinned_pool_bytes == 64 << 30


def test_findings_point_at_the_users_line():
    def both(x, w):
        return jnp.tanh(jaxoff.name(x, "a") @ w) * jnp.sin(x)

    (finding,) = jaxoff.explain(stack(both, OFFLOAD_A), W, X).findings
    assert "test_findings.py:" in finding.source and "both)" in finding.source
