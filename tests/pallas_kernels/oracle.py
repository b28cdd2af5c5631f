"""The grouped MLP as a loop over experts in float64, arguments to try it on, and the measure of an error."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np


class Arguments(NamedTuple):
    """What the op takes besides group sizes, and an output gradient."""

    x: Any  # (R, H)
    w1: Any  # (E, H, I)
    w2: Any  # (E, I, H)
    probs: Any  # (R,)
    b1: Any  # (E, I)
    b2: Any  # (E, H)
    dy: Any  # (R, H)


class Results(NamedTuple):
    """The output and the gradients of `Arguments`, in their order."""

    y: Any
    dx: Any
    dw1: Any
    dw2: Any
    dprobs: Any
    db1: Any
    db2: Any


def make(group_sizes, rows, dtype, *, width=16, hidden=24, seed=0) -> Arguments:
    """Draws arguments; rows past the last group are NaN. Probs and biases are float32."""
    rng, experts = np.random.default_rng(seed), len(group_sizes)

    def draw(*shape):
        return 0.5 * rng.normal(size=shape)

    past = np.arange(rows) >= sum(group_sizes)
    x, dy, probs = draw(rows, width), draw(rows, width), rng.random(rows)
    x[past], dy[past], probs[past] = np.nan, np.nan, np.nan
    scale = min(1.0, 8 * width**-0.5)  # a second product stays within float16
    w1, w2 = scale * draw(experts, width, hidden), scale * draw(experts, hidden, width)
    b1, b2 = draw(experts, hidden), draw(experts, width)
    probs, b1, b2 = (jnp.asarray(value, jnp.float32) for value in (probs, b1, b2))
    x, w1, w2, dy = (jnp.asarray(value, dtype) for value in (x, w1, w2, dy))
    return Arguments(x, w1, w2, probs, b1, b2, dy)


def dense(group_sizes, arguments: Arguments) -> Results:
    """The output and all gradients, one expert at a time, in float64. Biases and probs may be None."""
    x, w1, w2, p, b1, b2, dy = (None if a is None else np.asarray(a, np.float64) for a in arguments)
    experts, width, hidden = w1.shape
    p = np.ones(len(x)) if p is None else p
    b1 = np.zeros((experts, hidden)) if b1 is None else b1
    b2 = np.zeros((experts, width)) if b2 is None else b2
    out = Results(*map(np.zeros_like, (x, x, w1, w2, p, b1, b2)))
    stops = np.minimum(np.cumsum(group_sizes), len(x))
    for e, (first, stop) in enumerate(zip([0, *stops[:-1]], stops, strict=True)):
        rows = slice(first, stop)
        q = p[rows, None]
        relu = np.maximum(x[rows] @ w1[e] + b1[e], 0)
        a, da = relu**2, dy[rows] @ w2[e].T
        out.y[rows] = q * (a @ w2[e] + b2[e])
        dz = 2 * q * da * relu
        out.dprobs[rows] = (dy[rows] * (a @ w2[e] + b2[e])).sum(1)
        out.dx[rows], out.dw1[e], out.dw2[e] = dz @ w1[e].T, x[rows].T @ dz, (q * a).T @ dy[rows]
        out.db1[e], out.db2[e] = dz.sum(0), (q * dy[rows]).sum(0)
    return out


def float64(value) -> np.ndarray:
    return np.asarray(value, np.float64)


def norm_error(got, want) -> float:
    """The error's norm over that of the wanted value; NaN where something is NaN."""
    difference, size = np.linalg.norm(float64(got) - want), np.linalg.norm(want)
    return float(difference) if size == 0 else float(difference / size)


def largest_error(got, want) -> float:
    """The largest error of an element, over its own size and the root mean square of all."""
    if not want.size:
        return 0.0
    size = np.abs(want) + np.sqrt(np.mean(np.square(want)))
    return float(np.max(np.abs(float64(got) - want) / np.where(size == 0, 1.0, size)))
