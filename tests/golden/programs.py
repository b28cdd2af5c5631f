"""Programs whose lowered text is stored: layers, policies, forms and meshes, for a CPU and an absent GPU.

`PROGRAMS` maps a name to a function that lowers the program. Nothing is compiled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoff
from bench.step_models import Workload
from models.layers import causal_attention
from models.options import Options, parse_overrides
from models.program import Program
from pallas_kernels import grouped_mlp
from tests.golden.small import (
    SOME,
    abstract_mesh_of,
    data_parallel,
    gathering,
    mesh_of,
    small_layer,
    small_loss,
    small_shapes,
)
from tests.golden.steps import (
    VOCABULARY,
    environment,
    on_cpu,
    on_gpu,
    policy_of,
    slow_link,
    step_of,
    train_step,
)

type Lower = Callable[[], jax.stages.Lowered]

PROGRAMS: dict[str, Lower] = {}


def lowered(name: str) -> jax.stages.Lowered:
    """A program of `PROGRAMS`, lowered."""
    with environment():
        return PROGRAMS[name]()


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
_add_steps("cpu", "dense-b2-l3", "scan/some first_scan/some layers/saved loop/te_v1 ordered/more", tiny=True)
_add_steps("cpu", "dense-b2-l4", "blocks/some", tiny=True)
_add_steps("cpu", "mlp-b2-l4", "scan/some layers/some lax_scan/some loop/some", tiny=True)
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


def _train_step(how: str, policy: str, *, tiny: bool):
    workload = Workload.parse("dense-b2-l2", tiny=tiny)
    return train_step(workload, how, policy_of(workload, policy), *((16, 32) if tiny else (4096, 4096)))


def _add_train_steps() -> None:
    for how, policy in (("scan", "some"), ("scan", "saved"), ("layers", "some")):
        for tiny in (True, False) if (how, policy) == ("scan", "some") else (False,):

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
