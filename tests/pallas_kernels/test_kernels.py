"""Each of the Hopper kernels by itself, interpreted, against its product in float64.

The shapes are small and the programs few: one program takes several tiles, its ring of buffers wraps, and
some have nothing to do. What ordinary shapes seldom meet has a test of its own.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.pallas_kernels.kernels import EXPERTS, KERNELS, ROWS, Program, operands
from tests.pallas_kernels.oracle import float64

GROUPS = {
    "uneven, and a tail": [70, 0, 5, 61],
    "to the last row": [1, 130, 0, 21],
    "one row": [0, 0, 1, 0],
    "all empty": [0, 0, 0, 0],
    "cut at the last row": [9, 90, 80, 7],
}
SLOW = {"fc1", "fc2", "grad_act", "grad_act, probs", "grad_w2, float32"}  # less than what their neighbours do


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in KERNELS]
)
def test_kernel_equals_its_product(name):
    """Blocks of 128 and 64 columns; two stages for a ring that wraps."""
    program = Program(KERNELS[name], operands([0] * EXPERTS), block_columns=128, stages=2)
    for seed, sizes in enumerate(GROUPS.values()):
        got = program.check(sizes, operands(sizes, seed=seed))
        # What grad_act gives past the groups besides dz and dp is no result: grad_weight does not read it.
        results = got if program.kernel.config != "grad_act" else (got[0], *got[2:])
        past = [float64(value[sum(sizes) :]) for value in results if len(value) == ROWS]
        assert not any(value.any() for value in past), sizes


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fc1, bias", "fc2, bias, probs", "grad_act, probs, p a", "grad_x"])
def test_kernel_in_float16(name):
    given = operands(GROUPS["uneven, and a tail"], dtype=jnp.float16)
    program = Program(KERNELS[name], given, block_columns=64)
    assert program.check(GROUPS["uneven, and a tail"], given)[0].dtype == jnp.float16


@pytest.mark.parametrize("name", ["fc1", pytest.param("grad_w1, accumulator", marks=pytest.mark.slow)])
def test_halves_of_a_tile_with_every_number_of_rows_at_every_start(name):
    """A group of n rows leaves through copies of powers of two, n = 1 to 63, and of 64 and a rest.

    The groups start at every residue of the eight rows that the copy engine moves together.
    """
    sizes = np.concatenate([np.arange(1, 64), [64, 65, 100]])
    sizes = np.random.default_rng(0).permutation(sizes)
    assert set(np.cumsum(sizes) % 8) == set(range(8))
    rows = int(-(-(sizes.sum() + 3) // 8) * 8)
    given = operands(sizes, rows, experts=len(sizes), width=64, hidden=64)
    Program(KERNELS[name], given).check(sizes, given)


@pytest.mark.parametrize("name", ["grad_act, probs, p a", "grad_w2"])
def test_more_programs_than_tiles_and_more_stages_than_steps(name):
    """No barrier may be left with a phase that nobody saw, by programs without a tile too."""
    given = operands([0] * EXPERTS, 16, width=64, hidden=64)
    program = Program(KERNELS[name], given, programs=9, stages=4)
    for sizes in ([0, 0, 0, 0], [3, 0, 0, 0], [4, 4, 4, 4]):
        program.check(sizes, operands(sizes, 16, width=64, hidden=64))


@pytest.mark.parametrize(
    ("minor", "width"),
    [pytest.param(0, 1, marks=pytest.mark.slow), (0, 2), pytest.param(1, 2, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("name", ["fc1", "grad_w2"])
def test_every_order_of_tiles_does_each_once(name, minor, width):
    sizes = GROUPS["uneven, and a tail"]
    given = operands(sizes)
    Program(KERNELS[name], given, block_columns=64, minor=minor, width=width).check(sizes, given)


@pytest.mark.parametrize(
    "name", ["grad_w2", *(pytest.param(n, marks=pytest.mark.slow) for n in sorted(KERNELS) if n != "grad_w2")]
)
def test_rows_of_other_groups_may_hold_nan(name):
    """Bit for bit as without: a mask by multiplication would turn a zero into NaN."""
    sizes = [9, 20, 1, 103]
    clean, stops = operands(sizes), np.cumsum(sizes)
    program = Program(KERNELS[name], clean, block_columns=64)
    wanted = program(sizes, clean)
    for expert, stop in enumerate(stops):
        own = slice(stop - sizes[expert], stop)
        dirty = clean | {n: clean[n].at[own].set(jnp.nan) for n in ("x", "dy", "a", "dz", "p")}
        for want, got in zip(wanted, program(sizes, dirty), strict=True):
            others = np.ones(len(want), bool)
            others[own if len(want) == ROWS else expert] = False
            assert np.asarray(got)[others].tobytes() == np.asarray(want)[others].tobytes(), expert
            assert np.isnan(float64(got)[~others]).any(), expert
