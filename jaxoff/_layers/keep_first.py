"""The residual that a layer's backward pass needs first, and whether it had better stay on the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from jaxoff._device.profile import Device
from jaxoff._policy.policy import KeepFirst, Kind
from jaxoff._residuals.residuals import Row, kept_rows
from jaxoff._residuals.traced_function import Program
from jaxoff._residuals.traffic import Traffic, traffic_of

type Choice = bool | Literal["auto"]


def check(keep_first: Any) -> None:
    """Raises for what is no choice.

    Raises:
      ValueError: for anything but True, False and "auto".
    """
    if keep_first not in (True, False, "auto"):
        raise ValueError(f"keep_first must be True, False or 'auto', got {keep_first!r}.")


@dataclasses.dataclass(frozen=True)
class Block:
    """Layers that run together: an iteration of a loop, or a layer that is in none.

    Attributes:
      layer: a function of arrays, without its `jax.checkpoint`.
      args: what it is called with: pytrees of arrays, or of tracers.
      num_layers: how many layers a block has.
      iterations: how many such blocks there are.
    """

    layer: Callable[..., Any]
    args: tuple[Any, ...]
    num_layers: int = 1
    iterations: int = 1


def policy_of_last(block: Block, policy: Callable[..., Any], keep_first: Choice, device: Device) -> Any:
    """The policy of the last layer of a block, with which its backward pass begins.

    Args:
      block: the layers.
      policy: that of the others.
      keep_first: whether to keep on the device what the backward pass needs first; "auto": where a step would
        wait for the copies back, and does not without that one.
      device: speeds that the times are estimated with.

    Returns:
      `policy`, or one that keeps the value.
    """
    planned = getattr(policy, "preset", None) == "plan"  # that has weighed it
    if keep_first is False or (keep_first == "auto" and planned):
        return policy
    try:
        program = Program.trace(
            _an_iteration(block.layer, policy), block.args, {}, None, False
        ).with_closure()
        moved = [row for row in kept_rows(program, program.kept()) if row.residual.placement == "host"]
        if not moved:
            return policy
        kind = _kind(moved[-1])
        if keep_first == "auto" and not _frees_the_link(block, program, moved, kind, device):
            return policy
    except (NotImplementedError, TypeError, ValueError):
        if keep_first == "auto":  # what has no gradient has nothing to keep
            return policy
        raise
    return KeepFirst(policy, kind)


def _an_iteration(layer: Callable[..., Any], policy) -> Callable[..., Any]:
    """A loop of one iteration around a layer: what is estimated for a loop is told by the iteration."""
    checkpointed = jax.checkpoint(layer, policy=policy, prevent_cse=False)

    def once(_, args):
        outs = jax.tree.leaves(checkpointed(*args))
        return None, [out for out in outs if jnp.issubdtype(out.dtype, jnp.inexact)]

    return lambda *args: lax.scan(once, None, jax.tree.map(lambda x: jnp.asarray(x)[None], args), 1)[1]


def _kind(row: Row) -> Kind:
    eqn = row.origin.eqn
    assert eqn is not None  # an equation made what moves
    return Kind.of(eqn.primitive, *(v.aval for v in eqn.invars), **eqn.params)


def _frees_the_link(block: Block, program: Program, moved: list[Row], kind: Kind, device: Device) -> bool:
    """Whether a step waits for copies from the host, and does not if a kind stays in the last layer."""
    layer = next((t for t in traffic_of(program.step, device) if t.part == "backward"), None)
    if layer is None:
        return False
    kept = sum(row.residual.nbytes for row in moved if _kind(row) == kind)

    def of_block(nbytes: int) -> Traffic:
        compute_ms = block.num_layers * layer.compute_ms
        return dataclasses.replace(
            layer,
            iterations=block.iterations,
            nbytes=nbytes,
            copy_ms=device.h2d_ms(nbytes),
            compute_ms=compute_ms,
        )

    nbytes = block.num_layers * layer.nbytes
    return of_block(nbytes).waits and not of_block(nbytes - kept).waits
