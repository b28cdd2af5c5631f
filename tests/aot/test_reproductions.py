"""Train steps of other people's that once ran worse under `jaxoff.jit` than under `jax.jit`."""

import functools
import warnings

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoff
from jaxoff import FindingCode
from jaxoff._runtime.program_memory import program_nbytes
from tests.recipes import jit_in_order

pytestmark = pytest.mark.aot

LAYERS, WIDTH, HEADS, HEAD_SIZE, HIDDEN, BATCH, LENGTH = 4, 512, 4, 128, 2048, 2, 512
OFFLOAD = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=["query_proj", "key_proj", "value_proj", "out_proj", "mlpwi_0"],
    offload_src="device",
    offload_dst="pinned_host",
)
SAVE = jax.checkpoint_policies.save_only_these_names(
    "query_proj", "key_proj", "value_proj", "out_proj", "mlpwi_0"
)


def layer(x, w):
    """MaxText's layer: names on the tensors around attention; attention has heads as an axis of their own."""
    w = {name: v.astype(jnp.bfloat16) for name, v in w.items()}
    x = checkpoint_name(x, "decoder_layer_input")
    q = checkpoint_name(jnp.einsum("bsd,dhk->bshk", x, w["q"]), "query_proj")
    k = checkpoint_name(jnp.einsum("bsd,dhk->bshk", x, w["k"]), "key_proj")
    v = checkpoint_name(jnp.einsum("bsd,dhk->bshk", x, w["v"]), "value_proj")
    p = jax.nn.softmax(jnp.einsum("bshk,bthk->bhst", q, k).astype(jnp.float32), -1).astype(jnp.bfloat16)
    o = checkpoint_name(jnp.einsum("bhst,bthk->bshk", p, v), "attention_out")
    x = x + checkpoint_name(jnp.einsum("bshk,hkd->bsd", o, w["o"]), "out_proj")
    up = checkpoint_name(x @ w["up"], "mlpwi_0")
    return x + jax.nn.silu(up) @ w["down"], None


def step_of(policy, *, prevent_cse=False, body=layer):
    def loss(w, x):
        block = jax.checkpoint(body, policy=policy, prevent_cse=prevent_cse)
        return jax.lax.scan(block, x, w)[0].astype(jnp.float32).mean()

    def step(w, x):
        return jax.tree.map(lambda w, g: w - 1e-3 * g, w, jax.grad(loss)(w, x))

    return step


def arguments(batch=BATCH):
    def stack(*shape):
        return jax.ShapeDtypeStruct((LAYERS, *shape), jnp.float32)

    heads = (WIDTH, HEADS, HEAD_SIZE)
    w = dict(q=stack(*heads), k=stack(*heads), v=stack(*heads), o=stack(*heads[1:], WIDTH))
    w |= dict(up=stack(WIDTH, HIDDEN), down=stack(HIDDEN, WIDTH))
    return w, jax.ShapeDtypeStruct((batch, LENGTH, WIDTH), jnp.bfloat16)


def shard(devices, batch):
    """A mesh; structs of arguments and keywords of `jit` for weights and a batch divided by "fsdp"."""
    mesh = jaxoff.target("h200", devices=devices).mesh((1, devices), ("data", "fsdp"))
    w, x = arguments(batch)
    by_fsdp = jax.tree.map(lambda _: NamedSharding(mesh, P(None, "fsdp")), w)
    shardings = {"in_shardings": (by_fsdp, NamedSharding(mesh, P("fsdp"))), "out_shardings": by_fsdp}
    return mesh, (w, x), {"donate_argnums": 0, **shardings}


def compile_on(mesh, jitted, args):
    with jax.set_mesh(mesh):
        compiled = jitted.lower(*args).compile()
    return jaxoff.verify(compiled, compiler_options=getattr(jitted, "options", None))


@pytest.mark.parametrize(
    ("devices", "prevent_cse", "constrained"),
    [
        (2, False, False),
        pytest.param(1, True, False, marks=pytest.mark.long),
        pytest.param(1, False, True, marks=pytest.mark.long),
    ],
)
def test_reloads_of_tensors_around_attention_are_no_kernels(devices, prevent_cse, constrained):
    mesh, args, options = shard(devices, devices * BATCH)

    def constrained_layer(x, w):
        x, _ = layer(x, w)
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("fsdp"))), None

    step = step_of(OFFLOAD, prevent_cse=prevent_cse, body=constrained_layer if constrained else layer)
    facts = compile_on(mesh, jit_in_order(step, **options), args)
    assert {copy.via for copy in facts.copies if copy.direction == "H2D"} == {"dma"}
    assert FindingCode.KERNEL_TOUCHES_HOST not in {finding.code for finding in facts.findings}


@pytest.mark.long
def test_weights_sharded_by_the_compiler_take_no_more_memory():
    mesh, args, options = shard(2, 2 * BATCH)
    stock = compile_on(mesh, jax.jit(step_of(OFFLOAD), **options), args)
    saved = compile_on(mesh, jax.jit(step_of(SAVE), **options), args)
    jitted = jaxoff.jit(step_of(OFFLOAD), **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        facts = compile_on(mesh, jitted, args)
    assert facts.device_peak_bytes <= 1.01 * min(stock.device_peak_bytes, saved.device_peak_bytes)
    assert [str(warning.message) for warning in caught] == [str(finding) for finding in jitted.findings]


@pytest.mark.long
def test_layers_in_a_python_loop_that_cannot_leave_in_time_take_no_more_memory():
    def loss(weights, x, policy):
        for w in weights:
            x, _ = jax.checkpoint(layer, policy=policy)(x, w)
        return x.astype(jnp.float32).mean()

    stacked, x = arguments()
    row = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], jnp.bfloat16), stacked)
    policy = jaxoff.policy("te_v2")

    def facts_of(transform, policy):
        jitted = transform(jax.value_and_grad(functools.partial(loss, policy=policy)))
        compiled = jaxoff.target("h200").compile(jitted, [row] * LAYERS, x)
        return jitted, jaxoff.verify(compiled, compiler_options=getattr(jitted, "options", None))

    stock, saved = facts_of(jax.jit, policy)[1], facts_of(jax.jit, policy.on_device())[1]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jitted, facts = facts_of(jaxoff.jit, policy)
    assert [str(warning.message) for warning in caught] == [str(finding) for finding in jitted.findings]
    assert facts.device_peak_bytes <= 1.01 * min(stock.device_peak_bytes, saved.device_peak_bytes)
    assert (jitted.recipe == "saved") == (facts.d2h_bytes == 0)


def test_passes_that_share_host_memory_have_no_finding():
    """A step with a second gradient on some steps: XLA gives the stacks of both the same host memory."""
    policy = jaxoff.policy(offload=["h"])

    def block(x, w):
        return x + jnp.tanh(jaxoff.name(x @ w, "h")) @ w.T, None

    def loss(w, x):
        return (jax.lax.scan(jax.checkpoint(block, policy=policy, prevent_cse=False), x, w)[0] ** 2).mean()

    def step(w, x, again):
        grads = jax.grad(loss)(w, x)
        return jax.lax.cond(again, lambda g: jax.grad(loss)(w + 0.1 * g, x), lambda g: g, grads)

    struct = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    args = struct((LAYERS, WIDTH, WIDTH)), struct((8192, WIDTH)), jax.ShapeDtypeStruct((), bool)
    jitted = jaxoff.jit(step)
    facts = jaxoff.verify(jaxoff.target("h200").lower(jitted, *args).compile())
    asked = 2 * LAYERS * 8192 * WIDTH * 2
    assert facts.h2d_bytes >= asked > facts.host_bytes
    assert not jitted.findings


@pytest.mark.parametrize("axis", [0, 1])
def test_a_budget_holds_for_weights_with_layers_on_another_axis(axis):
    """The transpose of the weights is a copy of them all, and not a view."""
    layers, width, hidden, rows = 16, 1024, 2048, 8192

    def loss(w, x):
        w = jax.tree.map(lambda v: jnp.moveaxis(v, axis, 0), w)
        body = lambda x, w: (x + jnp.square(jax.nn.relu(x @ w["up"])) @ w["down"], None)  # noqa: E731
        return jax.lax.scan(body, x, w)[0].astype(jnp.float32).mean()

    def step(w, x):
        return jax.tree.map(lambda v, g: v - 1e-3 * g, w, jax.grad(loss)(w, x))

    shapes = {"up": [width, hidden], "down": [hidden, width]}
    w = {n: jax.ShapeDtypeStruct((*s[:axis], layers, *s[axis:]), jnp.bfloat16) for n, s in shapes.items()}
    x = jax.ShapeDtypeStruct((rows, width), jnp.bfloat16)
    within = jaxoff.jit(step, donate_argnums=0, device_bytes=0.6e9)
    nbytes = program_nbytes(jaxoff.target("h200").compile(within, w, x))
    assert 0.5e9 * axis < nbytes <= 0.6e9
    assert within.plan.peak_bytes == nbytes
