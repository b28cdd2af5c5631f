"""The meaning of each mark and preset.

Which residuals lie where in the jaxpr, with loss and gradients unchanged.
"""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxoff
from tests.jaxoff import remat3

KEY = jax.random.key(0)
W = jax.random.normal(KEY, (16, 16)) / 4
X = jax.random.normal(KEY, (8, 16))
LARGE = 512 * 1024  # bytes: te_v2's default threshold


def kept(fun, *args):
    """Shapes of the residuals besides the arguments, by memory space."""
    jaxpr = jax.make_jaxpr(lambda *args: jax.tree.leaves(jax.vjp(fun, *args)[1]))(*args).jaxpr
    spaces = collections.defaultdict(list)
    for var in dict.fromkeys(v for v in jaxpr.outvars if v not in {*jaxpr.invars, *jaxpr.constvars}):
        spaces["host" if "host" in str(var.aval) else "device"].append(var.aval.shape)
    return {space: sorted(shapes) for space, shapes in spaces.items()}


def check(block, policy, *args, host=(), device=(), rtol=2e-5):
    """The block keeps exactly these shapes, with the loss and gradients of no jax.checkpoint."""
    checkpointed = jax.checkpoint(block, policy=policy)
    expected = {space: sorted(shapes) for space, shapes in (("host", host), ("device", device)) if shapes}
    assert kept(checkpointed, *args) == expected
    argnums = tuple(range(len(args)))
    for transform in (lambda f: f, jax.jit):
        got = transform(jax.value_and_grad(lambda *a: checkpointed(*a).sum(), argnums))(*args)
        want = transform(jax.value_and_grad(lambda *a: block(*a).sum(), argnums))(*args)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=2e-5), got, want)


def square(x):
    """Reads its operand again in the backward pass."""
    return x * x


def test_the_check_itself_catches_a_policy_that_does_nothing():
    def block(w, x):
        return square(jaxoff.name(x @ w, "a"))

    with pytest.raises(AssertionError):
        check(block, jax.checkpoint_policies.nothing_saveable, W, X, host=[(8, 16)])


# te_v1: opt in


def test_unmarked_stays_under_te_v1():
    check(lambda w, x: square(jaxoff.name(x @ w, "a")), jaxoff.policy("te_v1"), W, X, device=[(8, 16)])


def test_marked_goes_under_te_v1():
    check(lambda w, x: square(jaxoff.mark_offload(x @ w)), jaxoff.policy("te_v1"), W, X, host=[(8, 16)])


@remat3.differs
def test_only_the_marked_goes_under_te_v1():
    def block(w, x):
        h = jaxoff.mark_offload(x @ w)
        return square(square(h) @ w.T[:, :4])

    check(block, jaxoff.policy("te_v1"), W, X, host=[(8, 16)], device=[(8, 4), (8, 16)])


# te_v2: opt out


@pytest.mark.parametrize(("rows", "goes"), [(LARGE // 64, True), (LARGE // 64 - 1, False)])
def test_unmarked_goes_when_large_and_stays_when_small_under_te_v2(rows, goes):
    x = jnp.linspace(-1, 1, rows * 16).reshape(rows, 16)
    shapes = {"host" if goes else "device": [(rows, 16)]}
    check(lambda w, x: square(x @ w), jaxoff.policy("te_v2"), W, x, **shapes)


@pytest.mark.parametrize(
    "anchor",
    [
        lambda w, x: x @ w,
        lambda w, x: jaxoff.name(jnp.sin(x) @ w, "a"),
        pytest.param(
            lambda w, x: jax.lax.ragged_dot(x, w[None], jnp.array([8], jnp.int32)), marks=remat3.differs
        ),
    ],
    ids=["dot", "name", "ragged_dot"],
)
def test_anchors_go_under_te_v2(anchor):
    check(lambda w, x: square(anchor(w, x)), jaxoff.policy("te_v2", min_bytes=1), W, X, host=[(8, 16)])


def test_convolutions_go_under_te_v2():
    def block(w, x):
        return square(
            jax.lax.conv_general_dilated(
                x[None], w[None], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
            )
        )

    check(block, jaxoff.policy("te_v2", min_bytes=1), W, X, host=[(1, 8, 16)])


@remat3.differs
def test_kernels_go_under_te_v2():
    from jax.experimental import pallas as pl

    def double(x):
        def kernel(x_ref, o_ref):
            o_ref[...] = 2 * x_ref[...]

        return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)

    @jax.custom_vjp
    def op(x):
        return square(double(x))

    def forward(x):
        doubled = double(x)
        return square(doubled), doubled

    op.defvjp(forward, lambda doubled, g: (4 * doubled * g,))
    check(op, jaxoff.policy("te_v2", min_bytes=1), X, host=[(8, 16)])
    check(op, jaxoff.policy("te_v2", min_bytes=8 * 16 * 4 + 1), X, device=[(8, 16)])


def test_ffi_calls_go_under_te_v2():
    call = jax.ffi.ffi_call("a_library_function", jax.ShapeDtypeStruct((8, 16), jnp.float32))
    (eqn,) = jax.make_jaxpr(call)(X).eqns
    policy = jaxoff.policy("te_v2", min_bytes=8 * 16 * 4)
    avals = [v.aval for v in eqn.invars]
    assert policy.decide(eqn.primitive, *avals, **eqn.params).placement == "offload"
    larger = jaxoff.policy("te_v2", min_bytes=8 * 16 * 4 + 1)
    assert larger.decide(eqn.primitive, *avals, **eqn.params).placement == "save"


def test_cheap_values_are_recomputed_under_te_v2():
    def norm_and_project(w, x):
        x = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
        return square(jnp.tanh(x.astype(jnp.float32)) @ w)

    check(norm_and_project, jaxoff.policy("te_v2", min_bytes=1), W, X, host=[(8, 16)])


# mark_not_offload


ORDERS = {
    "mark": lambda x: jaxoff.mark_not_offload(x),
    "mark(name)": lambda x: jaxoff.mark_not_offload(jaxoff.name(x, "a")),
    "name(mark)": lambda x: jaxoff.name(jaxoff.mark_not_offload(x), "a"),
    "mark(offload)": lambda x: jaxoff.mark_not_offload(jaxoff.mark_offload(x)),
    "offload(mark)": lambda x: jaxoff.mark_offload(jaxoff.mark_not_offload(x)),
    "offload(name(mark))": lambda x: jaxoff.mark_offload(jaxoff.name(jaxoff.mark_not_offload(x), "a")),
    "name(name(mark))": lambda x: jaxoff.name(jaxoff.name(jaxoff.mark_not_offload(x), "b"), "a"),
}
POLICIES = {
    "te_v1": jaxoff.policy("te_v1"),
    "te_v2": jaxoff.policy("te_v2", min_bytes=1),
    "megatron": jaxoff.policy("megatron", modules=["core_attn"], offload=["a"]),
    "save_all": jaxoff.policy("save_all", offload=["a"]),
    "recompute_all": jaxoff.policy("recompute_all", offload=["a"]),
    "dots": jaxoff.policy("dots", offload=["a"]),
    "list": jaxoff.policy(offload=["*"]),
    "either": jaxoff.policy(recompute=["a"]) | jaxoff.policy(offload=["a"]),
    "stock second": jaxoff.policy()
    | jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("preset", POLICIES)
@pytest.mark.some_cases(38)
def test_mark_not_offload_stays_under_every_preset_in_every_order(order, preset):
    check(lambda w, x: square(ORDERS[order](x @ w)), POLICIES[preset], W, X, device=[(8, 16)])


def test_mark_not_offload_wins_over_recompute():
    check(
        lambda w, x: square(jaxoff.mark_not_offload(jaxoff.name(x @ w, "a"))),
        jaxoff.policy(recompute=["a"]),
        W,
        X,
        device=[(8, 16)],
    )


@pytest.mark.parametrize("order", ["mark of the name", "name of the mark"])
@pytest.mark.parametrize(
    ("field", "shapes"),
    [("save", {"device": [(8, 16)]}), ("recompute", {}), ("offload", {"host": [(8, 16)]})],
)
def test_lists_decide_before_mark_offload(order, field, shapes):
    def block(w, x):
        h = x @ w
        h = (
            jaxoff.mark_offload(jaxoff.name(h, "a"))
            if order.startswith("mark")
            else jaxoff.name(jaxoff.mark_offload(h), "a")
        )
        return square(h)

    check(block, jaxoff.policy(**{field: ["a"]}), W, X, **shapes)


def test_lists_in_the_order_recompute_save_offload():
    def block(w, x):
        return square(jaxoff.name(x @ w, "a"))

    check(block, jaxoff.policy(offload=["*"], save=["a"]), W, X, device=[(8, 16)])
    check(block, jaxoff.policy(offload=["*"], save=["?"], recompute=["a"]), W, X)


def test_the_mark_survives_vmap_and_inner_gradients():
    def inside_vmap(w, x):
        return jax.vmap(lambda x: square(jaxoff.name(jaxoff.mark_not_offload(x @ w), "a")))(x)

    check(inside_vmap, jaxoff.policy(offload=["a"]), W, X, device=[(8, 16)])

    def inside_grad(w, x):
        return jax.grad(lambda x: square(jaxoff.name(jaxoff.mark_not_offload(jnp.sin(x) @ w), "a")).sum())(x)

    assert "host" not in kept(jax.checkpoint(inside_grad, policy=jaxoff.policy(offload=["a"])), W, X)


# Weights, shared values, views, inputs


def test_weights_are_never_moved():
    closed_over = W + 1
    low = W.astype(jnp.bfloat16)

    def block(w, x):
        w = w.astype(jnp.float32) * 2  # computed from weights alone
        return square(x @ w) @ closed_over

    check(block, jaxoff.policy("te_v2", min_bytes=1), low, X, host=[(8, 16)], rtol=1e-2)
    assert (
        jaxoff.explain(jax.checkpoint(block, policy=jaxoff.policy("te_v2", min_bytes=1)), low, X).host_bytes
        == 8 * 16 * 4
    )


def test_a_value_with_two_consumers_is_moved_once():
    def block(w, x):
        h = jaxoff.name(x @ w, "a")
        return square(h) + jnp.sin(h) @ w

    for policy in (jaxoff.policy(offload=["a"]), jaxoff.policy("te_v2", min_bytes=512)):
        moved = list(kept(jax.checkpoint(block, policy=policy), W, X)["host"])
        assert moved == [(8, 16)]


@pytest.mark.parametrize(
    "policy",
    [jaxoff.policy("te_v1"), jaxoff.policy("te_v2", min_bytes=1), jaxoff.policy()],
    ids=["te_v1", "te_v2", "lists"],
)
def test_views_of_a_moved_value_move_nothing_more(policy):
    def block(w, x):
        h = jaxoff.mark_offload(jnp.sin(x @ w) if policy.unmarked == "save" else x @ w)
        return (
            square(h.reshape(16, 8)).sum()
            + square(h.T).sum()
            + square(h[2:6]).sum()
            + square(h[None, :, 3:][0]).sum()
        )

    spaces = kept(jax.checkpoint(block, policy=policy), W, X)
    assert spaces["host"] == [(8, 16)]
    assert spaces.get("device", []) == ([(8, 16)] if policy.unmarked == "save" else [])  # the residual of sin


def test_a_blocks_input_named_inside_is_moved_and_its_device_copy_goes():
    def blocks(w, x, label):
        def block(x):
            x = jaxoff.name(x, "x_in") if label else x
            return x + square(x) @ w

        block = jax.checkpoint(block, policy=jaxoff.policy(offload=["x_in"]))
        return block(block(jnp.sin(x)))

    shapes = kept(lambda w, x: blocks(w, x, True), W, X)
    assert shapes["host"] == [(8, 16)] * 2
    assert shapes["device"] == [(8, 16)]  # cos(x), which is outside the checkpoints
    assert kept(lambda w, x: blocks(w, x, False), W, X) == {"device": [(8, 16)] * 3}


def test_a_marked_value_that_is_not_needed_moves_nothing():
    check(lambda w, x: jaxoff.mark_offload(x @ w) + 1, jaxoff.policy("te_v1"), W, X)


def test_a_call_without_gradients_moves_nothing():
    block = jax.checkpoint(lambda w, x: square(jaxoff.name(x @ w, "a")), policy=jaxoff.policy(offload=["a"]))
    assert "host" not in str(jax.make_jaxpr(block)(W, X)).replace("pinned_host", "")
    np.testing.assert_array_equal(jax.jit(block)(W, X), jax.jit(lambda w, x: square(x @ w))(W, X))


def test_the_first_call_is_right():
    step = jax.jit(
        jax.grad(
            lambda w, x: jax.checkpoint(
                lambda w, x: square(jaxoff.name(x @ w, "a")), policy=jaxoff.policy(offload=["a"])
            )(w, x).sum()
        )
    )
    first, second = step(W, X), step(W, X)
    np.testing.assert_array_equal(first, second)
    np.testing.assert_allclose(first, 2 * X.T @ (X @ W), rtol=1e-5, atol=1e-5)


# Presets and combinations


@remat3.differs
def test_presets():
    def block(w, x):
        h = jaxoff.name(x @ w, "attn.core")
        return square(jnp.sin(h)) @ w

    kept_by = {
        "save_all": {"device": 3},  # sin's derivative, and the operands of square and the dot
        "recompute_all": {},
        "dots": {"device": 1},
        "te_v1": {"device": 3},
    }
    for preset, expected in kept_by.items():
        spaces = kept(jax.checkpoint(block, policy=jaxoff.policy(preset)), W, X)
        assert {k: len(v) for k, v in spaces.items()} == expected, preset
    moved = kept(jax.checkpoint(block, policy=jaxoff.policy("megatron", modules=["core_attn"])), W, X)
    assert "host" not in moved  # nothing reads the named value itself under save_all: sin keeps its cosine


STOCK_OFFLOAD = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=["a"],
    offload_src="device",
    offload_dst="pinned_host",
)


@pytest.mark.parametrize(
    "policy",
    [
        jaxoff.policy(offload=["a"]) | jax.checkpoint_policies.dots_saveable,
        jax.checkpoint_policies.dots_saveable | jaxoff.policy(offload=["a"]),
        jaxoff.policy("dots") | STOCK_OFFLOAD,
        jaxoff.policy() | (jaxoff.policy(offload=["a"]) | jaxoff.policy("dots")),
    ],
    ids=["stock second", "stock first", "offloading stock", "nested"],
)
def test_policies_combine_with_stock_ones(policy):
    def block(w, x):
        return square(square(jaxoff.name(jnp.cos(x), "a")) @ w)

    check(block, policy, W, X, host=[(8, 16)], device=[(8, 16)])


def test_the_first_answer_that_is_not_recompute_wins():
    def block(w, x):
        return square(jaxoff.name(x * 2, "a"))

    host, device = jaxoff.policy(offload=["a"]), jaxoff.policy(save=["a"])
    check(block, host | device, W, X, host=[(8, 16)])
    check(block, device | host, W, X, device=[(8, 16)])


def test_the_saved_twin_keeps_what_the_policy_moves():
    def block(w, x):
        return square(square(jaxoff.name(x @ w, "a")) @ w)

    for policy in (
        jaxoff.policy(offload=["a"]),
        jaxoff.policy(offload=["a"]) | jax.checkpoint_policies.nothing_saveable,
    ):
        check(block, policy, W, X, host=[(8, 16)])
        check(block, policy.on_device(), W, X, device=[(8, 16)])


def test_min_bytes_of_a_list():
    def block(w, x):
        return square(jaxoff.name(x @ w, "a"))

    check(block, jaxoff.policy(offload=["a"], min_bytes=8 * 16 * 4), W, X, host=[(8, 16)])
    check(block, jaxoff.policy(offload=["a"], min_bytes=8 * 16 * 4 + 1), W, X, device=[(8, 16)])
    check(
        lambda w, x: square(jaxoff.mark_offload(x @ w)),
        jaxoff.policy(min_bytes=1 << 30),
        W,
        X,
        host=[(8, 16)],
    )
