"""The grouped MLP's values and gradients, by either implementation, against a loop over experts in float64.

The kernels run in the interpreter here; on a GPU in `tests/gpu`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import grouped_mlp
from pallas_kernels._tiles import choose_height, cut_tiles
from tests.pallas_kernels.interpreter import interpreted
from tests.pallas_kernels.oracle import Results, dense, float64, largest_error, make, norm_error

EXPERTS, ROWS = 4, 141
# Group sizes over the same rows; rows past the groups hold NaN.
GROUPS = {
    "uneven, and a tail": [70, 0, 5, 61],
    "one row each": [1, 1, 1, 1],
    "all in one": [0, 0, ROWS, 0],
    "one row": [0, 1, 0, 0],
    "all empty": [0, 0, 0, 0],
    "more rows than there are": [90, 30, 60, 9],
}
OF_ONE_KERNEL = ("one row each", "all in one", "one row")
# The largest error of an output by its norm, and of an element.
BOUNDS = {jnp.float32: (2e-6, 2e-5), jnp.bfloat16: (8e-3, 8e-2), jnp.float16: (2e-3, 1e-2)}


def output_and_gradients(implementation):
    def run(sums, group_sizes, *arguments):
        *given, dy = arguments

        def apply(sums, x, w1, w2, probs, b1, b2):
            more = dict(probs=probs, b1=b1, b2=b2, grad_accumulators=sums)
            return grouped_mlp(x, w1, w2, group_sizes, **more, implementation=implementation)

        y, pullback = jax.vjp(apply, sums, *given)
        added, *gradients = pullback(dy)
        return Results(y, *gradients), added

    return run


def program(implementation, function, *arguments):
    """Compiles once for many values: the kernels in the interpreter.

    One program a kernel is the cheapest to interpret; test_kernels.py runs several.
    """
    if implementation == "mosaic":
        return interpreted(function, *arguments, programs=1)
    return jax.jit(function)


class Case:
    """An implementation at a dtype: one program, tried on many groups and values.

    The kernels add the weights' gradients to accumulators. `run` takes what was there before off again.
    """

    def __init__(self, implementation: str, dtype):
        self.dtype, self.sums = dtype, None
        arguments = self.make([1, 1, 1, 1])
        if implementation == "mosaic":
            rng = np.random.default_rng(0)
            self.sums = tuple(jnp.asarray(rng.normal(size=w.shape), jnp.float32) for w in arguments[1:3])
        given = self.sums, jnp.zeros(EXPERTS, jnp.int32), *arguments
        self.program = program(implementation, output_and_gradients(implementation), *given)

    @functools.cached_property
    def uneven(self) -> Results:
        sizes = GROUPS["uneven, and a tail"]
        return self.run(sizes, self.make(sizes))

    def make(self, sizes, seed=0):
        return make(sizes, ROWS, self.dtype, width=64, hidden=128, seed=seed)

    def run(self, sizes, arguments) -> Results:
        results, added = self.program(self.sums, jnp.array(sizes, jnp.int32), *arguments)
        if self.sums is None:
            return results
        assert not float64(results.dw1).any() and not float64(results.dw2).any()
        dw1, dw2 = (after - before for after, before in zip(added, self.sums, strict=True))
        return results._replace(dw1=dw1, dw2=dw2)

    def check(self, sizes, arguments, got):
        bound, bound_of_element = BOUNDS[self.dtype]
        for name, value, want in zip(Results._fields, got, dense(sizes, arguments), strict=True):
            errors = norm_error(value, want), largest_error(value, want)
            assert errors[0] <= bound and errors[1] <= bound_of_element, (sizes, name, errors)
        of_weights = self.dtype if self.sums is None else jnp.float32
        assert [g.dtype for g in got] == [self.dtype] * 2 + [of_weights] * 2 + [jnp.float32] * 3


@functools.cache
def case(implementation, dtype):
    return Case(implementation, dtype)


EVERY_CASE = pytest.mark.parametrize(
    ("implementation", "dtype"),
    [
        ("reference", jnp.float32),
        ("reference", jnp.bfloat16),
        pytest.param("reference", jnp.float16, marks=pytest.mark.long),
        ("mosaic", jnp.bfloat16),
        pytest.param("mosaic", jnp.float16, marks=pytest.mark.long),
    ],
)


@EVERY_CASE
@pytest.mark.some_cases(2)
def test_output_and_gradients_equal_a_loop(implementation, dtype):
    tried = case(implementation, dtype)
    # Interpreting takes long; test_kernels.py tries the other groups on each kernel.
    names = GROUPS if implementation == "reference" else [n for n in GROUPS if n not in OF_ONE_KERNEL]
    for seed, sizes in enumerate(map(GROUPS.get, names)):
        arguments = tried.make(sizes, seed)
        got = tried.run(sizes, arguments) if seed else tried.uneven
        tried.check(sizes, arguments, got)
        for value in (got.y, got.dx, got.dprobs):
            assert not float64(value[sum(sizes) :]).any(), "rows of no expert"
    sizes = GROUPS["uneven, and a tail"]
    for first, second in zip(tried.uneven, tried.run(sizes, tried.make(sizes)), strict=True):
        assert np.asarray(first).tobytes() == np.asarray(second).tobytes(), "equal inputs give equal bits"


@EVERY_CASE
@pytest.mark.some_cases(2)
def test_probs_of_zero_one_and_tiny_and_units_that_are_off(implementation, dtype):
    tried, sizes = case(implementation, dtype), GROUPS["uneven, and a tail"]
    arguments = tried.make(sizes)
    probs, b1 = np.array(arguments.probs), np.array(arguments.b1)
    probs[0:9], probs[9:20], probs[20:30] = 0.0, 1.0, 1e-30
    b1[2] = -1e3  # no unit of this expert is on
    arguments = arguments._replace(probs=jnp.asarray(probs), b1=jnp.asarray(b1))
    got = tried.run(sizes, arguments)
    tried.check(sizes, arguments, got)
    assert not float64(got.y[:9]).any() and not float64(got.dx[:9]).any()
    assert float64(got.dprobs[:9]).all(), "a row that is switched off still learns its prob"
    assert not float64(got.dx[70:75]).any() and not float64(got.dw1[2]).any()


@EVERY_CASE
@pytest.mark.some_cases(2)
def test_nan_of_one_expert_stays_with_it(implementation, dtype):
    """Bit for bit: neither a mask by multiplication nor a tile of two groups would do that."""
    tried, sizes = case(implementation, dtype), GROUPS["uneven, and a tail"]
    clean = tried.make(sizes)
    own = slice(70, 75)  # expert 2, in the middle of a tile of rows
    dirty = clean._replace(
        **{name: getattr(clean, name).at[own].set(jnp.nan) for name in ("x", "probs", "dy")}
    )
    wanted, got = tried.uneven, tried.run(sizes, dirty)
    for name, want, value in zip(Results._fields, wanted, got, strict=True):
        others = np.ones(len(want), bool)
        others[own if len(want) == ROWS else 2] = False
        assert np.asarray(value)[others].tobytes() == np.asarray(want)[others].tobytes(), name
        assert np.isnan(float64(value)[~others]).any(), f"{name}: the NaN reaches its own expert"


@pytest.mark.parametrize("implementation", ["reference", pytest.param("mosaic", marks=pytest.mark.long)])
def test_without_probs_and_biases(implementation):
    sizes = GROUPS["uneven, and a tail"]
    arguments = make(sizes, ROWS, jnp.bfloat16, width=64, hidden=128)

    def run(x, w1, w2, dy):
        def apply(x, w1, w2):
            return grouped_mlp(x, w1, w2, jnp.array(sizes), implementation=implementation)

        y, pullback = jax.vjp(apply, x, w1, w2)
        return y, *pullback(dy)

    given = arguments.x, arguments.w1, arguments.w2, arguments.dy
    got = program(implementation, run, *given)(*given)
    want = dense(sizes, arguments._replace(probs=None, b1=None, b2=None))
    for value, expected in zip(got, want, strict=False):
        assert norm_error(value, expected) < BOUNDS[jnp.bfloat16][0]


@settings(deadline=None, max_examples=2)
@given(data=st.data())
def test_any_shape_and_groups(data):
    try_shape_and_groups(data)


@pytest.mark.long
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_many_shapes_and_groups(data):
    try_shape_and_groups(data)


def try_shape_and_groups(data):
    experts = data.draw(st.integers(1, 5), "experts")
    sizes = data.draw(st.lists(st.integers(0, 20), min_size=experts, max_size=experts), "sizes")
    rows = max(sum(sizes) + data.draw(st.integers(0, 9), "tail"), 1)
    width, hidden = data.draw(st.integers(1, 9), "width"), data.draw(st.integers(1, 9), "hidden")
    arguments = make(sizes, rows, jnp.float32, width=width, hidden=hidden)
    got, _ = jax.jit(output_and_gradients("reference"))(None, jnp.array(sizes, jnp.int32), *arguments)
    errors = {
        name: norm_error(value, want)
        for name, value, want in zip(Results._fields, got, dense(sizes, arguments), strict=True)
    }
    assert all(error <= 1e-5 for error in errors.values()), errors


def test_no_rows():
    x, w1, w2 = jnp.zeros((0, 4)), jnp.ones((2, 4, 8)), jnp.ones((2, 8, 4))
    value, grads = jax.value_and_grad(
        lambda *a: grouped_mlp(a[0], a[1], a[2], jnp.array([0, 0])).sum(), (0, 1, 2)
    )(x, w1, w2)
    assert value == 0
    assert [g.shape for g in grads] == [x.shape, w1.shape, w2.shape]
    assert not grads[1].any()


@pytest.mark.parametrize(("rows", "experts"), [(1, 1), (7, 3), (2048, 8), (98304, 128), (32768, 8)])
def test_tiles_are_few_and_cover_every_row_once(rows, experts):
    rng = np.random.default_rng(rows)
    height = choose_height(rows, experts)
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
