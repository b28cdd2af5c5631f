"""Layers in a loop, and layers one after the other, whose residuals a policy places."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax

from jaxoff._device.profile import H200, Device, checked_device
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.scopes import LAYER_LOOP, PLAIN_LOOP, layer_scope
from jaxoff._layers.keep_first import Block, Choice, check, policy_of_last
from jaxoff._policy.policy import FirstLayers
from jaxoff._report.near_miss import near_miss

compat.exclude_from_source_lines(__file__)

Strategy = Literal["auto", "captured", "ordered", "plain"]


def scan(
    body: Callable[..., Any],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    *,
    policy: Callable[..., Any],
    reverse: bool = False,
    strategy: Strategy = "auto",
    block: int = 1,
    keep_first: Choice = "auto",
    device: Device = H200,
) -> tuple[Any, Any]:
    """`jax.lax.scan` over layers, each under `jax.checkpoint` with a policy.

    Inside `jaxoff.jit` the copies of what the policy offloads run beside the compute. A loop that offloads
    nothing takes less memory there than `jax.lax.scan`, and no more time. Two policies, a
    `jaxoff.FirstLayers`, make two loops; inside `jaxoff.jit` both read the rows of xs, and write their
    gradients, where those are. Elsewhere XLA copies them. Copies of a single layer, a loop of one iteration,
    do not overlap.

    Args:
      body: `(carry, x) -> (carry, y)`, as for `jax.lax.scan`.
      init: the first carry, a pytree of arrays.
      xs: pytree of arrays whose leading axis is the loop's; None with a length.
      length: number of steps, where xs does not tell.
      policy: a `jaxoff.policy`, any policy of `jax.checkpoint`, or a `jaxoff.FirstLayers` of two such.
      reverse: whether to go from the last step to the first.
      strategy: "captured": a loop, whose body is captured into CUDA graphs with concurrent edges; "ordered":
        no loop, the steps one after the other with copies ordered by barriers; "plain": a loop, left to XLA.
        "auto" takes "captured" for more than one step.
      block: how many steps one iteration of the loop does; a divisor of the length.
      keep_first: whether the residual that the backward pass needs first, the last that moves in the last
        step of a block, stays on the device. "auto": where the step would wait for the copies back, by
        `jaxoff.explain`'s estimate, and does not without that one. It stays in every block: the device holds
        it as many times. If other residuals of that step have its name, shape and dtype, they stay, too; so
        do, of un-named ones, those that the same operation makes of equal shapes. `jaxoff.explain` says what
        stays.
      device: speeds of the accelerator and its link, from which "auto" estimates.

    Returns:
      The last carry and the stacked ys.

    Raises:
      ValueError: for an unknown strategy or keep_first, or a block that does not divide the length or the
        number of first layers.
      TypeError: for a device that is no `jaxoff.Device`.
    """
    check(keep_first)
    checked_device(device)
    if strategy not in get_args(Strategy):
        choices = ", ".join(map(repr, get_args(Strategy)))
        raise ValueError(
            f"strategy must be one of {choices}, got {strategy!r}.{near_miss(strategy, get_args(Strategy))}"
        )
    steps = _length(xs, length)
    if block < 1 or steps % block:
        raise ValueError(f"block must divide the number of steps, {steps}, got {block}.")
    if steps == 0:  # nothing runs, and nothing is kept
        return lax.scan(body, init, xs, 0, reverse=reverse)
    if strategy == "auto":
        strategy = "captured" if steps > block else "ordered"
    if isinstance(policy, FirstLayers):
        parts = _in_two(policy, xs, steps, reverse)
        if policy.count % block and len(parts) == 2:
            raise ValueError(f"block must divide the number of first layers, {policy.count}, got {block}.")
        stacked = []
        for part, rows, count in parts:
            init, ys = scan(
                body,
                init,
                rows,
                count,
                policy=part,
                reverse=reverse,
                strategy=strategy,
                block=block,
                keep_first=keep_first,
                device=device,
            )
            stacked.append(ys)
        stacked = stacked[::-1] if reverse else stacked
        return init, jax.tree.map(lambda *ys: lax.concatenate(ys, 0), *stacked)
    iterations = steps // block
    args = jax.eval_shape(lambda: (init, jax.tree.map(lambda leaf: leaf[0], xs)))
    last = policy_of_last(Block(body, args, block, iterations), policy, keep_first, device)
    policies = [policy] * (block - 1) + [last]
    if strategy == "ordered":
        return _one_by_one(_checkpointed(body, policies), init, xs, steps, reverse)
    layers = _checkpointed(body, policies, prevent_cse=False)
    if block == 1:
        return _loop(layers[0], init, xs, steps, reverse, strategy)

    def iteration(carry, x):
        return _one_by_one(layers, carry, x, block, reverse)

    blocks = jax.tree.map(lambda leaf: leaf.reshape(iterations, block, *leaf.shape[1:]), xs)
    carry, ys = _loop(iteration, init, blocks, iterations, reverse, strategy)
    return carry, jax.tree.map(lambda leaf: leaf.reshape(steps, *leaf.shape[2:]), ys)


def layers(
    functions: Sequence[Callable[[Any], Any]] | Callable[..., Any],
    x: Any,
    params: Sequence[Any] | None = None,
    *,
    policy: Callable[..., Any],
    keep_first: Choice = "auto",
    device: Device = H200,
) -> Any:
    """Applies layers one after the other, each under `jax.checkpoint` with a policy.

    For layers that differ, and so cannot be in a `jaxoff.scan`. Inside `jaxoff.jit` their copies are ordered
    by barriers and overlap.

    Args:
      functions: one `x -> x` a layer; or one function `(params, x) -> x` for all.
      x: what the first layer takes, a pytree of arrays.
      params: with one function, the parameters of each layer, pytrees that may differ.
      policy: a `jaxoff.policy`, any policy of `jax.checkpoint`, or a `jaxoff.FirstLayers` of two such.
      keep_first: whether the last residual that moves in each layer stays on the device; as for
        `jaxoff.scan`, each layer a block.
      device: speeds of the accelerator and its link, from which "auto" estimates.

    Returns:
      What the last layer returns.

    Raises:
      ValueError: if params are given for several functions, or missing for one; for an unknown keep_first.
      TypeError: for a device that is no `jaxoff.Device`.
    """
    check(keep_first)
    checked_device(device)
    if callable(functions):
        if params is None:
            raise ValueError("One function for all layers takes (params, x): pass params, one entry a layer.")
        calls = [(functions, (weights,)) for weights in params]
    elif params is not None:
        raise ValueError("Several functions take x alone: params go with one function for all layers.")
    else:
        calls = [(function, ()) for function in functions]
    known = {}  # equal layers are looked at once
    for i, (function, weights) in enumerate(calls):
        given = policy.of(i) if isinstance(policy, FirstLayers) else policy
        args = *weights, x
        key = id(function), given, jax.tree.structure(args), *map(jax.typeof, jax.tree.leaves(args))
        if key not in known:
            known[key] = policy_of_last(
                Block(function, args, iterations=len(calls)), given, keep_first, device
            )
        with jax.named_scope(layer_scope(i)):
            x = jax.checkpoint(function, policy=known[key])(*args)
    return x


def _in_two(policy: FirstLayers, xs: Any, steps: int, reverse: bool) -> list[tuple[Any, Any, int]]:
    """The policies that steps have, with the xs of those that have it and how many they are."""
    first = min(policy.count, steps)
    if first in (0, steps):
        return [(policy.of(0), xs, steps)]
    counts = (steps - first, first) if reverse else (first, steps - first)
    leaves, structure = jax.tree.flatten(xs)
    pieces = [lax.split(leaf, counts) for leaf in leaves]
    rows = [jax.tree.unflatten(structure, [piece[i] for piece in pieces]) for i in range(2)]
    rows = rows[::-1] if reverse else rows
    return [(policy.policy, rows[0], first), (policy.rest, rows[1], steps - first)]


def _loop(body, init, xs, steps, reverse, strategy):
    with jax.named_scope(PLAIN_LOOP if strategy == "plain" else LAYER_LOOP):
        return lax.scan(body, init, xs, steps, reverse=reverse)


def _checkpointed(body, policies, prevent_cse=True):
    """The steps of a block, each under its policy."""
    return [jax.checkpoint(body, policy=policy, prevent_cse=prevent_cse) for policy in policies]


def _one_by_one(block, carry, xs, steps, reverse):
    """Runs the steps of a block, again and again until all are done."""
    ys = [None] * steps
    for nth, i in enumerate(reversed(range(steps)) if reverse else range(steps)):
        carry, ys[i] = block[nth % len(block)](carry, jax.tree.map(lambda leaf, i=i: leaf[i], xs))
    return carry, jax.tree.map(lambda *leaves: jnp.stack(leaves), *ys)


def _length(xs, length: int | None) -> int:
    leaves = jax.tree.leaves(xs)
    lengths = {leaf.shape[0] for leaf in leaves} | ({length} if length is not None else set())
    if len(lengths) != 1:
        got = f"leading axes of xs {sorted({leaf.shape[0] for leaf in leaves})} and length={length}"
        raise ValueError(f"xs and length must agree on the number of steps and one must give it, got {got}.")
    return lengths.pop()
