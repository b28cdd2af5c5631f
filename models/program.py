"""The computations of a run: initial state, loss, optimizer step, held-out loss."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxoff
from models import optim
from models.config import Config
from models.data import held_out_windows
from models.lm import LM, loss_fn
from models.moe import experts_implementation
from models.options import Options
from models.work import Work
from pallas_kernels import Implementation

State = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Program:
    """The computations of a run under a checkpoint policy, or without checkpoints.

    A state is {"step": int32 steps done, "params": weights, "optimizer": AdamW's}, plain pytrees of arrays.
    For weights in 16 bits it also has "masters", the same in float32, which the optimizer updates.

    Attributes:
      options: checked options.
      policy: a policy of JAX's protocol, or None.
      device_bytes: budget of each device's memory, within which `jaxoff.jit` places each value; or None.
      device: profile of the device, for the budget; None for the GPU at hand.
      host_bytes: the most host memory within the budget; None for any.
    """

    options: Options
    policy: Callable[..., Any] | None
    device_bytes: float | None = None
    device: jaxoff.Device | None = None
    host_bytes: float | None = None

    @functools.cached_property
    def config(self) -> Config:
        return self.options.config()

    @functools.cached_property
    def graph(self) -> nnx.GraphDef:
        return nnx.graphdef(nnx.eval_shape(self._model))

    @functools.cached_property
    def rate(self) -> optax.Schedule:
        return optim.schedule(self.options.lr, self.options.warmup, self.options.steps)

    @functools.cached_property
    def optimizer(self) -> optax.GradientTransformation:
        return optim.adamw(self.rate, weight_decay=self.options.weight_decay, clip=self.options.clip)

    @functools.cached_property
    def state_shapes(self) -> State:
        """The state's shapes and dtypes; nothing is allocated."""
        return jax.eval_shape(self._init)

    @property
    def state_bytes(self) -> int:
        return _nbytes(self.state_shapes)

    @property
    def microbatch_shape(self) -> jax.ShapeDtypeStruct:
        o = self.options
        return jax.ShapeDtypeStruct((o.batch // o.accum, o.seq + 1), jnp.int32)

    @property
    def tokens_shape(self) -> jax.ShapeDtypeStruct:
        """Shape of a step's tokens: (A, B, S + 1)."""
        shape = self.microbatch_shape
        return jax.ShapeDtypeStruct((self.options.accum, *shape.shape), shape.dtype)

    @property
    def experts(self) -> Implementation | None:
        """Implementation of the experts on the default device, with its reason; None without experts."""
        batch, length = self.microbatch_shape.shape
        return experts_implementation(self.config, batch * (length - 1))

    @property
    def work(self) -> Work:
        """The work of an optimizer step on the default device."""
        o, kind = self.options, jax.devices()[0].device_kind
        return Work.of(self.config, tokens=o.tokens_per_step, seq=o.seq, device_kind=kind)

    def loss(self, params: Any, tokens_BL: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Computes the model's loss and scalar metrics."""
        value, metrics = loss_fn(nnx.merge(self.graph, params), tokens_BL)
        return value, {key: x for key, x in metrics.items() if not x.ndim}

    def explain(self) -> jaxoff.Report:
        """Reports the placement of a microbatch's residuals. Nothing is allocated."""
        params = self.state_shapes["params"]
        return jaxoff.explain(self.loss, params, self.microbatch_shape, argnums=0, has_aux=True)

    @functools.cached_property
    def plan(self) -> jaxoff.Plan | None:
        """The plan of a step within `device_bytes`, compiled; None without a budget.

        Raises:
          jaxoff.BudgetError: nothing fits the budget.
        """
        if self.device_bytes is None:
            return None
        self.step.lower(self.state_shapes, self.tokens_shape)
        return self.step.plan

    @property
    def _jit_options(self) -> dict[str, Any]:
        budget = {"device_bytes": self.device_bytes, "host_bytes": self.host_bytes}
        return {"donate_argnums": 0, "device": self.device, **budget}

    def init(self) -> State:
        """Computes the state before the first step.

        With state on the host, parts of the state one after the other, so that the device never has all.
        """
        places, tree = jax.tree.flatten(None if self.plan is None else self.plan.in_shardings[0])
        if self.device_bytes is None or all(place.memory_kind == "device" for place in places):
            return jax.jit(self._init)()
        shapes, parts = jax.tree.leaves(self.state_shapes), [[0]]
        for i in range(1, len(shapes)):
            if _nbytes([shapes[k] for k in (*parts[-1], i)]) > self.device_bytes / 4:
                parts.append([])
            parts[-1].append(i)
        made: list[jax.Array] = []
        for part in parts:

            def make(part: list[int] = part) -> list[jax.Array]:
                leaves = jax.tree.leaves(self._init())
                return [leaves[i] for i in part]

            made += jax.block_until_ready(jax.jit(make, out_shardings=[places[i] for i in part])())
        return tree.unflatten(made)

    @functools.cached_property
    def step(self) -> Any:
        """Maps (state, tokens (A, B, S + 1)) to (state, metrics), by `jaxoff.jit`. The state is donated."""
        return jaxoff.jit(self._step, **self._jit_options)

    @functools.cached_property
    def compiled_step(self) -> jax.stages.Compiled:
        """`step`, compiled."""
        return self.step.lower(self.state_shapes, self.tokens_shape).compile()

    def compile_held_out(self, windows: np.ndarray) -> jax.stages.Compiled:
        """Compiles (params, tokens (B, S + 1)) to the cross-entropy, for windows (K, B, S + 1)."""
        tokens = jax.ShapeDtypeStruct(windows.shape[1:], windows.dtype)
        return (
            jaxoff.jit(lambda params, tokens: self.loss(params, tokens)[1]["ce"])
            .lower(self.state_shapes["params"], tokens)
            .compile()
        )

    def held_out_windows(self, tokens: np.ndarray) -> np.ndarray:
        """Picks windows (K, B, S + 1) of held-out text, each as large as a microbatch."""
        o = self.options
        return held_out_windows(tokens, batch=o.batch // o.accum, seq=o.seq, num_batches=o.eval_batches)

    def microbatches(self, tokens_BL: np.ndarray) -> np.ndarray:
        """Divides a batch into microbatches: (A, B / A, S + 1)."""
        return tokens_BL.reshape(self.options.accum, -1, tokens_BL.shape[-1])

    @property
    def saved_shapes(self) -> State:
        """Shapes of a checkpoint's arrays; within a budget with the memory that each is restored to."""
        if self.plan is None:
            return self.state_shapes

        def place(shape: jax.ShapeDtypeStruct, sharding: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

        return jax.tree.map(place, self.state_shapes, self.plan.in_shardings[0])

    def saved_form(self, state: State) -> State:
        """Converts a state to the form of a checkpoint."""
        return state

    def from_saved(self, saved: State) -> State:
        """Converts a checkpoint to a state."""
        return saved

    def gradients(self, params: Any, tokens_ABL: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
        """Computes the mean gradients over microbatches, in float32, and the metrics, loss included."""
        return optim.mean_grads(self.loss, params, tokens_ABL)

    def new_params(self) -> Any:
        """Initialises the parameters."""
        return nnx.to_pure_dict(nnx.state(self._model(), nnx.Param))

    def _model(self) -> LM:
        return LM(self.config, policy=self.policy, rngs=nnx.Rngs(self.options.seed))

    def _init(self) -> State:
        params = self.new_params()
        masters = jax.tree.map(lambda p: p.astype(jnp.float32), params)
        state = {
            "step": jnp.zeros((), jnp.int32),
            "params": params,
            "optimizer": self.optimizer.init(masters),
        }
        return state if self.config.param_dtype == "float32" else state | {"masters": masters}

    def _step(self, state: State, tokens_ABL: jax.Array) -> tuple[State, dict[str, jax.Array]]:
        masters = state.get("masters", state["params"])
        grads, metrics = self.gradients(state["params"], tokens_ABL)
        updates, optimizer = self.optimizer.update(grads, state["optimizer"], masters)
        masters = optax.apply_updates(masters, updates)
        params = jax.tree.map(lambda p, master: master.astype(p.dtype), state["params"], masters)
        # The norm of the new weights is finite only if all weights are: a state saved after this step is
        # known to be good.
        metrics |= {
            "grad_norm": optax.tree.norm(grads),
            "param_norm": optax.tree.norm(params),
            "lr": jnp.asarray(self.rate(state["step"]), jnp.float32),
        }
        new = {"step": state["step"] + 1, "params": params, "optimizer": optimizer}
        return new | ({"masters": masters} if "masters" in state else {}), metrics


def _nbytes(tree: Any) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))
