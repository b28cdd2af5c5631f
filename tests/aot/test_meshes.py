"""Steps that a mesh divides, compiled for two H100s: what they exchange, and which copies are hidden."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoff
from jaxoff._budget.parts import write_in_parts
from jaxoff._compiled import hlo
from jaxoff._compiled.exchange import exchanged_nbytes
from jaxoff._runtime.program_memory import program_nbytes
from tests.aot.programs import TRITON

pytestmark = pytest.mark.aot


def struct_on(mesh, spec, *shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def count_exchanged(text):
    return exchanged_nbytes(hlo.parse(text))


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
    struct = functools.partial(struct_on, mesh)
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
    struct = functools.partial(struct_on, mesh, dtype=jnp.float32)

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
        count_exchanged(target.compile(jit(jax.grad(loss), out_shardings=shardings), *args).as_text())
        for jit in (jax.jit, functools.partial(jaxoff.jit, recipe="concurrent"))
    ]
    assert 0 < exchanged[1] <= exchanged[0]


def test_offloads_beside_weights_divided_by_columns_are_hidden_and_exchange_weights():
    """Where jaxoff's order exchanges activations, the batch is divided throughout."""
    target = jaxoff.target("h200", devices=2)
    struct = functools.partial(struct_on, target.mesh((2,), ("fsdp",)), dtype=jnp.float32)

    def layer(x, w):
        h = jaxoff.name(x, "x") * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True))
        gate, up, down = (w[name].astype(x.dtype) for name in ("gate", "up", "down"))
        return x + (jax.nn.silu(h @ gate) * (h @ up)) @ down, None

    def loss(w, tokens):
        block = jax.checkpoint(layer, policy=jaxoff.policy(offload=["x"]), prevent_cse=False)
        x, _ = lax.scan(block, w["embed"].astype(jnp.bfloat16)[tokens], w["layers"])
        return jnp.square(x.astype(jnp.float32)).mean()

    def step(w, tokens):
        return jax.tree.map(lambda a, b: a - 0.1 * b, w, jax.grad(loss)(w, tokens))

    stacks = {"gate": (6, 1024, 4096), "up": (6, 1024, 4096), "down": (6, 4096, 1024)}
    layers = {name: struct(P(None, None, "fsdp"), *shape) for name, shape in stacks.items()}
    w = {"embed": struct(P(None, "fsdp"), 8192, 1024), "layers": layers}
    args = w, struct(P("fsdp"), 16, 2048, dtype=jnp.int32)
    options = {"donate_argnums": 0, "out_shardings": jax.tree.map(lambda leaf: leaf.sharding, w)}
    jitted = jaxoff.jit(step, **options)
    given, compiled = (target.compile(jitted, *args) for jitted in (jax.jit(step, **options), jitted))
    assert jitted.recipe in ("concurrent", "early") and not jitted.findings
    assert count_exchanged(compiled.as_text()) < 0.5 * count_exchanged(given.as_text())
    assert program_nbytes(compiled) <= 1.01 * program_nbytes(given)


@pytest.mark.parametrize(("form", "devices"), [("scan", 2), ("list", 2), ("scan", 8)])
def test_gradients_of_an_input_by_divided_weights_are_exchanged_once(form, devices):
    """Tensor parallel: each device has a part of the sums over heads, and of those over hidden features."""
    target = jaxoff.target("h200", devices=devices)
    mesh = target.mesh((devices,), ("tensor",))
    sizes = {"q": (1024, 1024), "k": (1024, 1024), "v": (1024, 1024), "o": (1024, 1024)}
    sizes |= {"gate": (1024, 4096), "up": (1024, 4096), "down": (4096, 1024)}

    def normalize(x):
        return x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True))

    def layer(x, w):
        x = jaxoff.name(x, "x")
        q, k, v = (normalize(x) @ w[name] for name in "qkv")
        x = x + (q * jax.nn.silu(k) * v) @ w["o"]
        h = normalize(x)
        return x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"], None

    block = jax.checkpoint(layer, policy=jaxoff.policy(offload=["x"]), prevent_cse=False)

    def loss(w, x):
        if form == "scan":
            x, _ = lax.scan(block, x, w)
        else:
            for weights in w:
                x, _ = block(x, weights)
        return jnp.square(x.astype(jnp.float32)).mean()

    def make_weights(rows=()):
        specs = {name: ("tensor", None) if name in ("o", "down") else (None, "tensor") for name in sizes}
        depth = (None,) * len(rows)
        return {name: struct_on(mesh, P(*depth, *specs[name]), *rows, *sizes[name]) for name in sizes}

    w = make_weights((6,)) if form == "scan" else [make_weights() for _ in range(6)]
    args = w, struct_on(mesh, P(), 32768, 1024)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, w)
    compiled = [
        target.compile(jit(jax.grad(loss), out_shardings=shardings), *args)
        for jit in (jax.jit, functools.partial(jaxoff.jit, recipe="ordered"))
    ]
    given, ordered = (count_exchanged(program.as_text()) for program in compiled)
    assert 0 < ordered <= given


def test_operands_that_the_compiler_gathers_are_gathered_once_for_all_products():
    """Megatron's mesh with divided features: barriers between products would each have a gather behind it."""
    target = jaxoff.target("h200", devices=4)
    struct = functools.partial(struct_on, target.mesh((2, 2), ("data", "model")))
    x = struct(P("data", "model"), 32768, 2048)
    sharding = x.sharding

    def layer(x, w):
        x = jaxoff.name(x, "x")
        h = x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True))
        q, k, v = (h @ w[name] for name in "qkv")
        x = x + (q * jax.nn.silu(k) * v) @ w["o"]
        return lax.with_sharding_constraint(x, sharding), None

    def loss(w, x):
        block = jax.checkpoint(layer, policy=jaxoff.policy(offload=["x"]), prevent_cse=False)
        return jnp.square(lax.scan(block, x, w)[0].astype(jnp.float32)).mean()

    specs = {name: P(None, None, "model") for name in "qkv"} | {"o": P(None, "model", None)}
    w = {name: struct(spec, 6, 2048, 2048) for name, spec in specs.items()}
    args, shardings = (
        (w, struct(P("data", "model"), 32768, 2048)),
        jax.tree.map(lambda leaf: leaf.sharding, w),
    )
    ours = jaxoff.jit(jax.grad(loss), out_shardings=shardings)
    stock = jax.jit(jax.grad(loss), out_shardings=shardings)
    first = jaxoff.jit(jax.grad(loss), out_shardings=shardings, recipe="concurrent")
    by_stock, by_first, by_ours = (target.compile(jitted, *args) for jitted in (stock, first, ours))
    given = count_exchanged(by_stock.as_text())
    assert count_exchanged(by_first.as_text()) > 1.1 * given  # the form that is tried first
    assert ours.recipe in ("concurrent", "early") and not ours.findings
    assert count_exchanged(by_ours.as_text()) <= 1.01 * given
    assert program_nbytes(by_ours) <= 1.01 * program_nbytes(by_stock)


def test_gathers_by_reshard_exchange_what_they_exchange_by_jax_jit():
    """With Explicit axes: gradients are reduced and scattered, and a gather runs beside the last product."""
    target = jaxoff.target("h100", devices=2)
    mesh = target.mesh((2,), ("fsdp",), (AxisType.Explicit,))
    struct = functools.partial(struct_on, mesh, dtype=jnp.float32)

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
    assert 0 < count_exchanged(ours) <= count_exchanged(stock)
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

    struct = functools.partial(struct_on, mesh)
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
    struct = functools.partial(struct_on, mesh)
    w = {
        "up": struct(P(None, None, "tensor"), 6, 1024, 4096),
        "down": struct(P(None, "tensor"), 6, 4096, 1024),
    }
    fun = jax.grad(lambda w, x: lax.scan(block, x, w)[0].astype(jnp.float32).mean())
    jitted = jaxoff.jit(fun, compiler_options=TRITON)
    compiled = target.compile(jitted, w, struct(P(), 8192, 1024))
    facts = jaxoff.verify(compiled, compiler_options=jitted.options)
    assert jitted.recipe == "concurrent"
    assert facts.h2d_bytes == 6 * 8192 * 2048 * 2
    assert all(copy.overlaps for copy in facts.copies)


def test_copies_of_a_shard_map_are_hidden_where_the_gradient_is_taken_outside():
    """The mapped function returns a sum and a count; its forward and backward pass become one."""
    target = jaxoff.target("h100", devices=2)
    mesh = target.mesh((2,), ("d",))

    def layer(x, w):
        up, down = (lax.all_gather(w[n], "d", tiled=True) for n in ("up", "down"))
        return x + jax.nn.gelu(jaxoff.name(x, "x") @ up) @ down, None

    def sum_and_count(w, x):
        block = jax.checkpoint(layer, policy=jaxoff.policy(offload=["x"]), prevent_cse=False)
        x = lax.scan(block, x, w)[0].astype(jnp.float32)
        return lax.psum(jnp.sum(x**2), "d"), lax.psum(jnp.sum(x > 0), "d")

    mapped = jax.shard_map(sum_and_count, mesh=mesh, in_specs=(P(None, "d"), P("d")), out_specs=(P(), P()))

    def loss(w, x):
        total, count = mapped(w, x)
        return total / count

    struct = functools.partial(struct_on, mesh)
    w = {"up": struct(P(None, "d"), 6, 1024, 4096), "down": struct(P(None, "d"), 6, 4096, 1024)}
    jitted = jaxoff.jit(jax.grad(loss))
    compiled = target.compile(jitted, w, struct(P("d"), 16384, 1024))
    facts = jaxoff.verify(compiled, compiler_options=jitted.options)
    assert jitted.recipe in ("concurrent", "early")
    assert facts.d2h_bytes == facts.h2d_bytes == 6 * 8192 * 1024 * 2
    assert all(copy.overlaps for copy in facts.copies)


def test_copies_of_a_list_in_a_shard_map_are_hidden():
    """The step of each device, its layers one after the other, is ordered as on a single device."""
    target = jaxoff.target("h200", devices=2)
    mesh = target.mesh((2,), ("d",))

    def layer(x, w):
        h = jaxoff.name(jaxoff.name(x, "x") @ w["up"], "up")
        return x + jax.nn.gelu(h) @ w["down"]

    def local(layers, x):
        def loss(layers, x):
            block = jax.checkpoint(layer, policy=jaxoff.policy(offload=["x", "up"]))
            for w in layers:
                x = block(x, w)
            return lax.pmean(jnp.mean(x.astype(jnp.float32) ** 2), "d")

        return jax.value_and_grad(loss)(layers, x)

    struct = functools.partial(struct_on, mesh)
    layers = [{"up": struct(P(), 2048, 8192), "down": struct(P(), 8192, 2048)} for _ in range(6)]
    args = layers, struct(P("d"), 32768, 2048)
    step = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("d")), out_specs=(P(), P()))
    device = jaxoff.Device(flops=100e12, memory_gbps=4000, d2h_gbps=1000, h2d_gbps=1000)
    jitted = jaxoff.jit(step, device=device)
    compiled = target.compile(jitted, *args)
    facts = jaxoff.verify(compiled, compiler_options=jitted.options)
    assert jitted.recipe == "ordered"
    assert facts.h2d_bytes >= 4 * 16384 * (8192 + 2048) * 2
    assert all(copy.overlaps for copy in facts.copies)
    assert program_nbytes(compiled) < 0.75 * program_nbytes(target.compile(jax.jit(step), *args))


def test_a_head_in_parts_gathers_its_weight_once():
    """In a loop over parts, the compiler gathered the divided weight once for each part."""
    target = jaxoff.target("h100", devices=2)
    mesh = target.mesh((2,), ("fsdp",))
    struct = functools.partial(struct_on, mesh)
    args = struct(P("fsdp"), 512, 16384, dtype=jnp.float32), struct(P("fsdp"), 2, 8192, 512)

    def loss(head, x):
        logits = (x @ head.astype(x.dtype)).astype(jnp.float32)
        return jax.nn.logsumexp(logits, -1).mean()

    closed = jax.make_jaxpr(jax.grad(loss, (0, 1)))(*args)
    written, (region,) = write_in_parts(closed, 1e8, devices=2)
    assert region.parts == 8
    texts = [
        target.compile(jax.jit(functools.partial(jax.core.eval_jaxpr, p.jaxpr, p.consts)), *args).as_text()
        for p in (closed, written)
    ]
    whole, in_parts = map(count_exchanged, texts)
    assert 0 < in_parts <= 1.001 * whole
