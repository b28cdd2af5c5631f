"""The public function `grouped_mlp`: checks the arguments and picks an implementation.

Shapes: R rows (one a routed token), H model width, I expert width, E experts.
"""

import difflib

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import DTypeLike

from pallas_kernels import _op
from pallas_kernels._implementation import IMPLEMENTATIONS, choose_implementation, require_mosaic

_DTYPES = tuple(map(jnp.dtype, (jnp.bfloat16, jnp.float16, jnp.float32)))
_FLOAT32 = jnp.dtype(jnp.float32)


def grouped_mlp(
    x: jax.Array,
    w1: jax.Array,
    w2: jax.Array,
    group_sizes: jax.Array,
    *,
    probs: jax.Array | None = None,
    b1: jax.Array | None = None,
    b2: jax.Array | None = None,
    grad_dtype: DTypeLike | None = None,
    grad_accumulators: tuple[jax.Array, jax.Array] | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Applies to each group of rows the squared-ReLU MLP of the group's expert.

    For a row of expert e: `z = x W1[e] + b1[e] ; a = relu(z)^2 ; y = p * (a W2[e] + b2[e])`. Products
    accumulate in float32.

    The gradient is hand-written. Its only residuals of R rows are x and a:
    `dA = dy W2^T ; dp = sum_I dA a + sum_H dy b2 ; dz = 2 p dA sqrt(a) ; dW2 = (p a)^T dy ; dx = dz W1^T ;
    dW1 = x^T dz ; db1 = sum dz ; db2 = sum p dy`. A checkpoint policy places both residuals by name:
    `moe.dispatched` (x) and `moe.act` (a). Every sum has a fixed order: equal inputs give equal bits.

    Args:
      x: (R, H) bfloat16, float16 or float32, rows sorted by expert. Rows past `sum(group_sizes)` belong to no
        expert: they may hold any value, NaN included, and their outputs and gradients are zero. In float16 an
        activation past 65504, from z = 256 on, is infinite.
      w1: (E, H, I), x's dtype or float32. Float32 weights are rounded to x's dtype for the products.
      w2: (E, I, H), w1's dtype.
      group_sizes: (E,) of a 32-bit or narrower integer, rows of each expert, on the device. Zero is allowed.
        Concrete sizes are checked, which outside of `jax.jit` waits for the device. Traced sizes are not.
      probs: (R,) x's dtype or float32, factor of each row's output; None is one. The gradient is computed in
        float32.
      b1: (E, I) x's dtype or float32, or None.
      b2: (E, H) x's dtype or float32, or None.
      grad_dtype: the dtype in which the products store the gradients of w1 and w2: x's dtype or float32. None
        is the weights' dtype. JAX gives a gradient the dtype of its primal, so float32 needs float32 weights.
        For float32 weights, x's dtype halves the memory traffic of the gradients.
      grad_accumulators: float32 (E, H, I) and (E, I, H) arrays to which the gradients of w1 and w2 are added
        in float32. The sums are returned as the gradients *of the accumulators*, and the gradients of w1 and
        w2 are zero. y does not depend on the accumulators: see the example.
      implementation: "mosaic" (fused kernels for Hopper GPUs), "reference" (XLA operations, every platform),
        or None for the choice of `pallas_kernels.choose_implementation`.

    Returns:
      (R, H), x's dtype.

    Raises:
      TypeError: a dtype is outside of the choices above.
      ValueError: a shape does not fit, group sizes are negative or need more than R rows, or the
        implementation is unknown.
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
    _check_implementation(implementation)
    _check_shapes(x, w1, w2, group_sizes, probs, b1, b2, grad_accumulators)
    _check_dtypes(x, w1, w2, group_sizes, probs, b1, b2, grad_accumulators)
    grad_dtype = _check_grad_dtype(grad_dtype, x, w1, grad_accumulators)
    _check_sizes(group_sizes, x.shape[0])
    if implementation == "mosaic":
        require_mosaic(x, w1)
    name = implementation or choose_implementation(x, w1).name
    static = _op.StaticOptions(name, grad_dtype)
    return _op.grouped_mlp(static, x, w1, w2, jnp.asarray(group_sizes), probs, b1, b2, grad_accumulators)


def _check_implementation(implementation: str | None) -> None:
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        near = difflib.get_close_matches(str(implementation), IMPLEMENTATIONS, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"grouped_mlp: unknown implementation {implementation!r}; "
            f"choose None, 'mosaic' or 'reference'{hint}"
        )


def _check_shapes(x, w1, w2, group_sizes, probs, b1, b2, accumulators) -> None:
    got = {"x": x, "w1": w1, "w2": w2, "group_sizes": group_sizes, "probs": probs, "b1": b1, "b2": b2}
    if accumulators is not None:
        if not isinstance(accumulators, tuple) or len(accumulators) != 2:
            raise ValueError(
                "grouped_mlp: grad_accumulators must be a tuple of two arrays, for w1 and for w2, "
                f"got {accumulators!r:.80}"
            )
        got |= {"grad_accumulators[0]": accumulators[0], "grad_accumulators[1]": accumulators[1]}
    shapes = {name: tuple(jnp.shape(value)) for name, value in got.items() if value is not None}
    seen = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
    letters = {
        "x": "RH",
        "w1": "EHI",
        "w2": "EIH",
        "group_sizes": "E",
        "probs": "R",
        "b1": "EI",
        "b2": "EH",
        "grad_accumulators[0]": "EHI",
        "grad_accumulators[1]": "EIH",
    }
    sizes: dict[str, int] = {}
    for name, shape in shapes.items():
        want = f"{name} must be ({', '.join(letters[name])})"
        if len(shape) != len(letters[name]):
            raise ValueError(f"grouped_mlp: {want}, got {len(shape)} axes: {seen}")
        for letter, size in zip(letters[name], shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                raise ValueError(
                    f"grouped_mlp: {want} with {letter} = {sizes[letter]}, got {letter} = {size}: {seen}"
                )
    if sizes["E"] == 0:
        raise ValueError(f"grouped_mlp: there must be at least one expert: {seen}")


def _check_dtypes(x, w1, w2, group_sizes, probs, b1, b2, accumulators) -> None:
    def dtype(value):
        return jnp.result_type(value)

    if dtype(x) not in _DTYPES:
        raise TypeError(f"grouped_mlp: x must be bfloat16, float16 or float32, got {dtype(x)}")
    for name, value in {"w1": w1, "w2": w2, "probs": probs, "b1": b1, "b2": b2}.items():
        if value is not None and dtype(value) not in (dtype(x), _FLOAT32):
            raise TypeError(
                f"grouped_mlp: {name} must be float32 or x's dtype {dtype(x)}, got {dtype(value)}; "
                f"cast it: {name}.astype(x.dtype)"
            )
    if dtype(w2) != dtype(w1):
        raise TypeError(
            f"grouped_mlp: w2 must have w1's dtype {dtype(w1)}, got {dtype(w2)}; cast one of the two"
        )
    for value in accumulators or ():
        if dtype(value) != _FLOAT32:
            raise TypeError(f"grouped_mlp: grad_accumulators must be float32, got {dtype(value)}")
    if not jnp.issubdtype(dtype(group_sizes), jnp.integer):
        raise TypeError(
            f"grouped_mlp: group_sizes must be integers, got {dtype(group_sizes)}; use .astype(jnp.int32)"
        )


def _check_grad_dtype(grad_dtype, x, w1, accumulators) -> jnp.dtype:
    """Returns the dtype in which the weights' gradients leave the products."""
    if accumulators is not None:
        if grad_dtype is not None and jnp.dtype(grad_dtype) != _FLOAT32:
            raise TypeError(
                f"grouped_mlp: grad_accumulators are float32, so grad_dtype must be None or float32, "
                f"got {jnp.dtype(grad_dtype)}"
            )
        return _FLOAT32
    if grad_dtype is None:
        return jnp.dtype(w1.dtype)
    grad_dtype = jnp.dtype(grad_dtype)
    if grad_dtype not in (x.dtype, _FLOAT32):
        raise TypeError(f"grouped_mlp: grad_dtype must be float32 or x's dtype {x.dtype}, got {grad_dtype}")
    if grad_dtype == _FLOAT32 != w1.dtype:
        raise TypeError(
            f"grouped_mlp: grad_dtype=float32 needs float32 weights, got {w1.dtype}: JAX would round the "
            "gradient to the weights' dtype; pass float32 weights, or grad_accumulators"
        )
    return grad_dtype


def _check_sizes(group_sizes, rows: int) -> None:
    if isinstance(group_sizes, Tracer) or not getattr(group_sizes, "is_fully_addressable", True):
        return
    sizes = np.asarray(group_sizes).astype(np.int64)
    if (sizes < 0).any():
        where = int(np.argmin(sizes))
        raise ValueError(
            f"grouped_mlp: group_sizes must not be negative, got {sizes[where]} "
            f"for expert {where} of {sizes.size}"
        )
    if sizes.sum() > rows:
        raise ValueError(
            f"grouped_mlp: group_sizes must sum to at most R = {rows}, the rows of x, "
            f"got {sizes.sum()} over {sizes.size} experts"
        )
