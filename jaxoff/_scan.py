"""Layers in a loop, and layers one after the other, whose residuals a policy places."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax

from jaxoff import _compat
from jaxoff._errors import near_miss

_compat.exclude_from_source_lines(__file__)

Strategy = Literal["auto", "captured", "ordered", "plain"]
# The scope in which a loop stands whose copies are left to XLA.
PLAIN_SCOPE = "jaxoff_plain"


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
) -> tuple[Any, Any]:
    """`jax.lax.scan` over layers, each under `jax.checkpoint` with a policy.

    Inside `jaxoff.jit` the copies of what the policy offloads run beside the compute.

    Args:
      body: `(carry, x) -> (carry, y)`, as for `jax.lax.scan`.
      init: the first carry, a pytree of arrays.
      xs: pytree of arrays whose leading axis is the loop's; None with a length.
      length: number of steps, where xs does not tell.
      policy: a `jaxoff.policy` or any policy of `jax.checkpoint`.
      reverse: whether to go from the last step to the first.
      strategy: "captured": a loop, whose body is captured into CUDA graphs with concurrent edges; "ordered":
        no loop, the steps one after the other with copies ordered by barriers; "plain": a loop, left to XLA.
        "auto" takes "captured" for more than one step.
      block: how many steps one turn of the loop does; a divisor of the length.

    Returns:
      The last carry and the stacked ys.

    Raises:
      ValueError: for an unknown strategy, or a block that does not divide the length.
    """
    if strategy not in get_args(Strategy):
        choices = ", ".join(map(repr, get_args(Strategy)))
        raise ValueError(
            f"strategy must be one of {choices}, got {strategy!r}.{near_miss(strategy, get_args(Strategy))}"
        )
    steps = _length(xs, length)
    if block < 1 or steps % block:
        raise ValueError(f"block must divide the number of steps, {steps}, got {block}.")
    if strategy == "auto":
        strategy = "captured" if steps > block else "ordered"
    if strategy == "ordered":
        return _unrolled(body, init, xs, steps, policy, reverse)
    if block > 1:
        return _blocked(body, init, xs, steps, policy, reverse, strategy, block)
    return _loop(jax.checkpoint(body, policy=policy, prevent_cse=False), init, xs, steps, reverse, strategy)


def layers(
    functions: Sequence[Callable[[Any], Any]] | Callable[..., Any],
    x: Any,
    params: Sequence[Any] | None = None,
    *,
    policy: Callable[..., Any],
) -> Any:
    """Applies layers one after the other, each under `jax.checkpoint` with a policy.

    For layers that differ, and so cannot be in a `jaxoff.scan`. Inside `jaxoff.jit` their copies are ordered
    by barriers and overlap.

    Args:
      functions: one `x -> x` a layer; or one function `(params, x) -> x` for all.
      x: what the first layer takes, a pytree of arrays.
      params: with one function, the parameters of each layer, pytrees that may differ.
      policy: a `jaxoff.policy` or any policy of `jax.checkpoint`.

    Returns:
      What the last layer returns.

    Raises:
      ValueError: if params are given for several functions, or missing for one.
    """
    if callable(functions):
        if params is None:
            raise ValueError("One function for all layers takes (params, x): pass params, one entry a layer.")
        layer = jax.checkpoint(functions, policy=policy)
        for weights in params:
            x = layer(weights, x)
        return x
    if params is not None:
        raise ValueError("Several functions take x alone: params go with one function for all layers.")
    for function in functions:
        x = jax.checkpoint(function, policy=policy)(x)
    return x


def _loop(body, init, xs, steps, reverse, strategy):
    if strategy == "plain":
        with jax.named_scope(PLAIN_SCOPE):
            return lax.scan(body, init, xs, steps, reverse=reverse)
    return lax.scan(body, init, xs, steps, reverse=reverse)


def _unrolled(body, carry, xs, steps, policy, reverse):
    step, ys = jax.checkpoint(body, policy=policy), [None] * steps
    for i in reversed(range(steps)) if reverse else range(steps):
        carry, ys[i] = step(carry, jax.tree.map(lambda leaf, i=i: leaf[i], xs))
    return carry, jax.tree.map(lambda *leaves: jnp.stack(leaves), *ys)


def _blocked(body, init, xs, steps, policy, reverse, strategy, block):
    step = jax.checkpoint(body, policy=policy, prevent_cse=False)

    def turn(carry, x):
        ys = [None] * block
        for i in reversed(range(block)) if reverse else range(block):
            carry, ys[i] = step(carry, jax.tree.map(lambda leaf, i=i: leaf[i], x))
        return carry, jax.tree.map(lambda *leaves: jnp.stack(leaves), *ys)

    blocks = jax.tree.map(lambda leaf: leaf.reshape(steps // block, block, *leaf.shape[1:]), xs)
    carry, ys = _loop(turn, init, blocks, steps // block, reverse, strategy)
    return carry, jax.tree.map(lambda leaf: leaf.reshape(steps, *leaf.shape[2:]), ys)


def _length(xs, length: int | None) -> int:
    leaves = jax.tree.leaves(xs)
    lengths = {leaf.shape[0] for leaf in leaves} | ({length} if length is not None else set())
    if len(lengths) != 1:
        got = f"leading axes of xs {sorted({leaf.shape[0] for leaf in leaves})} and length={length}"
        raise ValueError(f"xs and length must agree on the number of steps and one must give it, got {got}.")
    return lengths.pop()
