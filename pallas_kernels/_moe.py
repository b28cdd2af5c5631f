"""The public function `moe`: checks the arguments and picks an implementation.

Shapes: T tokens, k experts a token, H model width, I expert width, E experts.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import _checks, _op
from pallas_kernels._activation import ACTIVATIONS, SQUARED_RELU
from pallas_kernels._implementation import IMPLEMENTATIONS, choose_implementation, require_mosaic


def moe(
    x: jax.Array,
    probs: jax.Array,
    experts: jax.Array,
    w1: jax.Array,
    w2: jax.Array,
    *,
    b1: jax.Array | None = None,
    b2: jax.Array | None = None,
    activation: str = SQUARED_RELU.name,
    grad_dtype: DTypeLike | None = None,
    grad_accumulators: tuple[jax.Array, jax.Array] | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Applies a mixture-of-experts layer after its router: sort, gather, experts, weighted sum.

    For token t: `out_t = sum_j p_tj y_e(x_t)`, with e = experts_tj and expert e's MLP
    `y_e(x) = f(x W1[e] + b1[e]) W2[e] + b2[e]`: f(z) = relu(z)^2, or f(z) = act(g) u of a gated activation
    with z = (g, u). Products and sums accumulate in float32; a row is rounded once before the sum over j.

    The gradient is hand-written. Its only wide residuals are x, once a token, and the experts' activation:
    a, (T k, I), for the squared ReLU, else z, (T k, 2 I). In 16 bits a token keeps 2 H + 2 k I bytes, or
    2 H + 4 k I, whatever the number of experts. A checkpoint policy places both by name: `moe.in` and
    `moe.act`. The backward pass gathers the rows of x again. Every sum has a fixed order: equal inputs give
    equal bits.

    Args:
      x: (T, H) bfloat16, float16 or float32, tokens.
      probs: (T, k) x's dtype or float32, weight of each chosen expert. The gradient is computed in float32.
      experts: (T, k) of a 32-bit or narrower integer, each in 0 to E - 1, on the device. An expert may have
        any number of tokens, and a token may choose an expert more than once. Concrete indices are checked,
        which outside of `jax.jit` waits for the device. Traced indices are not.
      w1: (E, H, I), x's dtype or float32; (E, H, 2 I) for a gated activation, the I columns of g first.
        Float32 weights are rounded to x's dtype for the products.
      w2: (E, I, H), w1's dtype.
      b1: (E, I), or (E, 2 I) for a gated activation, x's dtype or float32, or None.
      b2: (E, H) x's dtype or float32, or None.
      activation: as in `pallas_kernels.grouped_mlp`.
      grad_dtype: as in `pallas_kernels.grouped_mlp`.
      grad_accumulators: as in `pallas_kernels.grouped_mlp`.
      implementation: "mosaic" (fused kernels for Hopper GPUs), "reference" (XLA operations, every platform),
        or None for the choice of `pallas_kernels.choose_implementation`.

    Returns:
      (T, H), x's dtype.

    Raises:
      TypeError: a dtype is outside of the choices above.
      ValueError: a shape does not fit, an index of an expert is out of range, or a name is unknown.
      NotImplementedError: `implementation="mosaic"` does not support the case; the message says why.

    Example:
      >>> import jax.numpy as jnp, pallas_kernels
      >>> x, probs = jnp.ones((3, 4)), jnp.array([[0.5, 0.5], [1.0, 0.0], [0.25, 0.5]])
      >>> experts = jnp.array([[0, 1], [1, 0], [1, 1]])
      >>> w1, w2 = jnp.ones((2, 4, 8)), jnp.ones((2, 8, 4))
      >>> pallas_kernels.moe(x, probs, experts, w1, w2)[:, 0]
      Array([128., 128.,  96.], dtype=float32)

    References:
      Guo et al., SonicMoE: Accelerating MoE with IO and Tile-aware Optimizations, 2025 (the residuals).
      Shazeer, GLU Variants Improve Transformer, 2020 (gated activations).
    """
    values = {"x": x, "w1": w1, "w2": w2, "probs": probs, "experts": experts, "b1": b1, "b2": b2}
    _checks.check_name("moe", "implementation", implementation, IMPLEMENTATIONS, optional=True)
    _checks.check_name("moe", "activation", activation, tuple(ACTIVATIONS))
    axes = {"x": "TH", "probs": "Tk", "experts": "Tk"}
    _checks.check_shapes("moe", values, axes, activation, grad_accumulators)
    _checks.check_dtypes("moe", values, "experts", x, w1, w2, grad_accumulators)
    grad_dtype = _checks.check_grad_dtype("moe", grad_dtype, x, w1, grad_accumulators)
    _checks.check_experts("moe", experts, w1.shape[0])
    if implementation == "mosaic":
        require_mosaic("moe", x, w1, activation)
    name = implementation or choose_implementation(x, w1, activation).name
    static = _op.StaticOptions(name, grad_dtype, activation)
    return _op.moe(static, x, probs, jnp.asarray(experts), w1, w2, b1, b2, grad_accumulators)
