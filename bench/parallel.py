"""A step on several GPUs with offloaded residuals against its saved twins and stock offload.

    python -m bench.parallel --out p2.json --mesh pipe=2 --virtual 2 --layers 4 --microbatches 8
    python -m bench.parallel --out bits.json --mesh pipe=2 --layers 2 --microbatches 4 --bits 300

All variants are compiled in one process, run their first step in the order of their memory, so that the peak
of each variant on every GPU can be read, and are then timed in balanced rounds. The result file is rewritten
after every variant. `--bits N`: loss and gradients of N steps against the saved twin's, bit for bit, under
deterministic kernels. `--limit-s` ends the run in time. `--ahead` compiles the variants for as many H200s as
the mesh has, on a machine without GPUs: bytes of each device, and no times. `--tiny` runs on a CPU; GPU-only
figures are null there.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoff
from bench.grouped_mlp import describe, say
from bench.options import one_of
from bench.parallel_programs import (
    OFFLOAD,
    SAVE,
    VARIANTS,
    Workload,
    add_options,
    allow_pinned_memory,
    compile_all,
    shrink,
)
from bench.provenance import provenance
from bench.step import compiled_facts, time_variants
from bench.step_checks import compare_bits
from bench.step_variants import DETERMINISTIC, Program
from bench.traced import trace_call
from models.divided import CAPACITY, Layout
from models.mesh import AXES, MeshShape

type Row = dict[str, Any]

TRACED_CALLS = 2
LINK_NBYTES = 512 << 20


def peaks(mesh: jax.sharding.Mesh) -> list[int | None]:
    """The peak bytes of each device of this process so far; None where the device does not count."""
    return [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in mesh.local_devices]


def measure_peaks(
    mesh: jax.sharding.Mesh, programs: dict[str, Program], arguments: Any, rows: dict[str, Row], save
) -> None:
    """Takes a step of each program, the smallest first: the counters of the devices only rise."""
    before = peaks(mesh)
    for name in sorted(programs, key=lambda name: rows[name]["temp_bytes"]):
        try:
            jax.block_until_ready(programs[name].call(*arguments))
            after = peaks(mesh)
            rows[name]["peak_bytes"] = [
                now if now is not None and (was is None or now > was) else None
                for was, now in zip(before, after, strict=True)
            ]
            before = after
        except Exception as error:  # out of memory
            rows[name]["error"] = describe(error)
        save()


def link_gbps(mesh: jax.sharding.Mesh, nbytes: int = LINK_NBYTES, repeats: int = 5) -> Row | None:
    """GB/s of each GPU while all copy at once, to the host, from the host, and both ways; None off GPUs."""
    if jax.default_backend() != "gpu":
        return None
    there = NamedSharding(mesh, P(AXES))
    on_host = there.with_memory_kind("pinned_host")
    device = jax.jit(lambda: jnp.zeros((mesh.size, nbytes), jnp.uint8), out_shardings=there)()
    host = jax.device_put(device, on_host)

    def d2h():
        return jax.device_put(device, on_host)

    def h2d():
        return jax.device_put(host, there)

    ways = {"d2h": d2h, "h2d": h2d, "both": lambda: (d2h(), h2d())}
    found = {}
    for way, copy in ways.items():
        jax.block_until_ready(copy())
        start = time.perf_counter()
        for _ in range(repeats):
            jax.block_until_ready(copy())
        found[way] = (1 + (way == "both")) * repeats * nbytes / 1e9 / (time.perf_counter() - start)
    return found


def derive(rows: list[Row], tokens: int) -> None:
    """Overhead against the fastest saved twin, R of each GPU against the smallest twin, and stock's time.

    R is of the bytes in host memory at once: a loop over microbatches offloads as many in each iteration.
    """
    twins = [row for row in rows if row["role"] == "twin"]
    fastest = min((row["ms"] for row in twins if row.get("ms")), default=None)
    stock = next((row["ms"] for row in rows if row["role"] == "stock" and row.get("ms")), None)
    temp = min((row["temp_bytes"] for row in twins if row.get("temp_bytes")), default=None)
    known = [row["peak_bytes"] for row in twins if row.get("peak_bytes") and None not in row["peak_bytes"]]
    peak = [min(each) for each in zip(*known, strict=True)]
    for row in rows:
        ms, moved = row.get("ms"), min(row.get("moved_bytes") or 0, row.get("host_bytes") or 0)
        if ms:
            row["tokens_per_s"] = tokens / ms * 1e3
            row["overhead"] = ms / fastest - 1 if fastest else None
            row["speedup"] = stock / ms if stock else None
        if moved and row["role"] != "twin":
            row["r_compiled"] = (temp - row["temp_bytes"]) / moved if temp else None
            own = row.get("peak_bytes") or []
            row["r"] = [
                (twin - mine) / moved if mine else None for twin, mine in zip(peak, own, strict=False)
            ]


def run(workload: Workload, o: argparse.Namespace, result: Row, over: Callable[[], bool], save) -> None:
    """Compiles, times and traces the variants, adding to the result."""
    rows = {name: {"variant": name, "role": VARIANTS[name].role} for name in o.variants}
    result["rows"] = list(rows.values())

    def report(name: str, found: Program | Row) -> None:
        if isinstance(found, Program):
            rows[name] |= {"lower_s": found.lower_s, "compile_s": found.compile_s}
            rows[name] |= compiled_facts(found.call, ahead=workload.target is not None)
        else:
            rows[name] |= found
        say(f"  {rows[name]}")
        save()

    programs = compile_all(workload, {name: VARIANTS[name] for name in o.variants}, o.jobs, report)
    if workload.target is not None:
        return
    arguments = workload.weights(seed=o.seed), workload.inputs(o.seed)
    jax.block_until_ready(arguments)
    measure_peaks(workload.mesh, programs, arguments, rows, save)
    programs = {name: program for name, program in programs.items() if "error" not in rows[name]}
    by_form = {"scanned": arguments}
    time_variants(programs, by_form, rows, o.repeats, o.sample_ms, over, save)  # pyright: ignore[reportArgumentType]
    for name, program in programs.items():
        if "error" not in rows[name] and not (o.no_trace or over()):
            try:
                call = functools.partial(program.call, *arguments)
                rows[name]["gpus"] = trace_call(call, TRACED_CALLS)
            except Exception as error:
                rows[name]["trace_error"] = describe(error)
            save()
    if not over():
        result["link_gbps"] = link_gbps(workload.mesh)
    save()
    for row in rows.values():
        say(line_of(row))


# A loop whose reduce-scatters XLA pipelines has its body twice. Of two equal backward passes of cuDNN
# attention under deterministic kernels, XLA finds only the first and aborts (openxla/xla#46500).
ONE_BACKWARD = {"xla_gpu_pipeline_reduce_scatter": "COLLECTIVE_PIPELINING_MODE_OFF"}


def run_bits(workload: Workload, o: argparse.Namespace, result: Row, over: Callable[[], bool], save) -> None:
    """Compares the bits of offloaded and saved residuals over many steps."""
    row: Row = {"steps": 0}
    result["bits"] = row

    def report(name: str, found: Program | Row) -> None:
        if not isinstance(found, Program):
            raise RuntimeError(f"{name}: {found['error']}")

    def keep(found: Row) -> None:
        row.update(found)
        if row["steps"] % 10 == 0:
            save()
        if row["steps"] < o.bits and over():
            raise TimeoutError(f"time was up after {row['steps']} steps")

    try:
        pair = {name: VARIANTS[name] for name in ("jaxoff", "saved")}
        programs = compile_all(workload, pair, o.jobs, report, DETERMINISTIC | ONE_BACKWARD)
        first, second = programs["jaxoff"], programs["saved"]
        row |= compare_bits(workload, first, second, o.bits, o.seed, keep)  # pyright: ignore[reportArgumentType]
    except Exception as error:  # out of memory, out of time, or a failed compilation
        row |= {"error": describe(error), "ok": False}
    save()
    say(f"  bits: {row}")


def line_of(row: Row) -> str:
    """Formats a measured row for the terminal."""
    at = f"  {row['variant']:18}"
    if "ms" not in row:
        return f"{at} {row.get('error', 'not timed')}"
    parts = [
        f"{row['ms']:9.2f} ms ({row['q1_ms']:.2f} to {row['q3_ms']:.2f})",
        f"{row['tokens_per_s']:,.0f} tokens/s",
    ]
    parts += [f"{row['overhead']:+.2%}"] if row["overhead"] is not None else []
    peak = [nbytes for nbytes in row.get("peak_bytes") or () if nbytes]
    parts += [f"peak {max(peak) / 1e9:.2f} GB"] if peak else []
    r = [value for value in row.get("r") or () if value is not None]
    parts += [f"R {min(r):.1%}"] if r else []
    gpus = row.get("gpus") or ()
    parts += [f"exposed {max(gpu['exposed_ms'] for gpu in gpus):.2f} ms"] if gpus else []
    return f"{at} {', '.join(parts)}"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="A step on several GPUs with offloaded residuals against its peers."
    )
    parser.add_argument("--out", type=Path, required=True, help="the result file, JSON")
    parser.add_argument("--mesh", required=True, help="such as data=2,expert=2,pipe=2")
    parser.add_argument("--virtual", type=int, default=1, help="stages of each pipe rank")
    parser.add_argument("--capacity", type=float, default=CAPACITY, help="room for rows to experts' devices")
    parser.add_argument("--microbatches", type=int, default=8, help="of a step")
    parser.add_argument("--logits-chunk", type=int, default=0, help="tokens with logits at a time; 0: all")
    parser.add_argument("--offload", default=OFFLOAD, help="names to offload")
    parser.add_argument("--save", default=SAVE, help="names to save on the device; the rest is recomputed")
    parser.add_argument(
        "--variants", type=one_of(VARIANTS), default=tuple(VARIANTS), help=", ".join(VARIANTS)
    )
    parser.add_argument("--sample-ms", type=float, default=600.0, help="shorter steps are queued")
    parser.add_argument("--seed", type=int, default=0, help="of weights and inputs")
    parser.add_argument("--limit-s", type=float, help="start nothing after this many seconds")
    parser.add_argument("--ahead", action="store_true", help="only compile, for H200s, where there are none")
    parser.add_argument("--no-trace", action="store_true", help="no profile of each variant")
    parser.add_argument(
        "--bits", type=int, default=0, metavar="STEPS", help="compare bits with the saved twin's"
    )
    add_options(parser, batch=1, repeats=10, jobs=5)
    o = parser.parse_args(arguments)
    if o.ahead and (o.tiny or o.bits):
        parser.error("--ahead compiles for GPUs and runs nothing: leave out --tiny and --bits")
    shrink(o)
    try:
        o.mesh = MeshShape.parse(o.mesh)
        policy = jaxoff.policy(offload=o.offload.split(","), save=o.save.split(","))
        layout = Layout(o.mesh, o.virtual, o.capacity)
        target = jaxoff.target("h200", devices=o.mesh.size) if o.ahead else None
        o.workload = Workload(
            o.widths, o.layers, layout, o.microbatches, o.batch, o.seq, policy, o.logits_chunk, target
        )
    except ValueError as error:
        parser.error(str(error))
    return o


def main(arguments: list[str] | None = None) -> None:
    start = time.perf_counter()
    o = parse(arguments)
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    allow_pinned_memory(o.mesh.size)
    result: Row = {"workload": o.workload.name, "rows": []}

    def over() -> bool:
        return o.limit_s is not None and time.perf_counter() - start > o.limit_s

    def save() -> None:
        derive(result["rows"], o.workload.tokens)
        o.out.write_text(json.dumps(result, indent=1) + "\n")

    result |= provenance({key: value for key, value in vars(o).items() if key != "workload"})
    save()
    say(o.workload.name)
    (run_bits if o.bits else run)(o.workload, o, result, over, save)


if __name__ == "__main__":
    main()
