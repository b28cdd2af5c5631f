"""`tiled`: a token-wise function on a part of its tokens at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxoff._budget.row_axes import find_operand_axes
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import JaxprEqn, Var
from jaxoff._jaxpr.dataflow import map_makers, mark_dependents
from jaxoff._jaxpr.inline import inline_program

type _Fun = Callable[..., Any]


def tiled(fun: Callable[..., Any], /, *, tiles: int, axis: int = 0, check: bool = True) -> Callable[..., Any]:
    """Applies a token-wise function to `tiles` parts of the tokens in turn.

    No intermediate value of the function exists for all tokens at once, neither in the forward pass nor in
    the backward pass, which computes each part again. So an MLP over a long sequence takes the memory of its
    input, its output and a part. Outputs equal the function's on all tokens; gradients of the weights, which
    all tokens share, are added up over the parts in float32.

    Args:
      fun: (x, *args) -> outputs: pytrees of arrays. Each row of the outputs along `axis` depends on the same
        row of `x` and on all of `args`. `fun` may close over arrays.
      tiles: the number of parts, a divisor of the axis' size.
      axis: the axis of the tokens in all arrays of `x` and of the outputs; counted from the front.
      check: whether the rule for rows is checked by the function's equations. False for functions with
        kernels of their own (Pallas, FFI) or loops, whose rows cannot be told.

    Returns:
      A function like `fun`, with a gradient in reverse mode (`jax.grad`, `jax.vjp`) only.

    Raises:
      TypeError, ValueError: for tiles or an axis other than whole numbers; at a call, for unequal sizes along
        the axis, sizes not divided by `tiles`, and equations mixing rows.

    References:
      Bekman et al., Arctic Long Sequence Training, 2025 (tiled MLP).

    Example:
      >>> import jax, jax.numpy as jnp, jaxoff
      >>> def mlp(x, up, down):
      ...     return jax.nn.gelu(x @ up) @ down
      >>> x, up, down = jnp.ones((2, 8, 4)), jnp.ones((4, 16)), jnp.ones((16, 4))
      >>> y = jaxoff.tiled(mlp, tiles=4, axis=1)(x, up, down)
      >>> bool(jnp.allclose(y, mlp(x, up, down)))
      True
    """
    for name, value, least in (("tiles", tiles, 1), ("axis", axis, 0)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} of jaxoff.tiled is a whole number, got {value!r}.")
        if value < least:
            raise ValueError(f"{name} of jaxoff.tiled is at least {least}, got {value}.")

    @functools.wraps(fun)
    def apply(x: Any, *args: Any) -> Any:
        x = jax.tree.map(jnp.asarray, x)
        _refuse_uneven(x, tiles, axis)
        part = jax.eval_shape(lambda x: _take(x, 0, tiles, axis), x)
        pure, consts = jax.closure_convert(fun, part, *args)  # the only call of the user's function
        if check and tiles > 1:
            _refuse_mixed_rows(pure, part, (*args, *consts), axis)
        return _run(pure, tiles, axis)(x, (*args, *consts))

    return apply


def _refuse_uneven(x: Any, tiles: int, axis: int) -> None:
    """Raises for arrays without a common size along the axis, and for a size not divided by `tiles`."""
    shapes = {jnp.shape(leaf) for leaf in jax.tree.leaves(x)}
    if not shapes or any(len(shape) <= axis for shape in shapes):
        raise ValueError(
            f"jaxoff.tiled along axis {axis} takes arrays with such an axis, got {sorted(shapes)}."
        )
    sizes = {shape[axis] for shape in shapes}
    if len(sizes) > 1 or (size := sizes.pop()) % tiles or not size:
        raise ValueError(
            f"The arrays of jaxoff.tiled have one size along axis {axis}, which tiles={tiles} divides; got "
            f"{sorted(shapes)}."
        )


def _run(fun: _Fun, tiles: int, axis: int) -> _Fun:
    """The function of (x, args) in parts, with its gradient."""

    @jax.custom_vjp
    def run(x: Any, args: Any) -> Any:
        def add_part(outs: Any, i: jax.Array) -> tuple[Any, None]:
            part = fun(_take(x, i, tiles, axis), *args)
            return jax.tree.map(lambda out, new: _put(out, new, i, axis), outs, part), None

        made = jax.eval_shape(lambda x, args: fun(_take(x, 0, tiles, axis), *args), x, args)
        outs = jax.tree.map(lambda out: jnp.zeros(_widen(out.shape, tiles, axis), out.dtype), made)
        return lax.scan(add_part, outs, jnp.arange(tiles))[0]

    def differentiate(residuals: tuple[Any, Any], cotangents: Any) -> Any:
        (x, x_tree), (args, args_tree) = map(jax.tree.flatten, residuals)
        cotangents = [leaf for leaf in jax.tree.leaves(cotangents) if leaf.dtype != jax.dtypes.float0]

        def add_part(state: Any, i: jax.Array) -> tuple[Any, None]:
            grads, sums = state
            part = _take(x, i, tiles, axis)

            def of_floats(part_floats: list[Any], args_floats: list[Any]) -> list[Any]:
                own, shared = _fill(part, part_floats), _fill(args, args_floats)
                return _floats(fun(x_tree.unflatten(own), *args_tree.unflatten(shared)))

            _, pull = jax.vjp(of_floats, _floats(part), _floats(args))
            own, shared = pull(_take(cotangents, i, tiles, axis))
            grads = [_put(whole, new, i, axis) for whole, new in zip(grads, own, strict=True)]
            return (
                grads,
                [total + g.astype(total.dtype) for total, g in zip(sums, shared, strict=True)],
            ), None

        sums = [jnp.zeros(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32)) for leaf in _floats(args)]
        state = list(map(jnp.zeros_like, _floats(x))), sums
        (grads, sums), _ = lax.scan(add_part, state, jnp.arange(tiles))
        totals = [total.astype(leaf.dtype) for total, leaf in zip(sums, _floats(args), strict=True)]
        zeros = [[np.zeros(leaf.shape, jax.dtypes.float0) for leaf in leaves] for leaves in (x, args)]
        return (
            x_tree.unflatten(_fill(zeros[0], grads, like=x)),
            args_tree.unflatten(_fill(zeros[1], totals, like=args)),
        )

    run.defvjp(lambda x, args: (run(x, args), (x, args)), differentiate)
    return run


def _take(tree: Any, i: Any, tiles: int, axis: int) -> Any:
    """Part `i` of the arrays of a pytree."""

    def take(leaf: jax.Array) -> jax.Array:
        size = leaf.shape[axis] // tiles
        return lax.dynamic_slice_in_dim(leaf, i * size, size, axis)

    return jax.tree.map(take, tree)


def _put(whole: jax.Array, part: jax.Array, i: Any, axis: int) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(whole, part, i * part.shape[axis], axis)


def _widen(shape: Sequence[int], tiles: int, axis: int) -> tuple[int, ...]:
    return tuple(n * tiles if i == axis else n for i, n in enumerate(shape))


def _is_float(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def _floats(tree: Any) -> list[Any]:
    """The arrays of a pytree with a gradient."""
    return [leaf for leaf in jax.tree.leaves(tree) if _is_float(leaf)]


def _fill(leaves: Sequence[Any], floats: Sequence[Any], like: Sequence[Any] | None = None) -> list[Any]:
    """The leaves, the ones with a gradient replaced by others."""
    left, given = iter(floats), leaves if like is None else like
    return [next(left) if _is_float(kind) else leaf for leaf, kind in zip(leaves, given, strict=True)]


def _refuse_mixed_rows(fun: _Fun, part: Any, args: Sequence[Any], axis: int) -> None:
    """Raises where a row of the outputs does not depend on the same row of `part` alone."""
    program = inline_program(jax.make_jaxpr(fun)(part, *args).jaxpr)
    inputs = set(program.invars[: len(jax.tree.leaves(part))])
    sizes = {compat.shape_of(v.aval)[axis] for v in inputs}
    for out in program.outvars:
        shape = compat.shape_of(out.aval)
        if len(shape) <= axis or shape[axis] not in sizes:
            raise ValueError(
                f"Outputs of a function under jaxoff.tiled have its rows along axis {axis}; for a part of "
                f"{sizes.pop()} rows it has one of shape {shape}."
            )
    makers, depends = map_makers(program.eqns), set(inputs)
    for eqn, does in zip(program.eqns, mark_dependents(program.eqns, inputs), strict=True):
        depends.update(eqn.outvars if does else ())
    places: dict[Var, int] = {}  # value -> the axis of its rows
    todo: list[tuple[Any, int | None, JaxprEqn | None]] = [(v, axis, None) for v in program.outvars]
    while todo:
        v, place, reader = todo.pop()
        if v not in depends:
            if place is not None and not _is_uniform(v, place, makers):
                raise ValueError(_describe_own(reader, axis))
            continue
        if places.get(v, -1) == place:
            continue
        if place is None or v in places or (v in inputs and place != axis):
            raise ValueError(_describe(reader, axis))
        places[v] = place
        if v not in inputs:
            if (axes := find_operand_axes(makers[v], place)) is None:
                raise ValueError(_describe(makers[v], axis))
            todo += [
                (w, a, makers[v]) for w, a in zip(makers[v].invars, axes, strict=True) if isinstance(w, Var)
            ]


def _is_uniform(v: Any, place: int, makers: Mapping[Var, JaxprEqn]) -> bool:
    """Whether a value that does not depend on the rows of `x` is the same in each row along an axis."""
    todo, seen = [(v, place)], set()
    while todo:
        v, place = todo.pop()
        if (v, place) in seen:
            continue
        seen.add((v, place))
        axes = find_operand_axes(makers[v], place) if v in makers else None
        if axes is None:
            return False
        operands = zip(makers[v].invars, axes, strict=True)
        todo += [(w, a) for w, a in operands if isinstance(w, Var) and a is not None]
    return True


def _describe_own(eqn: JaxprEqn | None, axis: int) -> str:
    line = "" if eqn is None else compat.source_line(eqn)
    return (
        f"jaxoff.tiled takes functions that compute each row along axis {axis} from the same row of x; "
        f"{'an output' if eqn is None else eqn.primitive.name}{f' at {line}' if line else ''} reads rows "
        "that the function makes itself for a part, such as positions (jnp.arange) or random numbers, "
        "which would be the same in each part: make them outside, and pass them as a part of x."
    )


def _describe(eqn: JaxprEqn | None, axis: int) -> str:
    line = "" if eqn is None else compat.source_line(eqn)
    what = ("an output" if eqn is None else eqn.primitive.name) + (f" at {line}" if line else "")
    return (
        f"jaxoff.tiled takes functions that compute each row along axis {axis} from the same row of x; "
        f"{what} mixes rows, or cannot be told not to: check=False leaves this to you."
    )
