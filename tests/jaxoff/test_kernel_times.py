"""How long the planner takes kernels to be: products by operations, the rest by bytes, copies for both."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import Primitive

from jaxoff._cost import Device
from jaxoff._inline import inlined, now
from jaxoff._kernel_times import IDLE, LOAD, PRODUCTS, TRAFFIC, kernel_ms, under_load
from jaxoff._units import Units

ROWS, WIDTH, HIDDEN = 256, 64, 128
DEVICE = Device(flops=1e12, memory_gbps=1.0, d2h_gbps=1.0, h2d_gbps=1.0)
QUICK = Device(flops=1e12, memory_gbps=1e9, d2h_gbps=1.0, h2d_gbps=1.0)  # bytes take no time
FLOPS = 2 * ROWS * WIDTH * HIDDEN


def milliseconds(fun, *args, device=DEVICE, rows=()):
    """Of the last unit of a function, whose arguments of these numbers are rows of a loop's stacks."""
    jaxpr = jax.make_jaxpr(fun)(*args).jaxpr
    renamed = {}
    eqns = list(inlined(jaxpr.eqns, renamed))
    units = Units(eqns, frozenset(now(renamed, v) for v in jaxpr.outvars))
    return kernel_ms(units, units.all[-1], device, {jaxpr.invars[n] for n in rows})


def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def traffic_ms(*arrays):
    return sum(x.size * x.dtype.itemsize for x in arrays) / DEVICE.memory_gbps / 1e6


X, W, OUT = array(ROWS, WIDTH), array(WIDTH, HIDDEN), array(ROWS, HIDDEN)


def test_a_product_takes_its_operations_and_some_of_its_traffic():
    found = milliseconds(jnp.matmul, X, W)
    assert found == pytest.approx(1e3 * FLOPS / PRODUCTS / DEVICE.flops + TRAFFIC * traffic_ms(X, W, OUT))


def test_products_in_float32_throughout_leave_the_matrix_units():
    x, w = array(ROWS, WIDTH, dtype=jnp.float32), array(WIDTH, HIDDEN, dtype=jnp.float32)
    usual = milliseconds(jnp.matmul, x, w, device=QUICK)
    whole = milliseconds(lambda x, w: jnp.matmul(x, w, precision=lax.Precision.HIGHEST), x, w, device=QUICK)
    assert usual == pytest.approx(2 * milliseconds(jnp.matmul, X, W, device=QUICK))
    assert whole > 5 * usual
    narrow = milliseconds(lambda x, w: jnp.matmul(x, w, precision=lax.Precision.HIGHEST), X, W, device=QUICK)
    assert narrow == milliseconds(jnp.matmul, X, W, device=QUICK)


@pytest.mark.parametrize(
    "algorithm", [lax.DotAlgorithmPreset.F32_F32_F32, lax.DotAlgorithmPreset.TF32_TF32_F32]
)
def test_an_algorithm_says_whether_a_product_is_in_float32_throughout(algorithm):
    x, w = array(ROWS, WIDTH, dtype=jnp.float32), array(WIDTH, HIDDEN, dtype=jnp.float32)
    found = milliseconds(lambda x, w: lax.dot(x, w, precision=algorithm), x, w, device=QUICK)
    usual = milliseconds(jnp.matmul, x, w, device=QUICK)
    assert (found > 5 * usual) == (algorithm is lax.DotAlgorithmPreset.F32_F32_F32)
    assert found >= usual


def test_a_product_reads_a_copy_of_a_row_of_a_stack():
    assert milliseconds(jnp.matmul, X, W, rows=[1]) == pytest.approx(
        milliseconds(jnp.matmul, X, W) + DEVICE.pass_ms(2 * W.size)
    )


@pytest.mark.parametrize("rows", [(), (1,)])
def test_weights_in_another_type_are_read_and_written_once(rows):
    wide = array(WIDTH, HIDDEN, dtype=jnp.float32)
    found = milliseconds(lambda x, w: x @ w.astype(x.dtype), X, wide, rows=rows)
    assert found == pytest.approx(milliseconds(jnp.matmul, X, W) + traffic_ms(wide, W))


def test_an_elementwise_kernel_reads_all_its_operands():
    found = milliseconds(lambda a, b: jnp.where(a > 0, a * b, b), OUT, OUT)
    assert found == pytest.approx(traffic_ms(OUT, OUT, OUT))


def test_a_sum_reads_all_that_it_adds_up():
    assert milliseconds(jnp.sum, OUT) == pytest.approx(traffic_ms(OUT), rel=0.01)


def test_what_takes_a_part_reads_no_more_than_that():
    table, indices = array(50 * ROWS, WIDTH), array(ROWS, dtype=jnp.int32)
    found = milliseconds(lambda table, i: jnp.take(table, i, axis=0, mode="clip"), table, indices)
    assert found == pytest.approx(2 * traffic_ms(X), rel=0.05)


def test_an_update_in_place_writes_what_is_new():
    found = milliseconds(
        lambda stack, x: lax.dynamic_update_index_in_dim(stack, x, 0, 0), array(9, *X.shape), X
    )
    assert found == pytest.approx(2 * traffic_ms(X))


def test_attention_is_slower_than_products_and_slower_still_going_back():
    def attention(name):
        primitive = Primitive(name)
        primitive.def_abstract_eval(lambda q, k: q)
        q = array(2, 64, 4, 32)
        return milliseconds(primitive.bind, q, q, device=QUICK)

    forward, back = (attention(f"dot_product_attention_{way}_wrapper") for way in ("fwd", "bwd"))
    flops = 2 * 2 * 64 * 4 * 32 * 64  # half of both products
    assert forward > 1e3 * flops / QUICK.flops
    assert back > 2.5 * forward


def test_what_is_no_product_goes_by_its_bytes():
    assert milliseconds(lambda x: lax.fft(x, "FFT", (WIDTH,)), array(ROWS, WIDTH, dtype=jnp.complex64)) == (
        pytest.approx(DEVICE.pass_ms(8 * X.size))
    )


def loaded(fun, *args, device):
    """What part of its rate of products a device has in a layer."""
    jaxpr = jax.make_jaxpr(fun)(*args).jaxpr
    units = Units(jaxpr.eqns, frozenset(jaxpr.outvars))
    found = under_load(units, units.all, device)
    assert found == dataclasses.replace(device, flops=found.flops)
    return found.flops / device.flops


def test_the_more_of_a_layers_time_products_take_the_slower_they_are():
    assert loaded(jnp.matmul, X, W, device=QUICK) == pytest.approx(IDLE - LOAD)
    assert loaded(jnp.add, X, X, device=QUICK) == IDLE
    product = 1e3 * FLOPS / PRODUCTS / DEVICE.flops
    rest = TRAFFIC * traffic_ms(X, W, OUT) + traffic_ms(X, X)
    both = loaded(lambda x, w: (x @ w, x + x), X, W, device=DEVICE)
    assert both == pytest.approx(IDLE - LOAD * product / (product + rest))
