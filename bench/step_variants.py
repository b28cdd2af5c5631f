"""The ways to train a stack of layers, compared by `bench.step`, and their programs."""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Literal

import jax
from jax import lax

import jaxoff
from bench.grouped_mlp import describe
from bench.step_models import Form, Layer, Naming, PlacedNames, Workload, loss
from jaxoff import Policy
from jaxoff._layers.scan import scan_by_strategy

CONCURRENT = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}
# Without this option XLA computes a kernel twice whose result a scan saves and reads: once for each.
NO_SLICE_FUSION = {"xla_gpu_enable_dynamic_slice_fusion": False}
DETERMINISTIC = {"xla_gpu_deterministic_ops": True}

# `bound`: other trades of time for memory. `twin`: the same residuals, kept on the device.
# `stock`: offloaded by JAX alone. `ours`: offloaded by this project.
type Role = Literal["bound", "twin", "stock", "ours"]
type Placement = Literal["none", "recompute", "device", "host"]


@dataclasses.dataclass(frozen=True)
class Variant:
    """A way to train.

    Attributes:
      label: for tables.
      role: the kind of variant, a `Role`.
      form: a loop over layers, or a Python loop.
      placement: the placement of the named residuals; "none" is no checkpoint at all.
      naming: the way to name values, a `Naming`.
      strategy: of `scan_by_strategy`, or "layers": `jaxoff.layers`; None for `jax.jit` and JAX's own loops.
      options: compiler options beside the defaults.
      recipe: of `jaxoff.jit`; None for its choice.
      offload: the offloaded values, in place of the workload's.
      store: name or glob -> the format of kept values, of `jaxoff.policy`.
    """

    label: str
    role: Role
    form: Form
    placement: Placement
    naming: Naming = "pinned"
    strategy: str | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    recipe: str | None = None
    offload: tuple[str, ...] = ()
    store: Mapping[str, str] = dataclasses.field(default_factory=dict)


_FLOAT8 = {"*": "float8_e4m3fn"}
# All products of a dense layer but the last, and the inputs of the others: nothing wide is computed again.
_PRODUCTS = ("x_in", "qkv", "attn", "mlp_in", "pre")

VARIANTS: dict[str, Variant] = {
    "no_remat": Variant("no remat", "bound", "scanned", "none"),
    "full_remat": Variant("full remat", "bound", "scanned", "recompute"),
    "saved": Variant("saved", "twin", "scanned", "device"),
    "saved_concurrent": Variant("saved, CONCURRENT", "twin", "scanned", "device", options=CONCURRENT),
    "saved_no_fusion": Variant(
        "saved, no slice fusion", "twin", "scanned", "device", options=NO_SLICE_FUSION
    ),
    "saved_plain": Variant("saved, plain names", "bound", "scanned", "device", naming="plain"),
    "saved_unrolled": Variant("saved, unrolled", "twin", "unrolled", "device"),
    "stock_offload": Variant("stock offload", "stock", "scanned", "host", naming="plain"),
    "stock_offload_unrolled": Variant("stock offload, unrolled", "stock", "unrolled", "host", naming="plain"),
    "maxtext": Variant("MaxText-style offload", "stock", "scanned", "host", naming="maxtext"),
    "captured": Variant("jaxoff captured", "ours", "scanned", "host", strategy="captured"),
    "ordered": Variant("jaxoff ordered", "ours", "unrolled", "host", strategy="layers"),
    "auto": Variant("jaxoff auto", "ours", "scanned", "host", strategy="auto"),
    "auto_early": Variant("jaxoff early", "ours", "scanned", "host", strategy="auto", recipe="early"),
    "auto_float8": Variant("jaxoff auto, float8", "ours", "scanned", "host", strategy="auto", store=_FLOAT8),
    "products": Variant(
        "jaxoff, all products of dense", "ours", "scanned", "host", "planned", "auto", offload=_PRODUCTS
    ),
    "products_float8": Variant(
        "jaxoff, all products of dense, float8",
        "ours",
        "scanned",
        "host",
        "planned",
        "auto",
        offload=_PRODUCTS,
        store=_FLOAT8,
    ),
    # The same program with everything on the device; not a twin: twins are stock programs.
    "auto_saved": Variant("jaxoff, saved", "bound", "scanned", "device", strategy="auto"),
}


@dataclasses.dataclass(frozen=True)
class Step:
    """A step to compile.

    Attributes:
      form: a loop over stacked weights, or layers with a list of weights.
      jitted: `(weights, x) -> (loss, gradients of both)`.
      options: the choice of compiler options: two steps of the same text and options are one program.
    """

    form: Form
    jitted: Any
    options: str


def step_of(workload: Workload, variant: Variant, options: Mapping[str, Any] | None = None) -> Step:
    """The step of a variant, with compiler options overriding the variant's own."""
    placed = workload.placed_names(variant.naming)
    if variant.offload:
        placed = PlacedNames(variant.offload)
    step = jax.value_and_grad(loss(workload, variant.naming, stack_of(variant, placed)), (0, 1))
    merged = {**variant.options, **(options or {})}
    if variant.strategy is None:
        return Step(variant.form, jax.jit(step, compiler_options=merged or None), f"jax {merged}")
    jitted = jaxoff.jit(step, compiler_options=merged or None, recipe=variant.recipe)
    return Step(variant.form, jitted, f"jaxoff {variant.recipe} {merged}")


def _policy(placement: Placement, placed: PlacedNames) -> Any:
    names = jax.checkpoint_policies
    if placement == "recompute":
        return names.nothing_saveable
    if placement == "device":
        return names.save_only_these_names(*placed.offload, *placed.save)
    return names.save_and_offload_only_these_names(
        names_which_can_be_saved=list(placed.save),
        names_which_can_be_offloaded=list(placed.offload),
        offload_src="device",
        offload_dst="pinned_host",
    )


def stack_of(variant: Variant, placed: PlacedNames) -> Callable[[Layer, Any, Any], Any]:
    if variant.strategy is not None:
        policy = jaxoff.policy(offload=placed.offload, save=placed.save, store=variant.store)
        return _ours(variant.strategy, policy.on_device() if variant.placement == "device" else policy)

    def checkpoint(layer, **kwargs):
        if variant.placement == "none":
            return layer
        return jax.checkpoint(layer, policy=_policy(variant.placement, placed), **kwargs)

    def scan_layers(layer, carry, weights):
        body = checkpoint(layer, prevent_cse=False)
        return lax.scan(lambda carry, w: (body(w, carry), None), carry, weights)[0]

    def unroll_layers(layer, carry, weights):
        body = checkpoint(layer)
        for w in weights:
            carry = body(w, carry)
        return carry

    return scan_layers if variant.form == "scanned" else unroll_layers


def _ours(strategy: str, policy: Policy) -> Callable[[Layer, Any, Any], Any]:
    if strategy == "layers":
        return lambda layer, carry, weights: jaxoff.layers(layer, carry, weights, policy=policy)

    def scan_layers(layer, carry, weights):
        def body(carry, w):
            return layer(w, carry), None

        return scan_by_strategy(body, carry, weights, policy=policy, strategy=strategy)[0]  # pyright: ignore

    return scan_layers


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled step.

    Attributes:
      call: the executable.
      form: a loop over stacked weights, or layers with a list of weights.
      lower_s, compile_s: seconds to trace and lower, alone; to compile, beside the others.
      same_as: the name of an equal step, whose executable this step shares.
    """

    call: jax.stages.Compiled
    form: Form
    lower_s: float
    compile_s: float
    same_as: str | None = None


type Failure = dict[str, Any]


def compile_all(
    workload: Workload,
    steps: Mapping[str, Step],
    jobs: int,
    on_done: Callable[[str, Program | Failure], None] = lambda name, result: None,
) -> dict[str, Program]:
    """Compiles steps side by side.

    Args:
      workload: the workload of the steps.
      steps: by name.
      jobs: the number of steps compiling at a time.
      on_done: receives each step in order: the program, or {"error": the cause}.

    Returns:
      The programs by name, without failed steps.
    """
    pending: dict[str, tuple[float, Future[Compiled], str | None]] = {}
    first: dict[tuple[str, str], str] = {}
    done: dict[str, Program] = {}
    with ThreadPoolExecutor(jobs) as pool:
        for name, step in steps.items():
            try:
                start = time.perf_counter()
                with warnings.catch_warnings():  # jaxoff.jit warns of modes chosen here on purpose
                    warnings.filterwarnings("ignore", ".*puts the copies of scanned layers in line")
                    lowered = step.jitted.lower(*workload.shapes(step.form))
                lower_s = time.perf_counter() - start
                same = first.setdefault((lowered.as_text(), step.options), name)
                future = start_compile(pool, lowered, alone=not pending) if same == name else pending[same][1]
                pending[name] = lower_s, future, None if same == name else same
            except Exception as error:  # whatever tracing or lowering raises
                on_done(name, {"error": describe(error)})
        for name, (lower_s, future, same) in pending.items():
            try:
                call, compile_s = future.result()
            except Exception as error:  # the compiler, or its autotuning out of memory
                on_done(name, {"error": describe(error), "lower_s": lower_s})
                continue
            done[name] = Program(call, steps[name].form, lower_s, compile_s, same)
            on_done(name, done[name])
    return done


type Compiled = tuple[jax.stages.Compiled, float]


def start_compile(pool: ThreadPoolExecutor, lowered: jax.stages.Lowered, *, alone: bool) -> Future[Compiled]:
    """A future of a program and the seconds of its compilation.

    A process remembers XLA's fastest kernels for a product. Programs compiled at the same time
    all try kernels beside each other, and choose differently, so that equal programs have differed by 5%
    (openxla/xla#41620): the first program is compiled `alone`.
    """
    future = pool.submit(_compile, lowered)
    if alone:
        wait([future])
    return future


def _compile(lowered: jax.stages.Lowered) -> Compiled:
    start = time.perf_counter()
    return lowered.compile(), time.perf_counter() - start
