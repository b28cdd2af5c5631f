"""The interface of an implementation of the grouped MLP: two forward products and one backward pass.

Shapes: R rows (one a routed token), H model width, I expert width, E experts.
"""

from typing import Any, NamedTuple, Protocol

import jax

_Optional = jax.Array | None


class Weights(NamedTuple):
    """The experts' weights, in the dtype of the products, and their biases in float32."""

    w1: jax.Array  # (E, H, I)
    w2: jax.Array  # (E, I, H)
    b1: _Optional  # (E, I)
    b2: _Optional  # (E, H)


class Grads(NamedTuple):
    """The gradients of one call. The gradient of an absent argument is None."""

    x: jax.Array  # (R, H)
    w1: jax.Array  # (E, H, I)
    w2: jax.Array  # (E, I, H)
    b1: _Optional  # (E, I) float32
    b2: _Optional  # (E, H) float32
    probs: _Optional  # (R,) float32


class Backend(Protocol):
    """An implementation of the grouped MLP."""

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
        """Returns the gradients of `fc2(fc1(x))`.

        Args:
          x: (R, H) input rows, saved by the forward pass.
          a: (R, I) activations, saved or recomputed.
          w: the weights.
          probs: (R,) row scales or None.
          group_sizes: (E,) int32.
          dy: (R, H) gradient of the output.
          accumulators: float32 (E, H, I) and (E, I, H) arrays, to which the weight gradients are added, or
            None.
          grad_dtype: dtype of the weight gradients.
        """
        ...
