"""The activations of the experts: squared ReLU, and gated activations `f(g) u` of two halves of FC1.

FC1 of a gated expert has 2 I columns: I of the gate g, then I of the value u.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

# sqrt(2 / pi) and the cubic term of the tanh form of GELU: Hendrycks and Gimpel, 2016.
_GELU_SCALE, _GELU_CUBE = 0.7978845608028654, 0.044715


@dataclasses.dataclass(frozen=True)
class Activation:
    """An activation and its derivative, on float32 arrays.

    Attributes:
      name: the name in the public functions.
      gate: `f` of a gated activation `f(g) u`, with its derivative: g -> (f(g), f'(g)). None for the squared
        ReLU, whose derivative `2 sqrt(a)` follows from its value.
    """

    name: str
    gate: Callable[[jax.Array], tuple[jax.Array, jax.Array]] | None = None

    @property
    def parts(self) -> int:
        """The columns of FC1 a column of the activation: 2 for a gated activation."""
        return 1 if self.gate is None else 2


def _silu(g: jax.Array) -> tuple[jax.Array, jax.Array]:
    sigmoid = 1.0 / (1.0 + jnp.exp(-g))
    return g * sigmoid, sigmoid * (1.0 + g * (1.0 - sigmoid))


def _gelu(g: jax.Array) -> tuple[jax.Array, jax.Array]:
    square = g * g
    tanh = jnp.tanh(_GELU_SCALE * g * (1.0 + _GELU_CUBE * square))
    half = 0.5 * (1.0 + tanh)
    inner = _GELU_SCALE * (1.0 + 3.0 * _GELU_CUBE * square)
    return g * half, half + 0.5 * g * (1.0 - tanh * tanh) * inner


def _squared_relu(g: jax.Array) -> tuple[jax.Array, jax.Array]:
    on = jnp.maximum(g, 0.0)
    return on * on, 2.0 * on


SQUARED_RELU = Activation("squared_relu")

# Name -> activation.
ACTIVATIONS = {
    activation.name: activation
    for activation in (
        SQUARED_RELU,
        Activation("swiglu", _silu),
        Activation("geglu", _gelu),
        Activation("squared_reglu", _squared_relu),
    )
}
