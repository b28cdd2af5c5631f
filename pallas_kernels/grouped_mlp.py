"""The grouped MLP's public function: checks its arguments and picks an implementation."""

import difflib

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from pallas_kernels.reference import grouped_mlp_reference

_IMPLEMENTATIONS = ("reference", "mosaic")
_DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))


def grouped_mlp(
    x: jax.Array,
    w1: jax.Array,
    w2: jax.Array,
    group_sizes: jax.Array,
    *,
    probs: jax.Array | None = None,
    b1: jax.Array | None = None,
    b2: jax.Array | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Applies to each group of rows the squared-ReLU MLP of its own expert.

    For a row of expert e: `z = x W1[e] + b1[e] ; a = relu(z)^2 ; y = p * (a W2[e] + b2[e])`. Sums are in
    float32.

    The gradient is hand-written. It needs x and a and nothing else of that size:
    `dA = dy W2^T ; dp = sum_I dA a + sum_H dy b2 ; dz = 2 p dA sqrt(a) ; dW2 = (p a)^T dy ; dx = dz W1^T ;
    dW1 = x^T dz ; db1 = sum dz ; db2 = sum p dy`. A checkpoint policy places the two by their names,
    `moe.dispatched` (x) and `moe.act` (a). Every sum has a fixed order: equal inputs give equal bits.

    Args:
      x: (R, H) bfloat16 or float32, rows sorted by expert. Rows past `sum(group_sizes)` belong to no expert:
        they may hold anything, NaN too, and their output and their gradients are zero.
      w1: (E, H, I), x's dtype.
      w2: (E, I, H), x's dtype.
      group_sizes: (E,) of a 32-bit or narrower integer, rows of each expert, on the device. Zero is allowed.
        Checked where the values are known, which outside of `jax.jit` waits for them.
      probs: (R,) x's dtype or float32, what each row's output is multiplied by; None is one. The gradient is
        computed in float32.
      b1: (E, I) x's dtype or float32, or None.
      b2: (E, H) x's dtype or float32, or None.
      implementation: "reference" (XLA operations, every platform), or None for the best there is.

    Returns:
      (R, H), x's dtype.

    Raises:
      TypeError: a dtype is not one of those above.
      ValueError: a shape does not fit, group sizes are negative or need more than R rows, or the
        implementation is unknown.
      NotImplementedError: `implementation="mosaic"`, the fused GPU kernel, which this version does not have.

    Example:
      >>> import jax.numpy as jnp, pallas_kernels
      >>> x = jnp.ones((5, 4))
      >>> w1, w2 = jnp.ones((2, 4, 8)), jnp.ones((2, 8, 4))
      >>> pallas_kernels.grouped_mlp(x, w1, w2, jnp.array([3, 1]))[:, 0]
      Array([128., 128., 128., 128.,   0.], dtype=float32)

    References:
      Gale et al., MegaBlocks: Efficient Sparse Training with Mixture-of-Experts, 2022. So et al., Primer,
      2021 (squared ReLU).
    """
    _check_implementation(implementation)
    _check_shapes(x, w1, w2, group_sizes, probs, b1, b2)
    _check_dtypes(x, w1, w2, group_sizes, probs, b1, b2)
    _check_sizes(group_sizes, x.shape[0])
    return grouped_mlp_reference(x, w1, w2, jnp.asarray(group_sizes), probs, b1, b2)


def _check_implementation(implementation: str | None) -> None:
    if implementation == "mosaic":
        raise NotImplementedError(
            'grouped_mlp: implementation="mosaic" asks for the fused GPU kernel, which this version does not '
            'have; pass "reference" or None'
        )
    if implementation is not None and implementation not in _IMPLEMENTATIONS:
        near = difflib.get_close_matches(str(implementation), _IMPLEMENTATIONS, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"grouped_mlp: unknown implementation {implementation!r}; "
            f"choose None, 'reference' or 'mosaic'{hint}"
        )


def _check_shapes(x, w1, w2, group_sizes, probs, b1, b2) -> None:
    got = {"x": x, "w1": w1, "w2": w2, "group_sizes": group_sizes, "probs": probs, "b1": b1, "b2": b2}
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


def _check_dtypes(x, w1, w2, group_sizes, probs, b1, b2) -> None:
    def dtype(value):
        return jnp.result_type(value)

    if dtype(x) not in _DTYPES:
        # relu(z)^2 leaves float16's range from z = 256 on, and sqrt(a) could not give relu(z) back.
        raise TypeError(f"grouped_mlp: x must be bfloat16 or float32, got {dtype(x)}")
    for name, value in {"w1": w1, "w2": w2}.items():
        if dtype(value) != dtype(x):
            raise TypeError(
                f"grouped_mlp: {name} must have x's dtype {dtype(x)}, got {dtype(value)}; "
                f"cast it: {name}.astype(x.dtype)"
            )
    for name, value in {"probs": probs, "b1": b1, "b2": b2}.items():
        if value is not None and dtype(value) not in (dtype(x), jnp.dtype(jnp.float32)):
            raise TypeError(
                f"grouped_mlp: {name} must be float32 or x's dtype {dtype(x)}, got {dtype(value)}"
            )
    if not jnp.issubdtype(dtype(group_sizes), jnp.integer):
        raise TypeError(
            f"grouped_mlp: group_sizes must be integers, got {dtype(group_sizes)}; use .astype(jnp.int32)"
        )


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
