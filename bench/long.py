"""The longest sequence of a step with the shapes of Llama 3 that one GPU holds, by compiled memory.

    JAX_PLATFORMS=cpu python -m bench.long --target h100 --device-gb 78 --tokens 131072 262144 --out long.json

Nothing runs: the steps are compiled ahead of time, and no GPU is needed. A variant ends at the first length
that does not fit. `--figure` draws the longest sequence of each. On a GPU, `--steps` times them:

    python -m bench.long --steps 2 --device-gb 76 --host-gb 110 --layers 16 --tokens 131072 --variants jaxoff

One sequence, AdamW with clipping, weights in bfloat16 with float32 masters. Variants:

- "recompute": `jax.jit`, each layer recomputed, a plain head;
- "offload": the same with the layers' inputs offloaded by JAX's own policy;
- "dots": the same with the results of all products without batch dimensions offloaded by JAX's own policy;
- "budget": `jaxoff.jit(device_bytes=)` of the step of "recompute", without another change;
- "list": the same, the layers in a list and a Python loop instead of `jax.lax.scan`;
- "jaxoff": "budget" with the MLP and the head under `jaxoff.tiled`;
- "kept" and "moved": the step of "jaxoff" without a budget, each layer recomputed from its input, which stays
  on the device or is offloaded by `jaxoff.policy`: what the copies cost.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax._src.cudnn import fused_attention_stablehlo
from jax.ad_checkpoint import checkpoint_name

import jaxoff
from bench.client_steps.decoder import initialize_decoder, normalize, stack
from bench.client_steps.step import Sizes, offload
from bench.provenance import provenance
from jaxoff._runtime.program_memory import program_nbytes

VARIANTS = {
    "recompute": "jax.jit, all recomputed",
    "offload": "jax.jit, layer inputs offloaded",
    "dots": "jax.jit, products offloaded",
    "budget": "jaxoff.jit(device_bytes=...)",
    "list": "the same, layers in a list",
    "jaxoff": "the same, MLP and head tiled",
    "kept": "jaxoff.jit, tiled, all recomputed",
    "moved": "jaxoff.jit, tiled, layer inputs offloaded",
}
MODELS = {  # meta-llama/Llama-3.1-8B and Llama-3.2-1B
    "llama3_8b": Sizes(layers=32, batch=1),
    "llama3_1b": Sizes(layers=16, width=2048, hidden=8192, head_size=64, batch=1),
}
WITHIN_BUDGET = ("budget", "list", "jaxoff")
WITHOUT_BUDGET = ("kept", "moved")
POLICIES = {
    "offload": offload("block_in"),
    "dots": jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
    "moved": jaxoff.policy(offload=["block_in"]),
}
# A tile's tokens: products of this many rows run at the full rate.
TILE = 8192
# An H100 SXM's and an H200's 16-bit products a second, by the data sheet.
PEAK_FLOPS = 989e12


@contextlib.contextmanager
def cudnn_attention() -> Iterator[None]:
    """A context in which JAX traces cuDNN's attention without cuDNN, for a GPU that is not there."""
    check = fused_attention_stablehlo.check_cudnn_version
    fused_attention_stablehlo.check_cudnn_version = lambda: 91200
    try:
        yield
    finally:
        fused_attention_stablehlo.check_cudnn_version = check


def make_layer(sizes: Sizes, tiles: int) -> Callable[..., Any]:
    """A layer, its part behind the attention in tiles."""
    s = sizes

    def feed(rows, o, norm, gate, up, down):
        x, a = rows
        x = x + a @ o
        h = normalize(x, norm)
        return x + (jax.nn.silu(h @ gate) * (h @ up)) @ down

    def layer(x, w):
        x = checkpoint_name(x, "block_in")
        h = normalize(x, w["norm1"])
        q = (h @ w["q"]).reshape(*x.shape[:2], s.heads, s.head_size)
        k, v = ((h @ w[n]).reshape(*x.shape[:2], s.kv_heads, s.head_size) for n in "kv")
        a = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
        tail = feed if tiles == 1 else jaxoff.tiled(feed, tiles=tiles, axis=1)
        rows = x, a.reshape(*x.shape[:2], -1)
        return tail(rows, w["o"], w["norm2"], w["gate"], w["up"], w["down"]), None

    return layer


def cross_entropy(rows, norm, head):
    """The cross entropy of each token."""
    x, labels = rows
    logits = (normalize(x, norm) @ head).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def make_step(sizes: Sizes, variant: str) -> tuple[Callable[..., Any], Any]:
    """The step of a variant, and structs of its arguments."""
    tiled = variant in ("jaxoff", *WITHOUT_BUDGET)
    tiles = max(1, sizes.length // TILE) if tiled else 1
    layer = make_layer(sizes, tiles)
    block = jax.checkpoint(layer, policy=POLICIES.get(variant), prevent_cse=False)
    head = jaxoff.tiled(cross_entropy, tiles=tiles * 4, axis=1) if tiled else cross_entropy

    def loss_of(params, tokens):
        x = params["embed"][tokens[:, :-1]]
        if variant == "list":
            for weights in params["layers"]:
                x, _ = block(x, weights)
        else:
            x, _ = jax.lax.scan(block, x, params["layers"])
        return head((x, tokens[:, 1:]), params["norm"], params["head"]).mean()

    def step(state, tokens):
        weights, masters, optimizer_state = state
        loss, grads = jax.value_and_grad(loss_of)(weights, tokens)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        updates, optimizer_state = sizes.optimizer.update(grads, optimizer_state, masters)
        masters = optax.apply_updates(masters, updates)
        weights = jax.tree.map(lambda m: m.astype(jnp.bfloat16), masters)
        return (weights, masters, optimizer_state), loss

    def initialize(key):
        masters = initialize_decoder(sizes, list if variant == "list" else stack, key)
        return jax.tree.map(lambda m: m.astype(jnp.bfloat16), masters), masters, sizes.optimizer.init(masters)

    return step, (jax.eval_shape(initialize, jax.random.key(0)), sizes.tokens)


def model_flops(sizes: Sizes) -> float:
    """Operations of a step without recomputation: three times the forward pass, attention as causal."""
    s = sizes
    heads = (2 * s.heads + 2 * s.kv_heads) * s.head_size
    weights = s.layers * s.width * (heads + 3 * s.hidden) + s.width * s.vocabulary
    attention = s.layers * s.length * s.heads * s.head_size
    return 3 * s.batch * s.length * 2.0 * (weights + attention)


def draw_arguments(args: Any, shardings: Any) -> Any:
    """Random weights and tokens and a fresh optimizer's state, one array after the other, in its place."""

    def draw(path, struct, place):
        if jnp.issubdtype(struct.dtype, jnp.integer) and struct.ndim:
            value = jax.random.randint(jax.random.key(0), struct.shape, 0, 1000)
        elif path[1:2] == (jax.tree_util.SequenceKey(len(args[0]) - 1),):  # the optimizer's state
            value = jnp.zeros(struct.shape, struct.dtype)
        else:
            value = jax.random.normal(jax.random.key(0), struct.shape, struct.dtype) * 0.02
        return jax.block_until_ready(jax.device_put(value, place))

    if shardings is None:
        shardings = jax.tree.map(lambda _: jax.devices()[0], args)
    return jax.tree_util.tree_map_with_path(draw, args, shardings)


def time_steps(jitted: Any, args: Any, sizes: Sizes, steps: int) -> dict[str, Any]:
    """Times steps after a first one: the shortest, its share of the card's 16-bit peak, and the losses."""
    plan = getattr(jitted, "plan", None)
    state, batch = draw_arguments(args, None if plan is None else plan.in_shardings)
    samples, losses = [], []
    for _ in range(steps + 1):
        started = time.perf_counter()
        state, loss = jax.block_until_ready(jitted(state, batch))
        samples.append(time.perf_counter() - started)
        losses.append(float(loss))
    best = min(samples[1:])
    return {
        "seconds_a_step": best,
        "samples_s": samples,
        "losses": losses,
        "tokens_per_s": sizes.batch * sizes.length / best,
        "model_flops_share": model_flops(sizes) / best / PEAK_FLOPS,
    }


def measure_step(jitted: Any, args: Any, sizes: Sizes, o: argparse.Namespace) -> dict[str, Any]:
    """The peaks of a step's function, its plan, and with `--steps` its times; or the error."""
    row: dict[str, Any] = {}
    started = time.perf_counter()
    attention = contextlib.nullcontext() if o.steps else cudnn_attention()
    with attention, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            if o.steps:
                compiled = jitted.lower(*args).compile()
            else:
                compiled = jaxoff.target(o.target).compile(jitted, *args)
            memory: Any = compiled.memory_analysis()
            row |= {
                "peak_bytes": program_nbytes(compiled),
                "host_bytes": memory.host_argument_size_in_bytes + memory.host_temp_size_in_bytes,
                "seconds": time.perf_counter() - started,
            }
            if (plan := getattr(jitted, "plan", None)) is not None:
                row |= {"plan": str(plan), "predicted_s": 1e-3 * plan.step_ms}
            if o.steps:
                print({k: v for k, v in row.items() if k != "plan"}, flush=True)
                row |= time_steps(jitted, args, sizes, o.steps)
        except (jaxoff.BudgetError, jax.errors.JaxRuntimeError) as error:
            return row | {"error": str(error).splitlines()[0], "seconds": time.perf_counter() - started}
    return row


def jit_within(step: Callable[..., Any], o: argparse.Namespace) -> Any:
    """The step within the budget of the options."""
    budget = {"device_bytes": 1e9 * o.device_gb, "host_bytes": 1e9 * o.host_gb}
    compress = ["*"] if o.compress else ()
    return jaxoff.jit(step, donate_argnums=0, device=jaxoff.Device.of(o.target), compress=compress, **budget)


def measure_variant(variant: str, sizes: Sizes, o: argparse.Namespace) -> dict[str, Any]:
    """The row of a variant: its peaks, and with `--steps` its times, or the error."""
    step, args = make_step(sizes, variant)
    if variant in WITHIN_BUDGET:
        jitted = jit_within(step, o)
    else:
        jitted = (jaxoff if variant in WITHOUT_BUDGET else jax).jit(step, donate_argnums=0)
    return {"variant": variant, "tokens": sizes.length} | measure_step(jitted, args, sizes, o)


def measure_in_turn(
    measure: Callable[[str, Sizes, argparse.Namespace], dict[str, Any]],
    cases: Sequence[Sizes],
    o: argparse.Namespace,
) -> list[dict[str, Any]]:
    """The rows of all variants, each up to the first of the growing cases that does not fit."""
    rows: list[dict[str, Any]] = []
    for variant, sizes in itertools.product(o.variants, cases):
        if any(row["variant"] == variant and not fits(row, o.device_gb) for row in rows):
            continue
        rows.append(measure(variant, sizes, o))
        print({k: v for k, v in rows[-1].items() if k != "plan"}, flush=True)
        if o.out:
            result = {"provenance": provenance(vars(o)), "sizes": dataclasses.asdict(sizes)}
            o.out.write_text(json.dumps(result | {"rows": rows}, indent=1) + "\n")
    return rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `measure_in_turn` and `measure_step`."""
    parser.add_argument("--target", default="h100", help="the GPU, a name that jaxoff.target takes")
    parser.add_argument("--device-gb", type=float, default=78.0)
    parser.add_argument(
        "--steps", type=int, default=0, help="times this many steps on the GPU of this machine"
    )
    parser.add_argument("--compress", action="store_true", help="budgets may store values as float8")
    parser.add_argument("--out", type=Path)


def fits(row: dict[str, Any], device_gb: float) -> bool:
    """Whether the program of a row compiles within the memory of the device."""
    return row.get("peak_bytes", math.inf) <= 1e9 * device_gb


def draw_longest(rows: list[dict[str, Any]], o: argparse.Namespace) -> None:
    """Draws the longest sequence of each variant that fits, as bars."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    fitting = [row for row in rows if fits(row, o.device_gb)]
    longest = [max((r["tokens"] for r in fitting if r["variant"] == v), default=0) for v in o.variants]
    figure, axes = plt.subplots(figsize=(8, 1 + 0.5 * len(longest)), layout="constrained")
    colors = ["C0" if variant in WITHIN_BUDGET else "0.6" for variant in o.variants]
    bars = axes.barh([VARIANTS[v] for v in o.variants], longest, color=colors)
    axes.bar_label(bars, [f"{tokens:,}" for tokens in longest], padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel(f"tokens of one sequence, {o.model} within {o.device_gb:g} GB ({o.target})")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(o.figure, dpi=150)


def main(arguments: list[str] | None = None) -> None:
    """Compiles each variant at each length, times it with `--steps`, and writes the rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    parser.add_argument("--host-gb", type=float, default=300.0)
    parser.add_argument("--model", choices=MODELS, default="llama3_8b")
    parser.add_argument("--layers", type=int, help="as many layers instead of the model's")
    parser.add_argument("--tokens", type=int, nargs="+", default=[131072])
    longest = [name for name in VARIANTS if name not in WITHOUT_BUDGET]
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=longest)
    parser.add_argument("--figure", type=Path, help="a picture of the longest sequences")
    options = parser.parse_args(arguments)
    model = MODELS[options.model]
    model = dataclasses.replace(model, layers=options.layers or model.layers)
    cases = [dataclasses.replace(model, length=tokens) for tokens in sorted(options.tokens)]
    rows = measure_in_turn(measure_variant, cases, options)
    if options.figure:
        draw_longest(rows, options)


if __name__ == "__main__":
    main()
