"""A divided step, read from what is compiled for eight H200s: experts and a pipeline with virtual stages."""

import functools
import json

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoff
from bench import parallel
from models import Config
from models.divided import DividedModel, Layout
from models.mesh import BATCH, MeshShape
from models.sharding import shardings_of
from tests.recipes import jit_in_order

# A minute on two cores; the suite on several GPUs runs such steps.
pytestmark = [pytest.mark.aot, pytest.mark.long]

SHAPE, VIRTUAL, MICROBATCHES = MeshShape(expert=4, pipe=2), 2, 16
BATCH_SIZE, LENGTH, WIDTH = 4, 512, 1024
TICKS = MICROBATCHES * VIRTUAL + SHAPE.pipe - 1
CONFIG = Config.preset(
    "tiny", num_layers=4, first_k_dense=0, d_model=WIDTH, num_heads=8, num_kv_heads=8, head_dim=128,
    num_experts=4, d_expert=1024, d_shared=0, vocab_size=1024, max_seq_len=LENGTH, attention="xla",
)  # fmt: skip
# Of a tick, on one device: q, k and v are as wide as each of the others.
POLICY = jaxoff.policy(
    offload=["attn.norm_in", "attn.qkv", "attn.proj_in", "mlp.norm_in"], save=["moe.probs"]
)
NBYTES = 6 * 2 * BATCH_SIZE * LENGTH * WIDTH
# These layers are too small for a real link to hide their copies.
FAST_LINK = jaxoff.Device(flops=650e12, memory_gbps=4000, d2h_gbps=1000, h2d_gbps=1000)


@functools.cache
def target():
    return jaxoff.target("h200", devices=SHAPE.size)


def step(policy):
    """A step by `jaxoff.jit`, and its arguments."""
    mesh = SHAPE.build(target().topology.devices)
    divided = DividedModel(CONFIG, policy, Layout(SHAPE, VIRTUAL), mesh)
    params = jax.eval_shape(divided.params)
    shardings = shardings_of({"params": params}, mesh, SHAPE)["params"]
    params = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), params, shardings)
    tokens = jax.ShapeDtypeStruct(
        (MICROBATCHES, BATCH_SIZE * SHAPE.batch, LENGTH + 1),
        jnp.int32,
        sharding=NamedSharding(mesh, P(None, BATCH)),
    )
    jitted = jit_in_order(divided.gradients, device=FAST_LINK, out_shardings=(shardings, None))
    return jitted, params, tokens


@functools.cache
def compiled():
    jitted, *args = step(POLICY)
    return target().compile(jitted, *args), jitted.options


@functools.cache
def facts():
    program, options = compiled()
    return jaxoff.verify(program, compiler_options=options)


def test_copies_of_every_tick_run_beside_kernels():
    assert facts().findings == ()
    assert facts().d2h_bytes == facts().h2d_bytes == TICKS * NBYTES
    assert facts().host_bytes == (TICKS + 1) * NBYTES  # each stack has a spare row
    assert all(copy.via == "dma" and copy.is_async and copy.overlaps for copy in facts().copies)


def test_copies_to_the_host_end_with_the_tick():
    """Not where they start: beside each run the collectives over the experts' devices come after it."""
    sent = [copy for copy in facts().copies if copy.direction == "D2H"]
    assert {copy.count for copy in sent} == {TICKS}
    for copy in sent:
        assert sum("all" in beside.name and beside.kind == "collective" for beside in copy.overlaps) >= 4, (
            copy
        )


def test_collectives_are_captured():
    """With the kernels of a tick in one graph: the all-to-all collectives do not cut it in pieces."""
    assert facts().scheduling_mode == "CONCURRENT"
    assert "COLLECTIVES" in facts().captured_commands
    assert all(copy.captured for copy in facts().copies)
    assert any(compute.kind == "collective" for copy in facts().copies for compute in copy.overlaps)


def test_what_moves_is_off_the_device():
    """A program that kept it there would need at least as much."""
    assert facts().device_temp_bytes < 0.6 * facts().d2h_bytes


@pytest.mark.long
def test_the_benchmark_compiles_a_mesh_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")  # as the program would for the process
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "192")
    out = tmp_path / "ahead.json"
    small = ["--mesh", "expert=2,pipe=2", "--layers", "2", "--microbatches", "4", "--seq", "512"]
    parallel.main(["--ahead", *small, "--variants", "jaxoff,saved", "--out", str(out)])
    ours, saved = json.loads(out.read_text())["rows"]
    assert ours["device_peak_bytes"] > 0 and ours["kernel_host_bytes"] == 0
    assert ours["host_bytes"] > ours["d2h_bytes"] > 0 == saved["host_bytes"]
