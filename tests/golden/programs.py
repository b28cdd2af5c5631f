"""Programs whose lowered text is stored: layers, policies, forms and meshes, for a CPU and an absent GPU.

`PROGRAMS` maps a name to a function that lowers the program. Nothing is compiled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoff
from bench.step_models import Workload, loss
from models.layers import causal_attention
from models.options import Options, parse_overrides
from models.program import Program
from pallas_kernels import grouped_mlp

type Lower = Callable[[], jax.stages.Lowered]
type Stack = Callable[[Any, Any, Any], Any]

H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="cuda")
PROGRAMS: dict[str, Lower] = {}
FORMS: dict[str, Callable[[Any], Stack]] = {}

# Variables of the process on which a program depends.
_VARIABLES = ("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB",)
_CUDNN = "jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version"
_MODULES = ["core_attn", "attn_norm", "moe_act"]


def lowered(name: str) -> jax.stages.Lowered:
    """A program of `PROGRAMS`, lowered."""
    with environment():
        return PROGRAMS[name]()


@contextlib.contextmanager
def environment() -> Iterator[None]:
    """The process as goldens expect the process: no limits from variables, and the version of cuDNN."""
    with mock.patch.dict(os.environ), mock.patch(_CUDNN, return_value=91900):
        for variable in _VARIABLES:
            os.environ.pop(variable, None)
        yield


def form(fun):
    FORMS[fun.__name__] = fun
    return fun


def _body(layer):
    return lambda carry, w: (layer(w, carry), None)


def _scan(policy, **options):
    return lambda layer, carry, weights: jaxoff.scan(_body(layer), carry, weights, policy=policy, **options)[
        0
    ]


@form
def scan(policy):
    return _scan(policy)


@form
def blocks(policy):
    """Two layers a turn, of which the residual that is needed first stays."""
    return _scan(policy, block=2, keep_first=True)


@form
def plain(policy):
    return _scan(policy, strategy="plain")


@form
def ordered(policy):
    return _scan(policy, strategy="ordered")


@form
def layers(policy):
    return lambda layer, carry, weights: jaxoff.layers(layer, carry, weights, policy=policy)


@form
def first_scan(policy):
    return _scan(jaxoff.FirstLayers(1, policy, rest=policy.on_device()))


@form
def first_layers(policy):
    return layers(jaxoff.FirstLayers(1, policy, rest=jaxoff.policy()))


@form
def loop(policy):
    def stack(layer, carry, weights):
        block = jax.checkpoint(layer, policy=policy)
        for w in weights:
            carry = block(w, carry)
        return carry

    return stack


@form
def lax_scan(policy):
    def stack(layer, carry, weights):
        block = jax.checkpoint(_body(layer), policy=policy, prevent_cse=False)
        return lax.scan(block, carry, weights)[0]

    return stack


LISTED = ("layers", "first_layers", "loop")
"""Forms that take a list of weights."""


def policy_of(workload: Workload, name: str) -> jaxoff.Policy:
    moves = workload.moves("planned")
    some = jaxoff.policy(offload=moves.offload, save=moves.save)
    return {
        "saved": some.on_device,
        "some": lambda: some,
        "more": lambda: jaxoff.policy(offload=["*"]),
        "recompute": jaxoff.policy,
        "te_v1": lambda: jaxoff.policy("te_v1"),
        "te_v2": lambda: jaxoff.policy("te_v2", min_bytes=1),
        "megatron": lambda: jaxoff.policy("megatron", modules=_MODULES),
        "dots": lambda: jaxoff.policy("dots"),
        "offload_dots": lambda: jaxoff.policy(unmarked="offload_dots"),
    }[name]()


def stacked_loss(workload: Workload, stack: Stack, *, marked: bool = False) -> Callable[..., Any]:
    """The loss of a workload's layers, whose input perhaps has a mark."""
    if not marked:
        return loss(workload, "planned", stack)

    def with_mark(layer):
        return lambda w, carry: layer(w, (jaxoff.mark_offload(carry[0]), carry[1]))

    return loss(workload, "planned", lambda layer, carry, weights: stack(with_mark(layer), carry, weights))


def slow_link() -> jaxoff.Device:
    """An H200 whose copies take eight times as long: compute waits for most, and goes in another order."""
    device = jaxoff.Device.of("h200")
    return dataclasses.replace(device, d2h_gbps=device.d2h_gbps / 8, h2d_gbps=device.h2d_gbps / 8)


def step_of(workload: Workload, how: str, policy: str, **options: Any) -> tuple[Any, tuple[Any, ...]]:
    """A step by `jaxoff.jit`, and the shapes of its arguments."""
    stack = FORMS[how](policy_of(workload, policy))
    fun = stacked_loss(workload, stack, marked=policy == "te_v1")
    shapes = workload.shapes("unrolled" if how in LISTED else "scanned")
    return jaxoff.jit(jax.value_and_grad(fun, (0, 1)), **options), shapes


def on_cpu(step, *shapes) -> jax.stages.Lowered:
    return step.lower(*shapes)


def on_gpu(step, *shapes, kernels: bool = True) -> jax.stages.Lowered:
    """A program for an H200: with the kernels that are for GPUs only, or with the ones for any device."""
    told = use_h200() if kernels else contextlib.nullcontext()
    with told:
        return step.trace(*shapes).lower(lowering_platforms=("cuda",))


def use_h200() -> Any:
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=H200))


def _add(name: str, lower: Lower) -> None:
    assert name not in PROGRAMS, name
    PROGRAMS[name] = lower


def _add_steps(
    where: str, workload: str, pairs: str, *, tiny: bool = False, slow: bool = False, **options: Any
) -> None:
    parsed = Workload.parse(workload, tiny=tiny)
    for pair in pairs.split():
        how, policy = pair.split("/")

        def lower(how=how, policy=policy):
            step, shapes = step_of(parsed, how, policy, **({"device": slow_link()} if slow else {}))
            return on_gpu(step, *shapes, **options) if where.startswith("gpu") else on_cpu(step, *shapes)

        _add(f"{where}/{workload}/{pair}", lower)


# Plain forms make the programs of jaxoff's own, with the same policy: they have others.
_FORMS = "scan/some layers/some first_scan/some first_layers/some loop/te_v1 lax_scan/more"
_PRESETS = "scan/saved scan/recompute scan/te_v1 scan/te_v2 scan/dots"
_OTHERS = "blocks/some plain/some layers/more layers/saved loop/saved lax_scan/offload_dots"
_add_steps("cpu", "dense-b2-l3", f"{_FORMS} scan/saved scan/recompute scan/te_v1 ordered/more", tiny=True)
_add_steps("cpu", "dense-b2-l4", "blocks/some", tiny=True)
_add_steps("cpu", "mlp-b2-l4", f"{_FORMS} lax_scan/some loop/some blocks/more", tiny=True)
_add_steps("cpu", "nano-b2-l2", "loop/some", tiny=True)
_add_steps("gpu", "dense-b4-l4", f"{_FORMS} {_PRESETS} {_OTHERS}")
_add_steps("gpu", "mlp-b4-l4", f"{_FORMS} scan/saved scan/recompute scan/te_v2 layers/more")
_add_steps("gpu-slow-link", "dense-b4-l3", "layers/more scan/more loop/some", slow=True)
_add_steps("gpu-slow-link", "mlp-b4-l4", "layers/more scan/more blocks/more first_scan/some", slow=True)
_add_steps("gpu-any", "nano-b4-l2", "scan/some layers/some", kernels=False)
_add_steps("gpu-any", "mixtral-b4-l2", "lax_scan/some first_layers/megatron", kernels=False)


def program(name: str) -> Callable[[Lower], Lower]:
    def add(lower: Lower) -> Lower:
        _add(name, lower)
        return lower

    return add


VOCABULARY = 128 * 1024


def train_step(workload: Workload, how: str, policy: jaxoff.Policy, tokens: int, width: int):
    """A step with an embedding, a head and AdamW, and the shapes of its state and tokens."""
    inner = loss_of_tokens(workload, FORMS[how](policy))
    optimizer = optax.adamw(1e-3)

    def step(params, state, ids):
        value, grads = jax.value_and_grad(inner)(params, ids)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    table = jax.ShapeDtypeStruct((VOCABULARY, width), jnp.bfloat16)
    weights, _ = workload.shapes("unrolled" if how in LISTED else "scanned")
    params = {"embedding": table, "layers": weights, "head": table}
    ids = jax.ShapeDtypeStruct((workload.batch, tokens), jnp.int32)
    return jaxoff.jit(step, donate_argnums=(0, 1)), (params, jax.eval_shape(optimizer.init, params), ids)


def loss_of_tokens(workload: Workload, stack: Stack):
    def compute(params, ids):
        x = params["embedding"][ids]
        x, _ = stack(workload.layer("planned"), (x, jnp.zeros((), jnp.float32)), params["layers"])
        logits = jaxoff.name(x @ params["head"].T, "logits").astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, ids).mean()

    return compute


def _train_step(how: str, policy: str, *, tiny: bool):
    workload = Workload.parse("dense-b2-l2", tiny=tiny)
    return train_step(workload, how, policy_of(workload, policy), *((16, 32) if tiny else (4096, 4096)))


def _add_train_steps() -> None:
    for how, policy in (("scan", "some"), ("scan", "saved"), ("layers", "some")):
        for tiny in (True, False):

            def lower(how=how, policy=policy, tiny=tiny):
                step, shapes = _train_step(how, policy, tiny=tiny)
                return on_cpu(step, *shapes) if tiny else on_gpu(step, *shapes)

            _add(f"{'cpu' if tiny else 'gpu'}/adamw-128k/{how}/{policy}", lower)


_add_train_steps()


def model_program(policy: Any = None, *more: str) -> Program:
    """The train step of a small model with a 128k vocabulary."""
    sizes = "d_model=32 num_layers=1 first_k_dense=0 num_heads=2 num_kv_heads=1 head_dim=16 num_experts=4"
    settings = [*sizes.split(), "d_expert=16", "d_shared=16", f"vocab_size={VOCABULARY}", *more]
    numbers = dict(steps=2, batch=4, seq=64, accum=2, eval_batches=1)
    return Program(Options.of("tiny", overrides=parse_overrides(settings), **numbers), policy)


@program("cpu/model-128k/some")
def _():
    found = model_program(jaxoff.policy(offload=["attn.norm_in", "attn.proj_in"], save=["moe.act"]))
    return found.step.lower(found.state_shapes, found.tokens_shape)


# Programs over several devices.

WIDTH, HIDDEN, LAYERS = 16, 32, 4
SOME = jaxoff.policy(offload=["x_in"], save=["act"])


def small_layer(w, x):
    x = jaxoff.name(x, "x_in")
    act = jaxoff.name(jnp.tanh(x @ w["up"]), "act")
    return x + jaxoff.name(act @ w["down"], "out")


def small_shapes(rows=16, layers=LAYERS, scale=1, sharding=None, of_rows=None):
    lead = () if layers is None else (layers,)
    width, hidden = WIDTH * scale, HIDDEN * scale
    make = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    w = {
        "up": make((*lead, width, hidden), sharding=sharding),
        "down": make((*lead, hidden, width), sharding=sharding),
    }
    return w, make((rows * scale, width), sharding=of_rows)


def small_loss(policy=SOME, how="scan", layer=small_layer):
    def compute(w, x):
        if how == "scan":
            return jaxoff.scan(lambda x, w: (layer(w, x), None), x, w, policy=policy)[0].sum()
        each = [jax.tree.map(lambda leaf, i=i: leaf[i], w) for i in range(LAYERS)]
        return jaxoff.layers(layer, x, each, policy=policy).sum()

    return compute


def mesh_of(devices: int, kind: AxisType = AxisType.Auto):
    return jax.make_mesh((devices,), ("data",), (kind,), devices=jax.devices()[:devices])


def abstract_mesh_of(devices: int):
    return AbstractMesh((devices,), ("data",), (AxisType.Auto,), abstract_device=H200)


def data_parallel(mesh, policy=SOME, how="scan"):
    """Gradients of each device's rows, summed over the devices, of replicated weights."""

    def local(w, x):
        return jax.tree.map(lambda g: lax.psum(g, "data"), jax.grad(small_loss(policy, how))(w, x))

    return jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)


def gathering(mesh, policy=SOME, how="scan"):
    """Gradients of a loss whose layers gather their weights, and hand their rows on to the next device."""
    ring = [(i, (i + 1) % mesh.size) for i in range(mesh.size)]

    def layer(w, x):
        w = jax.tree.map(lambda part: lax.all_gather(part, "data", axis=0, tiled=True), w)
        return small_layer(w, lax.ppermute(x, "data", ring))

    def local(w, x):
        return jax.grad(small_loss(policy, how, layer))(w, x)

    specs = P(None, "data"), P("data")
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(None, "data"), check_vma=False)


def _add_mapped() -> None:
    for devices in (1, 2, 8):
        for how in ("scan", "layers"):
            for body in (data_parallel, gathering):
                if (devices, how) == (8, "layers"):
                    continue

                def lower(devices=devices, how=how, body=body):
                    return jaxoff.jit(body(mesh_of(devices), how=how)).lower(*small_shapes())

                _add(f"cpu/shard_map-{devices}/{body.__name__}/{how}", lower)
    for body in (data_parallel, gathering):
        for how, slow in (("scan", False), ("layers", False), ("layers", True)):

            def lower_for_gpus(body=body, how=how, slow=slow):
                mesh = abstract_mesh_of(2)
                options: Any = {"device": slow_link()} if slow else {}
                with jax.sharding.use_abstract_mesh(mesh):
                    step = jaxoff.jit(body(mesh, how=how), **options)
                    return on_gpu(step, *small_shapes(scale=64), kernels=False)

            _add(f"gpu{'-slow-link' * slow}/shard_map-2/{body.__name__}/{how}", lower_for_gpus)


_add_mapped()


def _add_sharded() -> None:
    for devices, kind in ((8, AxisType.Auto), (8, AxisType.Explicit), (1, AxisType.Auto)):
        for policy in ("some", "saved"):

            def lower(devices=devices, kind=kind, policy=policy):
                mesh = mesh_of(devices, kind)
                rows, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
                chosen = SOME if policy == "some" else SOME.on_device()
                step = jax.value_and_grad(small_loss(chosen), (0, 1))
                if kind == AxisType.Auto:
                    return jaxoff.jit(step, in_shardings=(whole, rows)).lower(*small_shapes())
                with jax.set_mesh(mesh):
                    return jaxoff.jit(step).lower(*small_shapes(sharding=whole, of_rows=rows))

            _add(f"cpu/sharded-{devices}-{kind.name}/scan/{policy}", lower)


_add_sharded()


# Programs that have no loop of layers, or more than one.


@program("cpu/plain/nothing-moves")
def _():
    return jaxoff.jit(jax.value_and_grad(lambda x: jnp.sin(x @ x).sum())).lower(jnp.ones((8, 8)))


@program("cpu/plain/forward-only")
def _():
    return jaxoff.jit(small_loss()).lower(*small_shapes())


@program("cpu/plain/static-arguments")
def _():
    def step(w, x, power, *, scale):
        return jax.grad(lambda w, x: small_loss()(w, x**power) * scale)(w, x)

    jitted = jaxoff.jit(step, static_argnums=2, static_argnames="scale")
    return jitted.lower(*small_shapes(), 2, scale=0.5)


@program("cpu/plain/microbatches")
def _():
    def step(w, xs):
        def add(total, x):
            return jax.tree.map(jnp.add, total, jax.grad(small_loss())(w, x)), None

        return lax.scan(add, jax.tree.map(jnp.zeros_like, w), xs)[0]

    w, x = small_shapes()
    return jaxoff.jit(step, donate_argnums=0).lower(w, jax.ShapeDtypeStruct((3, *x.shape), x.dtype))


@program("cpu/plain/two-loops")
def _():
    def compute(w, x):
        for policy in (SOME, jaxoff.policy(offload=["act"])):
            x = jaxoff.scan(lambda x, w: (small_layer(w, x), x.sum()), x, w, policy=policy, reverse=True)[0]
        return x.sum()

    return jaxoff.jit(jax.value_and_grad(compute)).lower(*small_shapes())


@program("cpu/plain/vmap-of-scan")
def _():
    w, x = small_shapes()
    xs = jax.ShapeDtypeStruct((3, *x.shape), x.dtype)
    return jaxoff.jit(jax.vmap(jax.grad(small_loss()), (None, 0))).lower(w, xs)


@program("gpu/attention/model")
def _():
    """The attention of `models`, of a GPU, in two layers with marks."""

    def layer(w, x):
        q = (jaxoff.mark_offload(x) @ w["qkv"]).reshape(2, 256, 6, 64)
        heads = causal_attention(q[:, :, :4], q[:, :, 4:5], q[:, :, 5:], implementation="cudnn")
        return x + jaxoff.name(heads.reshape(2, 256, 256), "core") @ w["out"]

    def compute(w, x):
        policy = jaxoff.policy("te_v1")
        return jaxoff.layers(layer, x, w, policy=policy).astype(jnp.float32).sum()

    make = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    w = [{"qkv": make((256, 384)), "out": make((256, 256))}] * 2
    return on_gpu(jaxoff.jit(jax.grad(compute)), w, make((2, 256, 256)))


@program("gpu/grouped_mlp/lax_scan")
def _():
    """Layers of experts alone, whose kernels are for a GPU."""
    make = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    experts, width, hidden, rows = 4, 256, 128, 1024

    def layer(x, w):
        sizes = jnp.full((experts,), rows // experts, jnp.int32)
        x = jaxoff.name(x, "x_in")
        return x + grouped_mlp(x, w["up"], w["down"], sizes), None

    def compute(w, x):
        block = jax.checkpoint(layer, policy=jaxoff.policy(offload=["x_in"]), prevent_cse=False)
        return lax.scan(block, x, w)[0].astype(jnp.float32).sum()

    w = {"up": make((2, experts, width, hidden)), "down": make((2, experts, hidden, width))}
    return on_gpu(jaxoff.jit(jax.grad(compute, (0, 1))), w, make((rows, width)))
