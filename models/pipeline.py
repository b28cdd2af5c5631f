"""An interleaved pipeline in one SPMD program: each rank runs its own stages of every microbatch.

Stage s of V P is on rank s mod P. In a tick each rank runs one of its V stages on one microbatch and hands
the result to the next rank. Rank r is r ticks behind rank 0; it takes P microbatches through its first stage,
then the same through its second, and so on, and then the next P. What a rank hands on is then just what the
next one needs, after the last rank on the first, too: nothing waits in between.

The ticks are turns of one loop, differentiated as a whole. Its backward pass runs them the other way round,
so that residuals of all ticks are kept; on the host, with a policy that moves them. That leaves no more on
the device than one-forward-one-backward schedules do, which keep those of P microbatches there.

The embedding stands before the loop, head and loss behind it, each rank with m / P of the m microbatches: no
rank has more work than another, as it would have if the first and last held them.
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
    """What a rank works on: microbatch, number of its own stage, and whether it works at all."""

    microbatch: jax.Array
    stage: jax.Array
    busy: jax.Array


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Who does what when.

    Attributes:
      pipe: ranks P.
      virtual: stages of each, V.
      microbatches: of a step, m.

    Raises:
      InputError: for numbers below 1, or microbatches that are no multiple of the ranks.

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
        """Ticks in which a rank has nothing to do, by those in which it has: (P - 1) / (V m)."""
        return (self.pipe - 1) / (self.virtual * self.microbatches)

    def at(self, tick: jax.Array, rank: jax.Array) -> Place:
        """What a rank works on in a tick."""
        turn = tick - rank
        busy = (turn >= 0) & (turn < self.microbatches * self.virtual)
        turn = jnp.clip(turn, 0, self.microbatches * self.virtual - 1)
        group, within = turn // (self.pipe * self.virtual), turn % (self.pipe * self.virtual)
        return Place(group * self.pipe + within % self.pipe, within // self.pipe, busy)

    def finished(self, ticks: jax.Array) -> jax.Array:
        """Of what the last rank made in each tick, (ticks, ...), the finished microbatches (m, ...)."""
        made = ticks[self.pipe - 1 :].reshape(-1, self.virtual, self.pipe, *ticks.shape[1:])
        return made[:, -1].reshape(self.microbatches, *ticks.shape[1:])


class _Sums(NamedTuple):
    """A rank's share of what its layers' routers say, over a step."""

    aux: jax.Array
    z: jax.Array
    overflow: jax.Array


def pipelined_loss(
    model: LM, stages: list[Any], tokens_ABL: jax.Array, schedule: Schedule, whole: Whole
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """A rank's share of the mean loss of some microbatches, in the body of a `jax.shard_map`.

    Args:
      model: its parameters are whole, but for the layers, of which only the kind counts.
      stages: the parameters of the K layers of this rank's stages, with the leading axes (V, 1).
      tokens_ABL: (m, B, S + 1) integers: this device's sequences of each microbatch.
      schedule: of the m microbatches.
      whole: makes a layer's parameters from those in its stack.

    Returns:
      What adds up to the mean over all ranks: the loss, and `models.loss_fn`'s scalar metrics.
    """
    config, share = model.config, schedule.microbatches // schedule.pipe
    check_sequences(config, tokens_ABL[0])
    rank = lax.axis_index(_AXIS)
    own_ABL = lax.dynamic_slice_in_dim(tokens_ABL, rank * share, share)
    embedded = model.embed(own_ABL[:, :, :-1].reshape(-1, own_ABL.shape[2] - 1))
    embedded = lax.all_gather(embedded.reshape(*own_ABL.shape[:2], *embedded.shape[1:]), _AXIS, tiled=True)
    made, sums = _ticks(model, stages, embedded, schedule, whole)
    finished = schedule.finished(made)
    # From the last rank to all, a part to each: the others add zeros.
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
    """Runs the layers: what this rank made in each tick, (ticks, B, S, D), and its routers' sums."""
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
