"""The public function `grouped_mlp`: checks the arguments and picks an implementation.

Shapes: R rows (one a routed token), H model width, I expert width, E experts.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import _checks, _op
from pallas_kernels._activation import ACTIVATIONS, SQUARED_RELU
from pallas_kernels._implementation import IMPLEMENTATIONS, choose_implementation, require_mosaic


def grouped_mlp(
    x: jax.Array,
    w1: jax.Array,
    w2: jax.Array,
    group_sizes: jax.Array,
    *,
    probs: jax.Array | None = None,
    b1: jax.Array | None = None,
    b2: jax.Array | None = None,
    activation: str = SQUARED_RELU.name,
    grad_dtype: DTypeLike | None = None,
    grad_accumulators: tuple[jax.Array, jax.Array] | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Applies to each group of rows the MLP of the group's expert: squared ReLU, or a gated activation.

    For a row of expert e: `z = x W1[e] + b1[e] ; a = relu(z)^2 ; y = p * (a W2[e] + b2[e])`. For a gated
    activation `z = (g, u)` and `a = f(g) u`. Products accumulate in float32.

    The gradient is hand-written. Its only residuals of R rows are x and a:
    `dA = dy W2^T ; dp = sum_I dA a + sum_H dy b2 ; dz = 2 p dA sqrt(a) ; dW2 = (p a)^T dy ; dx = dz W1^T ;
    dW1 = x^T dz ; db1 = sum dz ; db2 = sum p dy`. A checkpoint policy places both residuals by name:
    `moe.dispatched` (x) and `moe.act` (a, or z of a gated activation). Every sum has a fixed order: equal
    inputs give equal bits.

    Args:
      x: (R, H) bfloat16, float16 or float32, rows sorted by expert. Rows past `sum(group_sizes)` belong to no
        expert: they may hold any value, NaN included, and their outputs and gradients are zero. In float16 an
        activation past 65504, from z = 256 on, is infinite.
      w1: (E, H, I), x's dtype or float32; (E, H, 2 I) for a gated activation, the I columns of g first.
        Float32 weights are rounded to x's dtype for the products.
      w2: (E, I, H), w1's dtype.
      group_sizes: (E,) of a 32-bit or narrower integer, rows of each expert, on the device. Zero is allowed.
        Concrete sizes are checked, which outside of `jax.jit` waits for the device. Traced sizes are not.
      probs: (R,) x's dtype or float32, factor of each row's output; None is one. The gradient is computed in
        float32.
      b1: (E, I), or (E, 2 I) for a gated activation, x's dtype or float32, or None.
      b2: (E, H) x's dtype or float32, or None.
      activation: "squared_relu", or a gated activation with f the SiLU ("swiglu"), the tanh form of the GELU
        ("geglu") or the squared ReLU ("squared_reglu").
      grad_dtype: the dtype in which the products store the gradients of w1 and w2: x's dtype or float32. None
        is the weights' dtype. JAX gives a gradient the dtype of its primal, so float32 needs float32 weights.
        For float32 weights, x's dtype halves the memory traffic of the gradients.
      grad_accumulators: float32 arrays like w1 and w2, to which the gradients of w1 and w2 are added
        in float32. The sums are returned as the gradients *of the accumulators*, and the gradients of w1 and
        w2 are zero. y does not depend on the accumulators: see the example.
      implementation: "mosaic" (fused kernels for Hopper GPUs), "reference" (XLA operations, every platform),
        or None for the choice of `pallas_kernels.choose_implementation`.

    Returns:
      (R, H), x's dtype.

    Raises:
      TypeError: a dtype is outside of the choices above.
      ValueError: a shape does not fit, group sizes are negative or need more than R rows, or a name is
        unknown.
      NotImplementedError: `implementation="mosaic"` does not support the case; the message says why.

    Example:
      >>> import jax, jax.numpy as jnp, pallas_kernels
      >>> x = jnp.ones((5, 4))
      >>> w1, w2 = jnp.ones((2, 4, 8)), jnp.ones((2, 8, 4))
      >>> sizes = jnp.array([3, 1])
      >>> pallas_kernels.grouped_mlp(x, w1, w2, sizes)[:, 0]
      Array([128., 128., 128., 128.,   0.], dtype=float32)

      Sum the weight gradients of several calls in the accumulators' buffers:

      >>> def loss(sums, x):
      ...     return pallas_kernels.grouped_mlp(x, w1, w2, sizes, grad_accumulators=sums).sum()
      >>> sums = jnp.zeros_like(w1), jnp.zeros_like(w2)
      >>> for _ in range(2):
      ...     sums = jax.grad(loss)(sums, x)
      >>> sums[1][0, 0]
      Array([96., 96., 96., 96.], dtype=float32)

    References:
      Gale et al., MegaBlocks: Efficient Sparse Training with Mixture-of-Experts, 2022. So et al., Primer,
      2021 (squared ReLU).
    """
    values = {"x": x, "w1": w1, "w2": w2, "group_sizes": group_sizes, "probs": probs, "b1": b1, "b2": b2}
    _checks.check_name("grouped_mlp", "implementation", implementation, IMPLEMENTATIONS, optional=True)
    _checks.check_name("grouped_mlp", "activation", activation, tuple(ACTIVATIONS))
    axes = {"x": "RH", "group_sizes": "E", "probs": "R"}
    _checks.check_shapes("grouped_mlp", values, axes, activation, grad_accumulators)
    _checks.check_dtypes("grouped_mlp", values, "group_sizes", x, w1, w2, grad_accumulators)
    grad_dtype = _checks.check_grad_dtype("grouped_mlp", grad_dtype, x, w1, grad_accumulators)
    _checks.check_group_sizes("grouped_mlp", group_sizes, x.shape[0])
    if implementation == "mosaic":
        require_mosaic("grouped_mlp", x, w1, activation)
    name = implementation or choose_implementation(x, w1, activation).name
    static = _op.StaticOptions(name, grad_dtype, activation)
    return _op.grouped_mlp(static, x, w1, w2, jnp.asarray(group_sizes), probs, b1, b2, grad_accumulators)
