"""Scatters of one element a row into zeros, as a comparison: the logits' gradient of a cross entropy.

The loss reads one logit of each row, the label's. JAX's gradient of that is a scatter of one element a row
into zeros as large as the logits, in the type of the loss: in float32, twice the bytes of logits in
bfloat16. XLA keeps the array that it scatters into in memory, and makes the softmax's part of the gradient
there. A comparison of the label with each column is a part of the kernel that makes the gradient instead.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import GatherScatterMode

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jaxoff._jaxpr.dataflow import map_makers
from jaxoff._jaxpr.inline import trace_call, write_otherwise
from jaxoff._jaxpr.meshes import explicit_mesh

_Makers = Mapping[Var, JaxprEqn]


def compare_labels(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Replaces each scatter of one element a row into zeros by a comparison, in all programs of a program."""
    return compat.rewrite_jaxprs(closed, _compare_labels)


def _compare_labels(jaxpr: Jaxpr) -> Jaxpr:
    if not any(eqn.primitive.name == "scatter-add" for eqn in jaxpr.eqns):
        return jaxpr
    makers = map_makers(jaxpr.eqns)

    def write(eqn: JaxprEqn) -> JaxprEqn | tuple[list[JaxprEqn], list[Any]]:
        rows = _Rows.find(eqn, makers)
        if rows is None:
            return eqn
        written = trace_call(rows.compare, (eqn.invars[1], eqn.invars[2]), eqn)
        return written if written[1][0].aval == eqn.outvars[0].aval else eqn

    return write_otherwise(jaxpr, write)


@dataclasses.dataclass(frozen=True)
class _Rows:
    """A scatter of one element into each row of an array of zeros.

    Attributes:
      zeros: the type of the array.
      axis: the axis along which the rows run.
      column: which component of an index is the column, by its place in the index.
      order: the axes of the indices, in the order of the other axes of the array; none for axes of length 1.
      clips: whether columns out of bounds count as the nearest column; otherwise they are dropped.
    """

    zeros: Any
    axis: int
    column: int
    order: tuple[int, ...]
    clips: bool

    @staticmethod
    def find(eqn: JaxprEqn, makers: _Makers) -> _Rows | None:
        """The rows of an equation; None unless it is such a scatter."""
        if eqn.primitive.name != "scatter-add" or not _is_zero(eqn.invars[0], makers):
            return None
        zeros: Any = eqn.invars[0].aval
        dims = eqn.params["dimension_numbers"]
        *batch, _ = compat.shape_of(eqn.invars[1].aval)
        sources = dict(zip(dims.operand_batching_dims, dims.scatter_indices_batching_dims, strict=True))
        columns = []
        for component, axis in enumerate(dims.scatter_dims_to_operand_dims):
            source = _find_own_index(eqn.invars[1], component, makers)
            if source is not None and batch[source] == zeros.shape[axis]:
                sources[axis] = source
            else:
                columns.append((component, axis))
        if len(columns) != 1:
            return None
        ((column, axis),) = columns
        rows = [i for i, n in enumerate(zeros.shape) if i != axis and n > 1]
        order = tuple(sources[i] for i in rows if i in sources)
        others = [n for i, n in enumerate(batch) if i not in order]
        is_one_a_row = len({*order}) == len(rows) and all(n == 1 for n in others)
        if not is_one_a_row or math.prod(compat.shape_of(eqn.invars[2].aval)) != math.prod(batch):
            return None
        return _Rows(zeros, axis, column, order, eqn.params["mode"] is GatherScatterMode.CLIP)

    def compare(self, indices: jax.Array, updates: jax.Array) -> jax.Array:
        """The array with its elements, by the operands of the scatter."""
        shape = self.zeros.shape
        labels = self._spread(indices[..., self.column])
        if labels.dtype.itemsize < 4:  # columns may be more than such numbers
            labels = labels.astype(jnp.int32)
        if self.clips:
            labels = jnp.clip(labels, 0, shape[self.axis] - 1)
        elements = self._spread(updates.reshape(indices.shape[:-1]))
        sharding = self.zeros.sharding if explicit_mesh(self.zeros) else None
        columns = jax.lax.broadcasted_iota(labels.dtype, shape, self.axis, out_sharding=sharding)
        return jnp.where(columns == labels, elements, jnp.zeros((), self.zeros.dtype))

    def _spread(self, values: jax.Array) -> jax.Array:
        """Values by index, with the array's axes and one element along the axis of the rows."""
        others = [i for i in range(values.ndim) if i not in self.order]
        rows = values.transpose(*self.order, *others)
        return rows.reshape([1 if i == self.axis else n for i, n in enumerate(self.zeros.shape)])


def _is_zero(v: Any, makers: _Makers) -> bool:
    """Whether a value is known to be zero, at each index."""
    if isinstance(v, Literal):
        return not np.any(v.val)
    maker = makers.get(v)
    return (
        maker is not None
        and maker.primitive.name in ("broadcast_in_dim", "pvary")
        and _is_zero(maker.invars[0], makers)
    )


def _find_own_index(indices: Any, component: int, makers: _Makers) -> int | None:
    """The axis of the indices whose positions a component of each index is; None where it is another value.

    `logits[jnp.arange(n), labels]` has indices of two components, of which the first is such a one.
    """
    maker = makers.get(indices) if isinstance(indices, Var) else None
    if maker is None or maker.primitive.name != "concatenate":
        return None
    shape = compat.shape_of(indices.aval)
    if maker.params["dimension"] != len(shape) - 1 or len(maker.invars) != shape[-1]:
        return None
    return _find_iota_axis(maker.invars[component], makers)


def _find_iota_axis(v: Any, makers: _Makers) -> int | None:
    """The axis along which a value is 0, 1, 2 ...; None if it is another value."""
    eqn = makers.get(v) if isinstance(v, Var) else None
    if eqn is None:
        return None
    name = eqn.primitive.name
    if name == "iota":
        return eqn.params["dimension"]
    if name == "convert_element_type" and _holds_positions(v.aval):
        return _find_iota_axis(eqn.invars[0], makers)
    if name == "select_n" and _counts_from_the_end(eqn, makers):
        return _find_iota_axis(eqn.invars[1], makers)
    if name != "broadcast_in_dim":
        return None
    axis = _find_iota_axis(eqn.invars[0], makers)
    if axis is None:
        return None
    result = int(eqn.params["broadcast_dimensions"][axis])
    before, after = compat.shape_of(eqn.invars[0].aval)[axis], compat.shape_of(v.aval)[result]
    return result if before == after else None


def _holds_positions(aval: Any) -> bool:
    """Whether integers of a type count the positions along each axis."""
    return jnp.issubdtype(aval.dtype, jnp.integer) and jnp.iinfo(aval.dtype).max >= max(aval.shape, default=0)


def _counts_from_the_end(select: JaxprEqn, makers: _Makers) -> bool:
    """Whether a choice replaces an index below zero, as indexing does."""
    which, index, *_ = select.invars
    test = makers.get(which) if isinstance(which, Var) else None
    if test is None or test.primitive.name != "lt" or test.invars[0] is not index:
        return False
    return _is_zero(test.invars[1], makers)
