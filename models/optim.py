"""The optimizer: AdamW with warm-up, cosine decay and clipping, and gradients averaged over microbatches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

# Leaves that shift or scale a feature, known by name: in stacked layers they have an axis more.
_NOT_DECAYED = frozenset({"scale", "bias", "b1", "b2"})


def schedule(lr: float, warmup: int, steps: int) -> optax.Schedule:
    """Makes the schedule of the learning rate over steps i, counted from 0.

    `lr (i + 1) / (warmup + 1)` for i < warmup, then `lr (0.1 + 0.9 (1 + cos(pi t)) / 2)` with `t = (i -
    warmup) / (steps - warmup)`.

    Args:
      lr: peak, reached at step `warmup`.
      warmup: steps before the peak, 0 for none.
      steps: steps of the whole run; greater than `warmup`.

    Returns:
      A function of the step.

    Example:
      >>> from models import optim
      >>> rate = optim.schedule(1.0, warmup=3, steps=103)
      >>> [round(float(rate(i)), 3) for i in (0, 1, 3, 53, 103)]
      [0.25, 0.5, 1.0, 0.55, 0.1]
    """
    return optax.warmup_cosine_decay_schedule(lr / (warmup + 1), lr, warmup, steps, 0.1 * lr)


def select_decayed(params: Any) -> Any:
    """Selects the leaves with weight decay, as a pytree of bools: all but scales, biases and vectors."""

    def of(path: tuple[Any, ...], leaf: Any) -> bool:
        names = {str(getattr(key, "key", getattr(key, "name", key))) for key in path}
        return leaf.ndim > 1 and not names & _NOT_DECAYED

    return jax.tree_util.tree_map_with_path(of, params)


def adamw(rate: optax.Schedule, *, weight_decay: float, clip: float) -> optax.GradientTransformation:
    """Clips by the global norm, then AdamW with moments 0.9 and 0.95, its decay masked by `select_decayed`.

    References:
      Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019.
    """
    return optax.chain(
        optax.clip_by_global_norm(clip),
        optax.adamw(rate, b1=0.9, b2=0.95, eps=1e-8, weight_decay=weight_decay, mask=select_decayed),
    )


def mean_grads(
    loss: Callable[..., tuple[jax.Array, dict[str, jax.Array]]], params: Any, tokens_ABL: jax.Array
) -> tuple[Any, dict]:
    """Averages metrics and gradients over microbatches, in float32, a single microbatch in memory at a time.

    `g = 1/A sum_a grad loss(params, tokens[a])`

    Args:
      loss: maps (params, tokens (B, L)) to (scalar, dict of arrays).
      params: a pytree.
      tokens_ABL: (A, B, L) integers.

    Returns:
      (gradients in float32, shaped as params; the metrics' means, including "loss").
    """

    def one(tokens_BL: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
        (value, metrics), grads = jax.value_and_grad(loss, has_aux=True)(params, tokens_BL)
        return grads, metrics | {"loss": value}

    def add(total: Any, tokens_BL: jax.Array) -> tuple[Any, None]:
        return jax.tree.map(lambda t, x: t + x.astype(jnp.float32), total, one(tokens_BL)), None

    count = tokens_ABL.shape[0]
    if count == 1:  # no second copy of the gradients
        return jax.tree.map(lambda x: x.astype(jnp.float32), one(tokens_ABL[0]))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), jax.eval_shape(one, tokens_ABL[0]))
    total, _ = jax.lax.scan(add, zeros, tokens_ABL)
    return jax.tree.map(lambda x: x / count, total)
