"""A model's loss and gradients on a mesh of devices, as one `jax.shard_map`.

Each device differentiates its own share of the loss; the shares add up to the mean over all sequences.
Devices add the gradients of shared parameters afterwards, once a step and in float32. So no layer handles
gradients of other devices, and the loops with offloaded residuals stand with their backward passes in the
program of a single device, where `jaxoff.jit` orders both.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from models import optim
from models.config import Config
from models.errors import InputError
from models.lm import LM, loss_fn
from models.mesh import AXES, BATCH, TOKENS, MeshShape
from models.moe import Division
from models.pipeline import Schedule, pipelined_loss
from models.sharding import as_stages, gather, specs_of, specs_of_layer, sum_shared

# Room for rows on the way to their experts, in multiples of the rows sent by an even router.
CAPACITY = 2.0


@dataclasses.dataclass(frozen=True)
class Layout:
    """The division of a step between devices.

    Attributes:
      mesh: sizes of the mesh's axes.
      virtual: stages of each pipe rank.
      capacity: room for the rows sent from a device to another's experts, in multiples of the rows sent by an
        even router.

    Raises:
      InputError: capacity is not above 0.
    """

    mesh: MeshShape
    virtual: int = 1
    capacity: float = CAPACITY

    def __post_init__(self):
        if not self.capacity > 0:
            raise InputError(f"--capacity is greater than 0, got {self.capacity}.")

    @property
    def is_pipelined(self) -> bool:
        return self.mesh.pipe * self.virtual > 1

    @property
    def division(self) -> Division:
        context = "context" if self.mesh.context > 1 else None
        return Division(TOKENS, "expert", self.capacity, context)

    def check(self, config: Config, batch: int, microbatches: int, seq: int) -> None:
        """Refuses models and batches that this layout cannot divide.

        Args:
          config: numbers of the model.
          batch: sequences of a microbatch.
          microbatches: microbatches of a step.
          seq: tokens of a sequence.

        Raises:
          InputError: the layout does not divide the model or batch; the message names the size and the fix.
        """
        stages = self.mesh.pipe * self.virtual
        Schedule(self.mesh.pipe, self.virtual, microbatches)
        if batch % self.mesh.batch:
            raise InputError(
                f"a microbatch is divided by data x fsdp x expert = {self.mesh.batch}, got {batch} "
                "sequences. Change --batch, --accum or --mesh."
            )
        if self.mesh.context > 1:
            self._check_context(config, seq)
        if config.num_layers % stages:
            raise InputError(
                f"layers are divided into pipe x virtual = {stages} equal stages, got {config.num_layers}: a "
                "stage with fewer would wait for the others. Take "
                f"--set num_layers={-(-config.num_layers // stages) * stages}."
            )
        if self.is_pipelined and 0 < config.num_dense_layers < config.num_layers:
            raise InputError(
                "a pipeline takes layers of one kind, since all ranks run one program; got "
                f"first_k_dense={config.first_k_dense} of {config.num_layers} layers. Take "
                "--set first_k_dense=0."
            )
        if (config.num_moe_layers or config.mtp_layers) and config.num_experts % self.mesh.expert:
            raise InputError(
                f"experts are divided by expert = {self.mesh.expert}, got {config.num_experts}. "
                "Change --mesh."
            )

    def _check_context(self, config: Config, seq: int) -> None:
        parts = self.mesh.context
        for what, number in (("tokens of a sequence", seq), ("key-value heads", config.num_kv_heads)):
            if number % parts:
                raise InputError(
                    f"{what} are divided by context = {parts}, got {number}. Change --mesh or --seq."
                )
        for what, has in (("multi-token prediction", config.mtp_layers), ("a pipeline", self.is_pipelined)):
            if has:
                raise InputError(
                    f"context = {parts} divides sequences of models without {what}. Take context=1, or "
                    f"{'--set mtp_layers=0' if config.mtp_layers else 'pipe=1 and --virtual 1'}."
                )


@dataclasses.dataclass(frozen=True)
class DividedModel:
    """A model on a mesh.

    Attributes:
      config: numbers of the model.
      policy: checkpoint policy of each layer, or None.
      layout: division between devices.
      mesh: mesh of devices.
    """

    config: Config
    policy: Callable[..., Any] | None
    layout: Layout
    mesh: Mesh

    def model(self, rngs: nnx.Rngs | None = None) -> LM:
        return LM(self.config, policy=self.policy, rngs=rngs, division=self.layout.division)

    @functools.cached_property
    def graph(self) -> nnx.GraphDef:
        return nnx.graphdef(nnx.eval_shape(self.model))

    @functools.cached_property
    def specs(self) -> Any:
        """The partitions of the parameters, a pytree like `params`."""
        return specs_of(jax.eval_shape(self.params), self.layout.mesh)

    def params(self, seed: int = 0) -> dict[str, Any]:
        """Initialises the parameters, layers in stages; every layout gives the same numbers."""
        params = nnx.to_pure_dict(nnx.state(self.model(nnx.Rngs(seed)), nnx.Param))
        return as_stages(params, self.layout.mesh.pipe, self.layout.virtual)

    def loss(self, params: Any, tokens_ABL: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Computes the mean loss over microbatches and the scalar metrics."""

        def local(params, tokens):
            value, metrics = self._local_loss(params, tokens)
            return lax.psum((value, metrics), AXES)

        return self._map_over_devices(local, (P(), P()))(params, tokens_ABL)

    def gradients(self, params: Any, tokens_ABL: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
        """Computes the mean gradients over microbatches, in float32, and the metrics, loss included.

        Args:
          params: pytree like `params`, divided by `specs`.
          tokens_ABL: (A, B, S + 1) integers, A microbatches.
        """

        def local(params, tokens):
            if self.layout.is_pipelined:
                (value, metrics), grads = jax.value_and_grad(self._local_loss, has_aux=True)(params, tokens)
                metrics |= {"loss": value}
            else:
                grads, metrics = optim.mean_grads(
                    lambda params, tokens: self._local_loss(params, tokens[None]), params, tokens
                )
            grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
            return sum_shared(grads, self.specs), lax.psum(metrics, AXES)

        return self._map_over_devices(local, (self.specs, P()))(params, tokens_ABL)

    def _map_over_devices(self, local: Callable[..., Any], out_specs: Any) -> Callable[..., Any]:
        in_specs = self.specs, P(None, BATCH)
        return jax.shard_map(local, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def _local_loss(self, params: Any, tokens_ABL: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Computes this device's share of the loss and metrics; all devices' shares add up to the mean."""
        kind = "experts" if self.config.num_moe_layers else "dense"
        of_layers = {key: specs_of_layer(x) for key, x in self.specs.items() if key in ("dense", "experts")}
        rest = {key: x for key, x in params.items() if key not in of_layers}
        rest = gather(rest, {key: self.specs[key] for key in rest})

        def whole(layer):
            values = nnx.to_pure_dict(layer)
            own = "experts" if "router" in values["mlp"] else "dense"
            return _like(layer, gather(values, of_layers[own]))

        tokens_ABL = self._take_part(tokens_ABL)
        if self.layout.is_pipelined:
            schedule = Schedule(self.layout.mesh.pipe, self.layout.virtual, tokens_ABL.shape[0])
            stages = params[kind]
            model = nnx.merge(self.graph, rest | {kind: stages[0]})
            value, metrics = pipelined_loss(model, stages, tokens_ABL, schedule, whole)
        else:
            model = nnx.merge(self.graph, rest | {key: params[key] for key in of_layers})
            value, metrics = loss_fn(model, tokens_ABL[0], whole)
            metrics = {key: x for key, x in metrics.items() if not x.ndim}
        metrics["overflow"] *= self.layout.mesh.parts  # a sum over devices; all other metrics are means
        return jax.tree.map(lambda x: x / self.layout.mesh.parts, (value, metrics))

    def _take_part(self, tokens_ABL: jax.Array) -> jax.Array:
        """This device's part of each sequence. Its last target is the first token of the next part."""
        parts = self.layout.mesh.context
        if parts == 1:
            return tokens_ABL
        length = (tokens_ABL.shape[2] - 1) // parts
        return lax.dynamic_slice_in_dim(tokens_ABL, lax.axis_index("context") * length, length + 1, axis=2)


def _like(state: nnx.State, values: dict[str, Any]) -> nnx.State:
    """Replaces the values of a state."""
    leaves = jax.tree.leaves(values)
    return jax.tree.unflatten(jax.tree.structure(state), leaves)
