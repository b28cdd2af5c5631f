"""Whole train steps as users of JAX write them, without a line of jaxoff in the model.

Each builder returns a `ClientStep`: a function of donated state and a batch, and structs of its arguments.
Names are JAX's `checkpoint_name`, policies are JAX's or of jaxoff's registry, optimizers are optax's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of a decoder; the defaults fill an 80 GB card."""

    layers: int = 8
    width: int = 4096
    hidden: int = 14336
    heads: int = 32
    kv_heads: int = 8
    head_size: int = 128
    vocabulary: int = 128256
    batch: int = 2
    length: int = 8192


@dataclasses.dataclass(frozen=True)
class ClientStep:
    """A train step with structs of its arguments.

    Attributes:
      fun: (state, batch) -> (state, loss). State: a pytree, donated. Batch: token ids, int32, of shape
        (batch, length + 1).
      state: structs of the state.
      batch: the struct of the batch.
      initialize: key -> state.
    """

    fun: Callable[..., Any]
    state: Any
    batch: jax.ShapeDtypeStruct
    initialize: Callable[[jax.Array], Any]

    def jit(self, transform: Callable[..., Any], **kwargs: Any) -> Any:
        """The step under `jax.jit`, `jaxoff.jit` or the like, with its state donated."""
        return transform(self.fun, donate_argnums=0, **kwargs)


def build_decoder(sizes: Sizes, policy: Any, *, loop: str = "scan", attention: Any = "cudnn") -> ClientStep:
    """A pre-norm decoder with grouped queries, SwiGLU, an untied head and plain cross entropy; AdamW.

    Weights are float32, compute is bfloat16, logits are one float32 array.

    Args:
      sizes: the sizes.
      policy: for `jax.checkpoint`; names are "block_in" (input of a layer), "attn" (output of attention).
      loop: "scan" over stacked weights, or "python" over a list of layers.
      attention: the implementation for `jax.nn.dot_product_attention`.
    """
    s = sizes

    def initialize_layer(key):
        shapes = {
            "q": (s.width, s.heads * s.head_size),
            "k": (s.width, s.kv_heads * s.head_size),
            "v": (s.width, s.kv_heads * s.head_size),
            "o": (s.heads * s.head_size, s.width),
            "gate": (s.width, s.hidden),
            "up": (s.width, s.hidden),
            "down": (s.hidden, s.width),
        }
        keys = dict(zip(shapes, jax.random.split(key, len(shapes)), strict=True))
        weights = {n: jax.random.normal(keys[n], shape) * shape[0] ** -0.5 for n, shape in shapes.items()}
        return weights | {"norm1": jnp.ones(s.width), "norm2": jnp.ones(s.width)}

    def normalize(x, scale):
        wide = x.astype(jnp.float32)
        return (wide * jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * scale).astype(jnp.bfloat16)

    def layer(x, weights):
        w = {n: v.astype(jnp.bfloat16) for n, v in weights.items()}
        x = checkpoint_name(x, "block_in")
        h = normalize(x, w["norm1"])
        q = (h @ w["q"]).reshape(*x.shape[:2], s.heads, s.head_size)
        k, v = ((h @ w[n]).reshape(*x.shape[:2], s.kv_heads, s.head_size) for n in "kv")

        a = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=attention).reshape(
            *x.shape[:2], -1
        )
        a = checkpoint_name(a, "attn")
        x = x + a @ w["o"]
        h = normalize(x, w["norm2"])
        return x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"], None

    block = jax.checkpoint(layer, policy=policy, prevent_cse=loop != "scan")

    def loss_of(params, tokens):
        x = params["embed"].astype(jnp.bfloat16)[tokens[:, :-1]]
        if loop == "scan":
            x, _ = jax.lax.scan(block, x, params["layers"])
        else:
            for weights in params["layers"]:
                x, _ = block(x, weights)
        logits = (normalize(x, params["norm"]) @ params["head"].astype(jnp.bfloat16)).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4))

    def initialize(key):
        keys = jax.random.split(key, s.layers + 2)
        layers = [initialize_layer(k) for k in keys[2:]]
        if loop == "scan":
            layers = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
        params = {
            "embed": jax.random.normal(keys[0], (s.vocabulary, s.width)) * 0.02,
            "layers": layers,
            "norm": jnp.ones(s.width),
            "head": jax.random.normal(keys[1], (s.width, s.vocabulary)) * s.width**-0.5,
        }
        return params, optimizer.init(params)

    def step(state, tokens):
        params, optimizer_state = state
        loss, grads = jax.value_and_grad(loss_of)(params, tokens)
        updates, optimizer_state = optimizer.update(grads, optimizer_state, params)
        return (optax.apply_updates(params, updates), optimizer_state), loss

    state = jax.eval_shape(initialize, jax.random.key(0))
    batch = jax.ShapeDtypeStruct((s.batch, s.length + 1), jnp.int32)
    return ClientStep(step, state, batch, initialize)


def offload(*names: str) -> Any:
    """JAX's own policy that offloads names."""
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=list(names),
        offload_src="device",
        offload_dst="pinned_host",
    )


def save(*names: str) -> Any:
    """The saved twin of `offload`."""
    return jax.checkpoint_policies.save_only_these_names(*names)
