"""The grouped MLP under vmap, scan over layers, shard_map and a second derivative.

The reference by its values; the kernels by the program that they become, and by values where the interpreter
can run them.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec, use_abstract_mesh

from pallas_kernels import grouped_mlp
from tests.pallas_kernels.hopper import H200, launches, lower
from tests.pallas_kernels.interpreter import interpreted
from tests.pallas_kernels.oracle import Results, make, norm_error

KERNELS = {"fc1": 1, "fc2": 1, "grad_act": 1, "grad_x": 1, "grad_weight": 2}


def output_and_gradients(implementation):
    def run(group_sizes, x, w1, w2, probs, b1, b2, dy):
        def apply(x, w1, w2, probs, b1, b2):
            more = dict(probs=probs, b1=b1, b2=b2, implementation=implementation)
            return grouped_mlp(x, w1, w2, group_sizes, **more)

        y, pullback = jax.vjp(apply, x, w1, w2, probs, b1, b2)
        return Results(y, *pullback(dy))

    return run


def stack(trees):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


SIZES = jnp.array([[5, 2, 1], [0, 0, 8], [1, 0, 2]], jnp.int32)


def test_vmap_equals_a_loop():
    run = jax.jit(output_and_gradients("reference"))
    batch = [make([5, 2, 1], 8, jnp.float32, seed=seed) for seed in range(3)]
    got = jax.jit(jax.vmap(run))(SIZES, *stack(batch))
    for i, arguments in enumerate(batch):
        for g, w in zip(got, run(SIZES[i], *arguments), strict=True):
            np.testing.assert_allclose(g[i], w, rtol=1e-4, atol=1e-5)


@pytest.mark.long  # test_vmap_launches_each_kernel_once_and_lowers has the kernels
def test_vmap_of_the_kernels_equals_a_loop():
    """Without probs and biases: the other whole-op tests of the kernels have both."""
    batch = [make([5, 2, 1], 8, jnp.bfloat16, width=64, hidden=64, seed=seed) for seed in range(2)]
    batch = [arguments._replace(probs=None, b1=None, b2=None) for arguments in batch]
    run, given = output_and_gradients("mosaic"), (SIZES[:2], *stack(batch))
    got = interpreted(jax.vmap(run), *given, programs=1)(*given)
    reference = jax.jit(output_and_gradients("reference"))
    for i, arguments in enumerate(batch):
        for g, w in zip(got, reference(SIZES[i], *arguments), strict=True):
            if w is not None:
                assert norm_error(g[i], np.asarray(w, np.float64)) < 5e-3


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


def scan_of_two(implementation):
    def loss(w1, w2, x, probs, sizes):
        def layer(x, w):
            return x + grouped_mlp(x, w[0], w[1], sizes, probs=probs, implementation=implementation), None

        return jax.lax.scan(layer, x, (w1, w2))[0].astype(jnp.float32).sum()

    return jax.value_and_grad(loss, (0, 1, 2, 3))


def layers_of_two():
    layers = [make([5, 2, 1], 8, jnp.bfloat16, width=64, hidden=64, seed=seed) for seed in range(2)]
    x, probs = layers[0].x, layers[0].probs
    return *stack([layer[1:3] for layer in layers]), x, probs, jnp.array([5, 2, 1], jnp.int32)


def test_scan_over_layers_launches_each_kernel_once():
    assert launches(scan_of_two("mosaic"), *layers_of_two()) == KERNELS


def test_vmap_launches_each_kernel_once_and_lowers():
    arguments = make([5, 2, 1], 8, jnp.bfloat16, width=64, hidden=64)._replace(b1=None, b2=None)
    function, given = jax.vmap(output_and_gradients("mosaic")), (SIZES[:2], *stack([arguments] * 2))
    assert launches(function, *given) == KERNELS
    assert lower(function, *given).as_text().count("custom_call @mosaic_gpu") == sum(KERNELS.values())


@pytest.mark.long
@pytest.mark.slow
def test_scan_over_layers_of_kernels_equals_the_reference():
    given = layers_of_two()
    got = interpreted(scan_of_two("mosaic"), *given)(*given)
    want = jax.jit(scan_of_two("reference"))(*given)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert norm_error(g, np.asarray(w, np.float64)) < 5e-3


def test_shard_map_sums_the_weights_gradients_over_devices():
    if jax.device_count() < 2:
        pytest.skip("needs two devices")
    devices = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    shards = [make([5, 2, 1], 8, jnp.float32, seed=seed) for seed in range(2)]
    _, w1, w2, _, b1, b2, _ = shards[0]
    sizes = [[5, 2, 1], [0, 3, 4]]
    x = jnp.concatenate([jnp.nan_to_num(s.x) for s in shards])
    probs = jnp.concatenate([jnp.nan_to_num(s.probs) for s in shards])

    def loss(x, w1, w2, probs, b1, b2, sizes):
        y = grouped_mlp(x, w1, w2, sizes[0], probs=probs, b1=b1, b2=b2)
        return jax.lax.psum(jnp.sum(jnp.sin(y)), "data")

    split, whole = PartitionSpec("data"), PartitionSpec()
    sharded = jax.shard_map(
        loss, mesh=devices, in_specs=(split, whole, whole, split, whole, whole, split), out_specs=whole
    )
    got = jax.jit(jax.grad(sharded, tuple(range(6))))(x, w1, w2, probs, b1, b2, jnp.array(sizes))

    def unsharded(x, w1, w2, probs, b1, b2):
        total = 0.0
        for i, size in enumerate(sizes):
            own = slice(8 * i, 8 * i + 8)
            y = grouped_mlp(x[own], w1, w2, jnp.array(size), probs=probs[own], b1=b1, b2=b2)
            total += jnp.sum(jnp.sin(y))
        return total

    want = jax.jit(jax.grad(unsharded, tuple(range(6))))(x, w1, w2, probs, b1, b2)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "accumulate", [pytest.param(False, id="", marks=pytest.mark.long), pytest.param(True, id="accumulators")]
)
def test_shard_map_over_the_kernels_lowers_and_sums_the_weights_gradients(accumulate):
    """The interpreter runs one device only; the sum over devices stands in the program."""
    x, w1, w2, probs, b1, b2, _ = make([5, 2, 1], 16, jnp.bfloat16, width=64, hidden=64)
    # Each device adds to its own: what they share would be added once a device.
    sums = jax.tree.map(lambda w: jnp.zeros((2, *w.shape)), (w1, w2)) if accumulate else None

    def loss(x, w1, w2, probs, b1, b2, sums, sizes):
        own = None if sums is None else (sums[0][0], sums[1][0])
        more = dict(probs=probs, b1=b1, b2=b2, grad_accumulators=own, implementation="mosaic")
        return jax.lax.psum(jnp.sum(grouped_mlp(x, w1, w2, sizes[0], **more).astype(jnp.float32)), "data")

    split, whole = PartitionSpec("data"), PartitionSpec()
    specs = (split, whole, whole, split, whole, whole, split, split)
    mesh = AbstractMesh((2,), ("data",), (AxisType.Auto,), abstract_device=H200)
    with use_abstract_mesh(mesh):
        sharded = jax.shard_map(loss, in_specs=specs, out_specs=whole)
        gradients = jax.jit(jax.grad(sharded, tuple(range(7))))
        traced = gradients.trace(x, w1, w2, probs, b1, b2, sums, SIZES[:2])
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") >= sum(KERNELS.values()) - 1  # y itself is not needed
    # Of both biases, and of both weights unless each device keeps its sums.
    assert text.count("all_reduce") >= (2 if accumulate else 4)


@pytest.mark.parametrize("shared", [False, True], ids=["each its own", "shared"])
def test_accumulators_in_shard_map_are_each_devices_own(shared):
    """Shared ones would count once a device: that is refused and told."""
    if jax.device_count() < 2:
        pytest.skip("needs two devices")
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    x, w1, w2, *_ = make([5, 2, 1], 8, jnp.float32)
    leading = () if shared else (2,)
    sums = tuple(jnp.full((*leading, *w.shape), 1e3) for w in (w1, w2))

    def loss(sums, x, sizes):
        own = sums if shared else (sums[0][0], sums[1][0])
        return jax.lax.psum(grouped_mlp(x, w1, w2, sizes[0], grad_accumulators=own).sum(), "data")

    split, whole = PartitionSpec("data"), PartitionSpec()
    specs = (whole if shared else split, split, split)
    gradients = jax.jit(jax.grad(jax.shard_map(loss, mesh=mesh, in_specs=specs, out_specs=whole)))
    given = sums, jnp.concatenate([x, x]), SIZES[:2]
    if shared:
        with pytest.raises(ValueError, match=r"must differ between devices .* the same over \['data'\]"):
            gradients(*given)
        return
    plain_gradients = jax.jit(jax.grad(lambda w, sizes: grouped_mlp(x, w[0], w[1], sizes).sum()))
    added = gradients(*given)
    for device, sizes in enumerate(SIZES[:2]):
        plain = plain_gradients((w1, w2), sizes)
        for got, begun, dw in zip(added, sums, plain, strict=True):
            np.testing.assert_allclose(got[device], begun[device] + dw, rtol=1e-6)


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


def test_the_kernels_say_that_they_have_no_second_derivative():
    x, w1, w2, *_ = make([5, 2, 1], 8, jnp.bfloat16, width=64, hidden=64)

    def loss(x):
        return grouped_mlp(x, w1, w2, SIZES[0], implementation="mosaic").astype(jnp.float32).sum()

    def twice(x):
        return jax.grad(lambda x: jax.grad(loss)(x).astype(jnp.float32).sum())(x)

    with pytest.raises(NotImplementedError, match=r'no second derivative; pass implementation="reference"'):
        lower(twice, x)
