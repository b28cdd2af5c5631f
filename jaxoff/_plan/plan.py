"""`plan`: where the values of a train step wait within a budget of memory, before the step runs."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxoff._budget.limits import Budget
from jaxoff._budget.report import Plan
from jaxoff._device.profile import Device, find_device
from jaxoff._device.target import PLUGINS, list_targets, target
from jaxoff._jaxpr.jit_functions import add_shardings, jit_keywords
from jaxoff._jaxpr.statics import list_statics
from jaxoff._schedule.jit import jit
from jaxoff._schedule.jitted import Jitted


def plan(
    fun: Callable[..., Any],
    /,
    *args,
    device_bytes: float | str,
    host_bytes: float | str | None = None,
    compress: Sequence[str] | None = None,
    device: Device | str | None = None,
    compiled: bool | None = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    **kwargs,
) -> Plan:
    """Finds where the values of a train step wait for the backward pass within a budget of memory.

    The plan is that of `jaxoff.jit(fun, device_bytes=...)`, and nothing runs. Memory is the compiler's: on a
    GPU of this GPU, elsewhere ahead of time if jax's CUDA plugin is there and has a description of the
    device. Otherwise memory is an estimate by liveness, and a fifth of the budget stays free.

    Args:
      fun: a train step, which differentiates inside: a function, or the function of a `jaxoff.jit` or
        `jax.jit`, whose donated and static arguments are honoured. Without donation, new weights need memory
        beside the old weights.
      *args, **kwargs: arguments of `fun`: pytrees of arrays or `jax.ShapeDtypeStruct`s.
      device_bytes, host_bytes, compress: as for `jaxoff.jit`.
      device: a profile, or the name of one that ships with jaxoff, such as "h100"; None is the `jaxoff.jit`
        function's, or as for `jaxoff.jit`.
      compiled: whether the memory is the compiler's; None: where there is one.
      static_argnums, static_argnames: as for `jax.jit`; None for those of a given `jax.jit` function.

    Returns:
      A `Plan`; `plan.step` is the step within the budget, to be called or lowered.

    Raises:
      BudgetError: if no program within `device_bytes` is found.
      TypeError: for a device that is neither a profile nor a name.
      ValueError: for a budget that is no number of bytes, for `device_bytes="fit"` off a GPU, and for
        `compiled=True` where there is no compiler.

    Example:
      >>> import jax, jax.numpy as jnp, jaxoff
      >>> def layer(x, w):
      ...     return x + jnp.tanh(x @ w) @ w.T, None
      >>> def step(w, x):
      ...     loss = lambda w: jax.lax.scan(layer, x, w)[0].astype(jnp.float32).var()
      ...     return w - jax.grad(loss)(w)
      >>> w = jax.ShapeDtypeStruct((16, 4096, 4096), "bfloat16")
      >>> x = jax.ShapeDtypeStruct((65536, 4096), "bfloat16")
      >>> step = jaxoff.jit(step, donate_argnums=0)
      >>> fast = jaxoff.plan(step, w, x, device_bytes="60GB", compiled=False)
      >>> tight = jaxoff.plan(step, w, x, device_bytes="8GB", compiled=False)
      >>> tight.peak_bytes < 8e9, tight.step_ms > fast.step_ms
      (True, True)
      >>> {v.placement for v in tight.values if v.value == "carry"}
      {'offload'}
    """
    budget = Budget.of(device_bytes, host_bytes, compress)
    if budget is None:
        raise ValueError('device_bytes is a number of bytes above 0, or text such as "60GB"; got None.')
    statics = list_statics(static_argnums, static_argnames)
    return make_planner(fun, args, kwargs, device, compiled, statics)(budget)


def make_planner(
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: Device | str | None,
    compiled: bool | None,
    statics: Mapping[str, Any] | None,
) -> Callable[[Budget], Plan]:
    """A function budget -> plan of a step; arguments as for `plan`. Estimates trace the step once for all."""
    name, args = device if isinstance(device, str) else None, add_shardings(fun, args)
    jitted = _jit(fun, None if device is None else find_device(device), statics)
    on_gpu = jax.default_backend() == "gpu"
    ahead = name or _find_target(jitted.device)
    can_compile = on_gpu or (ahead in list_targets() and any(map(importlib.util.find_spec, PLUGINS)))
    if compiled and not can_compile:
        raise ValueError(
            "compiled=True needs a GPU, or jax's CUDA plugin (pip install 'jax[cuda13]') with a device of "
            f"{', '.join(list_targets())}; got neither."
        )
    if compiled is False or not can_compile:
        return jitted.make_estimator(args, kwargs)

    def compile_plan(budget: Budget) -> Plan:
        within = jitted.within(budget)
        if on_gpu:
            within.lower(*args, **kwargs)
        else:
            assert ahead is not None
            target(ahead, jitted.count_devices(args, kwargs)).lower(within, *args, **kwargs)
        assert within.plan is not None
        return within.plan

    return compile_plan


def _find_target(device: Device) -> str | None:
    """The name under which this profile ships with jaxoff."""
    return next((name for name in list_targets() if Device.of(name) == device), None)


def _jit(fun: Callable[..., Any], device: Device | None, statics: Mapping[str, Any] | None) -> Jitted:
    """A `jaxoff.jit` function for a device, with a function's donations, and with its static arguments."""
    if isinstance(fun, Jitted):
        if not statics:
            return fun.within(None, device)
        device = device or fun.device
    given = jit_keywords(getattr(fun, "_inner", fun))  # calls of `fun` cannot donate
    if statics:
        fun = getattr(fun, "__wrapped__", fun) if given else fun  # a jit without these static arguments
        given = {k: v for k, v in given.items() if not k.startswith("static")} | dict(statics)
    return jit(fun, device=device, **given)
