"""`scan` and `layers`: layers in a loop and layers in a row, with a policy for their residuals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax

from jaxoff._device.at_hand import device_or_at_hand
from jaxoff._device.profile import Device, find_device
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.scopes import LAYER_LOOP, PLAIN_LOOP
from jaxoff._layers.keep_first import Block, KeepFirstOption, check_keep_first, choose_last_policy
from jaxoff._layers.rules import warn_of_unmatched_rules
from jaxoff._policy.combinators import FirstLayers
from jaxoff._policy.protocol import check_policy
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
    block: int = 1,
    keep_first: KeepFirstOption = "auto",
    device: Device | str | None = None,
) -> tuple[Any, Any]:
    """`jax.lax.scan` over layers, each layer under `jax.checkpoint` with a policy.

    Inside `jaxoff.jit` the copies of offloaded residuals run beside the compute, and the program takes no
    more device memory than as a `jax.lax.scan` under `jax.jit`. A `jaxoff.FirstLayers` makes two loops;
    inside `jaxoff.jit` both loops read the rows of xs, and write the rows' gradients, in place. Elsewhere
    XLA copies the rows. Copies of a single layer, a loop of one iteration, do not overlap.

    Outside of `jaxoff.jit`, a rule that matches no name in the layers is warned of: `rule-matched-nothing`.

    Args:
      body: `(carry, x) -> (carry, y)`, as for `jax.lax.scan`.
      init: the first carry, a pytree of arrays.
      xs: a pytree of arrays with the loop's axis first; None with a length.
      length: the number of steps, required without xs.
      policy: a `jaxoff.policy`, any policy of `jax.checkpoint`, or a `jaxoff.FirstLayers` of two policies.
      reverse: whether to go from the last step to the first.
      block: the number of steps in an iteration of the loop; a divisor of the length.
      keep_first: whether the residual at the start of the backward pass, offloaded last in the last step of
        a block, stays on the device. "auto": if by the estimate of `jaxoff.explain` the step waits for the
        copies back with this residual and does not wait without. The residual stays in every block, so the
        device holds as many copies as the loop has blocks. Other residuals of the step with the same name,
        shape and dtype stay, too; so do un-named residuals of the same operation on equal shapes.
        `jaxoff.explain` shows the residuals kept.
      device: speeds of the accelerator and its link, for the estimate of "auto"; as for `jaxoff.jit`.

    Returns:
      The last carry, and the ys, stacked along a new first axis.

    Raises:
      ValueError: for an unknown keep_first, lengths at odds, or a block other than a divisor of the length
        and of the number of first layers.
      TypeError: for a device other than a `jaxoff.Device`.

    Example:
      >>> import jax, jax.numpy as jnp, jaxoff
      >>> def layer(x, w):
      ...     return jnp.tanh(jaxoff.name(x, "x_in") @ w), None
      >>> def loss(w, x):
      ...     policy = jaxoff.policy(offload=["x_in"])
      ...     return jaxoff.scan(layer, x, w, policy=policy, keep_first=False)[0].sum()
      >>> w, x = jnp.ones((12, 16, 16)), jnp.ones((8, 16))
      >>> [(r.name, r.count, r.placement) for r in jaxoff.residuals(loss, w, x)]
      [('x_in', 12, 'offload')]
    """
    return scan_by_strategy(
        body,
        init,
        xs,
        length,
        policy=policy,
        reverse=reverse,
        strategy="auto",
        block=block,
        keep_first=keep_first,
        device=device,
    )


def scan_by_strategy(
    body: Callable[..., Any],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    *,
    policy: Callable[..., Any],
    strategy: Strategy = "auto",
    reverse: bool = False,
    block: int = 1,
    keep_first: KeepFirstOption = "auto",
    device: Device | str | None = None,
) -> tuple[Any, Any]:
    """Runs `scan` with a given strategy. Other arguments, result and errors as for `scan`.

    Args:
      strategy: "captured": a loop for `jaxoff.jit` to rewrite, its body captured into CUDA graphs with
        concurrent edges; "ordered": no loop, the steps in a row with copies ordered by barriers; "plain": a
        loop left to XLA; "auto": "captured" for more steps than fit into a block, else "ordered".

    Raises:
      ValueError: for an unknown strategy.
    """
    check_keep_first(keep_first)
    check_policy(policy)
    device = device_or_at_hand(find_device(device))
    if strategy not in get_args(Strategy):
        choices = ", ".join(map(repr, get_args(Strategy)))
        raise ValueError(
            f"strategy must be one of {choices}, got {strategy!r}.{near_miss(strategy, get_args(Strategy))}"
        )
    steps = _read_length(xs, length)
    if isinstance(block, bool) or not isinstance(block, int):
        raise TypeError(f"block is a number of steps, a whole number, got {block!r}.")
    if block < 1 or steps % block:
        raise ValueError(f"block must divide the number of steps, {steps}, got {block}.")
    if steps == 0:  # without steps there are no residuals
        return lax.scan(body, init, xs, 0, reverse=reverse)
    if strategy == "auto":
        strategy = "captured" if steps > block else "ordered"
    if isinstance(policy, FirstLayers):
        loops = _split_first_layers(policy, xs, steps, reverse)
        if policy.count % block and len(loops) == 2:
            raise ValueError(f"block must divide the number of first layers, {policy.count}, got {block}.")
        stacked = []
        for policy_of_loop, rows, count in loops:
            init, ys = scan_by_strategy(
                body,
                init,
                rows,
                count,
                policy=policy_of_loop,
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
    traced = Block(body, args, policy, block, iterations)
    warn_of_unmatched_rules([traced])
    last = choose_last_policy(traced, keep_first, device)
    policies = [policy] * (block - 1) + [last]
    if strategy == "ordered":
        return _run_unrolled(_checkpoint_steps(body, policies), init, xs, steps, reverse)
    layers = _checkpoint_steps(body, policies, prevent_cse=False)
    if block == 1:
        return _run_loop(layers[0], init, xs, steps, reverse, strategy)

    def iteration(carry, x):
        return _run_unrolled(layers, carry, x, block, reverse)

    blocks = jax.tree.map(lambda leaf: leaf.reshape(iterations, block, *leaf.shape[1:]), xs)
    carry, ys = _run_loop(iteration, init, blocks, iterations, reverse, strategy)
    return carry, jax.tree.map(lambda leaf: leaf.reshape(steps, *leaf.shape[2:]), ys)


def layers(
    functions: Sequence[Callable[[Any], Any]] | Callable[..., Any],
    x: Any,
    params: Sequence[Any] | None = None,
    *,
    policy: Callable[..., Any],
    keep_first: KeepFirstOption = "auto",
    device: Device | str | None = None,
) -> Any:
    """Applies layers in a row, each layer under `jax.checkpoint` with a policy.

    For layers of different shapes or functions, unfit for a `jaxoff.scan`. Inside `jaxoff.jit` the copies
    of the layers are ordered by barriers and overlap with compute.

    Args:
      functions: a function `x -> x` for each layer; or a function `(params, x) -> x` for all layers.
      x: the input of the first layer, a pytree of arrays.
      params: with a function for all layers, the parameters of each layer: pytrees, which may differ.
      policy: a `jaxoff.policy`, any policy of `jax.checkpoint`, or a `jaxoff.FirstLayers` of two policies.
      keep_first: whether the residual offloaded last in each layer stays on the device; as for `jaxoff.scan`,
        with a block for each layer.
      device: speeds of the accelerator and its link, for the estimate of "auto"; as for `jaxoff.jit`.

    Returns:
      The output of the last layer.

    Raises:
      ValueError: for params with several functions, no params with a function for all layers, or an unknown
        keep_first.
      TypeError: for a device other than a `jaxoff.Device`.

    Example:
      >>> import jax, jax.numpy as jnp, jaxoff
      >>> def layer(w, x):
      ...     return jnp.tanh(jaxoff.name(x @ w, "act"))
      >>> weights = [jnp.ones((16, 32)), jnp.ones((32, 8))]
      >>> jaxoff.layers(layer, jnp.ones((4, 16)), weights, policy=jaxoff.policy(offload=["act"])).shape
      (4, 8)
    """
    check_keep_first(keep_first)
    check_policy(policy)
    device = device_or_at_hand(find_device(device))
    if callable(functions):
        if params is None:
            raise ValueError("One function for all layers takes (params, x): pass params, one entry a layer.")
        calls = [(functions, (weights,)) for weights in params]
    elif params is not None:
        raise ValueError("Several functions take x alone: params go with one function for all layers.")
    else:
        calls = [(function, ()) for function in functions]
    for function, _ in calls:
        if not callable(function):
            raise TypeError(f"layers takes functions, got {function!r} of type {type(function).__name__}.")
    blocks = {}  # function, policy and types of a layer -> block and policy: equal layers are traced once
    for i, (function, weights) in enumerate(calls):
        given = policy.of(i) if isinstance(policy, FirstLayers) else policy
        args = *weights, x
        key = id(function), given, jax.tree.structure(args), *map(jax.typeof, jax.tree.leaves(args))
        if key not in blocks:
            block = Block(function, args, given, iterations=len(calls))
            blocks[key] = block, choose_last_policy(block, keep_first, device)
        x = jax.checkpoint(function, policy=blocks[key][1])(*args)
    warn_of_unmatched_rules([block for block, _ in blocks.values()])
    return x


def _split_first_layers(
    policy: FirstLayers, xs: Any, steps: int, reverse: bool
) -> list[tuple[Any, Any, int]]:
    """Splits a loop by first layers: for each of the loops its policy, its xs and its number of steps."""
    first = min(policy.count, steps)
    if first in (0, steps):
        return [(policy.of(0), xs, steps)]
    counts = (steps - first, first) if reverse else (first, steps - first)
    leaves, structure = jax.tree.flatten(xs)
    pieces = [lax.split(leaf, counts) for leaf in leaves]
    rows = [jax.tree.unflatten(structure, [piece[i] for piece in pieces]) for i in range(2)]
    rows = rows[::-1] if reverse else rows
    return [(policy.policy, rows[0], first), (policy.rest, rows[1], steps - first)]


def _run_loop(body, init, xs, steps, reverse, strategy):
    with jax.named_scope(PLAIN_LOOP if strategy == "plain" else LAYER_LOOP):
        return lax.scan(body, init, xs, steps, reverse=reverse)


def _checkpoint_steps(body, policies, prevent_cse=True):
    """Puts the steps of a block under `jax.checkpoint`, each with its policy."""
    return [jax.checkpoint(body, policy=policy, prevent_cse=prevent_cse) for policy in policies]


def _run_unrolled(block, carry, xs, steps, reverse):
    """Runs steps in a row, with the functions of a block in rotation."""
    ys = [None] * steps
    for nth, i in enumerate(reversed(range(steps)) if reverse else range(steps)):
        carry, ys[i] = block[nth % len(block)](carry, jax.tree.map(lambda leaf, i=i: leaf[i], xs))
    return carry, jax.tree.map(lambda *leaves: jnp.stack(leaves), *ys)


def _read_length(xs, length: int | None) -> int:
    leaves = jax.tree.leaves(xs)
    lengths = {leaf.shape[0] for leaf in leaves} | ({length} if length is not None else set())
    if len(lengths) != 1:
        got = f"leading axes of xs {sorted({leaf.shape[0] for leaf in leaves})} and length={length}"
        raise ValueError(f"xs and length must agree on the number of steps and one must give it, got {got}.")
    return lengths.pop()
