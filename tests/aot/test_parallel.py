"""A divided step, read from what is compiled for eight H200s: experts and a pipeline with virtual stages."""

import contextlib
import functools
import json

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoff
from bench import parallel
from jaxoff._compiled.exchange import exchanged_nbytes
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


@pytest.mark.parametrize("is_set", [False, True], ids=["arrays", "set_mesh"])
def test_loops_over_a_mesh_with_explicit_axes_hide_their_copies(is_set):
    """The default axes of `jax.make_mesh`; `jax.jit` reloads at the end of each turn."""
    target = jaxoff.target("h100", devices=2)
    mesh = target.mesh((2,), ("data",), (AxisType.Explicit,))
    layer = jax.checkpoint(
        lambda x, w: (jnp.tanh(jaxoff.name(x, "x") @ w["up"]) @ w["down"] + x, None),
        policy=jaxoff.policy(offload=["x"]),
        prevent_cse=False,
    )
    fun = jax.grad(lambda w, x: (lax.scan(layer, x, w)[0].astype(jnp.float32) ** 2).mean())

    def struct(spec, *shape):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    args = (
        {"up": struct(P(), 6, 1024, 4096), "down": struct(P(), 6, 4096, 1024)},
        struct(P("data"), 16384, 1024),
    )
    with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
        jitted = jaxoff.jit(fun, recipe="concurrent")
        facts = jaxoff.verify(target.compile(jitted, *args), compiler_options=jitted.options)
    reloads = [copy for copy in facts.copies if copy.direction == "H2D"]
    assert reloads and all(copy.overlaps for copy in reloads)


def test_weights_divided_by_the_compiler_are_gathered_as_often_as_by_jax_jit():
    """The forward pass and the backward pass read a float32 weight in bfloat16: one cast, and one gather."""
    target = jaxoff.target("h100", devices=2)
    mesh = target.mesh((2,), ("fsdp",))

    def struct(spec, *shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    def pin(x):
        return lax.with_sharding_constraint(x, NamedSharding(mesh, P("fsdp")))

    def layer(x, w):
        x = jaxoff.name(pin(x), "x")
        return pin(x + jnp.tanh(x @ w["up"].astype(x.dtype)) @ w["down"].astype(x.dtype)), None

    def loss(params, x):
        block = jax.checkpoint(layer, policy=jaxoff.policy(offload=["x"]), prevent_cse=False)
        x, _ = lax.scan(block, x, params["layers"])
        logits = pin(x @ params["head"].astype(x.dtype)).astype(jnp.float32)
        return jax.nn.logsumexp(logits, -1).mean()

    layers = {
        "up": struct(P(None, None, "fsdp"), 6, 1024, 4096),
        "down": struct(P(None, None, "fsdp"), 6, 4096, 1024),
    }
    params = {"layers": layers, "head": struct(P("fsdp"), 1024, 8192)}
    args = params, struct(P("fsdp"), 8192, 1024, dtype=jnp.bfloat16)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, params)
    exchanged = [
        exchanged_nbytes(target.compile(jit(jax.grad(loss), out_shardings=shardings), *args).as_text())
        for jit in (jax.jit, functools.partial(jaxoff.jit, recipe="concurrent"))
    ]
    assert 0 < exchanged[1] <= exchanged[0]


def test_gathers_by_reshard_exchange_what_they_exchange_by_jax_jit():
    """With Explicit axes: gradients are reduced and scattered, and a gather runs beside the last product."""
    target = jaxoff.target("h100", devices=2)
    mesh = target.mesh((2,), ("fsdp",), (AxisType.Explicit,))

    def struct(spec, *shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    def gather(w):
        return jax.sharding.reshard(w.astype(jnp.bfloat16), P(None, None))

    def layer(x, w):
        return x + jnp.tanh(jaxoff.name(x, "x") @ gather(w["up"])) @ gather(w["down"]), None

    def loss(w, x):
        block = jax.checkpoint(layer, policy=jaxoff.policy(offload=["x"]), prevent_cse=False)
        return (lax.scan(block, x, w)[0].astype(jnp.float32) ** 2).mean()

    by_row = P(None, "fsdp")
    layers = {"up": struct(by_row, 6, 1024, 4096), "down": struct(by_row, 6, 4096, 1024)}
    args = layers, struct(P("fsdp"), 8192, 1024, dtype=jnp.bfloat16)
    with jax.set_mesh(mesh):
        stock = target.compile(jax.jit(jax.grad(loss)), *args).as_text()
        ours = target.compile(jaxoff.jit(jax.grad(loss), recipe="early"), *args).as_text()
    assert 0 < exchanged_nbytes(ours) <= exchanged_nbytes(stock)
    assert "all-reduce" not in ours.replace("all-reduce-scatter", "")
    assert ours.count(" all-gather-start(") >= 2  # of the second product of a turn, in either loop


def test_rows_divided_along_the_sequence_are_copied_in_loops():
    """Sequence parallel: a sum over devices is scattered along the second axis, and laid out by this axis."""
    target = jaxoff.target("h100", devices=2)
    mesh = target.mesh((2,), ("tensor",))

    def pin(x, *spec):
        return lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    def layer(x, w):
        x = jaxoff.name(x, "x")
        h = pin(x, None, None, None)
        q, k, v = (pin(jnp.einsum("btd,dhe->bthe", h, w[n]), None, None, "tensor", None) for n in "qkv")
        a = jaxoff.name(jax.nn.dot_product_attention(q, k, v, is_causal=True), "attention")
        x = x + pin(jnp.einsum("bthe,hed->btd", a, w["o"]), None, "tensor", None)
        h = jax.nn.gelu(pin(pin(x, None, None, None) @ w["up"], None, None, "tensor"))
        return x + pin(h @ w["down"], None, "tensor", None), None

    def loss(w, x):
        policy = jaxoff.policy(offload=["x"], save=["attention"])
        block = jax.checkpoint(layer, policy=policy, prevent_cse=False)
        return lax.scan(block, x, w)[0].astype(jnp.float32).mean()

    def struct(spec, *shape):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    w = {
        "up": struct(P(None, None, "tensor"), 6, 1024, 4096),
        "down": struct(P(None, "tensor"), 6, 4096, 1024),
        **{n: struct(P(None, None, "tensor"), 6, 1024, 8, 128) for n in "qkv"},
        "o": struct(P(None, "tensor"), 6, 8, 128, 1024),
    }
    args = w, struct(P(None, "tensor"), 8, 1024, 1024)
    jitted = jaxoff.jit(jax.grad(loss), recipe="concurrent")
    facts = jaxoff.verify(target.compile(jitted, *args), compiler_options=jitted.options)
    assert facts.d2h_bytes == facts.h2d_bytes >= 6 * 8 * 512 * 1024 * 2  # of a device's half at least
    assert all(copy.overlaps for copy in facts.copies)


def test_copies_in_a_shard_map_of_a_layer_are_hidden():
    """A layer whose only named value is one of a device's own, as of expert and tensor parallel layers."""
    target = jaxoff.target("h100", devices=2)
    mesh = target.mesh((2,), ("tensor",))

    def feed(x, up, down):
        return lax.psum(jax.nn.gelu(jaxoff.name(x @ up, "up")) @ down, "tensor")

    specs = P(), P(None, "tensor"), P("tensor")
    mapped = jax.shard_map(feed, mesh=mesh, in_specs=specs, out_specs=P())
    block = jax.checkpoint(
        lambda x, w: (x + mapped(x, w["up"], w["down"]), None),
        policy=jaxoff.policy(offload=["up"]),
        prevent_cse=False,
    )

    def struct(spec, *shape):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    w = {
        "up": struct(P(None, None, "tensor"), 6, 1024, 4096),
        "down": struct(P(None, "tensor"), 6, 4096, 1024),
    }
    jitted = jaxoff.jit(jax.grad(lambda w, x: lax.scan(block, x, w)[0].astype(jnp.float32).mean()))
    compiled = target.compile(jitted, w, struct(P(), 8192, 1024))
    facts = jaxoff.verify(compiled, compiler_options=jitted.options)
    assert jitted.recipe == "concurrent"
    assert facts.h2d_bytes == 6 * 8192 * 2048 * 2
    assert all(copy.overlaps for copy in facts.copies)
