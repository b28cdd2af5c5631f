"""The kernels lower for a Hopper GPU that need not be there: layouts, tiles and shared memory are checked.

What ptxas would say is for a GPU to tell.
"""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from bench.grouped_mlp_shapes import MEASURED, SHAPES, Shape
from pallas_kernels import grouped_mlp
from pallas_kernels._mosaic import row_products, tuning
from pallas_kernels._mosaic.row_tiling import tile_rows
from tests.pallas_kernels.hopper import launches, lower

OTHER_WIDTHS = [(64, 64), (192, 192), (64, 8192), (1856, 2688), (192, 320), (256, 512), (8192, 64)]
# Tiles of 64 columns lower in test_transforms.py, with biases and accumulators too.
QUICK = [((192, 192), jnp.float16)]


def arguments(shape: Shape, dtype=jnp.bfloat16):
    R, E, H, I = shape.rows, shape.experts, shape.width, shape.hidden  # noqa: E741
    sizes = {"x": (R, H), "w1": (E, H, I), "w2": (E, I, H)}
    narrow = [jax.ShapeDtypeStruct(size, dtype) for size in sizes.values()]
    return *narrow, jax.ShapeDtypeStruct((E,), jnp.int32), jax.ShapeDtypeStruct((R,), jnp.float32)


def forward_and_backward(x, w1, w2, group_sizes, probs):
    """The output is a result too: without it nothing would need FC2."""

    def apply(x, w1, w2, probs):
        return grouped_mlp(x, w1, w2, group_sizes, probs=probs)

    y, pullback = jax.vjp(apply, x, w1, w2, probs)
    return y, pullback(y)


@pytest.mark.long  # that the kernels are the choice, and lower, is shown of whole layers and models as well
@pytest.mark.parametrize("name", MEASURED)
def test_every_measured_shape_lowers(name):
    """No implementation is named: on this device the kernels are the choice."""
    given = arguments(SHAPES[name])
    kernels = {"fc1": 1, "fc2": 1, "grad_act": 1, "grad_x": 1, "grad_weight": 2}
    assert launches(forward_and_backward, *given) == kernels
    assert lower(forward_and_backward, *given).as_text().count("custom_call @mosaic_gpu") == 6


def test_every_tuned_config_is_among_them():
    shapes = [SHAPES[name] for name in MEASURED]
    tried = {(s.width, s.hidden, tuning.bucket_rows(s.rows, s.experts)) for s in shapes}
    assert set(tuning.load_table("NVIDIA H200")) <= tried


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "hidden", "dtype"),
    [
        pytest.param(*widths, dtype, marks=[pytest.mark.long] * ((widths, dtype) not in QUICK))
        for widths in OTHER_WIDTHS
        for dtype in (jnp.bfloat16, jnp.float16)
    ],
)
def test_other_widths_and_biases_and_accumulators_lower(width, hidden, dtype):
    shape = Shape("any", experts=3, width=width, hidden=hidden, rows=1001)
    x, w1, w2, sizes, probs = arguments(shape, dtype)
    wide = [jax.ShapeDtypeStruct(w.shape, jnp.float32) for w in (w1, w2)]
    biases = [jax.ShapeDtypeStruct((3, columns), jnp.float32) for columns in (hidden, width)]

    def run(x, w1, w2, sizes, probs, b1, b2, sums):
        def apply(x, probs, b1, b2, sums):
            more = dict(probs=probs, b1=b1, b2=b2, grad_accumulators=sums)
            return grouped_mlp(x, w1, w2, sizes, **more, implementation="mosaic")

        y, pullback = jax.vjp(apply, x, probs, b1, b2, sums)
        return y, pullback(y)

    assert "grouped_mlp_fc1" in lower(run, x, w1, w2, sizes, probs, *biases, tuple(wide)).as_text()


def test_a_tile_that_does_not_fit_in_shared_memory_is_refused():
    """So the tests above can fail."""
    x, w1, _, sizes, _ = arguments(SHAPES["nano-16k"])
    config = tuning.choose_configs(w1.shape, x.shape[0]).fc1

    def fc1(config):
        return lambda x, w1, sizes: row_products.fc1(x, w1, None, tile_rows(sizes, x.shape[0]), config)

    lower(fc1(config), x, w1, sizes)
    with pytest.raises(ValueError, match=r"exceeds available shared memory.*232448"):
        lower(fc1(dataclasses.replace(config, stages=2 * config.stages)), x, w1, sizes)
