"""Steps whose programs are stored: layers of the benchmark under a policy in a form, and train steps."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AbstractDevice, AbstractMesh

import jaxoff
from bench.step_models import Workload, loss
from jaxoff._layers.scan import scan_by_strategy

type Stack = Callable[[Any, Any, Any], Any]

H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="cuda")
FORMS: dict[str, Callable[[Any], Stack]] = {}

# Variables of the process on which a program depends.
_VARIABLES = ("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB",)
_CUDNN = "jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version"
_MODULES = ["core_attn", "attn_norm", "moe_act"]


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
    scan = scan_by_strategy if "strategy" in options else jaxoff.scan
    return lambda layer, carry, weights: scan(_body(layer), carry, weights, policy=policy, **options)[0]


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
    placed = workload.placed_names("planned")
    some = jaxoff.policy(offload=placed.offload, save=placed.save)
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
