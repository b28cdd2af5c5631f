"""`explain` on copies against compute."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxoff
from jaxoff._device.kernel_time import equation_ms
from jaxoff._device.profile import H200

LAYERS, ROWS, WIDTH = 3, 4096, 16384
NBYTES = ROWS * WIDTH * 2
PRODUCT_MS = 2e3 * ROWS * WIDTH**2 / H200.flops
POLICY = jaxoff.policy(offload=["x_in"])
W = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.bfloat16)
X = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16)
PRODUCTS_ONLY = dataclasses.replace(H200, memory_gbps=math.inf)  # other kernels take no time


def layer(x, w):
    return jnp.sin(jaxoff.name(x, "x_in") @ w), None


def in_a_loop(w, x):
    return jaxoff.scan(layer, x, w, policy=POLICY)[0]


def one_by_one(w, x):
    return jaxoff.layers(lambda w, x: layer(x, w)[0], x, [w[i] for i in range(LAYERS)], policy=POLICY)


def test_a_loop_is_told_by_the_turn():
    forward, backward = jaxoff.explain(in_a_loop, W, X, device=PRODUCTS_ONLY).traffic
    assert (forward.part, backward.part) == ("forward", "backward")
    for t in (forward, backward):
        assert (t.iterations, t.nbytes) == (LAYERS, NBYTES)
        assert t.copy_ms == pytest.approx(NBYTES / 50e6)
        assert "test_traffic.py" in t.source
    assert forward.compute_ms == pytest.approx(PRODUCT_MS)
    assert backward.compute_ms == pytest.approx(3 * PRODUCT_MS)  # again, and both gradients


def test_light_kernels_take_their_time():
    """Here the sine, which the next iteration reads."""
    forward, _ = jaxoff.explain(in_a_loop, W, X).traffic
    assert forward.compute_ms == pytest.approx(PRODUCT_MS + H200.pass_ms(NBYTES))


def test_layers_outside_of_loops_are_told_together():
    forward, backward = jaxoff.explain(one_by_one, W, X, device=PRODUCTS_ONLY).traffic
    for t in (forward, backward):
        assert (t.iterations, t.nbytes, t.source) == (1, LAYERS * NBYTES, "")
    assert forward.compute_ms == pytest.approx(LAYERS * PRODUCT_MS)
    assert 2 * LAYERS * PRODUCT_MS < backward.compute_ms <= 3 * LAYERS * PRODUCT_MS + 1e-6


def test_what_a_loop_within_a_layer_computes_is_beside_its_copies():
    def chunked(x, w):
        x = jaxoff.name(x, "x_in").reshape(4, -1, WIDTH)
        y = lax.scan(lambda c, x: (c, jnp.sin(x @ w)), 0, x)[1]
        return y.reshape(ROWS, WIDTH), None

    def fun(w, x):
        return jaxoff.scan(chunked, x, w, policy=POLICY)[0]

    forward, backward = jaxoff.explain(fun, W, X, device=PRODUCTS_ONLY).traffic
    assert forward.compute_ms == pytest.approx(PRODUCT_MS)
    assert backward.compute_ms == pytest.approx(3 * PRODUCT_MS)


def test_what_the_link_cannot_take_is_a_finding():
    assert jaxoff.explain(in_a_loop, W, X).findings == ()
    report = jaxoff.explain(in_a_loop, W, X, device=d2h(5))
    (finding,) = report.findings
    assert finding.code == "link-too-slow"
    wait = LAYERS * (NBYTES / 5e6 - PRODUCT_MS)
    assert f"the step will wait about {wait:.1f} ms" in finding.message
    assert "forward pass, an iteration of the loop copies 134.22 MB to the host, 26.84 ms" in finding.message
    assert report.traffic[0].exposed_ms == pytest.approx(wait)
    assert report.traffic[1].exposed_ms == 0
    outside = jaxoff.explain(one_by_one, W, X, device=d2h(5))
    (text,) = [f.message for f in outside.findings if f.code == "link-too-slow"]
    assert "pass, the step, outside of loops, copies 402.65 MB to the host, 80.53 ms" in text


def d2h(gbps):
    return dataclasses.replace(PRODUCTS_ONLY, d2h_gbps=gbps)


def late(fun, device):
    found = [f for f in jaxoff.explain(fun, W, X, device=device).findings if f.code == "offload-late"]
    assert len(found) <= 1
    return found[0].message if found else None


def test_copies_that_are_late_when_the_forward_pass_ends_are_a_finding():
    """Of three copies of an input each, a layer apart."""
    a_layer = NBYTES / PRODUCT_MS / 1e6  # GB/s at which a copy takes as long as a layer
    assert late(one_by_one, H200) is None
    assert late(one_by_one, d2h(0.8 * a_layer)) is None  # a copy is under way, less than a layer behind
    two = late(one_by_one, d2h(0.6 * a_layer))
    assert two is not None and f": {2 * NBYTES:,} bytes that are to be on the host are on the device" in two
    behind = 3 * NBYTES / 5e6 - 3 * PRODUCT_MS
    three = late(one_by_one, d2h(5))
    assert three is not None and f"about {behind:.1f} ms behind, more than a layer: {3 * NBYTES:,}" in three
    assert late(in_a_loop, d2h(5)) is None  # where the step waits instead


def test_a_loop_behind_layers_gives_their_copies_time():
    def loss(w, x):
        x = one_by_one(w, x)
        return lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, jnp.concatenate([w] * 10))[0]

    assert late(one_by_one, d2h(5)) is not None
    assert late(loss, d2h(5)) is None


def test_it_stands_in_the_table_and_the_dictionary():
    report = jaxoff.explain(in_a_loop, W, X, device=PRODUCTS_ONLY)
    assert "forward: 3 iterations, each 134.22 MB, 2.68 ms of the link beside about 3.38 ms" in str(report)
    assert report.to_dict()["traffic"][0]["nbytes"] == NBYTES


def test_a_program_that_moves_nothing_has_no_traffic():
    def saved(w, x):
        return jaxoff.scan(layer, x, w, policy=POLICY.on_device())[0]

    report = jaxoff.explain(saved, W, X)
    assert report.traffic == ()
    assert "of the link" not in str(report)


@pytest.mark.parametrize(
    ("shapes", "flops"),
    [
        (((64, 32), (32, 128)), 2 * 64 * 32 * 128),  # a product
        (((4, 64, 32), (4, 32, 128)), 2 * 4 * 64 * 32 * 128),  # with a batch
    ],
)
def test_products_cost_their_operations(shapes, flops):
    a, b = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
    (eqn,) = jax.make_jaxpr(jnp.matmul)(a, b).jaxpr.eqns
    device = jaxoff.Device(flops=1e9, memory_gbps=1e9, d2h_gbps=1, h2d_gbps=1)
    assert equation_ms(eqn, device) == pytest.approx(1e3 * flops / 1e9)


@pytest.mark.parametrize("reads_saved", [False, True], ids=["alone", "beside a saved value"])
def test_a_kernel_of_experts_costs_the_product_of_its_rows_and_weights(reads_saved):
    """Whatever else the kernel reads: its largest operands need not be its factors."""
    rows, width, hidden, experts = 4096, 64, 48, 4
    out = jax.ShapeDtypeStruct((rows, hidden), jnp.bfloat16)
    given = [jax.ShapeDtypeStruct((rows, width), jnp.bfloat16)]
    given += [jax.ShapeDtypeStruct((experts, hidden, width), jnp.bfloat16)] + [out] * reads_saved
    (eqn,) = jax.make_jaxpr(lambda *args: jax.pure_callback(lambda *_: None, out, *args))(*given).jaxpr.eqns
    device = jaxoff.Device(flops=1e9, memory_gbps=1e9, d2h_gbps=1, h2d_gbps=1)
    assert equation_ms(eqn, device) == pytest.approx(1e3 * 2 * rows * width * hidden / 1e9)
