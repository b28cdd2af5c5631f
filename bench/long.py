"""The longest sequence of a step with Llama-3.1-8B's shapes that one GPU holds, by compiled memory.

    JAX_PLATFORMS=cpu python -m bench.long --target h100 --device-gb 78 --tokens 131072 262144 --out long.json

Nothing runs: the steps are compiled ahead of time, and no GPU is needed. On a GPU, `--steps` times them:

    python -m bench.long --steps 2 --device-gb 76 --host-gb 110 --layers 16 --tokens 131072 --variants jaxoff

One sequence, AdamW with clipping, weights in bfloat16 with float32 masters. Variants:

- "recompute": `jax.jit`, each layer recomputed, a plain head;
- "offload": the same with the layers' inputs offloaded by JAX's own policy;
- "jaxoff": `jaxoff.jit(device_bytes=)` of the step with its MLP and its head under `jaxoff.tiled`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax._src.cudnn import fused_attention_stablehlo
from jax.ad_checkpoint import checkpoint_name

import jaxoff
from bench.client_steps.decoder import initialize_decoder, normalize, stack
from bench.client_steps.step import OPTIMIZER, Sizes, offload
from bench.provenance import provenance
from jaxoff._runtime.program_memory import program_nbytes

VARIANTS = ("recompute", "offload", "jaxoff")
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
    tiles = max(1, sizes.length // TILE)
    layer = make_layer(sizes, tiles if variant == "jaxoff" else 1)
    policy = offload("block_in") if variant == "offload" else None
    block = jax.checkpoint(layer, policy=policy, prevent_cse=False)
    head = cross_entropy if variant != "jaxoff" else jaxoff.tiled(cross_entropy, tiles=tiles * 4, axis=1)

    def loss_of(params, tokens):
        x, _ = jax.lax.scan(block, params["embed"][tokens[:, :-1]], params["layers"])
        return head((x, tokens[:, 1:]), params["norm"], params["head"]).mean()

    def step(state, tokens):
        weights, masters, optimizer_state = state
        loss, grads = jax.value_and_grad(loss_of)(weights, tokens)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        updates, optimizer_state = OPTIMIZER.update(grads, optimizer_state, masters)
        masters = optax.apply_updates(masters, updates)
        weights = jax.tree.map(lambda m: m.astype(jnp.bfloat16), masters)
        return (weights, masters, optimizer_state), loss

    def initialize(key):
        masters = initialize_decoder(sizes, stack, key)
        return jax.tree.map(lambda m: m.astype(jnp.bfloat16), masters), masters, OPTIMIZER.init(masters)

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
        elif path[1:2] == (jax.tree_util.SequenceKey(2),):
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


def measure_variant(
    variant: str, sizes: Sizes, target: jaxoff.Target, device: jaxoff.Device, o: argparse.Namespace
) -> dict[str, Any]:
    """The row of a variant: its peaks, and with `--steps` its times, or the error."""
    row: dict[str, Any] = {"variant": variant, "tokens": sizes.length}
    started = time.perf_counter()
    attention = contextlib.nullcontext() if o.steps else cudnn_attention()
    with attention, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step, args = make_step(sizes, variant)
        jitted: Any = jax.jit(step, donate_argnums=0)
        if variant == "jaxoff":
            budget = {"device_bytes": 1e9 * o.device_gb, "host_bytes": 1e9 * o.host_gb}
            jitted = jaxoff.jit(step, donate_argnums=0, device=device, **budget)
        try:
            compiled = jitted.lower(*args).compile() if o.steps else target.compile(jitted, *args)
            memory: Any = compiled.memory_analysis()
            row |= {
                "peak_bytes": program_nbytes(compiled),
                "host_bytes": memory.host_argument_size_in_bytes + memory.host_temp_size_in_bytes,
                "seconds": time.perf_counter() - started,
            }
            if variant == "jaxoff":
                row |= {"plan": str(jitted.plan), "predicted_s": 1e-3 * jitted.plan.step_ms}
            print({k: v for k, v in row.items() if k != "plan"}, flush=True)
            if o.steps:
                row |= time_steps(jitted, args, sizes, o.steps)
        except (jaxoff.BudgetError, jax.errors.JaxRuntimeError) as error:
            return row | {"error": str(error).splitlines()[0], "seconds": time.perf_counter() - started}
    return row


def main(arguments: list[str] | None = None) -> None:
    """Compiles each variant at each length, times it with `--steps`, and writes the rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="h100", help="the GPU, a name that jaxoff.target takes")
    parser.add_argument("--device-gb", type=float, default=78.0)
    parser.add_argument("--host-gb", type=float, default=300.0)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tokens", type=int, nargs="+", default=[131072])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    parser.add_argument(
        "--steps", type=int, default=0, help="times this many steps on the GPU of this machine"
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    target, device = jaxoff.target(options.target), jaxoff.Device.of(options.target)
    rows = []
    for tokens in options.tokens:
        sizes = Sizes(layers=options.layers, batch=1, length=tokens)
        for variant in options.variants:
            rows.append(measure_variant(variant, sizes, target, device, options))
            print({k: v for k, v in rows[-1].items() if k != "plan"}, flush=True)
            if options.out:
                result = {"provenance": provenance(vars(options)), "sizes": dataclasses.asdict(sizes)}
                options.out.write_text(json.dumps(result | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
