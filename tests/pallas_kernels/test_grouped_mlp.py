"""The grouped MLP's values, gradients and errors, against a dense loop over experts in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import grouped_mlp
from pallas_kernels.tiles import cut_tiles, tile_height

NAMES = ("y", "dx", "dw1", "dw2", "dprobs", "db1", "db2")
# Group sizes, rows. Rows past the groups hold NaN.
GROUPS = {
    "uneven": ([5, 0, 1, 30], 36),
    "tail": ([9, 2, 0, 13], 40),
    "one_row_each": ([1, 1, 1, 1], 4),
    "all_in_one": ([0, 0, 40, 0], 40),
    "all_empty": ([0, 0, 0, 0], 24),
    "one_row": ([0, 1, 0, 0], 1),
    "many_tiles": ([100, 300, 1, 212], 640),
}


def make(group_sizes, rows, dtype, *, width=16, hidden=24, seed=0):
    """Arguments and an output gradient, NaN past the last group."""
    rng, experts = np.random.default_rng(seed), len(group_sizes)

    def draw(*shape):
        return 0.5 * rng.normal(size=shape)

    past = np.arange(rows) >= sum(group_sizes)
    x, dy, probs = draw(rows, width), draw(rows, width), rng.random(rows)
    x[past], dy[past], probs[past] = np.nan, np.nan, np.nan
    w1, w2 = draw(experts, width, hidden), draw(experts, hidden, width)
    arrays = (x, w1, w2, probs, draw(experts, hidden), draw(experts, width), dy)
    dtypes = (dtype, dtype, dtype, jnp.float32, jnp.float32, jnp.float32, dtype)
    return [jnp.asarray(a, d) for a, d in zip(arrays, dtypes, strict=True)]


def dense(group_sizes, x, w1, w2, probs, b1, b2, dy):
    """The output and all gradients, one expert at a time, in float64."""
    x, w1, w2, probs, b1, b2, dy = (np.asarray(a, np.float64) for a in (x, w1, w2, probs, b1, b2, dy))
    y, dx, dprobs = np.zeros_like(x), np.zeros_like(x), np.zeros_like(probs)
    dw1, dw2, db1, db2 = np.zeros_like(w1), np.zeros_like(w2), np.zeros_like(b1), np.zeros_like(b2)
    stops = np.cumsum(group_sizes)
    for e, (size, stop) in enumerate(zip(group_sizes, stops, strict=True)):
        rows = slice(stop - size, stop)
        p = probs[rows, None]
        relu = np.maximum(x[rows] @ w1[e] + b1[e], 0)
        a, da = relu**2, dy[rows] @ w2[e].T
        y[rows] = p * (a @ w2[e] + b2[e])
        dz = 2 * p * da * relu
        dprobs[rows] = (dy[rows] * (a @ w2[e] + b2[e])).sum(1)
        dx[rows], dw1[e], dw2[e] = dz @ w1[e].T, x[rows].T @ dz, (p * a).T @ dy[rows]
        db1[e], db2[e] = dz.sum(0), (p * dy[rows]).sum(0)
    return y, dx, dw1, dw2, dprobs, db1, db2


@jax.jit
def output_and_gradients(group_sizes, x, w1, w2, probs, b1, b2, dy):
    def apply(x, w1, w2, probs, b1, b2):
        return grouped_mlp(x, w1, w2, group_sizes, probs=probs, b1=b1, b2=b2)

    y, pullback = jax.vjp(apply, x, w1, w2, probs, b1, b2)
    return y, *pullback(dy)


def relative_errors(got, want):
    return {
        name: float(
            np.abs(np.asarray(g, np.float64) - w).max(initial=0) / max(np.abs(w).max(initial=0), 1e-3)
        )
        for name, g, w in zip(NAMES, got, want, strict=True)
    }


@pytest.mark.parametrize(("dtype", "bound"), [(jnp.float32, 2e-6), (jnp.bfloat16, 1.5e-2)])
@pytest.mark.parametrize("groups", GROUPS)
def test_output_and_gradients_equal_a_dense_loop(groups, dtype, bound):
    sizes, rows = GROUPS[groups]
    arguments = make(sizes, rows, dtype)
    got = output_and_gradients(jnp.array(sizes, jnp.int32), *arguments)
    errors = relative_errors(got, dense(sizes, *arguments))
    assert all(error <= bound for error in errors.values()), errors
    assert [g.dtype for g in got] == [dtype] * 4 + [jnp.float32] * 3


@settings(deadline=None, max_examples=12)
@given(data=st.data())
def test_any_shape_and_groups(data):
    experts = data.draw(st.integers(1, 5), "experts")
    sizes = data.draw(st.lists(st.integers(0, 20), min_size=experts, max_size=experts), "sizes")
    rows = sum(sizes) + data.draw(st.integers(0, 9), "tail")
    if rows == 0:
        rows = 1
    width, hidden = data.draw(st.integers(1, 9), "width"), data.draw(st.integers(1, 9), "hidden")
    arguments = make(sizes, rows, jnp.float32, width=width, hidden=hidden)
    got = output_and_gradients(jnp.array(sizes, jnp.int32), *arguments)
    errors = relative_errors(got, dense(sizes, *arguments))
    assert all(error <= 1e-5 for error in errors.values()), errors


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rows_past_the_groups_are_exactly_zero(dtype):
    sizes, rows = [9, 2, 0, 13], 40
    y, dx, dw1, dw2, dprobs, *_ = output_and_gradients(jnp.array(sizes, jnp.int32), *make(sizes, rows, dtype))
    for value in (y, dx, dprobs):
        assert not np.asarray(value[sum(sizes) :], np.float32).any()
    assert np.isfinite(np.asarray(dw1, np.float32)).all()
    assert np.isfinite(np.asarray(dw2, np.float32)).all()


def test_without_probs_and_biases():
    sizes, rows = [5, 0, 1, 30], 36
    x, w1, w2, _, b1, b2, dy = make(sizes, rows, jnp.float32)
    apply = jax.jit(lambda x, w1, w2: grouped_mlp(x, w1, w2, jnp.array(sizes)))
    y, pullback = jax.vjp(apply, x, w1, w2)
    want = dense(sizes, x, w1, w2, jnp.ones(rows), jnp.zeros_like(b1), jnp.zeros_like(b2), dy)
    for got, expected in zip((y, *pullback(dy)), want, strict=False):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_no_rows():
    x, w1, w2 = jnp.zeros((0, 4)), jnp.ones((2, 4, 8)), jnp.ones((2, 8, 4))
    value, grads = jax.value_and_grad(
        lambda *a: grouped_mlp(a[0], a[1], a[2], jnp.array([0, 0])).sum(), (0, 1, 2)
    )(x, w1, w2)
    assert value == 0
    assert [g.shape for g in grads] == [x.shape, w1.shape, w2.shape]
    assert not grads[1].any()


def test_gradient_of_gradient_is_that_of_the_formula():
    sizes = [3, 0, 5]
    x, w1, w2, probs, *_ = make(sizes, 8, jnp.float32)
    expert = np.repeat(np.arange(3), sizes)

    def plain(x, w1):
        z = jnp.einsum("rh,rhi->ri", x, w1[expert], precision="highest")
        a = jnp.square(jnp.maximum(z, 0))
        return probs[:, None] * jnp.einsum("ri,rih->rh", a, w2[expert], precision="highest")

    def twice(apply):
        def inner(x, w1):
            return jnp.sum(jnp.square(jax.grad(lambda x: jnp.sum(jnp.sin(apply(x, w1))))(x)))

        return jax.jit(jax.grad(inner, (0, 1)))(x, w1)

    got = twice(lambda x, w1: grouped_mlp(x, w1, w2, jnp.array(sizes), probs=probs))
    for g, w in zip(got, twice(plain), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-3, atol=1e-4)


def test_vmap_equals_a_loop():
    batch = [make([5, 2, 1], 8, jnp.float32, seed=seed) for seed in range(3)]
    sizes = jnp.array([[5, 2, 1], [0, 0, 8], [1, 0, 2]], jnp.int32)
    stacked = [jnp.stack(values) for values in zip(*batch, strict=True)]
    got = jax.vmap(output_and_gradients)(sizes, *stacked)
    for i, arguments in enumerate(batch):
        for g, w in zip(got, output_and_gradients(sizes[i], *arguments), strict=True):
            np.testing.assert_allclose(g[i], w, rtol=1e-4, atol=1e-5)


def test_scan_over_layers_equals_a_loop():
    sizes = jnp.array([5, 2, 1], jnp.int32)
    layers = [make([5, 2, 1], 8, jnp.float32, seed=seed)[1:3] for seed in range(3)]
    x = make([5, 2, 1], 8, jnp.float32)[0]
    scanned, _ = jax.lax.scan(
        lambda x, w: (grouped_mlp(x, w[0], w[1], sizes), None),
        x,
        tuple(map(jnp.stack, zip(*layers, strict=True))),
    )
    for w1, w2 in layers:
        x = grouped_mlp(x, w1, w2, sizes)
    np.testing.assert_allclose(scanned, x, rtol=1e-4, atol=1e-5)


def test_shard_map_sums_the_weights_gradients_over_devices():
    if jax.device_count() < 2:
        pytest.skip("needs two devices")
    devices = jax.make_mesh(
        (2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2]
    )
    spec = jax.sharding.PartitionSpec
    shards = [make([5, 2, 1], 8, jnp.float32, seed=seed) for seed in range(2)]
    _, w1, w2, _, b1, b2, _ = shards[0]
    sizes = [[5, 2, 1], [0, 3, 4]]
    x = jnp.concatenate([jnp.nan_to_num(s[0]) for s in shards])
    probs = jnp.concatenate([jnp.nan_to_num(s[3]) for s in shards])

    def loss(x, w1, w2, probs, b1, b2, sizes):
        y = grouped_mlp(x, w1, w2, sizes[0], probs=probs, b1=b1, b2=b2)
        return jax.lax.psum(jnp.sum(jnp.sin(y)), "data")

    split, whole = spec("data"), spec()
    sharded = jax.shard_map(
        loss,
        mesh=devices,
        in_specs=(split, whole, whole, split, whole, whole, split),
        out_specs=whole,
    )
    got = jax.jit(jax.grad(sharded, tuple(range(6))))(x, w1, w2, probs, b1, b2, jnp.array(sizes))

    def unsharded(x, w1, w2, probs, b1, b2):
        parts = (
            grouped_mlp(
                x[8 * i : 8 * i + 8], w1, w2, jnp.array(s), probs=probs[8 * i : 8 * i + 8], b1=b1, b2=b2
            )
            for i, s in enumerate(sizes)
        )
        return sum(jnp.sum(jnp.sin(y)) for y in parts)

    want = jax.jit(jax.grad(unsharded, tuple(range(6))))(x, w1, w2, probs, b1, b2)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5)


def test_equal_inputs_give_equal_bits():
    sizes, rows = GROUPS["many_tiles"]
    arguments = (jnp.array(sizes, jnp.int32), *make(sizes, rows, jnp.bfloat16))
    first, second = output_and_gradients(*arguments), output_and_gradients(*arguments)
    assert all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(("rows", "experts"), [(1, 1), (7, 3), (2048, 8), (98304, 128), (32768, 8)])
def test_tiles_are_few_and_cover_every_row_once(rows, experts):
    rng = np.random.default_rng(rows)
    height = tile_height(rows, experts)
    sizes = np.bincount(rng.integers(0, experts, rows - rows // 10), minlength=experts)
    tiles = jax.tree.map(
        np.asarray, jax.jit(cut_tiles, static_argnums=(1, 2))(jnp.asarray(sizes), rows, height)
    )
    assert len(tiles.expert) <= -(-rows // height) + experts
    assert (tiles.start >= 0).all()
    assert (tiles.start + height <= rows).all()
    covered = np.zeros(rows, int)
    owner = np.repeat(np.arange(experts), sizes)
    for expert, start, first, stop in zip(*tiles, strict=True):
        if stop > first:
            assert start <= first
            assert stop <= start + height
            assert (owner[first:stop] == expert).all()
            covered[first:stop] += 1
    assert (covered == (np.arange(rows) < sizes.sum())).all()


def test_wide_case_needs_memory_for_rows_and_not_for_experts_times_rows():
    """Compiled and not run, at Nemotron 3 Nano's width, where a masked dense product takes over 60 GB."""
    rows, experts, width, hidden = 4096, 128, 2688, 1856
    args = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        for shape in ((rows, width), (experts, width, hidden), (experts, hidden, width))
    ]
    sizes = jax.ShapeDtypeStruct((experts,), jnp.int32)
    memory = jax.jit(grouped_mlp).lower(*args, sizes).compile().memory_analysis()
    # Both sweeps together: a, y, and float32 copies of one tile and one expert.
    assert memory.temp_size_in_bytes < 3 * rows * (width + hidden) * 2 + 8 * width * hidden * 4


def test_gradient_never_holds_transposed_weights():
    experts, width, hidden, rows = 16, 320, 192, 512
    args = [
        jnp.zeros(shape, jnp.float32)
        for shape in ((rows, width), (experts, width, hidden), (experts, hidden, width))
    ]
    sizes = jnp.full(experts, rows // experts)
    grad = jax.jit(jax.grad(lambda x, w1, w2: grouped_mlp(x, w1, w2, sizes).sum(), (0, 1, 2)))
    compiled = grad.lower(*args).compile()
    for line in compiled.as_text().splitlines():
        if " transpose(" in line or " copy(" in line:
            for whole in (f"[{experts},{width},{hidden}]", f"[{experts},{hidden},{width}]"):
                assert whole not in line.split("=")[1].split("(")[0], line
    one_set_of_weights = 2 * experts * width * hidden * 4
    assert compiled.memory_analysis().temp_size_in_bytes < one_set_of_weights


def arguments(**changes):
    values = dict(
        x=jnp.zeros((8, 4)), w1=jnp.zeros((2, 4, 6)), w2=jnp.zeros((2, 6, 4)), group_sizes=jnp.array([3, 5])
    )
    return values | changes


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (dict(x=jnp.zeros(8)), ValueError, r"x must be \(R, H\), got 1 axes: x \(8,\)"),
        (dict(w2=jnp.zeros((2, 4, 6))), ValueError, r"w2 must be \(E, I, H\) with I = 6, got I = 4"),
        (dict(w1=jnp.zeros((3, 4, 6))), ValueError, r"w2 must be .* with E = 3, got E = 2"),
        (dict(group_sizes=jnp.array([1, 2, 3])), ValueError, r"group_sizes must be \(E\) with E = 2"),
        (dict(probs=jnp.zeros(7)), ValueError, r"probs must be \(R\) with R = 8, got R = 7"),
        (dict(b1=jnp.zeros((2, 4))), ValueError, r"b1 must be \(E, I\) with I = 6"),
        (dict(b2=jnp.zeros((2, 6))), ValueError, r"b2 must be \(E, H\) with H = 4"),
        (dict(x=jnp.zeros((8, 4), jnp.float16)), TypeError, "x must be bfloat16 or float32, got float16"),
        (dict(w1=jnp.zeros((2, 4, 6), jnp.bfloat16)), TypeError, r"w1\.astype\(x\.dtype\)"),
        (dict(probs=jnp.zeros(8, jnp.int32)), TypeError, "probs must be float32"),
        (dict(group_sizes=jnp.array([3.0, 5.0])), TypeError, "group_sizes must be integers, got float32"),
        (dict(group_sizes=jnp.array([9, -1])), ValueError, "not be negative, got -1 for expert 1 of 2"),
        (dict(group_sizes=np.array([3, 6])), ValueError, "sum to at most R = 8, .* got 9 over 2 experts"),
        (dict(implementation="mosaic"), NotImplementedError, 'pass "reference" or None'),
        (dict(implementation="referense"), ValueError, "'reference' or 'mosaic'; did you mean 'reference'"),
    ],
)
def test_wrong_arguments_are_told_at_once(changes, error, message):
    with pytest.raises(error, match=message):
        grouped_mlp(**arguments(**changes))


def test_reference_is_what_none_gives():
    x = jax.random.normal(jax.random.key(0), (8, 4))
    a, b = (
        grouped_mlp(**arguments(x=x, w1=jnp.ones((2, 4, 6)), w2=jnp.ones((2, 6, 4)), implementation=i))
        for i in (None, "reference")
    )
    assert a.any()
    assert (a == b).all()
