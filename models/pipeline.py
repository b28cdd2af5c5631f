"""An interleaved pipeline in one SPMD program: each rank runs its own stages of every microbatch.

Stage s of V P is on rank s mod P. In a tick each rank runs a stage, out of its V, on a microbatch and sends
the result to the next rank. Rank r is r ticks behind rank 0. A rank takes P microbatches through its first
stage, then the same P through its second stage, and so on, and then the next P. So each rank receives its
next input just in time, and so does the first rank from the last: nothing waits in between.

The ticks are iterations of a single loop, differentiated as a whole. The backward pass runs the ticks in
reverse and needs the residuals of all ticks, which a policy offloads. The device then holds no more residuals
than under a one-forward-one-backward schedule, which keeps the residuals of P microbatches on the device.

The embedding stands before the loop, head and loss after the loop, each rank with m / P of the m
microbatches: all ranks have equal work. With embedding and head on the first and last rank, the other ranks
would wait.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from models.errors import InputError
from models.lm import LM, Whole, check_sequences, head_losses, scan_under, total_loss

_AXIS = "pipe"


class Place(NamedTuple):
    """The work of a rank in a tick: microbatch, number of the rank's stage, and whether the rank is busy."""

    microbatch: jax.Array
    stage: jax.Array
    busy: jax.Array


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The assignment of microbatches and stages to ticks and ranks.

    Attributes:
      pipe: ranks P.
      virtual: stages V of each rank.
      microbatches: microbatches m of a step.

    Raises:
      InputError: a number is below 1, or `microbatches` is no multiple of `pipe`.

    Example:
      >>> from models.pipeline import Schedule
      >>> Schedule(pipe=4, virtual=2, microbatches=8).bubble
      0.1875
    """

    pipe: int
    virtual: int
    microbatches: int

    def __post_init__(self):
        if self.virtual < 1:
            raise InputError(f"--virtual is at least 1, got {self.virtual}.")
        if self.microbatches < 1 or self.microbatches % self.pipe:
            raise InputError(
                f"a pipeline of {self.pipe} ranks takes a multiple of {self.pipe} microbatches a step, got "
                f"{self.microbatches}. Change --accum."
            )

    @property
    def ticks(self) -> int:
        return self.microbatches * self.virtual + self.pipe - 1

    @property
    def bubble(self) -> float:
        """Idle ticks of a rank per busy tick: (P - 1) / (V m)."""
        return (self.pipe - 1) / (self.virtual * self.microbatches)

    def at(self, tick: jax.Array, rank: jax.Array) -> Place:
        """Computes the work of a rank in a tick."""
        position = tick - rank
        busy = (position >= 0) & (position < self.microbatches * self.virtual)
        position = jnp.clip(position, 0, self.microbatches * self.virtual - 1)
        group, within = position // (self.pipe * self.virtual), position % (self.pipe * self.virtual)
        return Place(group * self.pipe + within % self.pipe, within // self.pipe, busy)

    def select_finished(self, ticks: jax.Array) -> jax.Array:
        """Selects the finished microbatches (m, ...) from the last rank's results by tick (ticks, ...)."""
        made = ticks[self.pipe - 1 :].reshape(-1, self.virtual, self.pipe, *ticks.shape[1:])
        return made[:, -1].reshape(self.microbatches, *ticks.shape[1:])


class _Sums(NamedTuple):
    """A rank's share of its routers' stats, summed over a step."""

    aux: jax.Array
    z: jax.Array
    overflow: jax.Array


def pipelined_loss(
    model: LM, stages: list[Any], tokens_ABL: jax.Array, schedule: Schedule, whole: Whole
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Computes a rank's share of the mean loss of m microbatches, in the body of a `jax.shard_map`.

    Args:
      model: model with whole parameters outside the layers; of the layers only their kind is used.
      stages: parameters of the K layers of this rank's stages, with the leading axes (V, 1).
      tokens_ABL: (m, B, S + 1) integers: this device's sequences of each microbatch.
      schedule: schedule of the m microbatches.
      whole: maps a layer's slice of the stack to the layer's parameters.

    Returns:
      The shares of the loss and of `models.loss_fn`'s scalar metrics; the sum over all ranks is the mean.
    """
    config, share = model.config, schedule.microbatches // schedule.pipe
    check_sequences(config, tokens_ABL[0])
    rank = lax.axis_index(_AXIS)
    own_ABL = lax.dynamic_slice_in_dim(tokens_ABL, rank * share, share)
    embedded = model.embed(own_ABL[:, :, :-1].reshape(-1, own_ABL.shape[2] - 1))
    embedded = lax.all_gather(embedded.reshape(*own_ABL.shape[:2], *embedded.shape[1:]), _AXIS, tiled=True)
    made, sums = _ticks(model, stages, embedded, schedule, whole)
    finished = schedule.select_finished(made)
    # The last rank scatters its results to all ranks; the other ranks add zeros.
    finished = jnp.where(rank == schedule.pipe - 1, finished, jnp.zeros_like(finished))
    finished = lax.psum_scatter(finished, _AXIS, tiled=True)

    def one(total, microbatch):
        ce, mtp, stats = head_losses(model, *microbatch)
        found = [ce, mtp, *((stats.aux, stats.z, stats.overflow.astype(jnp.float32)) if stats else (0, 0, 0))]
        return total + jnp.stack([jnp.asarray(x, jnp.float32) for x in found]), None

    heads, _ = lax.scan(one, jnp.zeros(5, jnp.float32), (finished, own_ABL))
    m, layers = schedule.microbatches, max(config.num_moe_layers + config.mtp_layers, 1)
    metrics = {
        "ce": heads[0] / m,
        "mtp": heads[1] / m,
        "aux": (sums.aux + heads[2]) / (m * layers),
        "z": (sums.z + heads[3]) / (m * layers),
        "overflow": (sums.overflow + heads[4]) / m,
    }
    return total_loss(config, metrics), metrics


def _ticks(
    model: LM, stages: list[Any], embedded_ABSD: jax.Array, schedule: Schedule, whole: Whole
) -> tuple[jax.Array, _Sums]:
    """Runs the layers. Returns this rank's results of all ticks, (ticks, B, S, D), and its routers' sums."""
    stack = model.dense if model.experts is None else model.experts
    assert stack is not None  # a model has layers
    graph, params = nnx.split(stack)
    rank = lax.axis_index(_AXIS)
    ring = [(r, (r + 1) % schedule.pipe) for r in range(schedule.pipe)]

    def layer_of(layer, stage):
        taken = [lax.dynamic_index_in_dim(w[:, 0], stage, keepdims=False) for w in jax.tree.leaves(layer)]
        return nnx.merge(graph, whole(jax.tree.unflatten(jax.tree.structure(params), taken)))

    def tick(x_BSD, t):
        at = schedule.at(t, rank)
        enters = at.busy & (at.stage == 0) & (rank == 0)
        first = lax.dynamic_index_in_dim(embedded_ABSD, at.microbatch, keepdims=False)
        x_BSD = jnp.where(enters, first, x_BSD)
        sums = jnp.zeros(3, jnp.float32)
        for layer in stages:
            x_BSD, stats = layer_of(layer, at.stage)(x_BSD)
            if stats is not None:
                said = jnp.stack([stats.aux, stats.z, stats.overflow.astype(jnp.float32)])
                sums += jnp.where(at.busy, said, 0.0)
        return lax.ppermute(x_BSD, _AXIS, ring), (x_BSD, sums)

    ticks = jnp.arange(schedule.ticks, dtype=jnp.int32)
    _, (made, sums) = scan_under(model.policy, tick, jnp.zeros_like(embedded_ABSD[0]), ticks)
    return made, _Sums(*jnp.sum(sums, axis=0))
