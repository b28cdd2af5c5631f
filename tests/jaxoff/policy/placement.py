"""Where a differentiated program puts its arrays, read from its jaxpr with JAX alone: a second opinion."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.interpreters import partial_eval

Arrays = collections.Counter[tuple[tuple[int, ...], str]]
"""How often each shape and dtype occurs."""


def host_arrays(fun: Callable[..., Any], *args) -> Arrays:
    """The arrays copied to the host by a program, once for each iteration of the loops around the copy.

    Dead code is left out.

    Args:
      fun: what runs: to see residuals, a function that takes gradients.
      *args: its arguments.
    """
    closed = jax.make_jaxpr(fun)(*args)
    live, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
    return collections.Counter({key: n for key, n in _copied_to_host(live).items() if n})


def grad_host_arrays(loss: Callable[..., Any], *args) -> Arrays:
    """The arrays copied to the host by the gradient of a loss with respect to all its arguments."""
    return host_arrays(jax.grad(loss, argnums=tuple(range(len(args)))), *args)


def nbytes(arrays: Arrays) -> int:
    """Bytes of all the arrays."""
    return sum(n * math.prod(shape) * jax.numpy.dtype(dtype).itemsize for (shape, dtype), n in arrays.items())


def arrays(counts: dict[tuple[int, ...], int], dtype: str = "float32") -> Arrays:
    """Arrays of a single dtype from counts by shape."""
    return collections.Counter({(shape, dtype): n for shape, n in counts.items()})


def _copied_to_host(jaxpr) -> Arrays:
    found: Arrays = collections.Counter()
    for eqn in jaxpr.eqns:
        kind = eqn.primitive.name
        on_host = [v.aval for v in eqn.outvars if _is_host(v.aval)]
        # A shard_map's results have the shapes of whole arrays. A cond's branches share results by type.
        if kind == "device_put" or (kind in ("shard_map", "cond") and on_host):
            found.update((tuple(aval.shape), str(aval.dtype)) for aval in on_host)
            continue
        inside: Arrays = collections.Counter()
        for body in _bodies(eqn):
            inside = inside | _copied_to_host(body) if kind == "cond" else inside + _copied_to_host(body)
        if kind == "while" and inside:
            raise ValueError(f"A while loop has no trip count to multiply {dict(inside)} by.")
        found.update({key: n * _trips(eqn) for key, n in inside.items()})
    return found


def _trips(eqn) -> int:
    """How often the body of an equation runs."""
    if eqn.primitive.name == "scan":
        return eqn.params["length"]
    return eqn.params["mesh"].size if eqn.primitive.name == "shard_map" else 1


def _is_host(aval) -> bool:
    return getattr(aval, "memory_space", None) == jax.memory.Space.Host


def _bodies(eqn) -> Iterator[Any]:
    for value in eqn.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            body = getattr(item, "jaxpr", item)
            if hasattr(body, "eqns"):
                yield body
