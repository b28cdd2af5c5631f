"""Steps with layers in a list, within a loop or a condition."""

import functools

import jax
import jax.numpy as jnp
from jax import lax


def step_of_list(block, w, x):
    """Weights updated by the gradient of layers one after the other."""

    def loss(w):
        return functools.reduce(lambda x, w: block(x, w), w, x).astype(jnp.float32).mean()

    return jax.tree.map(lambda w, g: w - 0.1 * g, w, jax.grad(loss)(w))


def _while(step, w, x):
    return lax.while_loop(lambda s: s[1] < 3, lambda s: (step(s[0], x), s[1] + 1), (w, 0))[0]


def _cond(step, w, x):
    return lax.cond(x[0, 0] < 9, lambda: step(w, x), lambda: w)


def _scan(step, w, x):
    return lax.scan(lambda w, _: (step(w, x), None), w, None, length=3)[0]


REPEATED_STEPS = {"while": _while, "cond": _cond, "scan": _scan}
