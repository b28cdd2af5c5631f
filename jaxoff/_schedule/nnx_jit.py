"""`jaxoff.jit` for functions of flax.nnx objects: the counterpart of `nnx.jit`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxoff._device.profile import Device
from jaxoff._schedule.jit import jit
from jaxoff._schedule.wrapped_jitted import WrappedJitted

_HANDED_ON = (
    "static_argnums",
    "static_argnames",
    "donate_argnums",
    "donate_argnames",
    "keep_unused",
    "backend",
    "inline",
)
"""Keywords that `nnx.jit` hands on to `jax.jit` unchanged."""


def nnx_jit(
    fun: Callable[..., Any] | None = None,
    /,
    *,
    compiler_options: Mapping[str, Any] | None = None,
    device: Device | str | None = None,
    recipe: str | None = None,
    tune: bool = False,
    device_bytes: float | str | None = None,
    host_bytes: float | str | None = None,
    compress: Sequence[str] | None = None,
    **kwargs: Any,
) -> Any:
    """`flax.nnx.jit`, with copies between device and pinned host memory beside the compute.

    Modules, optimizers, `Rngs` and other graph objects of flax.nnx among the arguments are split into arrays
    and merged inside, and their updates are taken over after the call, as by `nnx.jit`. The program inside is
    that of `jaxoff.jit`. `jaxoff.jit` itself loses the updates, as `jax.jit` does.

    Args:
      fun: as for `nnx.jit`; without it, a decorator.
      compiler_options, device, recipe, tune, device_bytes, host_bytes, compress: as for `jaxoff.jit`.
      **kwargs: as for `nnx.jit`: static and donated arguments, shardings, `graph`, `graph_updates`.

    Returns:
      A function like that of `nnx.jit`, with `lower`, `trace` and `eval_shape`, and with the `recipe`,
      `options`, `findings`, `tuned` and `plan` of `jaxoff.jit`.

    Raises:
      ImportError: if flax is not installed.
      BudgetError, TypeError, ValueError, RuntimeError: as for `jaxoff.jit`.

    Example:
      >>> import jax, jax.numpy as jnp, jaxoff
      >>> from flax import nnx
      >>> @jaxoff.nnx_jit
      ... def step(model, x):
      ...     loss, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).sum())(model)
      ...     nnx.update(model, jax.tree.map(lambda p, g: p - 0.01 * g, nnx.state(model), grads))
      ...     return loss
      >>> model, x = nnx.Linear(2, 3, rngs=nnx.Rngs(0)), jnp.ones((4, 2))
      >>> bool(step(model, x) > step(model, x))
      True
    """
    ours: dict[str, Any] = dict(compiler_options=compiler_options, device=device, recipe=recipe, tune=tune)
    ours |= dict(device_bytes=device_bytes, host_bytes=host_bytes, compress=compress)
    if fun is None:
        return functools.partial(nnx_jit, **ours, **kwargs)
    return NnxJitted(_import_nnx().jit(fun, **kwargs), ours, kwargs)


def _import_nnx() -> Any:
    try:
        from flax import nnx
    except ImportError as error:
        raise ImportError("jaxoff.nnx_jit needs flax, which is not installed: pip install flax.") from error
    return nnx


class NnxJitted(WrappedJitted):
    """What `jaxoff.nnx_jit` returns: a function of `nnx.jit` around a function of `jaxoff.jit`."""

    transform = "jaxoff.nnx_jit"

    def __init__(self, wrapped: Any, ours: Mapping[str, Any], kwargs: Mapping[str, Any]):
        pure = wrapped.jitted_fn.__wrapped__  # from arrays to arrays; flax splits before and merges after
        given = {key: value for key, value in kwargs.items() if key in _HANDED_ON}
        jitted = jit(pure, **ours, **given, **_find_shardings(wrapped, pure, kwargs))
        wrapped.jitted_fn = jitted
        self._wrapped = wrapped
        super().__init__(wrapped.__wrapped__, jitted)

    def __call__(self, /, *args, **kwargs):
        return self._wrapped(*args, **kwargs)

    def lower(self, /, *args, **kwargs) -> Any:
        """As `nnx.jit(fun).lower`; `compile` uses the recipe and the options chosen."""
        return self._wrapped.lower(*args, **kwargs)

    def trace(self, /, *args, **kwargs) -> Any:
        """As `nnx.jit(fun).trace`, of the program in its new order."""
        return self._wrapped.trace(*args, **kwargs)

    def eval_shape(self, /, *args, **kwargs) -> Any:
        """As `nnx.jit(fun).eval_shape`."""
        return self._wrapped.eval_shape(*args, **kwargs)


def _find_shardings(wrapped: Any, pure: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The shardings of the pure function: its results are the updates of the arguments, and the results."""
    if kwargs.get("in_shardings") is None and kwargs.get("out_shardings") is None:
        return {}
    if hasattr(pure, "update_shardings"):  # without the graph protocol
        return {
            "in_shardings": kwargs.get("in_shardings"),
            "out_shardings": (kwargs.get("out_shardings"), list(pure.update_shardings)),
        }
    nnx = _import_nnx()

    def by_state(sharding: Any) -> Any:
        if not isinstance(sharding, nnx.StateSharding):
            return sharding
        return nnx.NodeStates.from_prefixes(sharding.shardings, metadata=sharding)

    updates = jax.tree.map(by_state, pure.in_shardings)  # with None for each static argument
    return {
        "in_shardings": wrapped.jax_in_shardings,
        "out_shardings": (updates, None, wrapped.jax_out_shardings),
    }
