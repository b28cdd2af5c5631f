"""Each of the Hopper kernels by itself, interpreted, against its product in float64.

The shapes are small and the programs few: one program takes several tiles, its ring of buffers wraps, and
some have nothing to do. What ordinary shapes seldom meet has a test of its own.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._mosaic.rows import walk
from pallas_kernels._mosaic.tuning import Config
from tests.pallas_kernels.kernels import EXPERTS, KERNELS, ROWS, Program, operands
from tests.pallas_kernels.oracle import float64

GROUPS = {
    "uneven, and a tail": [70, 0, 5, 61],
    "one row": [0, 0, 1, 0],
    "all empty": [0, 0, 0, 0],
    "cut at the last row, which has no tail": [9, 90, 80, 7],
}
# These do less than a kernel of the default run, which takes them as parts of the whole op: with probs in
# test_grouped_mlp.py, without probs and biases in test_transforms.py.
LONG = {"fc1", "fc2", "grad_act", "grad_act, probs", "grad_w2, float32", "grad_w2, left index"}
MARKED = [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in KERNELS]


@pytest.fixture(scope="module", params=MARKED)
def program(request):
    """A kernel compiled once: blocks of 128 and 64 columns, and two stages for a ring that wraps."""
    return Program(KERNELS[request.param], operands([0] * EXPERTS), block_columns=128, stages=2)


@pytest.mark.some_cases(4)
def test_kernel_equals_its_product(program):
    for seed, sizes in enumerate(GROUPS.values()):
        got = program.check(sizes, operands(sizes, seed=seed))
        # What grad_act gives past the groups besides dz and dp is no result: grad_weight does not read it.
        results = got if program.kernel.config != "grad_act" else (got[0], *got[2:])
        past = [float64(value[sum(sizes) :]) for value in results if len(value) == ROWS]
        assert not any(value.any() for value in past), sizes


@pytest.mark.long
@pytest.mark.parametrize("name", ["fc1, bias", "fc2, bias, probs", "grad_act, probs, p a", "grad_x"])
def test_kernel_in_float16(name):
    """The default run draws float16 in test_random_kernels.py."""
    given = operands(GROUPS["uneven, and a tail"], dtype=jnp.float16)
    program = Program(KERNELS[name], given, block_columns=64)
    assert program.check(GROUPS["uneven, and a tail"], given)[0].dtype == jnp.float16


@pytest.mark.parametrize("name", ["fc1", pytest.param("grad_w1, accumulator", marks=pytest.mark.long)])
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


ORDERS = [(0, 1), (0, 2), (1, 1), (1, 2), (1, 64)]  # minor, width


@pytest.mark.parametrize("shape", [(1, 1), (4, 1), (1, 5), (4, 3), (7, 10)])
@pytest.mark.some_cases(2)
def test_every_order_visits_each_block_once(shape):
    linear = jnp.arange(shape[0] * shape[1])
    for minor, width in ORDERS:
        config = Config(64, minor=minor, width=width)
        rows, columns = jax.vmap(lambda i, config=config: walk(i, shape, config))(linear)
        visited = set(zip(rows.tolist(), columns.tolist(), strict=True))
        assert visited == set(np.ndindex(shape)), (minor, width)


@pytest.mark.parametrize(
    ("name", "minor", "width"),
    [
        ("fc1", 0, 2),
        ("grad_w2", 1, 2),
        *(
            pytest.param(name, *order, marks=pytest.mark.long)
            for name, order in itertools.product(["fc1", "grad_w2"], [(0, 1), (0, 2), (1, 2)])
            if (name, *order) not in {("fc1", 0, 2), ("grad_w2", 1, 2)}
        ),
    ],
)
def test_kernels_compute_each_tile_in_every_order(name, minor, width):
    sizes = GROUPS["uneven, and a tail"]
    given = operands(sizes)
    Program(KERNELS[name], given, block_columns=64, minor=minor, width=width).check(sizes, given)


@pytest.mark.some_cases(2)
def test_rows_of_other_groups_may_hold_nan(program):
    """Bit for bit as without: a mask by multiplication would turn a zero into NaN.

    Every second group holds NaN, then every other: each boundary has NaN on either side.
    """
    sizes = [9, 20, 1, 103]
    clean, owner = operands(sizes), np.repeat(range(EXPERTS + 1), [*sizes, ROWS - sum(sizes)])
    wanted = program(sizes, clean)
    for parity in (0, 1):
        dirty_rows = (owner % 2 == parity) & (owner < EXPERTS)
        dirty = clean | {n: clean[n].at[dirty_rows].set(jnp.nan) for n in ("x", "dy", "a", "dz", "z", "p")}
        for want, got in zip(wanted, program(sizes, dirty), strict=True):
            owners = owner if len(want) == ROWS else np.arange(EXPERTS)
            others = (owners % 2 != parity) | (owners == EXPERTS)
            assert np.asarray(got)[others].tobytes() == np.asarray(want)[others].tobytes(), parity
            for expert in range(parity, EXPERTS, 2):
                assert np.isnan(float64(got)[owners == expert]).any(), expert
