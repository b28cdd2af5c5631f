"""Whole train steps as their users write them: `jaxoff.jit` takes no more memory than `jax.jit`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoff
from bench.client_steps import Sizes, build_decoder, offload, save
from jaxoff import FindingCode
from tests.recipes import jit_in_order

pytestmark = pytest.mark.aot

NAMES = ("block_in", "attn")
SMALL = Sizes(
    layers=4,
    width=512,
    hidden=1024,
    heads=4,
    kv_heads=2,
    head_size=128,
    vocabulary=32768,
    batch=2,
    length=512,
)


def shard(tree, mesh):
    """Structs with their first axis that all devices divide sharded over "fsdp"."""

    def shard_leaf(leaf):
        axes = [i for i, size in enumerate(leaf.shape) if size % mesh.size == 0 and size >= 512]
        spec = ["fsdp" if axes and i == axes[0] else None for i in range(leaf.ndim)]
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, P(*spec)))

    return jax.tree.map(shard_leaf, tree)


def test_copies_that_xla_folds_in_a_python_loop_are_said():
    def layer(w, x):
        return jnp.tanh(jaxoff.name(jnp.tanh(x @ w), "act") @ w.T) + x

    def loss(w, x):
        block = jax.checkpoint(layer, policy=jaxoff.policy(offload=["act"]))
        return functools.reduce(lambda x, w: block(w, x), w, x).sum()

    step = jaxoff.jit(jax.grad(loss))
    w, x = jax.ShapeDtypeStruct((4, 1024, 1024), "float32"), jax.ShapeDtypeStruct((4096, 1024), "float32")
    with pytest.warns(UserWarning, match="offload-vanished: the program offloads 67.11 MB, and the compiled"):
        compiled = jaxoff.target("h200").compile(step, w, x)
    assert jaxoff.verify(compiled).d2h_bytes < 0.9 * 4 * 4096 * 1024 * 4
    assert [finding.code for finding in step.findings] == [FindingCode.OFFLOAD_VANISHED]


@pytest.mark.parametrize(
    ("loop", "devices"),
    [
        ("scan", 1),
        pytest.param("python", 1, marks=pytest.mark.long),
        pytest.param("scan", 2, marks=pytest.mark.long),
    ],
)
def test_a_decoder_never_takes_more_memory(loop, devices):
    target = jaxoff.target("h100", devices=devices)
    sizes = dataclasses.replace(SMALL, batch=SMALL.batch * devices)
    offloading, saving = (
        build_decoder(sizes, policy(*NAMES), loop=loop, attention="xla") for policy in (offload, save)
    )
    state, batch, options = offloading.state, offloading.batch, {}
    if devices > 1:
        mesh = target.mesh((devices,), ("fsdp",))
        state = shard(state, mesh)
        batch = jax.ShapeDtypeStruct(batch.shape, batch.dtype, sharding=NamedSharding(mesh, P("fsdp")))
        options["out_shardings"] = (jax.tree.map(lambda leaf: leaf.sharding, state), NamedSharding(mesh, P()))

    def verify(step, transform):
        jitted = step.jit(transform, **options)
        return jitted, jaxoff.verify(target.compile(jitted, state, batch))

    (_, stock), (_, twin) = verify(offloading, jax.jit), verify(saving, jax.jit)
    with pytest.warns(UserWarning, match=FindingCode.RECIPE_REPLACED):
        ours, facts = verify(offloading, jaxoff.jit)
    assert facts.device_peak_bytes <= 1.01 * min(stock.device_peak_bytes, twin.device_peak_bytes)
    (finding,) = ours.findings
    assert finding.code is FindingCode.RECIPE_REPLACED
    assert repr(ours.recipe) in finding.message
    assert (ours.recipe == "saved") == (facts.d2h_bytes == 0)
    insisted, larger = verify(offloading, jit_in_order)
    assert insisted.findings == ()
    assert larger.device_peak_bytes > 1.01 * min(stock.device_peak_bytes, twin.device_peak_bytes)
