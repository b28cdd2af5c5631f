"""The computations of a training run on a mesh of devices: `models.program.Program`, divided."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoff
from models.data import held_out_windows
from models.divided import DividedModel, Layout
from models.errors import InputError
from models.mesh import BATCH
from models.program import Program, State
from models.sharding import as_layers, as_stages, layer_shardings_of, shardings_of
from models.work import Work


@dataclasses.dataclass(frozen=True)
class ParallelProgram(Program):
    """The computations of a run on all devices of all processes. A state has its layers in stages.

    A checkpoint has the layers in a single axis, as on a single device, and so fits every mesh.
    """

    @property
    def layout(self) -> Layout:
        assert self.options.layout is not None  # otherwise the run has a `Program`
        return self.options.layout

    @functools.cached_property
    def mesh(self) -> Mesh:
        return self.layout.mesh.build()

    @functools.cached_property
    def model(self) -> DividedModel:
        return DividedModel(self.config, self.policy, self.layout, self.mesh)

    @functools.cached_property
    def state_shapes(self) -> State:
        shapes = super().state_shapes
        return _with(shapes, shardings_of(shapes, self.mesh, self.layout.mesh))

    @functools.cached_property
    def saved_shapes(self) -> State:
        return _with(jax.eval_shape(as_layers, self.state_shapes), layer_shardings_of(self._shardings))

    @property
    def tokens_shape(self) -> jax.ShapeDtypeStruct:
        """Shape and sharding of a step's tokens: (A, B, S + 1)."""
        o = self.options
        sharding = NamedSharding(self.mesh, P(None, BATCH))
        return jax.ShapeDtypeStruct((o.accum, o.batch // o.accum, o.seq + 1), jnp.int32, sharding=sharding)

    @property
    def work(self) -> Work:
        """The work of a step on each device."""
        o, devices = self.options, self.layout.mesh.size
        kind = jax.devices()[0].device_kind
        return Work.of(self.config, tokens=o.tokens_per_step // devices, seq=o.seq, device_kind=kind)

    def explain(self) -> jaxoff.Report:
        """Reports the residuals of a step, summed over all devices, which have equal shares."""
        params = self.state_shapes["params"]
        return jaxoff.explain(self.model.loss, params, self.tokens_shape, argnums=0, has_aux=True)

    @property
    def _shardings(self) -> State:
        return jax.tree.map(lambda x: x.sharding, self.state_shapes)

    @property
    def _places(self) -> State | None:
        """The sharding of each array where a budget keeps some in host memory; None otherwise."""
        places = None if self.plan is None else self.plan.in_shardings[0]
        return places if "pinned_host" in {place.memory_kind for place in jax.tree.leaves(places)} else None

    def init(self) -> State:
        return (
            jax.jit(self._init, out_shardings=self._shardings)() if self._places is None else super().init()
        )

    @functools.cached_property
    def step(self) -> Any:
        return jaxoff.jit(self._step, **self._jit_options, out_shardings=(self._shardings, None))

    def compile_held_out(self, windows: np.ndarray) -> Any:
        """Compiles (params, tokens (B, S + 1)) to the cross-entropy, for windows as large as a batch."""
        params = self.state_shapes["params"]
        loss = jax.jit(lambda params, tokens: self.model.loss(params, tokens)[1]["ce"])
        compiled = loss.lower(params, self.tokens_shape).compile()
        return lambda params, tokens: compiled(params, self.microbatches(tokens))

    def held_out_windows(self, tokens: np.ndarray) -> np.ndarray:
        """Picks windows of held-out text, each as large as a batch, since the mesh divides both alike."""
        o = self.options
        windows = held_out_windows(tokens, batch=o.batch, seq=o.seq, num_batches=o.eval_batches)
        if windows.shape[1] < o.batch:
            raise InputError(
                f"--mesh divides held-out text in batches of {o.batch} x {o.seq} bytes, got {len(tokens)} "
                "held-out bytes. Give more data, or a smaller --batch or --seq."
            )
        return windows

    def microbatches(self, tokens_BL: np.ndarray) -> Any:
        """Divides a batch, equal in all processes, between the devices: (A, B / A, S + 1)."""
        tokens = super().microbatches(tokens_BL)
        return jax.make_array_from_callback(tokens.shape, self.tokens_shape.sharding, lambda at: tokens[at])

    def saved_form(self, state: State) -> State:
        """Converts a state to the form of a checkpoint, layers in a single axis, on the devices."""
        shardings = jax.tree.map(lambda x: x.sharding, self.saved_shapes)
        state = state if self._places is None else jax.device_put(state, self._shardings)
        return jax.jit(as_layers, out_shardings=shardings)(state)

    def from_saved(self, saved: State) -> State:
        """Converts a checkpoint to a state, layers in stages."""
        divide = functools.partial(as_stages, pipe=self.layout.mesh.pipe, virtual=self.layout.virtual)
        state = jax.jit(divide, out_shardings=self._shardings)(saved)
        return state if self._places is None else jax.device_put(state, self._places)

    def gradients(self, params: Any, tokens_ABL: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
        return self.model.gradients(params, tokens_ABL)

    def new_params(self) -> Any:
        return self.model.params(self.options.seed)


def _with(shapes: State, shardings: State) -> State:
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes, shardings
    )
