"""`ClientStep`, a train step with structs of its arguments; sizes, policies and the step of plain JAX."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of a model; the defaults of a decoder fill an 80 GB card.

    Attributes:
      layers: the number of layers.
      width: features of the residual stream.
      hidden: features inside of an MLP, or channels of a state space layer.
      heads, kv_heads, head_size: the heads of attention.
      vocabulary: the number of tokens, or of classes.
      batch: the number of sequences or pictures.
      length: tokens of a sequence, or patches of a picture.
      groups: the number of groups that layers form, where they form groups.
      microbatches: the parts of a batch, where gradients are accumulated.
    """

    layers: int = 8
    width: int = 4096
    hidden: int = 14336
    heads: int = 32
    kv_heads: int = 8
    head_size: int = 128
    vocabulary: int = 128256
    batch: int = 2
    length: int = 8192
    groups: int = 2
    microbatches: int = 2

    @property
    def tokens(self) -> jax.ShapeDtypeStruct:
        """The struct of a batch of token ids: inputs and, one place later, labels."""
        return jax.ShapeDtypeStruct((self.batch, self.length + 1), jnp.int32)


@dataclasses.dataclass(frozen=True)
class ClientStep:
    """A train step with structs of its arguments.

    Attributes:
      fun: (state, batch) -> (state, loss). State: a pytree, donated; equal for all policies.
      state: structs of the state.
      batch: structs of the batch. Integers are ids of tokens or classes.
      initialize: key -> state.
      vocabulary: the number of ids.
    """

    fun: Callable[..., Any]
    state: Any
    batch: Any
    initialize: Callable[[jax.Array], Any]
    vocabulary: int

    @staticmethod
    def of(fun: Callable[..., Any], initialize: Callable[..., Any], batch: Any, sizes: Sizes) -> ClientStep:
        """The step of a function, its state's structs by tracing."""
        state = jax.eval_shape(initialize, jax.random.key(0))
        return ClientStep(fun, state, batch, initialize, sizes.vocabulary)

    def jit(self, transform: Callable[..., Any], **kwargs: Any) -> Any:
        """The step under `jax.jit`, `jaxoff.jit` or the like, with its state donated."""
        return transform(self.fun, donate_argnums=0, **kwargs)

    def make_batch(self, key: jax.Array) -> Any:
        """A random batch."""

        def make(struct: jax.ShapeDtypeStruct) -> jax.Array:
            if jnp.issubdtype(struct.dtype, jnp.integer):
                return jax.random.randint(key, struct.shape, 0, self.vocabulary)
            return jax.random.normal(key, struct.shape, struct.dtype)

        return jax.tree.map(make, self.batch)


OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4))


def build_step(
    loss_of: Callable[..., Any], initialize_params: Callable[..., Any], batch: Any, sizes: Sizes
) -> ClientStep:
    """The step of a loss over a pytree of parameters: gradients, clipped, into AdamW."""
    return build_step_of_gradients(jax.value_and_grad(loss_of), initialize_params, batch, sizes)


def build_step_of_gradients(
    value_and_grad: Callable[..., Any], initialize_params: Callable[..., Any], batch: Any, sizes: Sizes
) -> ClientStep:
    """The step of a function (parameters, batch) -> (loss, gradients)."""

    def initialize(key):
        params = initialize_params(key)
        return params, OPTIMIZER.init(params)

    def step(state, batch):
        params, optimizer_state = state
        loss, grads = value_and_grad(params, batch)
        updates, optimizer_state = OPTIMIZER.update(grads, optimizer_state, params)
        return (optax.apply_updates(params, updates), optimizer_state), loss

    return ClientStep.of(step, initialize, batch, sizes)


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
