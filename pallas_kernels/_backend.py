"""The interface of an implementation of the experts: two forward products, one backward pass, a sum of rows.

Shapes: T tokens, k experts a token, R rows (one a routed token), H model width, I expert width, E experts,
F columns of FC1 (I, or 2 I for a gated activation).
"""

from typing import Any, NamedTuple, Protocol

import jax

from pallas_kernels._activation import Activation

_Optional = jax.Array | None


class Weights(NamedTuple):
    """The experts' weights, in the dtype of the products, and their biases in float32."""

    w1: jax.Array  # (E, H, F)
    w2: jax.Array  # (E, I, H)
    b1: _Optional  # (E, F)
    b2: _Optional  # (E, H)


class Hidden(NamedTuple):
    """The values between the two products.

    Attributes:
      saved: the residual. It is a, (R, I), for the squared ReLU, else z, (R, 2 I); None where not asked for.
      a: (R, I), the activation.
    """

    saved: _Optional
    a: jax.Array


class Grads(NamedTuple):
    """The gradients of one call. The gradient of an absent argument is None."""

    x: jax.Array  # (R, H)
    w1: jax.Array  # (E, H, F)
    w2: jax.Array  # (E, I, H)
    b1: _Optional  # (E, F) float32
    b2: _Optional  # (E, H) float32
    probs: _Optional  # (R,) float32


class Backend(Protocol):
    """An implementation of the experts."""

    def fc1(
        self,
        x: jax.Array,
        w: Weights,
        group_sizes: jax.Array,
        activation: Activation,
        index: _Optional = None,
        *,
        save: bool,
    ) -> Hidden:
        """Computes `z = x W1 + b1` and `a = f(z)`; rows past the last group are zero.

        A gated activation is computed from z rounded to x's dtype. With `save` the result has the residual.
        With an index (R,), x is (T, H) and the rows are x[index].
        """
        ...

    def fc2(self, a: jax.Array, w: Weights, probs: _Optional, group_sizes: jax.Array) -> jax.Array:
        """`y = p (a W2 + b2)`, (R, H); rows past the last group are zero."""
        ...

    def backward(
        self,
        x: jax.Array,
        saved: jax.Array,
        w: Weights,
        probs: _Optional,
        group_sizes: jax.Array,
        dy: jax.Array,
        accumulators: tuple[jax.Array, jax.Array] | None,
        activation: Activation,
        index: _Optional = None,
        *,
        grad_dtype: Any,
    ) -> Grads:
        """Returns the gradients of `fc2(fc1(x))`.

        Args:
          x: (R, H) input rows, or (T, H) with an index.
          saved: `Hidden.saved`, saved or recomputed.
          w: the weights.
          probs: (R,) row scales or None.
          group_sizes: (E,) int32.
          dy: (R, H) gradient of the output, or (T, H) with an index.
          accumulators: float32 arrays like w1 and w2, to which the weight gradients are added, or None.
          activation: the activation.
          index: (R,) int32: the rows are x[index] and dy[index]. `Grads.x` is (R, H) all the same.
          grad_dtype: dtype of the weight gradients.
        """
        ...

    def sum_rows(self, rows: jax.Array, index: jax.Array) -> jax.Array:
        """`sum_j rows[index[t, j]]` in float32: rows of (R, H) by (T, k) int32, as (T, H)."""
        ...
