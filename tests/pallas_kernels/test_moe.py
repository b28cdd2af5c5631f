"""The MoE layer: values and gradients against a loop over experts in float64, transforms, residuals, errors.

The kernels' products run in the interpreter in test_kernels.py; here they are traced and lowered for a GPU
that need not be there. On a GPU the whole layer runs in `tests/gpu`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, PartitionSpec

import jaxoff
from pallas_kernels import grouped_mlp, moe
from pallas_kernels._activation import ACTIVATIONS
from pallas_kernels._mosaic.gather import gather_rows, sum_rows
from pallas_kernels._routing import route
from tests.pallas_kernels import moe_oracle
from tests.pallas_kernels.hopper import launches, lower, on_h200
from tests.pallas_kernels.interpreter import interpreted
from tests.pallas_kernels.oracle import norm_error

BOUNDS = {jnp.float32: 2e-6, jnp.bfloat16: 1e-2, jnp.float16: 2e-3}
TOKENS, K, EXPERTS = 21, 2, 4
CHOICES = {
    "uneven, and one without a token": None,
    "all in one, and each token twice": np.full((TOKENS, K), 2),
    "each once": np.stack([np.arange(TOKENS) % EXPERTS, (np.arange(TOKENS) + 1) % EXPERTS], axis=1),
}


@functools.cache
def reference(activation):
    return jax.jit(functools.partial(moe_oracle.output_and_gradients, "reference", activation))


def check(activation, arguments, run=None):
    """Compares output and gradients with the loop's."""
    got, want = (run or reference(activation))(*arguments), moe_oracle.dense(activation, arguments)
    for field, value, wanted in zip(moe_oracle.Results._fields, got, want, strict=True):
        if value is not None:
            assert norm_error(value, wanted) <= BOUNDS[arguments.x.dtype.type], field
    return got


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("activation", ["squared_relu", "swiglu"])
def test_equals_a_loop_over_experts(activation, choice):
    options = dict(tokens=TOKENS, top_k=K, experts=EXPERTS, dtype=jnp.float32, biased=True)
    check(activation, moe_oracle.make(activation, chosen=CHOICES[choice], **options))


NARROW = [("squared_relu", jnp.float16), *((activation, jnp.bfloat16) for activation in ACTIVATIONS)]


@pytest.mark.some_cases(3)
@pytest.mark.parametrize(("activation", "dtype"), NARROW)
def test_narrow_rows_are_rounded_a_few_times(activation, dtype):
    arguments = moe_oracle.make(activation, tokens=TOKENS, top_k=K, experts=EXPERTS, dtype=dtype)
    got = check(activation, arguments)
    again = reference(activation)(*arguments)
    assert [np.asarray(v).tobytes() for v in got[:5]] == [np.asarray(v).tobytes() for v in again[:5]]


@settings(deadline=None, max_examples=3)
@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 6), st.integers(0, 99))
def test_any_routing(tokens, top_k, experts, seed):
    options = dict(tokens=tokens, top_k=top_k, experts=experts, dtype=jnp.float32, seed=seed)
    check("squared_relu", moe_oracle.make("squared_relu", **options))


@settings(deadline=None, max_examples=3)
@given(st.integers(1, 700), st.integers(1, 3), st.integers(1, 9), st.integers(0, 99))
def test_routes_are_a_stable_sort(tokens, top_k, experts, seed):
    """Tokens of more than one block of the counting sort, and rows that fill no block."""
    chosen = np.random.default_rng(seed).integers(0, experts, (tokens, top_k))
    routes = jax.jit(route, static_argnums=1)(jnp.asarray(chosen, jnp.int32), experts)
    assert routes.order.tolist() == np.argsort(chosen.reshape(-1), kind="stable").tolist()
    assert routes.order[routes.places.reshape(-1)].tolist() == list(range(chosen.size))
    assert routes.group_sizes.tolist() == np.bincount(chosen.reshape(-1), minlength=experts).tolist()


def test_nan_of_one_token_stays_with_its_experts():
    arguments = moe_oracle.make("swiglu", tokens=TOKENS, top_k=K, experts=EXPERTS)
    run, token = reference("swiglu"), 3
    dirty = arguments._replace(x=arguments.x.at[token].set(jnp.nan), dy=arguments.dy.at[token].set(jnp.nan))
    its = np.isin(np.arange(EXPERTS), np.asarray(arguments.experts[token]))
    rows = np.arange(TOKENS) == token
    got, clean = run(*dirty), run(*arguments)
    for field, own in {"y": rows, "dx": rows, "dprobs": rows, "dw1": its, "dw2": its}.items():
        value, want = (np.asarray(getattr(v, field), np.float64) for v in (got, clean))
        assert (value[~own] == want[~own]).all() and np.isnan(value[own]).any(), field


def test_equals_the_grouped_mlp_between_gathers():
    """Bit for bit: the grouped MLP, with its activation, is this layer without its gathers."""
    x, probs, experts, w1, w2, *_ = moe_oracle.make("geglu", tokens=TOKENS, top_k=K, experts=EXPERTS)

    @jax.jit
    def both(x, probs, experts, w1, w2):
        routes = route(experts, EXPERTS)
        rows, p = x[routes.order // K], probs.reshape(-1)[routes.order]
        y = grouped_mlp(rows, w1, w2, routes.group_sizes, probs=p, activation="geglu")
        copies = y[routes.places].astype(jnp.float32)
        return moe(x, probs, experts, w1, w2, activation="geglu"), copies.sum(1).astype(x.dtype)

    got, want = both(x, probs, experts, w1, w2)
    assert np.asarray(got).tobytes() == np.asarray(want).tobytes()


def test_gradients_are_added_to_accumulators():
    x, probs, experts, w1, w2, _, _, dy = moe_oracle.make(
        "swiglu", tokens=TOKENS, top_k=K, experts=EXPERTS, dtype=jnp.float32
    )

    def loss(sums, w):
        out = moe(x, probs, experts, *w, activation="swiglu", grad_accumulators=sums)
        return jnp.vdot(out, dy)

    @jax.jit
    def gradients(sums, w):
        return jax.grad(loss, argnums=(0, 1))(sums, w), jax.grad(loss, argnums=1)(None, w)

    sums = jnp.ones(w1.shape), jnp.ones(w2.shape)
    (added, zero), grads = gradients(sums, (w1, w2))
    for total, start, grad in zip(added, sums, grads, strict=True):
        np.testing.assert_allclose(total, start + grad, rtol=1e-5, atol=1e-5)
    assert not any(np.asarray(z).any() for z in zero)


def batch_of(count):
    options = dict(tokens=8, top_k=2, experts=3, dtype=jnp.float32)
    return [moe_oracle.make("squared_relu", seed=seed, **options) for seed in range(count)]


@pytest.mark.long
def test_vmap_and_scan_equal_loops():
    batch = batch_of(2)
    run = reference("squared_relu")
    stacked = jax.tree.map(lambda *v: jnp.stack(v), *batch)
    got = jax.jit(jax.vmap(run))(*stacked)
    _, scanned = jax.jit(lambda v: jax.lax.scan(lambda _, given: (None, run(*given)), None, v))(stacked)
    for i, given_ in enumerate(batch):
        for g, s, w in zip(got, scanned, run(*given_), strict=True):
            if w is not None:
                np.testing.assert_allclose(g[i], w, rtol=1e-4, atol=1e-5)
                np.testing.assert_allclose(s[i], w, rtol=1e-4, atol=1e-5)


def test_shard_map_sums_the_weights_gradients_over_devices():
    if jax.device_count() < 2:
        pytest.skip("needs two devices")
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    shards, (split, whole) = batch_of(2), (PartitionSpec("data"), PartitionSpec())
    _, _, _, w1, w2, *_ = shards[0]
    x, probs, experts = (jnp.concatenate([s[i] for s in shards]) for i in range(3))

    def loss(x, probs, w1, w2, experts):
        return jax.lax.psum(jnp.sum(jnp.sin(moe(x, probs, experts, w1, w2))), "data")

    specs = split, split, whole, whole, split
    sharded = jax.shard_map(loss, mesh=mesh, in_specs=specs, out_specs=whole)
    got = jax.jit(jax.grad(sharded, (0, 1, 2, 3)))(x, probs, w1, w2, experts)
    unsharded = jax.grad(lambda *a: jnp.sum(jnp.sin(moe(a[0], a[1], experts, *a[2:]))), (0, 1, 2, 3))
    want = jax.jit(unsharded)(x, probs, w1, w2)
    for value, wanted in zip(got, want, strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-4, atol=1e-5)


T, H, I, E = 64, 128, 192, 4  # noqa: E741
LAUNCHES = {
    "squared_relu": {"fc1": 1, "fc2": 1, "grad_act": 1, "grad_x": 1, "grad_weight": 2},
    "swiglu": {"fc1_gated": 1, "fc2": 1, "grad_act_gated": 1, "grad_x": 1, "grad_weight": 2},
}


def shapes(activation):
    columns = I * ACTIVATIONS[activation].parts
    narrow = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((T, H), (E, H, columns), (E, I, H))]
    return *narrow, jax.ShapeDtypeStruct((T, K), jnp.float32), jax.ShapeDtypeStruct((T, K), jnp.int32)


def layer(activation, inner=jnp.sin):
    def apply(x, w1, w2, probs, experts):
        # The layer's input is made here: it is an intermediate of a checkpointed function, as in a model.
        return moe(inner(x), probs, experts, w1, w2, activation=activation)

    return apply


def loss_of(function):
    return lambda *given: jnp.sum(function(*given).astype(jnp.float32))


# tests/models lowers a layer with the squared ReLU.
@pytest.mark.parametrize("activation", [pytest.param("squared_relu", marks=pytest.mark.long), "swiglu"])
def test_the_kernels_serve_a_hopper_gpu_and_lower(activation):
    """No implementation is named: six products and two sums of rows, and no kernel that gathers rows."""
    step = jax.value_and_grad(loss_of(layer(activation)), argnums=(0, 1, 2, 3))
    given_ = shapes(activation)
    assert lower(step, *given_).as_text().count("custom_call @mosaic_gpu") == 8


@pytest.mark.long
@pytest.mark.parametrize("activation", LAUNCHES)
def test_each_product_is_launched_once(activation):
    step = jax.value_and_grad(loss_of(layer(activation)), argnums=(0, 1, 2, 3))
    assert launches(step, *shapes(activation)) == LAUNCHES[activation]


@pytest.mark.long
def test_vmap_of_the_kernels_lowers():
    step = jax.vmap(jax.value_and_grad(loss_of(layer("swiglu")), argnums=(0, 1, 2, 3)))
    batch = [jax.ShapeDtypeStruct((2, *s.shape), s.dtype) for s in shapes("swiglu")]
    assert lower(step, *batch).as_text().count("custom_call @mosaic_gpu") == 8


@pytest.mark.parametrize(
    ("activation", "policy"),
    [
        ("squared_relu", "offloaded"),
        ("swiglu", "the activation recomputed"),
        pytest.param("squared_relu", "saved", marks=pytest.mark.long),
        pytest.param("swiglu", "offloaded", marks=pytest.mark.long),
    ],
)
def test_both_residuals_are_placed_by_name_and_a_token_keeps_exactly_their_bytes(activation, policy):
    names = {"moe.in": (T, H), "moe.act": (T * K, I * ACTIVATIONS[activation].parts)}
    chosen = {
        "saved": jaxoff.policy(save=["moe.*"]),
        "offloaded": jaxoff.policy(offload=["moe.*"]),
        "the activation recomputed": jaxoff.policy(save=["moe.in"]),
    }[policy]
    with on_h200():
        table = jaxoff.residuals(jax.checkpoint(layer(activation), policy=chosen), *shapes(activation))
        plain = jaxoff.residuals(layer(activation, inner=lambda x: x), *shapes(activation))
    placed = {row.name: row.placement for row in table if row.name in names}
    act = "recompute" if "recomputed" in policy else placed["moe.in"]
    assert placed == {"moe.in": "offload" if policy == "offloaded" else "save", "moe.act": act}
    for row in table:
        if row.name in names:
            assert (row.shape, row.nbytes) == (names[row.name], 2 * np.prod(names[row.name]))
    # Without a checkpoint: the two residuals, the weights, and a few numbers a row.
    tall = [row for row in plain if len(row.shape) == 2 and row.shape[0] in (T, T * K) and row.shape[1] > K]
    wanted = 2 * H + 2 * K * I * ACTIVATIONS[activation].parts
    assert sum(row.nbytes for row in tall) == T * wanted


def test_the_gathers_kernels_take_and_add_rows():
    """Interpreted: blocks of rows in turn, pieces of odd multiples of 64 columns."""
    x = jax.random.normal(jax.random.key(0), (20, 192), jnp.bfloat16)
    index = jax.random.randint(jax.random.key(1), (32,), 0, 20)
    assert (interpreted(gather_rows, x, index, programs=2)(x, index) == x[index]).all()
    places = index[:9].reshape(3, 3)
    want = jnp.sum(x[places].astype(jnp.float32), axis=1).astype(x.dtype)
    assert (interpreted(sum_rows, x, places)(x, places) == want).all()


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("activation", ["squared_relu", "swiglu", "geglu"])
def test_the_kernels_in_the_interpreter_equal_a_loop(activation):
    options = dict(tokens=70, top_k=2, experts=4, width=128, hidden=64, biased=True)
    run = functools.partial(moe_oracle.output_and_gradients, "mosaic", activation)
    arguments = moe_oracle.make(activation, **options)
    check(activation, arguments, interpreted(run, *arguments))


GIVEN = dict(
    x=jnp.zeros((5, 4)),
    probs=jnp.zeros((5, 2)),
    experts=jnp.zeros((5, 2), jnp.int32),
    w1=jnp.zeros((3, 4, 6)),
    w2=jnp.zeros((3, 6, 4)),
)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (dict(x=jnp.zeros(5)), ValueError, r"moe: x must be \(T, H\), got 1 axes: x \(5,\)"),
        (dict(probs=jnp.zeros((5, 3))), ValueError, r"experts must be \(T, k\) with k = 3, got k = 2"),
        (dict(experts=jnp.full((5, 2), 3)), ValueError, "experts must be in 0 to E - 1 = 2, got 3 to 3"),
        (dict(experts=jnp.full((5, 2), -1)), ValueError, "experts must be in 0 to E - 1 = 2, got -1 to -1"),
        (dict(experts=jnp.zeros((5, 2))), TypeError, "experts must be integers, got float32"),
        (dict(activation="swish"), ValueError, "unknown activation 'swish'; choose 'squared_relu'"),
        (dict(activation="swigl"), ValueError, "did you mean 'swiglu'"),
        (dict(activation="swiglu", w1=jnp.zeros((3, 4, 10))), ValueError, "with 2 I = 12, got 2 I = 10"),
        (dict(activation="swiglu", b1=jnp.zeros((3, 6))), ValueError, r"b1 must be \(E, 2 I\) with 2 I = 12"),
        (dict(implementation="mosiac"), ValueError, "choose None, 'mosaic' or 'reference'; did you mean"),
        (dict(implementation="mosaic"), NotImplementedError, 'moe: implementation="mosaic" cannot do'),
    ],
)
def test_a_wrong_argument_is_refused_with_the_rule_and_what_was_given(changes, error, message):
    values = GIVEN | changes
    if values.get("activation") == "swiglu" and "w1" not in changes:
        values["w1"] = jnp.zeros((3, 4, 12))
    with pytest.raises(error, match=message):
        moe(**values)


def test_no_tokens_give_no_rows():
    empty = GIVEN | {name: GIVEN[name][:0] for name in ("x", "probs", "experts")}
    assert moe(**empty).shape == (0, 4)
    assert not moe(**GIVEN | {name: GIVEN[name][:, :0] for name in ("probs", "experts")}).any()
