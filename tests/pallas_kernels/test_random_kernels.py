"""Kernels of drawn shapes, groups and dtypes, interpreted, against float64 and against the reference."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import grouped_mlp
from tests.pallas_kernels.interpreter import interpreted
from tests.pallas_kernels.kernels import KERNELS, Program, operands
from tests.pallas_kernels.oracle import dense, largest_error, make, norm_error

WIDTHS = st.sampled_from([64, 128, 192])
DTYPES = st.sampled_from([jnp.bfloat16, jnp.float16])


@st.composite
def groups(draw):
    """Group sizes and rows: with a tail, without one, or with groups that the last row cuts off."""
    sizes = draw(
        st.lists(st.integers(0, 70) | st.sampled_from([0, 1, 63, 64, 65, 128]), min_size=1, max_size=5)
    )
    return sizes, max(sum(sizes) + draw(st.integers(-10, 20)), 1)


@st.composite
def tuning(draw):
    """What of a config changes the path through a kernel."""
    minor, width = draw(st.integers(0, 1)), draw(st.integers(1, 3))
    return dict(
        block_columns=64 * draw(st.integers(1, 3)), stages=draw(st.integers(2, 4)), minor=minor, width=width
    )


def try_kernel(name, drawn, width, hidden, dtype, programs, changes):
    """The kernels take rows in eights: the launch pads to that."""
    sizes, rows = drawn
    given = operands(sizes, -(-rows // 8) * 8, experts=len(sizes), width=width, hidden=hidden, dtype=dtype)
    Program(KERNELS[name], given, programs=programs, **changes).check(sizes, given)


DRAWS = dict(
    name=st.sampled_from(sorted(KERNELS)),
    drawn=groups(),
    width=WIDTHS,
    hidden=WIDTHS,
    dtype=DTYPES,
    programs=st.integers(1, 6),
    changes=tuning(),
)


@pytest.mark.long  # test_moe.py draws routings of the whole layer
@settings(deadline=None, max_examples=2)
@given(**DRAWS)
def test_any_kernel(**draws):
    try_kernel(**draws)


@pytest.mark.long
@settings(deadline=None, max_examples=80)
@given(**DRAWS)
def test_many_kernels(**draws):
    try_kernel(**draws)


@pytest.mark.long
@settings(deadline=None, max_examples=12)
@given(groups(), WIDTHS, WIDTHS, DTYPES, st.booleans(), st.booleans(), st.booleans())
def test_the_whole_op_is_as_near_to_float64_as_the_reference(
    drawn, width, hidden, dtype, has_probs, has_b1, has_b2
):
    sizes, rows = drawn
    arguments = make(sizes, rows, dtype, width=width, hidden=hidden)
    present = dict(probs=has_probs, b1=has_b1, b2=has_b2)
    arguments = arguments._replace(**{name: None for name, here in present.items() if not here})
    group_sizes = jnp.array(sizes, jnp.int32)

    def run(implementation):
        def output_and_gradients(group_sizes, arguments):
            *given, dy = arguments

            def apply(x, w1, w2, probs, b1, b2):
                more = dict(probs=probs, b1=b1, b2=b2)
                return grouped_mlp(x, w1, w2, group_sizes, **more, implementation=implementation)

            y, pullback = jax.vjp(apply, *given)
            return y, *pullback(dy)

        return output_and_gradients

    reference = jax.jit(run("reference"))(group_sizes, arguments)
    kernels = interpreted(run("mosaic"), group_sizes, arguments)(group_sizes, arguments)
    for got, other, want in zip(kernels, reference, dense(sizes, arguments), strict=True):
        assert (got is None) == (other is None)
        if got is not None:
            assert got.dtype == other.dtype
            assert norm_error(got, want) <= 2 * norm_error(other, want) + 1e-6
            assert largest_error(got, want) <= 3 * largest_error(other, want) + 1e-5
