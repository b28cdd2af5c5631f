"""The axes of an equation's operands whose rows make the rows of its result.

A row-wise equation computes a row of its result, along an axis, from the same row of some operands and from
other operands as a whole. A row-wise equation can run on a part of the rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import jax.numpy as jnp

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import JaxprEqn, Literal
from jaxoff._jaxpr.primitives import VIEWS, is_fused

# For each operand, the axis of its rows; None for an operand that is read as a whole.
type Axes = Sequence[int | None]


def find_operand_axes(eqn: JaxprEqn, axis: int, *, merges: bool = False) -> Axes | None:
    """The rows of the operands for the rows of the results along `axis`; None for no row-wise equation.

    Args:
      eqn: an equation.
      axis: the axis of the results.
      merges: whether a first axis may be merged with the axes behind it, or divided: a row is a block then.
    """
    name = eqn.primitive.name
    if name == "reshape" and merges and axis == 0 and _merges_first(eqn):
        return [0]
    if name in _RULES:
        return _RULES[name](eqn, axis)
    if name.startswith(("reduce_", "arg")) and "axes" in eqn.params:
        return [_kept(eqn, eqn.params["axes"])[axis]] * len(eqn.invars)
    return _elementwise(eqn, axis) if is_fused(eqn) and name not in VIEWS else None


def find_result_axis(eqn: JaxprEqn, operand: int, axis: int, *, merges: bool = False) -> int | None:
    """The axis of the results whose rows are made of an operand's rows along `axis`, if there is one."""
    for i in range(len(compat.shape_of(eqn.outvars[0].aval))):
        axes = find_operand_axes(eqn, i, merges=merges)
        if axes is not None and axes[operand] == axis:
            return i
    return None


def find_summed_axes(eqn: JaxprEqn, axes: Mapping[Any, int], made: Set[Any]) -> list[int] | None:
    """The axes of the operands over which an equation adds up rows; None for an equation that does not.

    Args:
      eqn: an equation.
      axes: the axis of the rows, by value.
      made: the values whose rows are added up; an operand is one of them.
    """
    side = next((k for k, v in enumerate(eqn.invars) if not isinstance(v, Literal) and v in made), None)
    if side is None:
        return None
    if not jnp.issubdtype(compat.struct_of(eqn.outvars[0].aval).dtype, jnp.floating):
        return None
    axis = axes[eqn.invars[side]]
    if eqn.primitive.name == "reduce_sum":
        return [axis] if axis in eqn.params["axes"] else None
    if eqn.primitive.name != "dot_general" or any(isinstance(v, Literal) for v in eqn.invars):
        return None
    contracted = eqn.params["dimension_numbers"][0]
    if axis not in contracted[side]:
        return None
    k = list(contracted[side]).index(axis)
    return [dims[k] for dims in contracted]


def resize(eqn: JaxprEqn, axis: int, size: int) -> dict[str, Any]:
    """The parameters of a row-wise equation for `size` rows of its results along `axis`."""
    params, name = dict(eqn.params), eqn.primitive.name
    if (key := {"broadcast_in_dim": "shape", "iota": "shape", "reshape": "new_sizes"}.get(name)) is not None:
        params[key] = _replace(params[key], axis, size)
    elif name == "slice":
        params["limit_indices"] = _replace(params["limit_indices"], axis, size)
    elif name == "gather" and axis in params["dimension_numbers"].offset_dims:
        operand = _gather(eqn, axis)
        assert operand is not None
        params["slice_sizes"] = _replace(params["slice_sizes"], operand[0], size)
    return params


def _replace(sizes: Sequence[int], axis: int | None, size: int) -> tuple[int, ...]:
    return tuple(size if i == axis else n for i, n in enumerate(sizes))


def _shape(eqn: JaxprEqn, operand: int = 0) -> tuple[int, ...]:
    return compat.shape_of(eqn.invars[operand].aval)


def _result(eqn: JaxprEqn) -> tuple[int, ...]:
    return compat.shape_of(eqn.outvars[0].aval)


def _kept(eqn: JaxprEqn, removed: Sequence[int]) -> list[int]:
    """The axes of the first operand that its result has, too."""
    return [i for i in range(len(_shape(eqn))) if i not in removed]


def _elementwise(eqn: JaxprEqn, axis: int) -> Axes | None:
    shapes, result = [_shape(eqn, i) for i in range(len(eqn.invars))], _result(eqn)
    if any(shape and len(shape) != len(result) for shape in shapes):
        return None
    sizes_fit = all(n in (1, m) for shape in shapes if shape for n, m in zip(shape, result, strict=True))
    return [axis if s and s[axis] == result[axis] else None for s in shapes] if sizes_fit else None


def _broadcast(eqn: JaxprEqn, axis: int) -> Axes:
    dims = eqn.params["broadcast_dimensions"]
    i = dims.index(axis) if axis in dims else None
    same = i is not None and _shape(eqn)[i] == _result(eqn)[axis]
    return [i if same else None, *[None] * (len(eqn.invars) - 1)]


def _reshape(eqn: JaxprEqn, axis: int) -> Axes | None:
    before, after = _shape(eqn), _result(eqn)
    for i, size in enumerate(before):
        if size == after[axis] > 1 and math.prod(before[:i]) == math.prod(after[:axis]):
            return [i]
    return None


def _merges_first(eqn: JaxprEqn) -> bool:
    """Whether a reshape makes the rows of a first axis blocks of rows, or blocks rows."""
    sizes = sorted(shape[0] for shape in (_shape(eqn), _result(eqn)) if shape)
    return len(sizes) == 2 and sizes[0] > 1 and sizes[1] % sizes[0] == 0


def _dot(eqn: JaxprEqn, axis: int) -> Axes | None:
    (contracted, batch) = eqn.params["dimension_numbers"]
    if axis < len(batch[0]):
        return [batch[0][axis], batch[1][axis]]
    free = [
        [i for i in range(len(_shape(eqn, side))) if i not in (*contracted[side], *batch[side])]
        for side in (0, 1)
    ]
    k = axis - len(batch[0])
    return [free[0][k], None] if k < len(free[0]) else [None, free[1][k - len(free[0])]]


def _gather(eqn: JaxprEqn, axis: int) -> Axes | None:
    dims, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    if axis in dims.offset_dims:  # an axis of the slices
        fixed = (*dims.collapsed_slice_dims, *dims.operand_batching_dims)
        operand = _kept(eqn, fixed)[dims.offset_dims.index(axis)]
        whole = sizes[operand] == _shape(eqn)[operand] and operand not in dims.start_index_map
        return [operand, None] if whole else None
    index = axis - sum(offset < axis for offset in dims.offset_dims)
    batch = dims.start_indices_batching_dims
    return [dims.operand_batching_dims[batch.index(index)] if index in batch else None, index]


def _scatter(eqn: JaxprEqn, axis: int) -> Axes | None:
    dims = eqn.params["dimension_numbers"]
    if axis not in dims.operand_batching_dims:
        return None
    index = dims.scatter_indices_batching_dims[dims.operand_batching_dims.index(axis)]
    updates = [i for i in range(len(_shape(eqn, 2))) if i not in dims.update_window_dims]
    return [axis, index, updates[index]]


def _slice(eqn: JaxprEqn, axis: int) -> Axes | None:
    return [axis] if _result(eqn)[axis] == _shape(eqn)[axis] else None


def _pad(eqn: JaxprEqn, axis: int) -> Axes | None:
    return [axis, None] if eqn.params["padding_config"][axis] == (0, 0, 0) else None


def _along(*names: str) -> Callable[[JaxprEqn, int], Axes | None]:
    """The rule of equations that combine the elements along the axis in one of the given parameters."""

    def find(eqn: JaxprEqn, axis: int) -> Axes | None:
        others = [eqn.params[name] for name in names if name in eqn.params]
        return None if axis in others else [axis if _shape(eqn, i) else None for i in range(len(eqn.invars))]

    return find


_RULES: dict[str, Callable[[JaxprEqn, int], Axes | None]] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": lambda eqn, axis: [_kept(eqn, eqn.params["dimensions"])[axis]],
    "transpose": lambda eqn, axis: [eqn.params["permutation"][axis]],
    "copy": _elementwise,
    "slice": _slice,
    "pad": _pad,  # the gradient of a slice
    "dot_general": _dot,
    "gather": _gather,
    "scatter-add": _scatter,
    "scatter": _scatter,
    "iota": lambda eqn, axis: None if axis == eqn.params["dimension"] else [],
    **dict.fromkeys(("concatenate", "sort"), _along("dimension")),
    "split": _along("axis"),
    **dict.fromkeys(("cumsum", "cumlogsumexp", "cummax", "cummin", "cumprod"), _along("axis")),
}
