"""The cost of pinning the rounding of named values, and of stock offload, on one GPU.

The dense workload: layers of attention and a squared-ReLU MLP in bf16, scanned; names x_in, mlp_in, attn.
Variants, interleaved in a process: plain `checkpoint_name`, `jaxoff.name`, and `jaxoff.name` with a barrier
on the statistic of each norm; saved and offloaded; in the default order and with command buffers scheduled
CONCURRENT. Also whether the loss and every gradient keep their bits from one placement to the other.

    python -m bench.name_cost --out result.json
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jaxoff
from bench.provenance import provenance
from bench.rounds import time_in_rounds

NAMES = ("x_in", "mlp_in", "attn")
CONCURRENT = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}
DETERMINISTIC = {"xla_gpu_deterministic_ops": True}

# The function to name a value, and the function applied to the statistic of a norm.
VARIANTS = {
    "checkpoint_name": (checkpoint_name, lambda x: x),
    "jaxoff.name": (jaxoff.name, lambda x: x),
    "jaxoff.name, fenced norms": (jaxoff.name, lax.optimization_barrier),
}
POLICIES = {
    "saved": jaxoff.policy(save=NAMES),
    "offloaded": jaxoff.policy(offload=NAMES),
    "recomputed": jaxoff.policy(recompute=NAMES),
}


def layer(name, fence, heads, x_BSD, w):
    """A transformer layer; B batch, S sequence, D width."""
    B, S, D = x_BSD.shape

    def rms_norm(x):
        wide = x.astype(jnp.float32)
        return (wide * lax.rsqrt(fence(jnp.mean(wide * wide, -1, keepdims=True)) + 1e-6)).astype(x.dtype)

    x = name(x_BSD, "x_in")
    q, k, v = jnp.split((rms_norm(x) @ w["qkv"]).reshape(B, S, 3 * heads, D // heads), 3, axis=2)
    attention = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
    x = x + name(attention.reshape(B, S, D), "attn") @ w["proj"]
    x = name(x, "mlp_in")
    return x + jnp.square(jax.nn.relu(rms_norm(x) @ w["up"])) @ w["down"], None


def step_of(variant, policy, heads, options):
    name, fence = VARIANTS[variant]
    block = jax.checkpoint(
        lambda x, w: layer(name, fence, heads, x, w), policy=POLICIES[policy], prevent_cse=False
    )

    def loss(w, x):
        return lax.scan(block, x, w)[0].astype(jnp.float32).mean()

    return jax.jit(jax.value_and_grad(loss, (0, 1)), compiler_options=options)


def arguments(o):
    keys = jax.random.split(jax.random.key(0), 5)

    def weight(key, rows, columns):
        return jax.random.normal(key, (o.layers, rows, columns), jnp.bfloat16) * rows**-0.5

    w = {"qkv": weight(keys[0], o.d, 3 * o.d), "proj": weight(keys[1], o.d, o.d)}
    w |= {"up": weight(keys[2], o.d, o.ff), "down": weight(keys[3], o.ff, o.d)}
    return w, jax.random.normal(keys[4], (o.batch, o.seq, o.d), jnp.bfloat16)


def measure_times(o, args) -> dict:
    """Median step times, interleaved, with the compiler's bytes."""
    programs, rows = {}, {}
    orders = {"default": {}, "concurrent": CONCURRENT}
    for variant, policy, order in itertools.product(VARIANTS, ("saved", "offloaded"), orders):
        program = step_of(variant, policy, o.heads, orders[order]).lower(*args).compile()
        memory = program.memory_analysis()
        assert memory is not None
        key = f"{variant}, {policy}, {order}"
        programs[key] = program
        rows[key] = {"temp_bytes": memory.temp_size_in_bytes, "host_bytes": memory.host_temp_size_in_bytes}
        jax.block_until_ready(program(*args))
    calls = {key: functools.partial(program, *args) for key, program in programs.items()}
    for key, measured in time_in_rounds(calls, o.repeats).items():
        row = rows[key] = {
            **rows[key],
            "ms": statistics.median(measured),
            "min_ms": min(measured),
            "max_ms": max(measured),
        }
        print(f"{key:46} {row['ms']:7.1f} ms  temp {row['temp_bytes'] / 1e9:5.2f} GB", flush=True)
    return rows


def compare_bits(o, args) -> dict[str, bool]:
    """Whether loss and gradients keep their bits, under deterministic options."""
    same = {}
    for variant in VARIANTS:
        results = {}
        for policy in POLICIES:
            out = step_of(variant, policy, o.heads, DETERMINISTIC)(*args)
            results[policy] = jax.tree.map(np.asarray, out)
        for other in ("offloaded", "recomputed"):
            equal = jax.tree.map(np.array_equal, results["saved"], results[other])
            same[f"{variant}: saved = {other}"] = all(jax.tree.leaves(equal))
    print(json.dumps(same, indent=2))
    return same


def main():
    parser = argparse.ArgumentParser(description="What pinning the rounding of named values costs.")
    for flag, default in dict(layers=12, d=4096, ff=16384, heads=32, batch=4, seq=4096, repeats=15).items():
        parser.add_argument(f"--{flag}", type=int, default=default)
    parser.add_argument("--out", type=Path, required=True)
    o = parser.parse_args()
    args = arguments(o)
    result = {**provenance(vars(o)), "rows": measure_times(o, args), "same_bits": compare_bits(o, args)}
    o.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
