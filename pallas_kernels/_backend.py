"""What an implementation of the grouped MLP provides.

Shapes: R rows (one a routed token), H model width, I expert width, E experts.
"""

from typing import Any, NamedTuple, Protocol

import jax

_Optional = jax.Array | None


class Weights(NamedTuple):
    """What an expert is made of, in the dtype of the products; the biases are float32."""

    w1: jax.Array  # (E, H, I)
    w2: jax.Array  # (E, I, H)
    b1: _Optional  # (E, I)
    b2: _Optional  # (E, H)


class Grads(NamedTuple):
    """The gradients of one call; those of arguments that were not given are None."""

    x: jax.Array  # (R, H)
    w1: jax.Array  # (E, H, I)
    w2: jax.Array  # (E, I, H)
    b1: _Optional  # (E, I) float32
    b2: _Optional  # (E, H) float32
    probs: _Optional  # (R,) float32


class Backend(Protocol):
    """What an implementation provides."""

    def fc1(self, x: jax.Array, w: Weights, group_sizes: jax.Array) -> jax.Array:
        """`a = relu(x W1 + b1)^2`, (R, I); rows past the last group are zero."""
        ...

    def fc2(self, a: jax.Array, w: Weights, probs: _Optional, group_sizes: jax.Array) -> jax.Array:
        """`y = p (a W2 + b2)`, (R, H); rows past the last group are zero."""
        ...

    def backward(
        self,
        x: jax.Array,
        a: jax.Array,
        w: Weights,
        probs: _Optional,
        group_sizes: jax.Array,
        dy: jax.Array,
        accumulators: tuple[jax.Array, jax.Array] | None,
        *,
        grad_dtype: Any,
    ) -> Grads:
        """The gradients of fc2 after fc1, where x and a are known; those of the weights in `grad_dtype`.

        With accumulators the gradients of the weights are added to them, in float32.
        """
        ...
