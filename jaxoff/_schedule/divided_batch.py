"""Keeps the rows of the batch divided as the caller divides the batch.

The compiler propagates shardings through the whole program. Where both operands of a product are divided over
the same devices, along axes of the result, the compiler has to pick an axis. In fully sharded data parallel
training it may divide an activation, or a gradient, by the rows or columns of a weight, and then exchanges
activations where weights would do: a decoder divided by rows over two devices exchanged 39 GB a step, and
10.7 with the batch divided throughout (bench/LOG.md).

So the axis of the batch is followed through the program, and the products along this axis are pinned; their
other axes are left to the compiler. The compiler is the judge: the pins stay unless the program exchanges
more with them. Where it divides all products so by itself, as marks on these tell, nothing is compiled to
judge: the pins hold the division in the program that a budget writes.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from jaxoff._compiled import hlo
from jaxoff._compiled.exchange import exchanged_nbytes
from jaxoff._device.flops import product_flops
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import ClosedJaxpr, JaxprEqn, Var
from jaxoff._jaxpr.dataflow import variables
from jaxoff._jaxpr.inline import trace_call
from jaxoff._jaxpr.meshes import explicit_mesh, list_axes, list_dividing
from jaxoff._jaxpr.shares import record_sharding
from jaxoff._schedule.batch_axes import Axes, BatchAxes, type_of
from jaxoff._schedule.sharding_marks import Lower, Recorded
from jaxoff._schedule.weight_layouts import lay_out_weights

# Smaller products are left to the compiler.
_LEAST_NBYTES = 2**20

# (the result of a product, axis=the axis of its batch) -> the result.
type _Wrap = Callable[..., jax.Array]


def divide_batch(
    closed: ClosedJaxpr,
    donated: Sequence[bool],
    shardings: Sequence[Sharding | None],
    lower_program: Lower,
) -> ClosedJaxpr:
    """A program with the batch divided throughout, unless more is exchanged between devices then.

    Weights of loops that columns divide are laid out by rows in any case.

    Args:
      closed: a program which is not differentiated any more.
      donated: for each argument, whether the program may reuse its memory.
      shardings: of the arguments; None for an argument on a single device.
      lower_program: lowers a program for its devices.

    Returns:
      The program with pins, or without.
    """
    batch = Batch.find(closed, donated, shardings)
    if batch is None:
        return closed
    laid, pinned = batch.pin_products(closed, shardings)
    if pinned is laid or batch.is_divided_by(lower_program, laid):
        return pinned
    with concurrent.futures.ThreadPoolExecutor() as pool:
        exchanged = [*pool.map(_count_exchanged, map(lower_program, (pinned, laid)))]
    return pinned if exchanged[0] <= exchanged[1] else laid


def pin_batch(
    closed: ClosedJaxpr,
    donated: Sequence[bool],
    shardings: Sequence[Sharding | None],
    lower_program: Lower,
) -> tuple[ClosedJaxpr, ClosedJaxpr]:
    """A program without pins and with pins, the same one where the compiler divides the batch by itself.

    Args:
      closed, donated, shardings, lower_program: as for `divide_batch`.
    """
    batch = Batch.find(closed, donated, shardings)
    if batch is None:
        return closed, closed
    laid, pinned = batch.pin_products(closed, shardings)
    return laid, laid if batch.is_divided_by(lower_program, laid) else pinned


@dataclasses.dataclass(frozen=True)
class Batch:
    """The batch of a program: arguments divided over devices.

    Attributes:
      mesh: the devices.
      names: the axes of the mesh which divide the batch.
      axes: of each argument, the axis of the batch; None for arguments without.
    """

    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh
    names: tuple[str, ...]
    axes: Axes

    @staticmethod
    def find(
        closed: ClosedJaxpr, donated: Sequence[bool], shardings: Sequence[Sharding | None]
    ) -> Batch | None:
        """The batch of a step; None where the compiler divides no batch.

        State is donated, or returned in a new version of the same type; whole numbers, such as tokens and
        labels, are none. Of the other arguments, frozen weights may be divided, too: whole numbers tell the
        batch from these. Without any, all have to be divided alike.
        """
        arguments, returned = closed.jaxpr.invars, {type_of(v) for v in closed.jaxpr.outvars}
        groups: dict[tuple[int, tuple[str, ...]], dict[int, int]] = {}  # size and division -> axes
        meshes = set[Any]()
        for k, (v, sharding) in enumerate(zip(arguments, shardings, strict=True)):
            if not isinstance(sharding, NamedSharding):
                continue
            meshes.add(sharding.mesh)
            parts = list_dividing(sharding)
            axis = next((i for i, names in enumerate(parts) if names), None)
            is_state = not _holds_indices(v) and (donated[k] or type_of(v) in returned)
            if axis is not None and not is_state and explicit_mesh(v.aval) is None:
                division = compat.shape_of(v.aval)[axis], parts[axis]
                groups.setdefault(division, {})[k] = axis
        told = [d for d, axes in groups.items() if any(_holds_indices(arguments[k]) for k in axes)]
        if len(meshes) != 1 or not (told or len(groups) == 1):  # a program has shardings over a single mesh
            return None
        division = (told or [*groups])[0]
        axes = tuple(groups[division].get(k) for k in range(len(arguments)))
        return Batch(meshes.pop(), division[1], axes)

    @property
    def shards(self) -> int:
        """The number of parts of the batch."""
        return math.prod(self.mesh.shape[name] for name in self.names)

    @property
    def is_first(self) -> bool:
        """Whether the batch's axis is the first of all arguments with rows of the batch."""
        return all(axis in (None, 0) for axis in self.axes)

    def pin_products(
        self, closed: ClosedJaxpr, shardings: Sequence[Sharding | None]
    ) -> tuple[ClosedJaxpr, ClosedJaxpr]:
        """A program without pins, its weights laid out by rows, and with pins."""
        laid = lay_out_weights(closed, self.axes, self.shards, shardings)
        return laid, self.wrap_products(laid, self.pin)

    def pin(self, value: jax.Array, axis: int) -> jax.Array:
        """Divides a value along an axis as the batch; its other axes are the compiler's."""
        spec = P(*(self.names if i == axis else P.UNCONSTRAINED for i in range(value.ndim)))
        return jax.lax.with_sharding_constraint(value, NamedSharding(self.mesh, spec))

    def is_divided_by(self, lower_program: Lower, closed: ClosedJaxpr) -> bool:
        """Whether the compiler divides the large products of a program as the batch, along the first axis."""
        if not self.is_first:
            return False
        marks: list[bool | None] = []  # whether it divides a product so, once recorded

        def mark(value: jax.Array, axis: int) -> jax.Array:
            number = len(marks)
            marks.append(None)

            def record(sharding: NamedSharding) -> None:
                names = list_axes((*sharding.spec, *[None] * value.ndim)[axis])
                marks[number] = set(self.names) <= set(names)
                if None not in marks:
                    raise Recorded

            return record_sharding(value, record)

        marked = self.wrap_products(closed, mark)
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # by `Recorded`, or XLA refuses the program
            if marks:
                lower_program(marked)()
        return False not in marks

    def wrap_products(self, closed: ClosedJaxpr, wrap: _Wrap) -> ClosedJaxpr:
        """A program with a function of the results of its large products along the batch's axis.

        Products of a forward pass and their repetition in the backward pass stay alike.
        """
        shards = self.shards

        def write(eqn: JaxprEqn, known: Mapping[Var, int]) -> list[JaxprEqn]:
            rows = [v for v in eqn.outvars if v in known]
            made = {v: Var(v.aval) for v in rows if compat.shape_of(v.aval)[known[v]] % shards == 0}
            if not made or not _is_pinned(eqn, known):
                return [eqn]
            eqns = [eqn.replace(outvars=[made.get(v, v) for v in eqn.outvars])]
            for v, result in made.items():
                (*others, last), _ = trace_call(functools.partial(wrap, axis=known[v]), [result], like=eqn)
                eqns += [*others, last.replace(outvars=[v])]
            return eqns

        return BatchAxes(shards).rewrite(closed, self.axes, write)


def _is_pinned(eqn: JaxprEqn, known: Mapping[Var, int]) -> bool:
    """Whether an equation makes a large product of the batch, or looks up rows of a table.

    Not a product with larger weights than rows of the batch: gathered weights would cost more.
    """
    if compat.sub_jaxprs(eqn) or compat.nbytes_of(eqn.outvars) < _LEAST_NBYTES:
        return False
    if eqn.primitive.name == "gather":
        return True
    rows = [v for v in variables(eqn) if v in known]
    is_of_rows = 2 * compat.nbytes_of(rows) >= compat.nbytes_of(variables(eqn))
    return is_of_rows and product_flops(eqn) > 0


def _holds_indices(v: Any) -> bool:
    """Whether a variable is of whole numbers, such as tokens and labels; quantized weights are narrower."""
    dtype = type_of(v)[1]
    return dtype is not None and jnp.issubdtype(dtype, jnp.integer) and dtype.itemsize >= 4


def _count_exchanged(compile_program: Callable[[], Any]) -> float:
    """Bytes that a program exchanges on a device; infinite if XLA refuses to compile it."""
    try:
        return exchanged_nbytes(hlo.parse(compile_program().as_text()))
    except jax.errors.JaxRuntimeError:
        return math.inf
