"""The programs of `bench.parallel`: `models` on a mesh, residuals saved, or offloaded by JAX or by jaxoff."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoff
from bench.grouped_mlp import describe
from bench.step_variants import CONCURRENT, NO_SLICE_FUSION, Form, Program, Role, start_compile
from models import Config
from models.divided import DividedModel, Layout
from models.mesh import BATCH, MeshShape
from models.sharding import shardings_of

# The model's own layers only, since a pipeline takes layers of one kind.
WIDTHS: dict[str, tuple[str, dict[str, Any]]] = {
    "nano": ("nano", {}),
    "dsv3": ("dsv3", dict(first_k_dense=0, mtp_layers=0)),
    "tiny": ("tiny", dict(first_k_dense=0)),
}
OFFLOAD = "attn.norm_in,attn.proj_in,mlp.norm_in"
SAVE = "moe.probs,moe.act,head.norm_in"


@dataclasses.dataclass(frozen=True)
class Variant:
    """A way to place residuals, and the jit of the step.

    Attributes:
      role: the kind of variant: a saved twin, stock offload, or this project's program.
      offloads: whether the policy's residuals are offloaded.
      jit: `jax.jit` or `jaxoff.jit`.
      options: compiler options beside the defaults.
    """

    role: Role
    offloads: bool
    jit: Callable[..., Any]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


# XLA's own choice, which cuts the graph of an iteration: see jaxoff/_runtime/flags.py.
_PIECES = {
    "xla_gpu_experimental_use_collective_kernels": "COLLECTIVE_KERNEL_ALL_REDUCE",
    "xla_gpu_enable_cub_radix_sort": True,
}
VARIANTS = {
    "jaxoff": Variant("ours", True, jaxoff.jit),
    "jaxoff_in_pieces": Variant("ours", True, jaxoff.jit, _PIECES),
    "stock_offload": Variant("stock", True, jax.jit),
    "saved": Variant("twin", False, jax.jit),
    "saved_concurrent": Variant("twin", False, jax.jit, CONCURRENT),
    "saved_no_fusion": Variant("twin", False, jax.jit, NO_SLICE_FUSION),
}


@dataclasses.dataclass(frozen=True)
class Workload:
    """A step on a mesh: loss and gradients of some microbatches.

    Attributes:
      widths: a key of `WIDTHS`.
      layers: of the model.
      layout: the division over the mesh.
      microbatches: of a step.
      batch: sequences of a microbatch on each device that has sequences of its own.
      seq: tokens a sequence.
      policy: the placement of residuals.
      logits_chunk: of the model's config.
      target: the absent devices to compile for ahead of time; None for the devices at hand.
    """

    widths: str
    layers: int
    layout: Layout
    microbatches: int
    batch: int
    seq: int
    policy: jaxoff.Policy
    logits_chunk: int = 0
    target: jaxoff.Target | None = None

    def __post_init__(self):
        self.layout.check(self.config, self.batch * self.shape.batch, self.microbatches, self.seq)

    @property
    def config(self) -> Config:
        preset, overrides = WIDTHS[self.widths]
        return Config.preset(preset, num_layers=self.layers, logits_chunk=self.logits_chunk, **overrides)

    @property
    def shape(self) -> MeshShape:
        return self.layout.mesh

    @property
    def name(self) -> str:
        step = f"v{self.layout.virtual}-m{self.microbatches}-b{self.batch}"
        step += f"-logits{self.logits_chunk}" if self.logits_chunk else ""
        return f"{self.widths}-l{self.layers}-{self.shape}-{step}"

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.microbatches * self.batch * self.shape.batch * self.seq

    @functools.cached_property
    def mesh(self) -> jax.sharding.Mesh:
        devices = jax.devices() if self.target is None else self.target.topology.devices
        return self.shape.build(devices[: self.shape.size])

    def divide(self, *, offloads: bool) -> DividedModel:
        policy = self.policy if offloads else self.policy.on_device()
        return DividedModel(self.config, policy, self.layout, self.mesh)

    @functools.cached_property
    def shardings(self) -> Any:
        params = jax.eval_shape(self.divide(offloads=False).params)
        return shardings_of({"params": params}, self.mesh, self.shape)["params"]

    def weights(self, form: Form = "scanned", seed: int = 0) -> Any:
        """The parameters, on their devices."""
        del form  # layers are always in a loop
        make = functools.partial(self.divide(offloads=False).params, seed)
        return jax.jit(make, out_shardings=self.shardings)()

    def shapes(self) -> tuple[Any, jax.ShapeDtypeStruct]:
        """The shapes of weights and inputs, with their shardings."""
        params = jax.eval_shape(self.divide(offloads=False).params)
        params = jax.tree.map(
            lambda x, like: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=like), params, self.shardings
        )
        of_tokens = NamedSharding(self.mesh, P(None, BATCH))
        return params, jax.ShapeDtypeStruct(self._tokens_shape, jnp.int32, sharding=of_tokens)

    def inputs(self, seed: int = 0) -> jax.Array:
        """Tokens (microbatches, sequences, seq + 1), on their devices; others for each seed."""
        shape, vocab_size = self._tokens_shape, self.config.vocab_size
        tokens = np.random.default_rng(seed).integers(0, vocab_size, shape, np.int32)
        return jax.device_put(tokens, NamedSharding(self.mesh, P(None, BATCH)))

    @property
    def _tokens_shape(self) -> tuple[int, int, int]:
        return self.microbatches, self.batch * self.shape.batch, self.seq + 1

    def jit_step(self, variant: Variant, options: Mapping[str, Any] | None = None) -> Any:
        """(weights, tokens) -> (loss, (gradients, metrics)), not compiled."""
        divided = self.divide(offloads=variant.offloads)

        def step(params, tokens):
            gradients, metrics = divided.gradients(params, tokens)
            return metrics["loss"], (gradients, metrics)

        merged = {**variant.options, **(options or {})}
        return variant.jit(
            step, compiler_options=merged or None, out_shardings=(None, (self.shardings, None))
        )

    def lower(self, variant: Variant, options: Mapping[str, Any] | None = None) -> jax.stages.Lowered:
        """A variant's step, traced and lowered for the devices at hand or for the target."""
        jitted = self.jit_step(variant, options)
        if self.target is not None:
            return self.target.lower(jitted, *self.shapes())
        return jitted.lower(*self.shapes())


def add_options(parser: argparse.ArgumentParser, *, batch: int, repeats: int, jobs: int) -> None:
    """Adds the options of programs with steps of a `Workload`, with these defaults."""
    parser.add_argument("--widths", choices=WIDTHS, default="nano", help="the model")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument(
        "--batch", type=int, default=batch, help="sequences of a microbatch, each device's own"
    )
    parser.add_argument("--seq", type=int, default=4096, help="tokens a sequence")
    parser.add_argument("--repeats", type=int, default=repeats, help="samples of each step")
    parser.add_argument("--jobs", type=int, default=jobs, help="how many programs compile at a time")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU")


def shrink(o: argparse.Namespace) -> None:
    """Replaces the sizes of a workload by tiny ones for `--tiny`."""
    if o.tiny:
        o.widths, o.seq = "tiny", 16


def allow_pinned_memory(gpus: int) -> None:
    """Sets the size of a process's only pool of pinned memory, for all of its GPUs."""
    os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", str(48 * gpus))


def compile_all(
    workload: Workload,
    variants: Mapping[str, Variant],
    jobs: int,
    on_done: Callable[[str, Program | dict[str, Any]], None],
    options: Mapping[str, Any] | None = None,
) -> dict[str, Program]:
    """Compiles variants side by side.

    Args:
      workload: the workload of the variants.
      variants: by name.
      jobs: the number of variants compiling at a time.
      on_done: receives each variant's name with the program or an error.
      options: compiler options overriding the variants' own.
    """
    lowerings = {
        name: functools.partial(workload.lower, variant, options) for name, variant in variants.items()
    }
    return compile_lowered(lowerings, jobs, on_done)


def compile_lowered(
    lowerings: Mapping[str, Callable[[], jax.stages.Lowered]],
    jobs: int,
    on_done: Callable[[str, Program | dict[str, Any]], None],
) -> dict[str, Program]:
    """Lowers steps one after the other and compiles them side by side; see `compile_all`."""
    done: dict[str, Program] = {}
    with ThreadPoolExecutor(jobs) as pool:
        pending = {}
        for name, lower in lowerings.items():
            try:
                start = time.perf_counter()
                lowered = lower()
                lower_s = time.perf_counter() - start
                pending[name] = lower_s, start_compile(pool, lowered, alone=not pending)
            except Exception as error:  # whatever tracing or lowering raises
                on_done(name, {"error": describe(error)})
        for name, (lower_s, future) in pending.items():
            try:
                call, compile_s = future.result()
                done[name] = Program(call, "scanned", lower_s, compile_s)
                on_done(name, done[name])
            except Exception as error:  # the compiler, or its autotuning out of memory
                on_done(name, {"error": describe(error), "lower_s": lower_s})
    return done
