"""How long the planner takes kernels to be: products by operations, the rest by bytes, copies for both."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax._src.cudnn.fused_attention_stablehlo import MaskType
from jax.experimental import pallas as pl
from jax.extend.core import Primitive
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxoff._device.calibration import H200_CALIBRATION, Constant
from jaxoff._device.flops import product_flops
from jaxoff._device.joined import join_devices
from jaxoff._device.kernel_time import lower_clock, program_ms, step_kernel_ms
from jaxoff._device.profile import Device
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.inline import inline_calls, inline_program, resolve
from jaxoff._jaxpr.kernels import KernelGraph

ROWS, WIDTH, HIDDEN = 256, 64, 128
DEVICE = Device(flops=1e12, memory_gbps=1.0, d2h_gbps=1.0, h2d_gbps=1.0)
QUICK = Device(flops=1e12, memory_gbps=1e9, d2h_gbps=1.0, h2d_gbps=1.0)  # bytes take no time
FLOPS = 2 * ROWS * WIDTH * HIDDEN
PRODUCTS, TRAFFIC = H200_CALIBRATION.product_share.value, H200_CALIBRATION.traffic_share.value
IDLE, LOAD = H200_CALIBRATION.idle_clock.value, H200_CALIBRATION.load_slope.value


def milliseconds(fun, *args, device=DEVICE, rows=()):
    """Of the last kernel of a function, whose arguments of these numbers are rows of a loop's stacks."""
    jaxpr = jax.make_jaxpr(fun)(*args).jaxpr
    renamed = {}
    eqns = list(inline_calls(jaxpr.eqns, renamed))
    graph = KernelGraph(eqns, frozenset(resolve(renamed, v) for v in jaxpr.outvars))
    return step_kernel_ms(graph, graph.kernels[-1], device, {jaxpr.invars[n] for n in rows})


def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def traffic_ms(*arrays):
    return sum(x.size * x.dtype.itemsize for x in arrays) / DEVICE.memory_gbps / 1e6


X, W, OUT = array(ROWS, WIDTH), array(WIDTH, HIDDEN), array(ROWS, HIDDEN)


def test_a_product_takes_its_operations_and_some_of_its_traffic_and_at_least_all_of_its_traffic():
    slow, traffic = dataclasses.replace(DEVICE, flops=1e10), traffic_ms(X, W, OUT)
    product = 1e3 * FLOPS / PRODUCTS / slow.flops
    assert milliseconds(jnp.matmul, X, W, device=slow) == pytest.approx(product + TRAFFIC * traffic)
    assert milliseconds(jnp.matmul, X, W, device=DEVICE) == pytest.approx(traffic)


@pytest.mark.parametrize(
    ("sizes", "padded"),
    [((256, 64, 128), ""), ((257, 64, 128), "x"), ((256, 63, 128), "xw"), ((256, 64, 127), "w")],
)
def test_operands_that_fill_no_blocks_of_8_are_copied(sizes, padded):
    rows, depth, columns = sizes
    x, w, out = array(3, rows, depth), array(3, depth, columns), array(3, rows, columns)
    copies = sum(2 * traffic_ms(y) for name, y in (("x", x), ("w", w)) if name in padded)
    assert milliseconds(jnp.matmul, x, w) == pytest.approx(traffic_ms(x, w, out) + copies)
    wide = [array(*y.shape, dtype=jnp.float32) for y in (x, w, out)]
    assert milliseconds(jnp.matmul, *wide[:2]) == pytest.approx(traffic_ms(*wide))


def test_the_rows_of_a_batch_are_the_side_of_one_matrix():
    x, w = array(8, 257, 64), array(64, 128)
    assert milliseconds(jnp.matmul, x, w) == pytest.approx(traffic_ms(x, w, array(8, 257, 128)))


def test_products_in_float32_throughout_leave_the_matrix_units():
    x, w = array(ROWS, WIDTH, dtype=jnp.float32), array(WIDTH, HIDDEN, dtype=jnp.float32)
    usual = milliseconds(jnp.matmul, x, w, device=QUICK)
    whole = milliseconds(lambda x, w: jnp.matmul(x, w, precision=lax.Precision.HIGHEST), x, w, device=QUICK)
    assert usual == pytest.approx(2 * milliseconds(jnp.matmul, X, W, device=QUICK))
    assert whole > 5 * usual
    narrow = milliseconds(lambda x, w: jnp.matmul(x, w, precision=lax.Precision.HIGHEST), X, W, device=QUICK)
    assert narrow == milliseconds(jnp.matmul, X, W, device=QUICK)


@pytest.mark.parametrize(("stride", "groups"), [(1, 1), (2, 1), (1, 4), (2, 4)])
def test_convolutions_take_their_operations(stride, groups):
    """Forward and for both gradients alike: the zeros of a stride cost nothing."""
    numbers = ("NHWC", "HWIO", "NHWC")

    def loss(x, w, precision=None):
        options = dict(dimension_numbers=numbers, feature_group_count=groups, precision=precision)
        return lax.conv_general_dilated(x, w, (stride, stride), "SAME", **options).astype(jnp.float32).sum()

    x, w = array(8, 64, 64, 32), array(3, 3, 32 // groups, 64)
    flops = 2 * 8 * (64 // stride) ** 2 * 64 * 9 * 32 // groups

    def found(x, w, precision=None):
        jaxpr = jax.make_jaxpr(jax.grad(functools.partial(loss, precision=precision), (0, 1)))(x, w).jaxpr
        graph = KernelGraph(list(inline_calls(jaxpr.eqns, {})), frozenset())
        convolutions = [i for i, e in enumerate(graph.eqns) if e.primitive.name == "conv_general_dilated"]
        return [step_kernel_ms(graph, i, QUICK) for i in convolutions]

    assert found(x, w) == pytest.approx(3 * [1e3 * flops / PRODUCTS / QUICK.flops])
    wide = array(*x.shape, dtype=jnp.float32), array(*w.shape, dtype=jnp.float32)
    assert found(*wide) == pytest.approx(3 * [2e3 * flops / PRODUCTS / QUICK.flops])
    assert min(found(*wide, lax.Precision.HIGHEST)) > 5 * found(*wide)[0]


@pytest.mark.parametrize("axes", [1, 2])
def test_convolutions_with_a_kernel_for_each_channel_go_by_their_elements(axes):
    numbers = ("NWC", "WIO", "NWC") if axes == 1 else ("NHWC", "HWIO", "NHWC")
    x, w = array(8, *[64] * axes, 32), array(*[4] * axes, 1, 32)

    def loss(x, w):
        options = dict(dimension_numbers=numbers, feature_group_count=32)
        return lax.conv_general_dilated(x, w, (1,) * axes, "SAME", **options).astype(jnp.float32).sum()

    jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1)))(x, w).jaxpr
    graph = KernelGraph(list(inline_calls(jaxpr.eqns, {})), frozenset())
    found = [
        step_kernel_ms(graph, i, QUICK)
        for i, eqn in enumerate(graph.eqns)
        if eqn.primitive.name == "conv_general_dilated"
    ]
    fitted = H200_CALIBRATION
    each = fitted.depthwise_line_operations if axes == 1 else fitted.depthwise_plane_operations
    assert found == pytest.approx([1e3 * x.size * each.value / PRODUCTS / QUICK.flops] * 3)


def chunks(form):
    """A product for each of four chunks of rows, in a loop, or for all of them in a branch."""

    def product(x, w):
        return jnp.tanh(jax.nn.relu(x) @ w)

    def fun(x, w):
        xs = x.reshape(4, -1, x.shape[-1])
        if form == "scan":
            return lax.scan(lambda c, x: (c, product(x, w)), 0, xs)[1]
        if form == "map":
            return lax.map(jax.checkpoint(lambda x: product(x, w)), xs)
        return lax.cond(x[0, 0] > 0, lambda: product(x, w), lambda: product(x, w))

    return fun


@pytest.mark.parametrize("form", ["scan", "map", "cond"])
def test_loops_and_branches_take_what_runs_in_them(form):
    """Branches alike, and all iterations: with their products, and with what they read and write."""
    none = Constant(0.0)
    fitted = dataclasses.replace(H200_CALIBRATION, iteration_us=none, least_kernel_us=none)
    quick, slow = (dataclasses.replace(device, calibration=fitted) for device in (QUICK, DEVICE))
    assert milliseconds(chunks(form), X, W, device=quick) == pytest.approx(1e3 * FLOPS / PRODUCTS / 1e12)
    slow = dataclasses.replace(slow, flops=1e30)
    weights = [W] if form == "cond" else 4 * [W]  # each iteration reads them
    product, elementwise = traffic_ms(X, OUT, *weights), traffic_ms(X, X, OUT, OUT)
    assert milliseconds(chunks(form), X, W, device=slow) == pytest.approx(product + elementwise, rel=1e-3)
    (eqn,) = (e for e in jax.make_jaxpr(chunks(form))(X, W).jaxpr.eqns if compat.control_flow(e))
    assert product_flops(eqn) == pytest.approx(FLOPS)


def test_a_condition_takes_the_mean_of_the_branches_that_compute():
    def run(fun, *args):
        return program_ms(jax.make_jaxpr(fun)(*args).jaxpr, DEVICE)

    def switch(*branches):
        index = jax.ShapeDtypeStruct((), jnp.int32)
        return run(lambda i, x, w: lax.switch(i, branches, x, w), index, X, W)

    def once(x, w):
        return x + jnp.tanh(x @ w) @ w.T

    def twice(x, w):
        return once(once(x, w), w)

    def skipped(x, _):
        return x

    one, two = (run(fun, X, W) for fun in (once, twice))
    assert switch(once, twice) == pytest.approx((one + two) / 2, rel=0.01)
    assert switch(once, skipped) == pytest.approx(one, rel=0.01)
    assert switch(skipped, skipped) < 0.01 * one


@pytest.mark.parametrize("fun", [jnp.equal, jnp.add, jnp.maximum])
def test_a_table_of_pairs_by_an_elementwise_equation_is_no_product(fun):
    jaxpr = jax.make_jaxpr(lambda a, b: fun(a, b))(jnp.ones((8, 1)), jnp.ones((1, 16))).jaxpr
    eqn = inline_program(jaxpr).eqns[-1]
    assert eqn.outvars[0].aval.shape == (8, 16)
    assert product_flops(eqn) == 0


def test_a_shard_map_takes_what_a_device_runs_in_it():
    def fun(x, w):
        return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0]

    rows, weights = jnp.ones((64, 256), jnp.bfloat16), jnp.ones((4, 256, 256), jnp.bfloat16)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    divided = jax.shard_map(fun, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))
    whole = program_ms(jax.make_jaxpr(divided)(rows, weights).jaxpr, DEVICE)
    assert whole == program_ms(jax.make_jaxpr(fun)(rows[:32], weights).jaxpr, DEVICE) > 0


def test_a_pallas_kernel_takes_what_its_author_says():
    def copy(x_ref, out_ref):
        out_ref[...] = x_ref[...]

    def kernel(x, flops):
        estimate = pl.CostEstimate(flops=flops, bytes_accessed=0, transcendentals=0)
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(copy, out_shape=shape, cost_estimate=estimate)(x)

    times = [milliseconds(functools.partial(kernel, flops=n * FLOPS), X, device=QUICK) for n in (1, 2)]
    assert times[1] == pytest.approx(2 * times[0]) != pytest.approx(times[0])


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
        primitive.def_abstract_eval(lambda q, k, **params: q)
        q = array(2, 64, 4, 32)
        bind = functools.partial(primitive.bind, mask_type=MaskType.CAUSAL)
        return milliseconds(bind, q, q, device=QUICK)

    forward, back = (attention(f"dot_product_attention_{way}_wrapper") for way in ("fwd", "bwd"))
    flops = 2 * 2 * 64 * 4 * 32 * 64  # half of both products
    assert forward > 1e3 * flops / QUICK.flops
    assert back > 2.5 * forward


@pytest.mark.parametrize(
    ("mask", "part"),
    [
        (MaskType.CAUSAL, 0.5),
        (MaskType.PADDING_CAUSAL, 0.5),
        (MaskType.NO_MASK, 1.0),
        (MaskType.PADDING, 1.0),
        (MaskType.ALIBI, 1.0),
    ],
)
def test_only_a_causal_mask_halves_the_operations_of_cudnn_attention(monkeypatch, mask, part):
    """Of JAX's own attention, whose primitive is traced for a GPU that need not be there."""
    query, key = array(2, 64, 4, 32), array(2, 128, 4, 32)
    product = 2 * query.size * key.shape[1]
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91900)
    lengths = [jnp.full(2, n, jnp.int32) if cudnn.has_padding(mask) else None for n in (64, 128)]

    def loss(query, key, value):
        out = cudnn.dot_product_attention(query, key, value, None, None, *lengths, mask_type=mask)
        return out.astype(jnp.float32).sum()

    jaxpr = jax.make_jaxpr(jax.value_and_grad(loss, (0, 1, 2)))(query, key, key).jaxpr
    kernels = [e for e in inline_calls(jaxpr.eqns, {}) if "dot_product_attention" in e.primitive.name]
    assert [product_flops(e) for e in kernels] == [part * 2 * product, part * 5 * product]


@pytest.mark.parametrize(("is_causal", "part"), [(True, 0.5), (False, 1.0)])
def test_only_a_causal_mask_halves_the_operations_of_attention_in_8_bits(is_causal, part):
    primitive = Primitive("dot_product_attention_fp8_fwd_wrapper")
    primitive.def_abstract_eval(lambda q, k, **params: q)
    q = array(2, 64, 4, 32)
    jaxpr = jax.make_jaxpr(functools.partial(primitive.bind, use_causal_mask=is_causal))(q, q).jaxpr
    assert product_flops(jaxpr.eqns[0]) == part * 2 * 2 * q.size * 64


def test_efficiencies_are_those_of_the_devices_calibration():
    fitted = dataclasses.replace(
        H200_CALIBRATION, product_share=Constant(2 * PRODUCTS), wide_type_slowdown=Constant(4)
    )
    mine = dataclasses.replace(QUICK, calibration=fitted)
    wide = array(ROWS, WIDTH, dtype=jnp.float32), array(WIDTH, HIDDEN, dtype=jnp.float32)
    for operands, times in (((X, W), 0.5), (wide, 1.0)):
        usual = milliseconds(jnp.matmul, *operands, device=QUICK)
        assert milliseconds(jnp.matmul, *operands, device=mine) == pytest.approx(times * usual)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_random_numbers_by_threefry_are_computed(impl):
    shape = (ROWS, WIDTH)
    key = jax.random.key(0, impl=impl)
    found = milliseconds(lambda key: jax.random.bits(key, shape), key, device=QUICK)
    drawn = 1e3 * ROWS * WIDTH * H200_CALIBRATION.threefry_operations.value / QUICK.flops
    assert found == pytest.approx(drawn if impl == "threefry2x32" else 0.0, abs=1e-6)
    quick = dataclasses.replace(DEVICE, flops=1e30)
    assert milliseconds(lambda key: jax.random.bits(key, shape), key, device=quick) == pytest.approx(
        traffic_ms(array(*shape, dtype=jnp.uint32)), rel=0.01
    )


def test_what_is_no_product_goes_by_its_bytes():
    assert milliseconds(lambda x: lax.fft(x, "FFT", (WIDTH,)), array(ROWS, WIDTH, dtype=jnp.complex64)) == (
        pytest.approx(DEVICE.pass_ms(8 * X.size))
    )


def loaded(fun, *args, device):
    """What part of its rate of products a device has in a layer."""
    jaxpr = jax.make_jaxpr(fun)(*args).jaxpr
    graph = KernelGraph(jaxpr.eqns, frozenset(jaxpr.outvars))
    found = lower_clock(graph, graph.kernels, device)
    assert found == dataclasses.replace(device, flops=found.flops)
    return found.flops / device.flops


def test_the_more_of_a_layers_time_products_take_the_slower_they_are():
    assert loaded(jnp.matmul, X, W, device=QUICK) == pytest.approx(IDLE - LOAD)
    assert loaded(jnp.add, X, X, device=QUICK) == IDLE
    slow = dataclasses.replace(DEVICE, flops=1e10)
    product = 1e3 * FLOPS / PRODUCTS / slow.flops
    rest = TRAFFIC * traffic_ms(X, W, OUT) + traffic_ms(X, X)
    both = loaded(lambda x, w: (x @ w, x + x), X, W, device=slow)
    assert both == pytest.approx(IDLE - LOAD * product / (product + rest))


@pytest.mark.parametrize(("prepare", "passes"), [(lambda h: h, 0), (jnp.tanh, 2)], ids=["stored", "fused"])
def test_a_barrier_takes_time_only_where_it_stores_what_a_kernel_would_compute(prepare, passes):
    def fun(x, w):
        h = prepare(x @ w)
        return lax.optimization_barrier(h) @ w.T

    x, w = jnp.ones((ROWS, WIDTH)), jnp.ones((WIDTH, HIDDEN))
    jaxpr = jax.make_jaxpr(fun)(x, w).jaxpr
    graph = KernelGraph(jaxpr.eqns, frozenset(jaxpr.outvars))
    found = sum(
        step_kernel_ms(graph, i, DEVICE)
        for i in graph.kernels
        if jaxpr.eqns[i].primitive.name == "optimization_barrier"
    )
    nbytes = passes * 4 * ROWS * HIDDEN
    assert found == pytest.approx(nbytes / DEVICE.memory_gbps / 1e6)


def test_a_kernel_behind_a_barrier_loads_one_of_its_operands():
    """It waits for all: a plan's recomputations wait for a cotangent by a barrier over many values."""

    def fun(large, small, *, waits):
        large, small = (jnp.sin(large), jnp.sin(small)) if waits else (large, small)
        if waits:
            large, small = lax.optimization_barrier((large, small))
        return jnp.sum(jnp.cos(small), 0), jnp.sum(large, 0)

    def sum_ms(waits):
        args = jax.ShapeDtypeStruct((1 << 16, 1024), "float32"), jax.ShapeDtypeStruct((64, 1024), "float32")
        program = jax.make_jaxpr(functools.partial(fun, waits=waits))(*args).jaxpr
        graph = KernelGraph(program.eqns, frozenset(program.outvars))
        (i,) = (i for i in graph.kernels if program.eqns[i].outvars[0] is program.outvars[0])
        return len(graph.reads[i]), step_kernel_ms(graph, i, DEVICE)

    (read, alone), (waiting, behind) = sum_ms(waits=False), sum_ms(waits=True)
    assert (read, waiting) == (1, 2)
    assert behind == alone


def test_an_iteration_of_a_loop_and_its_kernels_take_a_least_time():
    """Such as the steps of a recurrent layer, whose bytes take next to no time."""

    def run(x, w, *, products):
        def add_up(x, _):
            for _ in range(products):
                x = jnp.tanh(x @ w)
            return x, None

        return lax.scan(add_up, x, None, length=1000)[0]

    x, w = array(8, 8), array(8, 8)
    one, two = (milliseconds(functools.partial(run, products=n), x, w, device=QUICK) for n in (1, 2))
    iteration, kernel = H200_CALIBRATION.iteration_us.value, H200_CALIBRATION.least_kernel_us.value
    assert two - one == pytest.approx(2 * kernel, rel=0.01)  # a product and tanh
    assert one == pytest.approx(iteration + 2 * kernel, rel=0.01)


def test_a_shard_map_among_joined_devices_takes_what_one_of_them_runs_in_it():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    product = jax.shard_map(jnp.matmul, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))
    joined = join_devices(DEVICE, 2)
    assert (joined.flops, joined.memory_gbps) == (2 * DEVICE.flops, 2 * DEVICE.memory_gbps)
    alone = milliseconds(jnp.matmul, array(ROWS // 2, WIDTH), W)
    assert milliseconds(product, X, W, device=joined) == pytest.approx(alone)
    assert milliseconds(product, X, W) == pytest.approx(alone)  # DEVICE is one of the devices
