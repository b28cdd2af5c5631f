"""Train steps with control flow in their layers: conditions, loops over chunks of steps or blocks of keys.

    python -m bench.control_flow --program kinds --device-gb 20 --out results.json

Programs, all with their layers in a `jax.lax.scan`:

- "kinds": each layer is attention, an MLP or a gated recurrence, by a `jax.lax.switch`;
- "skipped": one in five layers of a decoder is skipped, by a `jax.lax.cond`;
- "chunks": each layer has a recurrence of matrices over time, by a scan over chunks of scans over steps;
- "maps": each layer calls a `jax.shard_map` with attention by a scan over blocks of keys.

Variants: the step as it is written, each layer under `jax.checkpoint` (and each chunk or block), with
products kept (`dots_with_no_batch_dims_saveable`), all by `jax.jit`; and the written step by
`jaxoff.jit(device_bytes=)`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

import jaxoff
from bench.client_steps.decoder import (
    apply_attention,
    apply_layer,
    apply_mlp,
    decoder_loss,
    initialize_decoder,
    normalize,
    stack,
)
from bench.client_steps.ssm import recur_by_tree
from bench.client_steps.step import ClientStep, Sizes, build_step
from bench.clients import Variant, describe_variant, find_limit, make_function, time_variants
from bench.provenance import provenance

type Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]

FULL = Sizes(
    layers=12,
    width=2048,
    hidden=8192,
    heads=16,
    kv_heads=16,
    head_size=128,
    vocabulary=32768,
    batch=8,
    length=2048,
)
TINY = Sizes(
    layers=3, width=64, hidden=128, heads=4, kv_heads=4, head_size=16, vocabulary=128, batch=2, length=32
)
CHUNKS = dataclasses.replace(FULL, layers=6, width=1024, hidden=4096, head_size=64, length=1024)
CHUNK = 32  # steps
MAPS = dataclasses.replace(FULL, layers=6, batch=2, length=4096)
BLOCKS = 4  # of keys
DOTS = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
WRAPS: dict[str, Wrap] = {
    "written": lambda f: f,
    "checkpoint": functools.partial(jax.checkpoint, prevent_cse=False),
    "dots": functools.partial(jax.checkpoint, prevent_cse=False, policy=DOTS),
}


def apply_recurrence(x: jax.Array, w: Any) -> jax.Array:
    """A gated recurrence over time, with its residual."""
    h = normalize(x, w["norm1"])
    decay = jax.nn.sigmoid((h @ w["q"]).astype(jnp.float32))
    states = recur_by_tree(decay, (1 - decay) * (h @ w["k"]).astype(jnp.float32))
    return x + (jax.nn.silu(h @ w["v"]) * states.astype(x.dtype)) @ w["o"]


def apply_chunks(s: Sizes, wrap: Wrap, x: jax.Array, w: Any) -> jax.Array:
    """A recurrence of matrices over time, a head each, by chunks of steps; with its residual."""
    h = normalize(x, w["norm1"])

    def divide(name):  # (chunks, steps, batch, heads, features)
        wide = (h @ w[name]).astype(jnp.float32).reshape(s.batch, -1, CHUNK, s.heads, s.head_size)
        return wide.transpose(1, 2, 0, 3, 4)

    def step(state, row):
        q, k, v = row
        state = 0.98 * state + jax.nn.sigmoid(k)[..., None] * v[..., None, :]
        return state, jnp.einsum("bhk,bhkv->bhv", q, state)

    chunk = wrap(lambda state, rows: jax.lax.scan(step, state, rows))
    start = jnp.zeros((s.batch, s.heads, s.head_size, s.head_size))
    _, found = jax.lax.scan(chunk, start, tuple(map(divide, "qkv")))
    return x + found.transpose(2, 0, 1, 3, 4).reshape(x.shape).astype(x.dtype) @ w["o"]


def attend_blocks(wrap: Wrap, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention of a device's rows of the batch, a block of keys at a time.

    Args:
      wrap: what is around each block.
      q, k, v: (batch, tokens, heads, features).

    Returns:
      (batch, tokens, heads, features).
    """
    batch, tokens, heads, features = q.shape
    at = jnp.arange(tokens)

    def add_block(carry, row):
        total, largest, weight = carry
        k, v, here = row
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) / features**0.5
        scores = jnp.where(at[:, None] >= here, scores, -1e30)
        new = jnp.maximum(largest, scores.max(-1))
        fade, part = jnp.exp(largest - new), jnp.exp(scores - new[..., None])
        values = jnp.einsum("bhqk,bkhd->bhqd", part.astype(v.dtype), v).astype(jnp.float32)
        return (total * fade[..., None] + values, new, weight * fade + part.sum(-1)), None

    rows = (z.reshape(batch, BLOCKS, -1, heads, features).swapaxes(0, 1) for z in (k, v))
    of_row = jnp.zeros((batch, heads, tokens), jnp.float32)
    start = jnp.zeros((*of_row.shape, features), jnp.float32), of_row - 1e30, of_row
    start = jax.lax.pcast(start, "data", to="varying")
    (total, _, weight), _ = jax.lax.scan(wrap(add_block), start, (*rows, at.reshape(BLOCKS, -1)))
    return (total / weight[..., None]).swapaxes(1, 2).astype(q.dtype)


def apply_maps(s: Sizes, wrap: Wrap, x: jax.Array, w: Any) -> jax.Array:
    """Attention over blocks of keys in a `jax.shard_map`, with its residual."""
    h = normalize(x, w["norm1"])
    heads = [(h @ w[name]).reshape(*x.shape[:2], s.heads, s.head_size) for name in "qkv"]
    rows, devices = jax.P("data"), jax.devices()[: math.gcd(s.batch, jax.device_count())]
    mesh = jax.make_mesh((len(devices),), ("data",), (AxisType.Auto,), devices=devices)
    attend = functools.partial(attend_blocks, wrap)
    found = jax.shard_map(attend, mesh=mesh, in_specs=(rows,) * 3, out_specs=rows)(*heads)
    return x + found.reshape(*x.shape[:2], -1) @ w["o"]


def build(program: str, sizes: Sizes, wrap: Wrap, attention: Any) -> ClientStep:
    """The step of a program.

    Args:
      program: its name.
      sizes: its sizes.
      wrap: what is around each layer, and each chunk or block: nothing, or a `jax.checkpoint`.
      attention: the implementation for `jax.nn.dot_product_attention`.
    """
    s = sizes

    def layer(x, row):
        weights, number = row
        if program == "skipped":
            decode = functools.partial(apply_layer, s, attention)
            return jax.lax.cond(number % 5 != 4, lambda x: decode(x, weights)[0], lambda x: x, x)
        w = {name: v.astype(jnp.bfloat16) for name, v in weights.items()}
        if program == "chunks":
            return apply_mlp(apply_chunks(s, wrap, x, w), w)
        if program == "maps":
            return apply_mlp(apply_maps(s, wrap, x, w), w)
        kinds = [functools.partial(apply_attention, s, attention), apply_mlp, apply_recurrence]
        return jax.lax.switch(number % 3, kinds, x, w)

    block = wrap(layer)

    def run(x, layers):
        rows = layers, jnp.arange(s.layers)
        return jax.lax.scan(lambda x, row: (block(x, row), None), x, rows)[0]

    loss = functools.partial(decoder_loss, run)
    return build_step(loss, functools.partial(initialize_decoder, s, stack), s.tokens, s)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Compiles and times the variants of a program; returns what a result file holds."""
    full = {"chunks": CHUNKS, "maps": MAPS}.get(options.program, FULL)
    sizes = full if options.sizes == "full" else TINY
    attention = "cudnn" if jax.default_backend() == "gpu" else "xla"
    steps = {name: build(options.program, sizes, wrap, attention) for name, wrap in WRAPS.items()}
    variants = {name: (Variant(name, jax.jit), step) for name, step in steps.items()}
    for gb in options.device_gb:
        budget = {"device_bytes": gb * 1e9, "host_bytes": 0}
        variants[f"within {gb:g} GB"] = Variant("written", jaxoff.jit, budget), steps["written"]
    state = jax.jit(steps["written"].initialize)(jax.random.key(0))
    batch = steps["written"].make_batch(jax.random.key(1))
    functions, rows = dict[str, Any](), dict[str, Any]()
    for name, (variant, step) in variants.items():
        function = make_function(variant, step)
        try:
            rows[name] = {"variant": name} | describe_variant(variant, function, state, batch)
            if rows[name].get("peak_bytes", 0) <= 0.95 * find_limit():  # else it does not fit the card
                functions[name] = function
        except (jaxoff.BudgetError, jax.errors.JaxRuntimeError) as error:
            rows[name] = {"variant": name, "error": str(error).splitlines()[0]}
        print(name, rows[name], flush=True)
    times = time_variants(functions, state, batch, options.steps, options.samples)
    for name, figures in times.items():
        rows[name] |= figures
        print(f"{name}: {figures['ms']:.1f} ms, loss {figures['loss']:.4f}", flush=True)
    origin = {"provenance": provenance(vars(options)), "sizes": dataclasses.asdict(sizes)}
    return origin | {"program": options.program, "rows": list(rows.values())}


def main(arguments: list[str] | None = None) -> None:
    """Measures a program and writes the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--program", choices=["kinds", "skipped", "chunks", "maps"], default="kinds")
    parser.add_argument(
        "--sizes", choices=["full", "tiny"], default="full", help="full: an 80 GB card; tiny: a CPU"
    )
    parser.add_argument("--device-gb", type=float, nargs="*", default=[], help="budgets, in GB")
    parser.add_argument("--steps", type=int, default=2, help="steps of a sample")
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    result = measure(options)
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
