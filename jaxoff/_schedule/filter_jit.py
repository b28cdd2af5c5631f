"""`jaxoff.jit` for functions of pytrees that hold more than arrays, as `equinox.filter_jit` takes them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxoff._device.profile import Device
from jaxoff._report.near_miss import near_miss
from jaxoff._schedule.jit import jit
from jaxoff._schedule.wrapped_jitted import WrappedJitted

_DONATE = ("all", "all-except-first", "warn", "warn-except-first", "none")
_OWN_KEYWORDS = (
    "static_argnums",
    "static_argnames",
    "donate_argnums",
    "donate_argnames",
    "in_shardings",
    "out_shardings",
)
_FUNCTION = "(function)"
"""The function itself among its arguments: it may be a pytree with arrays."""


def filter_jit(
    fun: Callable[..., Any] | None = None,
    /,
    *,
    donate: str = "none",
    compiler_options: Mapping[str, Any] | None = None,
    device: Device | str | None = None,
    recipe: str | None = None,
    tune: bool = False,
    device_bytes: float | str | None = None,
    host_bytes: float | str | None = None,
    compress: Sequence[str] | None = None,
    **kwargs: Any,
) -> Any:
    """`equinox.filter_jit`, with copies between device and pinned host memory beside the compute.

    JAX and NumPy arrays among the leaves of the arguments are traced; all other leaves are static, and have
    to be hashable. The same holds for the function, if it is a pytree, and for its results. `jaxoff.jit`
    itself refuses such leaves, as `jax.jit` does. Equinox need not be installed.

    Args:
      fun: as for `equinox.filter_jit`; without it, a decorator.
      donate: as for `equinox.filter_jit`: "all", "all-except-first" (argument), or "none"; "warn" and
        "warn-except-first" donate the same and let JAX warn of memory that was of no use.
      compiler_options, device, recipe, tune, device_bytes, host_bytes, compress: as for `jaxoff.jit`.
      **kwargs: as for `jax.jit`, such as `keep_unused`; none of static or donated arguments or shardings.

    Returns:
      A function like that of `equinox.filter_jit`, with `lower` and `trace`, and with the `recipe`,
      `options`, `findings`, `tuned` and `plan` of `jaxoff.jit`. `lower` takes `jax.ShapeDtypeStruct`s for
      arrays, too, and its compiled program is to be read: it takes arrays alone.

    Raises:
      ValueError: for another value of `donate`, and for keywords of static or donated arguments or shardings.
      BudgetError, TypeError, ValueError, RuntimeError: as for `jaxoff.jit`.

    Example:
      >>> import equinox as eqx, jax, jax.numpy as jnp, jaxoff
      >>> @jaxoff.filter_jit(donate="all-except-first")
      ... def step(x, model):
      ...     loss, grads = eqx.filter_value_and_grad(lambda m: (jax.vmap(m)(x) ** 2).mean())(model)
      ...     return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads)), loss
      >>> model, x = eqx.nn.MLP(2, 2, 8, depth=1, key=jax.random.key(0)), jnp.ones((4, 2))
      >>> model, before = step(x, model)
      >>> bool(step(x, model)[1] < before)
      True
    """
    ours: dict[str, Any] = dict(compiler_options=compiler_options, device=device, recipe=recipe, tune=tune)
    ours |= dict(device_bytes=device_bytes, host_bytes=host_bytes, compress=compress)
    if fun is None:
        return functools.partial(filter_jit, donate=donate, **ours, **kwargs)
    if donate not in _DONATE:
        raise ValueError(
            f"donate is one of {', '.join(map(repr, _DONATE))}; got {donate!r}.{near_miss(donate, _DONATE)}"
        )
    if taken := [key for key in _OWN_KEYWORDS if key in kwargs]:
        raise ValueError(
            f"jaxoff.filter_jit takes no {taken[0]}: arrays are traced, and all else is static. Donate by "
            "donate=, and place arrays by jax.device_put; or give the arrays to a function of jaxoff.jit."
        )
    return FilterJitted(fun, donate, ours | kwargs)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Rest:
    """A pytree without its arrays.

    Attributes:
      tree: its structure.
      leaves: its leaves, with None for each array.
    """

    tree: Any
    leaves: tuple[Hashable, ...]

    def combine(self, arrays: Any) -> Any:
        """The pytree, with the arrays of a tree that has None for each other leaf."""
        found = self.tree.flatten_up_to(arrays)
        return self.tree.unflatten(
            array if rest is None else rest for array, rest in zip(found, self.leaves, strict=True)
        )


def _divide(tree: Any) -> tuple[Any, _Rest]:
    """A pytree's arrays, as the pytree with None for each other leaf, and the rest."""
    leaves, structure = jax.tree.flatten(tree)
    arrays = structure.unflatten(leaf if _is_array(leaf) else None for leaf in leaves)
    return arrays, _Rest(structure, tuple(None if _is_array(leaf) else leaf for leaf in leaves))


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct)


class FilterJitted(WrappedJitted):
    """What `jaxoff.filter_jit` returns: a function of pytrees around a function of their arrays."""

    transform = "jaxoff.filter_jit"

    def __init__(self, fun: Callable[..., Any], donate: str, options: Mapping[str, Any]):
        self._signature, self._is_quiet = inspect.signature(fun), donate.startswith("all")
        names = [*self._signature.parameters, _FUNCTION]
        first = 1 if donate.endswith("except-first") else 0
        donated = [] if donate == "none" else names[first:]

        def of_arrays(rests: tuple[tuple[str, _Rest], ...], /, **arrays: Any) -> tuple[Any, _Rest]:
            values = {name: rest.combine(arrays[name]) for name, rest in rests}
            called = values.pop(_FUNCTION)
            bound = inspect.BoundArguments(self._signature, values)  # pyright: ignore[reportArgumentType]
            return _divide(called(*bound.args, **bound.kwargs))

        of_arrays.__name__ = getattr(fun, "__name__", type(fun).__name__)
        of_arrays.__qualname__ = getattr(fun, "__qualname__", of_arrays.__name__)
        super().__init__(fun, jit(of_arrays, static_argnums=0, donate_argnames=donated, **options))

    def __call__(self, /, *args, **kwargs):
        rests, arrays = self._divide_arguments(args, kwargs)
        with _unused_donations_allowed() if self._is_quiet else contextlib.nullcontext():
            results, rest = self.jitted(rests, **arrays)
        return rest.combine(results)

    def lower(self, /, *args, **kwargs) -> Any:
        """Traces and lowers the function; arrays may be `jax.ShapeDtypeStruct`s."""
        rests, arrays = self._divide_arguments(args, kwargs)
        return self.jitted.lower(rests, **arrays)

    def trace(self, /, *args, **kwargs) -> Any:
        """As `lower`, without the lowering: the program of the arrays in its new order."""
        rests, arrays = self._divide_arguments(args, kwargs)
        return self.jitted.trace(rests, **arrays)

    def _divide_arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[tuple[str, _Rest], ...], dict[str, Any]]:
        values = self._signature.bind(*args, **kwargs).arguments | {_FUNCTION: self._fun}
        divided = {name: _divide(value) for name, value in values.items()}
        rests = tuple((name, rest) for name, (_, rest) in divided.items())
        return rests, {name: arrays for name, (arrays, _) in divided.items()}


@contextlib.contextmanager
def _unused_donations_allowed() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        yield
