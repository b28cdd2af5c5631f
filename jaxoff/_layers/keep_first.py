"""`keep_first`: whether the residual at the start of a layer's backward pass stays on the device.

The backward pass of a layer begins with the residual offloaded last, and no compute hides the copy back.
Where the link is busy for longer than the kernels, a step waits for this copy.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from jaxoff._device.profile import Device
from jaxoff._policy.combinators import EquationKind, KeepFirst
from jaxoff._residuals.residuals import Row, list_kept
from jaxoff._residuals.traced_function import KeptValues, TracedFunction
from jaxoff._residuals.traffic import Traffic, estimate_traffic

type KeepFirstOption = bool | Literal["auto"]


def check_keep_first(keep_first: Any) -> None:
    """Checks the option `keep_first`.

    Raises:
      ValueError: for anything but True, False and "auto".
    """
    if keep_first not in (True, False, "auto"):
        raise ValueError(f"keep_first must be True, False or 'auto', got {keep_first!r}.")


@dataclasses.dataclass(frozen=True)
class Block:
    """The layers of an iteration of a loop, or a single layer outside of loops.

    Attributes:
      layer: the function of a layer, without `jax.checkpoint`.
      args: the arguments of the function: pytrees of arrays, tracers or `jax.ShapeDtypeStruct`s.
      policy: the policy of the layers.
      num_layers: the number of layers of the block.
      iterations: the number of blocks.
    """

    layer: Callable[..., Any]
    args: tuple[Any, ...]
    policy: Callable[..., Any]
    num_layers: int = 1
    iterations: int = 1

    @functools.cached_property
    def traced(self) -> TracedFunction:
        """The layer under its policy, in a loop of a single iteration.

        Raises:
          TypeError, ValueError: for a layer without a floating-point output.
        """
        return TracedFunction.trace(self._in_loop, self.args, {}, None, False).with_closure()

    @functools.cached_property
    def kept(self) -> KeptValues:
        """The values kept for the layer's backward pass.

        Raises:
          NotImplementedError, TypeError, ValueError: from JAX, for a layer without a gradient.
        """
        return self.traced.trace_kept()

    def _in_loop(self, *args: Any) -> Any:
        """Runs the layer in a loop: estimates of traffic are made by the iteration."""
        checkpointed = jax.checkpoint(self.layer, policy=self.policy, prevent_cse=False)

        def iterate(_, args):
            outs = jax.tree.leaves(checkpointed(*args))
            return None, [out for out in outs if jnp.issubdtype(out.dtype, jnp.inexact)]

        return lax.scan(iterate, None, jax.tree.map(lambda x: jnp.asarray(x)[None], args), 1)[1]


def choose_last_policy(block: Block, keep_first: KeepFirstOption, device: Device) -> Any:
    """Chooses the policy of the last layer of a block. The backward pass of the block begins with this layer.

    Args:
      block: the layers.
      keep_first: whether the residual offloaded last stays on the device; "auto": if a step waits for the
        copies back with this residual, and does not wait without.
      device: speeds for the estimates of times.

    Returns:
      The block's policy, or a `KeepFirst` around the policy.

    Raises:
      NotImplementedError, TypeError, ValueError: from JAX, for a layer without a gradient and keep_first
        True.
    """
    if keep_first is False:
        return block.policy
    try:
        kept = list_kept(block.traced, block.kept)
        offloaded = [row for row in kept if row.residual.placement == "offload"]
        if not offloaded:
            return block.policy
        kind = _kind_of(offloaded[-1])
        if keep_first == "auto" and not _frees_the_link(block, offloaded, kind, device):
            return block.policy
    except (NotImplementedError, TypeError, ValueError):
        if keep_first == "auto":  # a layer without a gradient has no residuals
            return block.policy
        raise
    return KeepFirst(block.policy, kind)


def _kind_of(row: Row) -> EquationKind:
    eqn = row.origin.eqn
    assert eqn is not None  # policies offload outputs of equations only
    return EquationKind.of(eqn.primitive, *(v.aval for v in eqn.invars), **eqn.params)


def _frees_the_link(block: Block, offloaded: list[Row], kind: EquationKind, device: Device) -> bool:
    """Whether a step waits for copies from the host, and does not wait once a kind stays on the device."""
    layer = next((t for t in estimate_traffic(block.traced.step, device) if t.part == "backward"), None)
    if layer is None:
        return False
    kept = sum(row.residual.nbytes for row in offloaded if _kind_of(row) == kind)

    def estimate_block(nbytes: int) -> Traffic:
        compute_ms = block.num_layers * layer.compute_ms
        return dataclasses.replace(
            layer,
            iterations=block.iterations,
            nbytes=nbytes,
            copy_ms=device.h2d_ms(nbytes),
            compute_ms=compute_ms,
        )

    nbytes = block.num_layers * layer.nbytes
    return estimate_block(nbytes).waits and not estimate_block(nbytes - kept).waits
