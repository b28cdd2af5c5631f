"""What pinning the rounding of named values costs, and what stock offload costs, on one GPU.

The dense workload: layers of attention and a squared-ReLU MLP in bf16, scanned; names x_in, mlp_in, attn.
Variants, interleaved in one
process: plain `checkpoint_name` against `jaxoff.name`, saved and offloaded, in the default order and with
command buffers scheduled
CONCURRENT. Also whether the loss and every gradient keep their bits from one placement to the other.

    python -m bench.name_cost --out result.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jaxoff
from bench.provenance import provenance

NAMES = ("x_in", "mlp_in", "attn")
CONCURRENT = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}
DETERMINISTIC = {"xla_gpu_deterministic_ops": True}


def rms_norm(x):
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)).astype(x.dtype)


def layer(name, heads, x_BSD, w):
    """One transformer layer; B batch, S sequence, D width."""
    B, S, D = x_BSD.shape
    x = name(x_BSD, "x_in")
    q, k, v = jnp.split((rms_norm(x) @ w["qkv"]).reshape(B, S, 3 * heads, D // heads), 3, axis=2)
    attention = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
    x = x + name(attention.reshape(B, S, D), "attn") @ w["proj"]
    x = name(x, "mlp_in")
    return x + jnp.square(jax.nn.relu(rms_norm(x) @ w["up"])) @ w["down"], None


def loss_of(name, policy, heads):
    block = jax.checkpoint(lambda x, w: layer(name, heads, x, w), policy=policy, prevent_cse=False)
    return lambda w, x: lax.scan(block, x, w)[0].astype(jnp.float32).mean()


def plain_name(x, label):
    return checkpoint_name(x, label)


def time_ms(program, args) -> float:
    start = time.perf_counter()
    jax.block_until_ready(program(*args))
    return (time.perf_counter() - start) * 1e3


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for flag, default in dict(layers=12, d=4096, ff=16384, heads=32, batch=4, seq=4096, repeats=15).items():
        parser.add_argument(f"--{flag}", type=int, default=default)
    parser.add_argument("--out", type=Path, required=True)
    o = parser.parse_args()

    keys = jax.random.split(jax.random.key(0), 5)

    def weight(key, rows, columns):
        return jax.random.normal(key, (o.layers, rows, columns), jnp.bfloat16) * rows**-0.5

    w = {"qkv": weight(keys[0], o.d, 3 * o.d), "proj": weight(keys[1], o.d, o.d)}
    w |= {"up": weight(keys[2], o.d, o.ff), "down": weight(keys[3], o.ff, o.d)}
    args = w, jax.random.normal(keys[4], (o.batch, o.seq, o.d), jnp.bfloat16)

    programs, rows = {}, {}
    names = {"checkpoint_name": plain_name, "jaxoff.name": jaxoff.name}
    policies = {"saved": jaxoff.policy(save=NAMES), "offloaded": jaxoff.policy(offload=NAMES)}
    options = {"default": {}, "concurrent": CONCURRENT}
    for (n, name), (p, policy), (s, extra) in itertools.product(
        names.items(), policies.items(), options.items()
    ):
        step = jax.jit(jax.value_and_grad(loss_of(name, policy, o.heads), (0, 1)), compiler_options=extra)
        program = step.lower(*args).compile()
        memory = program.memory_analysis()
        key = f"{n}, {p}, {s}"
        programs[key] = program
        rows[key] = {"temp_bytes": memory.temp_size_in_bytes, "host_bytes": memory.host_temp_size_in_bytes}
        jax.block_until_ready(program(*args))
    times = {key: [] for key in programs}
    for _ in range(o.repeats):
        for key, program in programs.items():
            times[key].append(time_ms(program, args))
    for key, measured in times.items():
        rows[key] |= {"ms": statistics.median(measured), "min_ms": min(measured), "max_ms": max(measured)}
        print(
            f"{key:40} {rows[key]['ms']:8.1f} ms  temp {rows[key]['temp_bytes'] / 1e9:6.2f} GB  host "
            f"{rows[key]['host_bytes'] / 1e9:5.2f} GB",
            flush=True,
        )
    programs.clear()

    same_bits = {}
    for n, name in names.items():
        results = []
        for policy in (*policies.values(), jaxoff.policy(recompute=NAMES)):
            step = jax.jit(
                jax.value_and_grad(loss_of(name, policy, o.heads), (0, 1)), compiler_options=DETERMINISTIC
            )
            results.append(jax.tree.map(np.asarray, step(*args)))
        for other, result in zip(("offloaded", "recomputed"), results[1:], strict=True):
            equal = jax.tree.map(np.array_equal, results[0], result)
            same_bits[f"{n}: saved = {other}"] = all(jax.tree.leaves(equal))
    print(json.dumps(same_bits, indent=2))
    o.out.write_text(
        json.dumps({**provenance(vars(o)), "rows": rows, "same_bits": same_bits}, indent=2, default=str)
        + "\n"
    )


if __name__ == "__main__":
    main()
