"""`jax.jit` for programs that move residuals: an order and compiler options that let the copies overlap."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxoff._budget.limits import Budget
from jaxoff._device.profile import Device, find_device
from jaxoff._schedule.jitted import Jitted
from jaxoff._schedule.recipes import checked_recipe


def jit(
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
    """`jax.jit`, with copies between device and pinned host memory beside the compute.

    Where the program moves residuals, and in loops of `jaxoff.scan` that keep all of theirs on the device,
    barriers put its large values into one order. In that order memory is reused, and a copy starts as late as
    it can and still be in time. The program computes the same values; un-named values may round elsewhere.
    XLA's own rematerialization is off in a program in order. Differentiate inside, as in
    `jaxoff.jit(jax.value_and_grad(loss))`: outside of the differentiation there is no backward pass to see.

    A program that offloads residuals is compiled by one of five recipes:

    - "concurrent" (loops only): jaxoff's order in CUDA graphs with edges by the use of data, the copies and
      the collectives among them;
    - "early" (loops only): jaxoff's order under XLA's own scheduler, which starts each copy as soon as the
      order allows; the copies are outside of CUDA graphs. Compiled twice: the first program names the copies;
    - "ordered": as "early", but XLA starts a copy 5 ms before its end, by its own estimate, or later, which
      takes less memory;
    - "stock": the program as given, the copies of loops outside of CUDA graphs;
    - "saved": the program without its copies, its residuals on the device.

    On a GPU, the first call with new types of arguments compiles "stock" and "saved" as well. It runs the
    first recipe that takes no more device memory than either (1% tolerance) and exchanges hardly more bytes
    between devices than "stock" (a tenth of its copied bytes at most), or "saved" if the copies win no
    memory. Where it may hide copies less well than the first recipe, a warning and `findings` of the result
    say so, with the bytes. Compilation takes three to five times as long. JAX's persistent compilation
    cache keeps the programs, but programs whose loops the compiler divides over devices only under
    `jax_remove_custom_partitioning_ptr_from_cache_key`.

    Args:
      fun: as for `jax.jit`; without it, a decorator.
      compiler_options: as for `jax.jit`; they win over the ones chosen here. What is known to harm is warned
        of.
      device: rates of the accelerator and its link, to plan the copies with, or the name of a profile that
        ships with jaxoff, such as "h100" (`Device.of`). None: the GPU at hand, or the one that a
        `jaxoff.target` describes, by its profile or by the nearest with a finding; an H200 without a GPU. A
        program on several devices is planned with their shared link (`Device.sharing`).
      recipe: the recipe to use instead of a choice; compiles one program.
      tune: whether to choose by time among the recipes within that memory, each also without CUDA graphs
        where its copies are outside of loops. Each of the first steps runs, and waits for, another of these
        programs; four steps each, and the fastest stays. `tuned` of the result has the times. Within
        `device_bytes` these are the programs that fit: the plan's by each recipe, one that offloads nothing,
        and the step as it is written; with state on the host, the plan's alone. The decision is
        kept in `$JAXOFF_CACHE_DIR` (default: `~/.cache/jaxoff`), by program, device and versions. All the
        programs compute the same step, in roundings of their own.
      device_bytes: a budget of device memory for the step, on each device: bytes, text such as "60GB", or
        "fit", the limit of the GPU's allocator less other live arrays. The step needs no names and no policy.
        Each value that layers keep for their backward pass is saved, offloaded or recomputed, whatever the
        model's own `jax.checkpoint` does, so that the compiled program is within the budget and fast by the
        model of time. Layers are the iterations of a loop, or alike one after the other, as a Python loop
        leaves them. If its logits decide the peak, a head runs in parts of its rows. At most four programs
        without and four with copies to the host are compiled. `jaxoff.mark_not_offload` is kept to. A budget
        that only this meets keeps donated state on the host between steps: arguments that an elementwise
        update alone reads and replaces, such as an optimizer's moments; of several devices in one process,
        arrays with a `NamedSharding`. The update then runs in blocks, copied in both directions at once; its
        time is added to the step. Calls take the state from either memory and return it in pinned host
        memory; `plan.in_shardings` has the place of each array.
      host_bytes: the most host memory for offloaded values and state, likewise; None for any.
      compress: values of loops that a budget may keep in float8 (e4m3fn) with a float32 scale for each block
        of 128 along the last axis, in 0.516 of the bytes of bfloat16, on the device, on the link and on the
        host: names, or patterns such as "mlp.*", of the values as the plan's table shows them. It changes
        numbers: the forward pass reads the exact value, the backward pass the rounded one. Nothing is
        compressed unless it is listed here.
      **kwargs: as for `jax.jit`: static and donated arguments, shardings.

    Returns:
      A function like that of `jax.jit`, with `lower`, `trace` and `eval_shape`; `recipe`, `options`,
      `findings` and `plan` (the `jaxoff.Plan` within `device_bytes`) describe the latest program.
      Called inside another transformation it is an inner `jax.jit`.

    Warns:
      UserWarning: of each finding, once: a policy's rule that matches no name, a value that a policy offloads
        and that stays on the device, a call with copies inside another transformation, updates of flax.nnx
        objects that are lost (`jaxoff.nnx_jit` keeps them), another recipe than the first.

    Raises:
      TypeError: for a device that is no `jaxoff.Device`, and for compiler_options that are no mapping.
      BudgetError: at the first call or by `lower`, if no program within `device_bytes` is found.
      ValueError: for an unknown recipe, for `recipe` together with `tune` or `device_bytes`, for `tune` in
        one of several processes, and at the first call for "fit" without a single GPU process.
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
        return functools.partial(
            jit,
            compiler_options=compiler_options,
            device=device,
            recipe=recipe,
            tune=tune,
            device_bytes=device_bytes,
            host_bytes=host_bytes,
            compress=compress,
            **kwargs,
        )
    if not isinstance(compiler_options, Mapping | None):
        raise TypeError(
            "compiler_options maps names to values, such as {'xla_gpu_enable_command_buffer': ''}; "
            f"got {compiler_options!r}."
        )
    options, rates = dict(compiler_options or {}), find_device(device)
    if recipe is not None and tune:
        raise ValueError(
            f"recipe= insists on one recipe, tune=True compares several; got recipe={recipe!r} and both."
        )
    budget = Budget.of(device_bytes, host_bytes, compress)
    if budget is not None and recipe is not None:
        raise ValueError(f"device_bytes= chooses the recipe by compiled memory; got {recipe=} as well.")
    return Jitted(fun, options, rates, checked_recipe(recipe), tune, budget, kwargs)
