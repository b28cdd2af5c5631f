"""`ClientStep`, a train step with structs of its arguments; sizes, policies and the step of plain JAX."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

ADAMW = optax.adamw(3e-4)
CLIPPED_ADAMW = optax.chain(optax.clip_by_global_norm(1.0), ADAMW)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of a model; the defaults of a decoder fill an 80 GB card.

    Attributes:
      layers: the number of layers.
      width: features of the residual stream.
      hidden: features inside of an MLP, or channels of a state space layer.
      heads, kv_heads, head_size: the heads of attention.
      vocabulary: the number of tokens, or of classes.
      batch: the number of sequences, pairs of sequences or pictures.
      length: tokens of a sequence, patches of a picture, or pixels of its side.
      groups: the number of groups that layers form, where they form groups.
      microbatches: the parts of a batch, where gradients are accumulated.
      source_length: tokens of the encoder, in a model with an encoder.
      experts: the number of experts of an MLP, where MLPs have experts.
      clipped: whether gradients are clipped by their global norm before AdamW.
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
    source_length: int = 0
    experts: int = 0
    clipped: bool = True

    @property
    def optimizer(self) -> optax.GradientTransformationExtraArgs:
        """AdamW, the same object for equal sizes: NNX compares optimizers by identity."""
        return CLIPPED_ADAMW if self.clipped else ADAMW

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
      initialize_frozen: key -> weights that the step reads and neither donates nor differentiates, the entry
        "frozen" of the batch. None: no such weights.
    """

    fun: Callable[..., Any]
    state: Any
    batch: Any
    initialize: Callable[[jax.Array], Any]
    vocabulary: int
    initialize_frozen: Callable[[jax.Array], Any] | None = None

    @staticmethod
    def of(
        fun: Callable[..., Any],
        initialize: Callable[..., Any],
        batch: Any,
        sizes: Sizes,
        initialize_frozen: Callable[..., Any] | None = None,
    ) -> ClientStep:
        """The step of a function, its state's structs and those of its frozen weights by tracing."""
        state = jax.eval_shape(initialize, jax.random.key(0))
        if initialize_frozen:
            batch = batch | {"frozen": jax.eval_shape(initialize_frozen, jax.random.key(0))}
        return ClientStep(fun, state, batch, initialize, sizes.vocabulary, initialize_frozen)

    def jit(self, transform: Callable[..., Any], **kwargs: Any) -> Any:
        """The step under `jax.jit`, `jaxoff.jit` or the like, with its state donated."""
        return transform(self.fun, donate_argnums=0, **kwargs)

    def make_batch(self, key: jax.Array) -> Any:
        """A random batch."""

        def make(struct: jax.ShapeDtypeStruct, key: jax.Array) -> jax.Array:
            if jnp.issubdtype(struct.dtype, jnp.integer):
                return jax.random.randint(key, struct.shape, 0, self.vocabulary)
            return jax.random.normal(key, struct.shape, struct.dtype)

        def make_all(data: Any) -> Any:
            leaves, tree = jax.tree.flatten(data)
            keys = jax.random.split(key, len(leaves))
            return tree.unflatten(make(leaf, k) for leaf, k in zip(leaves, keys, strict=True))

        if self.initialize_frozen is None:
            return make_all(self.batch)
        data = {name: struct for name, struct in self.batch.items() if name != "frozen"}
        return make_all(data) | {"frozen": jax.jit(self.initialize_frozen)(key)}


def build_step(
    loss_of: Callable[..., Any],
    initialize_params: Callable[..., Any],
    batch: Any,
    sizes: Sizes,
    initialize_frozen: Callable[..., Any] | None = None,
) -> ClientStep:
    """The step of a loss over a pytree of parameters: gradients, clipped, into AdamW."""
    value_and_grad = jax.value_and_grad(loss_of)
    return build_step_of_gradients(value_and_grad, initialize_params, batch, sizes, initialize_frozen)


def build_step_of_gradients(
    value_and_grad: Callable[..., Any],
    initialize_params: Callable[..., Any],
    batch: Any,
    sizes: Sizes,
    initialize_frozen: Callable[..., Any] | None = None,
) -> ClientStep:
    """The step of a function (parameters, batch) -> (loss, gradients)."""

    def initialize(key):
        params = initialize_params(key)
        return params, sizes.optimizer.init(params)

    def step(state, batch):
        params, optimizer_state = state
        loss, grads = value_and_grad(params, batch)
        updates, optimizer_state = sizes.optimizer.update(grads, optimizer_state, params)
        return (optax.apply_updates(params, updates), optimizer_state), loss

    return ClientStep.of(step, initialize, batch, sizes, initialize_frozen)


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
