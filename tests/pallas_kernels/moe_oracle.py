"""The MoE layer as a loop over experts in float64, arguments to try it on, and its output with gradients."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import moe
from tests.pallas_kernels.oracle import float64


class Arguments(NamedTuple):
    """What the layer takes, and an output gradient."""

    x: Any  # (T, H)
    probs: Any  # (T, k)
    experts: Any  # (T, k)
    w1: Any  # (E, H, F)
    w2: Any  # (E, I, H)
    b1: Any  # (E, F)
    b2: Any  # (E, H)
    dy: Any  # (T, H)


class Results(NamedTuple):
    """The output and the gradients of `Arguments`, in their order."""

    y: Any
    dx: Any
    dprobs: Any
    dw1: Any
    dw2: Any
    db1: Any
    db2: Any


def make(
    activation,
    *,
    tokens,
    top_k,
    experts,
    width=16,
    hidden=24,
    dtype=jnp.bfloat16,
    biased=False,
    chosen=None,
    seed=0,
) -> Arguments:
    """Draws arguments. The first expert gets the most tokens, the last none; a token may choose one twice."""
    rng = np.random.default_rng(seed)
    columns = hidden if activation == "squared_relu" else 2 * hidden

    def draw(*shape, scale=0.5):
        return scale * rng.normal(size=shape)

    if chosen is None:
        share = 1 / np.arange(1, experts + 1)
        share[-1] *= experts == 1
        chosen = rng.choice(experts, size=(tokens, top_k), p=share / share.sum())
    fan = min(0.5, 4 * width**-0.5)
    narrow = draw(tokens, width), draw(experts, width, columns, scale=fan)
    narrow += draw(experts, hidden, width, scale=min(0.5, 4 * hidden**-0.5)), draw(tokens, width)
    x, w1, w2, dy = (jnp.asarray(value, dtype) for value in narrow)
    b1, b2 = (jnp.asarray(draw(experts, n), jnp.float32) if biased else None for n in (columns, width))
    probs = jnp.asarray(rng.random((tokens, top_k)), jnp.float32)
    return Arguments(x, probs, jnp.asarray(chosen, jnp.int32), w1, w2, b1, b2, dy)


def output_and_gradients(implementation, activation, *given) -> Results:
    """The layer's output, and its gradients for `dy`."""
    x, probs, experts, w1, w2, b1, b2, dy = given

    def apply(x, probs, w1, w2, b1, b2):
        more = dict(b1=b1, b2=b2, activation=activation, implementation=implementation)
        return moe(x, probs, experts, w1, w2, **more)

    y, pullback = jax.vjp(apply, x, probs, w1, w2, b1, b2)
    return Results(y, *pullback(dy))


def _gate(activation, g):
    """`f(g)` of a gated activation, and its derivative."""
    if activation == "swiglu":
        s = 1 / (1 + np.exp(-g))
        return g * s, s * (1 + g * (1 - s))
    if activation == "geglu":
        c = np.sqrt(2 / np.pi)
        t = np.tanh(c * (g + 0.044715 * g**3))
        return 0.5 * g * (1 + t), 0.5 * (1 + t) + 0.5 * g * (1 - t**2) * c * (1 + 3 * 0.044715 * g**2)
    return np.maximum(g, 0) ** 2, 2 * np.maximum(g, 0)


def dense(activation, arguments: Arguments) -> Results:
    """The output and all gradients, one expert and choice at a time, in float64."""
    x, probs, chosen, w1, w2, b1, b2, dy = (None if a is None else np.asarray(a) for a in arguments)
    x, probs, w1, w2, dy = map(float64, (x, probs, w1, w2, dy))
    experts, _, columns = w1.shape
    c1 = np.zeros((experts, columns)) if b1 is None else float64(b1)
    c2 = np.zeros((experts, x.shape[1])) if b2 is None else float64(b2)
    out = Results(*map(np.zeros_like, (x, x, probs, w1, w2, c1, c2)))
    for e in range(experts):
        for j in range(chosen.shape[1]):
            rows = np.flatnonzero(chosen[:, j] == e)
            p, z = probs[rows, j, None], x[rows] @ w1[e] + c1[e]
            if activation == "squared_relu":
                a, slopes = np.maximum(z, 0) ** 2, [2 * np.maximum(z, 0)]
            else:
                g, u = np.split(z, 2, axis=1)
                value, slope = _gate(activation, g)
                a, slopes = value * u, [slope * u, value]
            y = a @ w2[e] + c2[e]
            out.y[rows] += p * y
            out.dprobs[rows, j] = (dy[rows] * y).sum(1)
            da = p * (dy[rows] @ w2[e].T)
            dz = np.concatenate([da * slope for slope in slopes], axis=1)
            out.dx[rows] += dz @ w1[e].T
            out.dw1[e] += x[rows].T @ dz
            out.dw2[e] += (p * a).T @ dy[rows]
            out.db1[e] += dz.sum(0)
            out.db2[e] += (p * dy[rows]).sum(0)
    return out
