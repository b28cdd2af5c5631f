"""`jax.jit` for programs that move residuals: an order and compiler options that let the copies overlap."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import os
import threading
import types
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.core import Tracer

from jaxoff._device.profile import H200, Device, checked_device
from jaxoff._jaxpr import compat
from jaxoff._runtime import flags
from jaxoff._runtime.flags import DISABLED_PASSES, parse_xla_flags
from jaxoff._runtime.pinned_pool import refuse_small_pool
from jaxoff._runtime.versions import refuse_wrong_jaxlib
from jaxoff._schedule.host_memory import peak_host_nbytes
from jaxoff._schedule.rewrite import Rewritten, rewrite

type Options = tuple[tuple[str, Any], ...]

# `jax.jit = jaxoff.jit` must not make this module call itself.
_jax_jit = jax.jit
_JAXLIB = importlib.metadata.version("jaxlib")


def jit(
    fun: Callable[..., Any] | None = None,
    /,
    *,
    compiler_options: Mapping[str, Any] | None = None,
    device: Device | None = None,
    **kwargs: Any,
) -> Any:
    """`jax.jit`, with copies between device and pinned host memory beside the compute.

    Where the program moves residuals, and in loops of `jaxoff.scan` that keep all of theirs on the device,
    barriers put its large values into one order, in which memory is used again and a copy starts as late as
    it can and still be in time; what is computed is the same, and un-named values may round elsewhere. Where
    it moves residuals, XLA also gets the options that this kind of program needs: for layers in a loop, CUDA
    graphs whose edges are those of the data (CONCURRENT), collectives among them. What XLA would compute
    again on its own, near the device's limit, it does not in a program in order. Differentiate inside, as in
    `jaxoff.jit(jax.value_and_grad(loss))`: outside of it there is no backward pass to see.

    Args:
      fun: as for `jax.jit`; without it, a decorator.
      compiler_options: as for `jax.jit`; they win over the ones chosen here. What is known to harm is warned
        of.
      device: rates of the accelerator and its link, to plan the copies with; None is an H200. A program on
        several devices is planned with the link that they share (`Device.sharing`).
      **kwargs: as for `jax.jit`: static and donated arguments, shardings.

    Returns:
      A function like that of `jax.jit`, with `lower`, `trace` and `eval_shape`. Called inside another
      transformation it is an inner `jax.jit` and leaves the choice to what is around it.

    Raises:
      TypeError: for a device that is no `jaxoff.Device`.
      RuntimeError: when the program is traced, at the first call or by `lower`, if it moves residuals on a
        GPU and jaxlib is older than 0.11.1, which computes wrong gradients then; or if it needs more pinned
        host memory at once than XLA's pool has, which XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB sets.

    Example:
      >>> import jax, jax.numpy as jnp, jaxoff
      >>> def layer(x, w):
      ...     return jnp.tanh(jaxoff.name(x, "x_in") @ w), None
      >>> def loss(w, x):
      ...     return jaxoff.scan(layer, x, w, policy=jaxoff.policy(offload=["x_in"]))[0].sum()
      >>> step = jaxoff.jit(jax.value_and_grad(loss))
      >>> value, grads = step(jnp.ones((3, 8, 8)), jnp.ones((2, 8)))
      >>> grads.shape
      (3, 8, 8)
    """
    if fun is None:
        return functools.partial(jit, compiler_options=compiler_options, device=device, **kwargs)
    return Jitted(
        fun, dict(compiler_options or {}), checked_device(H200 if device is None else device), kwargs
    )


@dataclasses.dataclass(frozen=True)
class _Traced:
    """A traced and rewritten program, for the second attempt of one call.

    Attributes:
      signature: the tree of the arguments, and by position the types of the traced arguments.
      given: the user's program.
      shapes: its results.
      program: the rewritten program.
    """

    signature: tuple[Any, ...]
    given: compat.ClosedJaxpr
    shapes: Any
    program: Rewritten

    @property
    def is_reusable(self) -> bool:
        """Whether the program holds no tracer of a trace that may have ended."""
        return not any(isinstance(const, Tracer) for const in self.given.consts)


class _NeedsOptionsError(Exception):
    """The program being traced needs other compiler options."""

    def __init__(self, options: Options, traced: _Traced):
        self.options, self.traced = options, traced


class Jitted:
    """What `jaxoff.jit` returns; see there."""

    def __init__(self, fun, compiler_options: dict[str, Any], device: Device, kwargs: dict[str, Any]):
        self._fun, self._given, self._device, self._kwargs = fun, compiler_options, device, kwargs
        self._inner: Any = _jax_jit(fun, **kwargs)
        self._by_options: dict[tuple[Options, int], Any] = {}
        self._latest: Options = ()
        self._carried = threading.local()  # `traced`: the program of the first attempt, for the second
        functools.update_wrapper(self, fun, updated=())  # not the attributes of a Jitted inside of it

    def __call__(self, *args, **kwargs):
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((args, kwargs))):
            return self._inner(*args, **kwargs)
        return self._try(lambda jitted: jitted(*args, **kwargs), (args, kwargs))

    def lower(self, *args, **kwargs) -> jax.stages.Lowered:
        """As `jax.jit(fun).lower`; `compile` uses the options chosen."""
        return self._try(lambda jitted: jitted.lower(*args, **kwargs), (args, kwargs))

    def trace(self, *args, **kwargs) -> Any:
        """As `jax.jit(fun).trace`, of the program in its new order."""
        return self._try(lambda jitted: jitted.trace(*args, **kwargs), (args, kwargs))

    def eval_shape(self, *args, **kwargs) -> Any:
        """As `jax.jit(fun).eval_shape`."""
        return self._inner.eval_shape(*args, **kwargs)

    def clear_cache(self) -> None:
        """As `jax.jit(fun).clear_cache`."""
        for jitted in (self._inner, *self._by_options.values()):
            jitted.clear_cache()

    def _try(self, use: Callable[[Any], Any], given: Any) -> Any:
        """Applies `use` to the function under the options of last time, or under the options it needs.

        JAX takes options before a trace, and the traced program decides them. So the first attempt may end
        with `_NeedsOptionsError`; the second takes over the traced program: the user's function runs once.
        """
        devices = max(map(_devices_of, jax.tree.leaves((given, self._kwargs))), default=1)
        try:
            return use(self._under(self._latest, devices))
        except _NeedsOptionsError as needed:
            options, traced = needed.options, needed.traced
        self._carried.traced = traced if traced.is_reusable else None
        try:
            result = use(self._under(options, devices))
        finally:
            self._carried.traced = None
        self._latest = options
        return result

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Binds the function to an instance, as a method of a class."""
        return self if instance is None else types.MethodType(self, instance)

    def _cache_size(self) -> int:
        return sum(jitted._cache_size() for jitted in (self._inner, *self._by_options.values()))

    @property
    def options(self) -> dict[str, Any]:
        """The compiler options of the latest call."""
        return dict(self._latest) | self._given

    def _under(self, options: Options, devices: int) -> Any:
        if (options, devices) not in self._by_options:
            merged = dict(options) | self._given
            self._by_options[options, devices] = _jax_jit(
                self._overlapped(options, devices), compiler_options=merged or None, **self._kwargs
            )
        return self._by_options[options, devices]

    def _overlapped(self, options: Options, devices: int) -> Callable[..., Any]:
        device = self._device.sharing(max(1, devices // jax.process_count()))

        @functools.wraps(self._fun)
        def overlapped(*args, **kwargs):
            leaves, tree = jax.tree.flatten((args, kwargs))
            traced = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tracer)]

            def of_traced(*values):
                filled = list(leaves)  # static arguments stay as they are
                for i, value in zip(traced, values, strict=True):
                    filled[i] = value
                positional, named = jax.tree.unflatten(tree, filled)
                return self._fun(*positional, **named)

            signature = tree, tuple(traced), tuple(jax.typeof(leaves[i]) for i in traced)
            made: _Traced | None = getattr(self._carried, "traced", None)
            if made is None or made.signature != signature:
                closed, shapes = jax.make_jaxpr(of_traced, return_shape=True)(*(leaves[i] for i in traced))
                program = rewrite(closed, device, one_device=devices == 1)
                made = _Traced(signature, closed, shapes, program)
            program = made.program
            disabled = parse_xla_flags(os.environ.get("XLA_FLAGS", "")).get(DISABLED_PASSES, "")
            wanted = flags.choose_options(
                loops=program.loops,
                scanned=program.scanned,
                flat=program.flat,
                jaxlib=_JAXLIB,
                disabled=disabled,
            )
            if wanted != options:
                raise _NeedsOptionsError(wanted, made)
            self._check(made.given, program)
            results = compat.jaxpr_as_fun(program.jaxpr)(*(leaves[i] for i in traced))
            return jax.tree.unflatten(jax.tree.structure(made.shapes), results)

        return overlapped

    def _check(self, given: compat.ClosedJaxpr, program: Rewritten) -> None:
        platform = jax.default_backend()
        # A process has one pool for its devices; whole arrays are spread over those of all processes.
        nbytes = (
            (peak_host_nbytes(given) + program.spare_nbytes) * jax.local_device_count() // jax.device_count()
        )
        refuse_small_pool(nbytes, os.environ, platform)
        if not (program.scanned or program.flat):
            return
        refuse_wrong_jaxlib(_JAXLIB, platform)
        level = jax.config.jax_optimization_level
        for text in flags.find_harmful_options(self._given, scanned=bool(program.scanned), level=level):
            warnings.warn(text, stacklevel=2)


def _devices_of(leaf: Any) -> int:
    """How many devices a sharding, or an array with one, is over."""
    sharding = leaf if isinstance(leaf, jax.sharding.Sharding) else getattr(leaf, "sharding", None)
    return sharding.num_devices if isinstance(sharding, jax.sharding.Sharding) else 1
