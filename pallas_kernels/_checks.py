"""Checks of the arguments of the public functions: shapes, dtypes and names, with errors that say the rule.

Each function takes the name of the public function as `op`, the first word of its messages.
"""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import DTypeLike

from pallas_kernels._activation import ACTIVATIONS

_DTYPES = tuple(map(jnp.dtype, (jnp.bfloat16, jnp.float16, jnp.float32)))
_FLOAT32 = jnp.dtype(jnp.float32)


def check_name(op: str, what: str, value: Any, names: Sequence[str], *, optional: bool = False) -> None:
    """Checks that a value is one of the names, or None where `optional`."""
    if value in names or (optional and value is None):
        return
    near = difflib.get_close_matches(str(value), names, 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    listed = ["None"] * optional + [repr(name) for name in names]
    choices = f"{', '.join(listed[:-1])} or {listed[-1]}"
    raise ValueError(f"{op}: unknown {what} {value!r}; choose {choices}{hint}")


def check_shapes(
    op: str, values: Mapping[str, Any], axes: Mapping[str, str], activation: str, accumulators: Any
) -> None:
    """Checks that equal axes have equal sizes.

    Args:
      op: the public function.
      values: name -> array or None. `b1`, `w1` and `w2` are among the names.
      axes: name -> a letter an axis, of the names that are no weights or biases.
      activation: the name of a known activation. w1 of a gated activation has 2 I columns.
      accumulators: None, or the two accumulators of the weights' gradients.
    """
    columns = "I" if ACTIVATIONS[activation].parts == 1 else "2 I"
    of_name = {name: tuple(letters) for name, letters in axes.items()}
    of_name |= {"w1": ("E", "H", columns), "w2": ("E", "I", "H"), "b1": ("E", columns), "b2": ("E", "H")}
    got = dict(values)
    if accumulators is not None:
        if not isinstance(accumulators, tuple) or len(accumulators) != 2:
            raise ValueError(
                f"{op}: grad_accumulators must be a tuple of two arrays, for w1 and for w2, "
                f"got {accumulators!r:.80}"
            )
        for index, name in enumerate(("w1", "w2")):
            got[f"grad_accumulators[{index}]"] = accumulators[index]
            of_name[f"grad_accumulators[{index}]"] = of_name[name]
    shapes = {name: tuple(jnp.shape(value)) for name, value in got.items() if value is not None}
    seen = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
    sizes: dict[str, int] = {}
    for name, shape in shapes.items():
        want = f"{name} must be ({', '.join(of_name[name])})"
        if len(shape) != len(of_name[name]):
            raise ValueError(f"{op}: {want}, got {len(shape)} axes: {seen}")
        for axis, size in zip(of_name[name], shape, strict=True):
            if sizes.setdefault(axis, size) != size:
                raise ValueError(f"{op}: {want} with {axis} = {sizes[axis]}, got {axis} = {size}: {seen}")
    if sizes["E"] == 0:
        raise ValueError(f"{op}: there must be at least one expert: {seen}")
    if sizes.get("2 I", 2 * sizes["I"]) != 2 * sizes["I"]:
        raise ValueError(
            f"{op}: w1 must be (E, H, 2 I) for the gated activation {activation!r}, "
            f"with 2 I = {2 * sizes['I']}, got 2 I = {sizes['2 I']}: {seen}"
        )


def check_dtypes(
    op: str, values: Mapping[str, Any], index: str, x: Any, w1: Any, w2: Any, accumulators: Any
) -> None:
    """Checks dtypes: of x, of the array of integers named `index`, and of the other values."""

    def dtype(value):
        return jnp.result_type(value)

    if dtype(x) not in _DTYPES:
        raise TypeError(f"{op}: x must be bfloat16, float16 or float32, got {dtype(x)}")
    for name, value in values.items():
        if name not in (index, "x") and value is not None and dtype(value) not in (dtype(x), _FLOAT32):
            raise TypeError(
                f"{op}: {name} must be float32 or x's dtype {dtype(x)}, got {dtype(value)}; "
                f"cast it: {name}.astype(x.dtype)"
            )
    if dtype(w2) != dtype(w1):
        raise TypeError(f"{op}: w2 must have w1's dtype {dtype(w1)}, got {dtype(w2)}; cast one of the two")
    for value in accumulators or ():
        if dtype(value) != _FLOAT32:
            raise TypeError(f"{op}: grad_accumulators must be float32, got {dtype(value)}")
    if not jnp.issubdtype(dtype(values[index]), jnp.integer):
        raise TypeError(f"{op}: {index} must be integers, got {dtype(values[index])}; use .astype(jnp.int32)")


def check_grad_dtype(op: str, grad_dtype: DTypeLike | None, x: Any, w1: Any, accumulators: Any) -> jnp.dtype:
    """Returns the dtype in which the weights' gradients leave the products."""
    if accumulators is not None:
        if grad_dtype is not None and jnp.dtype(grad_dtype) != _FLOAT32:
            raise TypeError(
                f"{op}: grad_accumulators are float32, so grad_dtype must be None or float32, "
                f"got {jnp.dtype(grad_dtype)}"
            )
        return _FLOAT32
    if grad_dtype is None:
        return jnp.dtype(w1.dtype)
    grad_dtype = jnp.dtype(grad_dtype)
    if grad_dtype not in (x.dtype, _FLOAT32):
        raise TypeError(f"{op}: grad_dtype must be float32 or x's dtype {x.dtype}, got {grad_dtype}")
    if grad_dtype == _FLOAT32 != w1.dtype:
        raise TypeError(
            f"{op}: grad_dtype=float32 needs float32 weights, got {w1.dtype}: JAX would round the "
            "gradient to the weights' dtype; pass float32 weights, or grad_accumulators"
        )
    return grad_dtype


def check_group_sizes(op: str, group_sizes: Any, rows: int) -> None:
    """Checks concrete group sizes against the number of rows. Traced sizes are not checked."""
    if not _is_concrete(group_sizes):
        return
    sizes = np.asarray(group_sizes).astype(np.int64)
    if (sizes < 0).any():
        where = int(np.argmin(sizes))
        raise ValueError(
            f"{op}: group_sizes must not be negative, got {sizes[where]} for expert {where} of {sizes.size}"
        )
    if sizes.sum() > rows:
        raise ValueError(
            f"{op}: group_sizes must sum to at most R = {rows}, the rows of x, "
            f"got {sizes.sum()} over {sizes.size} experts"
        )


def check_experts(op: str, experts: Any, num_experts: int) -> None:
    """Checks concrete indices of experts. Traced indices are not checked."""
    if not _is_concrete(experts) or not np.size(experts):
        return
    chosen = np.asarray(experts).astype(np.int64)
    if chosen.min() < 0 or chosen.max() >= num_experts:
        raise ValueError(
            f"{op}: experts must be in 0 to E - 1 = {num_experts - 1}, got {chosen.min()} to {chosen.max()}"
        )


def _is_concrete(value: Any) -> bool:
    return not isinstance(value, Tracer) and getattr(value, "is_fully_addressable", True)
