"""The speed of the fused grouped MLP against its peers, and the memory of a training step.

Six products and the whole forward, backward and both, in one process on one GPU, variants interleaved. A
sample is a queue of calls of about 30 ms and one wait, by the host's clock, the same for every variant.
Before a shape is timed, results and gradients of every variant are compared with torch's (without torch, with
this project's reference). A failure is recorded under the variant's name and the run goes on; the result file
is rewritten after every product.

    python -m bench.grouped_mlp --out speed.json
    python -m bench.grouped_mlp --out memory.json --memory --shapes nano-16k,ultra-4k
    python -m bench.grouped_mlp_table speed.json memory.json --markdown table.md --chart chart.png

Compiling takes most of the time. On a machine with many cores, one process a shape compiles beside the
others, and each process then measures alone:

    python -m bench.grouped_mlp --shapes dsv3 --turns /tmp/turns --of 2 --out dsv3.json &
    python -m bench.grouped_mlp --shapes mixtral --turns /tmp/turns --of 2 --out mixtral.json

Peers are optional: torch (with triton) and tokamax are measured where they can be imported.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import pallas_kernels
from bench import grouped_mlp_peers as peers
from bench.card_lock import hold_card
from bench.grouped_mlp_ours import ours
from bench.grouped_mlp_peers import Data, Program, Programs
from bench.grouped_mlp_shapes import GROUPS, MEASURED, PRODUCTS, SHAPES, WHOLE, group_sizes
from bench.options import one_of
from bench.provenance import provenance
from bench.rounds import order_of

SAMPLE_MS = 30.0
MAX_CALLS = 400
# For single-use states, such as autograd graphs.
MAX_STATE_NBYTES = 20 * 10**9
# Error in norm between two roundings of one function to bfloat16.
TOLERANCE = 2e-2
RESULTS = ("y", "dx", "dw1", "dw2", "dp")


def make_variants() -> dict[str, Callable[[Data], Programs]]:
    """The variants by name; tile-choosing variants start without a choice."""
    return {
        "ours": ours,
        "torch": peers.torch_eager,
        "torch_compiled": peers.torch_compiled,
        "torch_function": peers.torch_function,
        "torch_with_activation": peers.torch_with_activation,
        "tokamax": peers.tokamax,
        "tokamax_tuned": peers.TokamaxTuned(),
        "ragged_dot": peers.ragged_dot,
        "cublas": peers.dense_torch,
        "xla_dense": peers.dense_xla,
    }


VARIANTS = tuple(make_variants())
# All but the ceiling by XLA, which takes long to compile.
DEFAULT_VARIANTS = tuple(name for name in VARIANTS if name != "xla_dense")
# Variants of the whole op with its gradient; tiles do not change the memory of a step.
MEMORY_VARIANTS = ("ours", "torch", "torch_compiled", "torch_function", "tokamax")


def say(*words: Any) -> None:
    print(*words, flush=True)


def describe(error: Exception) -> str:
    """Formats an error as a line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"


def call_once(program: Program, sizes: jax.Array) -> Any:
    result = program.call(program.prepare(sizes))
    program.wait(result)
    return result


def sample_ms(program: Program, sizes: jax.Array, calls: int) -> float:
    """Milliseconds a call, over so many queued calls."""
    if program.once:
        states = [program.prepare(sizes) for _ in range(calls)]
    else:
        states = [program.prepare(sizes)] * calls
    program.wait(states)
    result = None
    start = time.perf_counter()
    while states:
        result = program.call(states.pop())
    program.wait(result)
    return (time.perf_counter() - start) * 1e3 / calls


def choose_calls(program: Program, sizes: jax.Array, target_ms: float) -> int:
    """How many calls make a sample long enough."""
    # The faster of two, since the first may wait for memory.
    once_ms = min(sample_ms(program, sizes, 2) for _ in range(2))
    calls = max(1, min(MAX_CALLS, round(target_ms / max(once_ms, 1e-3))))
    if program.once and program.state_nbytes:
        calls = max(1, min(calls, MAX_STATE_NBYTES // program.state_nbytes))
    return calls


def summary(times_ms: list[float]) -> dict[str, float]:
    """Median and spread."""
    q1, median, q3 = (
        statistics.quantiles(times_ms, n=4, method="inclusive") if len(times_ms) > 1 else times_ms * 3
    )
    return {"ms": median, "min_ms": min(times_ms), "q1_ms": q1, "q3_ms": q3, "max_ms": max(times_ms)}


def warm_up(programs: Programs, sizes: jax.Array) -> dict[str, dict[str, Any]]:
    """Calls each program once, to compile: by variant the seconds of the call, or the error."""
    rows: dict[str, dict[str, Any]] = {}
    for variant, program in programs.items():
        try:
            start = time.perf_counter()
            call_once(program, sizes)
            rows[variant] = {"first_call_s": time.perf_counter() - start}
        except Exception as error:  # whatever a compiler, an allocator or a missing kernel raises
            rows[variant] = {"error": describe(error)}
    return rows


def measure(
    programs: Programs, sizes: jax.Array, flops: int, repeats: int, target_ms: float = SAMPLE_MS
) -> dict[str, dict[str, Any]]:
    """Times variants of a product against each other.

    Args:
      programs: by variant, warmed up.
      sizes: (E,) int32 on the device.
      flops: operations of a call.
      repeats: samples of each variant; for their order see `bench.rounds`.
      target_ms: length of a sample.

    Returns:
      By variant, times and TFLOP/s, or the error.
    """
    rows: dict[str, dict[str, Any]] = {}
    times: dict[str, list[float]] = {}
    for variant, program in programs.items():
        try:
            rows[variant] = {"calls": choose_calls(program, sizes, target_ms)}
            times[variant] = []
        except Exception as error:
            rows[variant] = {"error": describe(error)}
    for repeat in range(repeats):
        for variant in order_of(list(times), repeat):
            try:
                times[variant].append(sample_ms(programs[variant], sizes, rows[variant]["calls"]))
            except Exception as error:
                rows[variant] = {"error": describe(error)}
                del times[variant]
    for variant, measured in times.items():
        row = rows[variant] = rows[variant] | summary(measured)
        row["tflops"] = flops / row["ms"] / 1e9
    return rows


@jax.jit
def _relative_error(got: jax.Array, want: jax.Array) -> jax.Array:
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    return jnp.sqrt(jnp.sum(jnp.square(got - want)) / jnp.sum(jnp.square(want)))


def _as_jax(value: Any) -> jax.Array:
    return value if isinstance(value, jax.Array) else jnp.from_dlpack(value.detach().contiguous())


def _results(program: Program, sizes: jax.Array) -> dict[str, jax.Array]:
    y, gradients = call_once(program, sizes)
    return {name: _as_jax(value) for name, value in zip(RESULTS, (y, *gradients), strict=True)}


def check(built: dict[str, Programs], data: Data, sizes: jax.Array) -> list[dict[str, Any]]:
    """Compares output and gradients of every variant with the yardstick's, in norm."""

    def reference(x, w1, w2, p, sizes):
        return pallas_kernels.grouped_mlp(x, w1, w2, sizes, probs=p, implementation="reference")

    part = "forward+backward"
    yardstick = "torch" if part in built.get("torch", {}) else "reference"
    programs = built["torch"] if yardstick == "torch" else peers.jax_parts(reference, data)
    want = _results(programs[part], sizes)
    checks = []
    for variant, variant_programs in built.items():
        if variant == yardstick or part not in variant_programs:
            continue
        found: dict[str, Any] = {"variant": variant, "against": yardstick}
        try:
            start = time.perf_counter()
            got = _results(variant_programs[part], sizes)
            found["first_call_s"] = time.perf_counter() - start
            errors = {name: float(_relative_error(got[name], want[name])) for name in RESULTS}
            # "not below" instead of "above": NaN fails.
            wrong = [name for name, error in errors.items() if not error <= TOLERANCE]
            found |= {"errors": errors, "ok": not wrong}
        except Exception as error:
            found |= {"error": describe(error), "ok": False}
        checks.append(found)
    return checks


def release() -> None:
    """Frees the memory of the last shape, also in torch's cache of blocks."""
    gc.collect()
    if "torch" in sys.modules and peers.import_torch().cuda.is_available():
        peers.import_torch().cuda.empty_cache()


def run_shape(
    name: str,
    variants: dict[str, Callable[[Data], Programs]],
    o: argparse.Namespace,
    result: dict[str, Any],
    save: Callable[[], None],
) -> None:
    """Checks and times a shape, adding to the result."""
    shape = SHAPES[name]
    say(f"\n{name}: E {shape.experts}, H {shape.width}, I {shape.hidden}, R {shape.rows}")
    data = peers.make_data(shape, o.seed)
    built: dict[str, Programs] = {}
    for variant in o.variants:
        try:
            built[variant] = variants[variant](data)
        except Exception as error:  # not installed, or not for this shape
            result["rows"].append({"shape": name, "variant": variant, "error": describe(error)})
            say(f"  {variant}: {result['rows'][-1]['error']}")
    drawn = {kind: jnp.asarray(group_sizes(kind, shape.experts, shape.rows, o.seed)) for kind in o.groups}
    for kind, sizes in drawn.items():
        try:
            checks = check(built, data, sizes)
        except Exception as error:  # the yardstick itself
            checks = [{"variant": "yardstick", "error": describe(error), "ok": False}]
        for found in checks:
            result["checks"].append({"shape": name, "groups": kind} | found)
            say_check(result["checks"][-1])
        save()
        release()
    programs = {product: {v: p[product] for v, p in built.items() if product in p} for product in o.products}
    warm = {product: warm_up(p, drawn[o.groups[0]]) for product, p in programs.items()}
    release()
    with hold_card(o.turns, o.of, name):
        for kind, sizes in drawn.items():
            for product in o.products:
                able = {v: p for v, p in programs[product].items() if "error" not in warm[product][v]}
                rows = measure(able, sizes, shape.flops(product), o.repeats)
                for variant, first in warm[product].items():
                    row = {"shape": name, "groups": kind, "product": product, "variant": variant}
                    result["rows"].append(row | first | rows.get(variant, {}))
                    say(line_of(result["rows"][-1]))
                save()
                release()


def say_check(found: dict[str, Any]) -> None:
    at = f"  {found['shape']} {found['groups']} {found['variant']}"
    if found["ok"]:
        say(f"{at}: agrees, " + ", ".join(f"{name} {e:.1e}" for name, e in found["errors"].items()))
    else:
        say(f"{at}: WRONG OR MISSING RESULTS: {found.get('error', found.get('errors'))}")


def line_of(row: dict[str, Any]) -> str:
    """Formats a measured row for the terminal."""
    at = f"  {row['shape']:10} {row['groups']:9} {row['product']:16} {row['variant']:21}"
    if "error" in row:
        return f"{at} {row['error'][:160]}"
    spread = f"{row['min_ms']:.3f} to {row['max_ms']:.3f}"
    return f"{at} {row['ms']:9.3f} ms ({spread}; {row['calls']} calls) {row['tflops']:6.0f} TFLOP/s"


def memory_of(variant: str, name: str, seed: int = 0) -> dict[str, Any]:
    """Runs forward and backward once, and reads the growth of device memory.

    Bytes beyond the inputs (x, weights, routing weights, dy): activations, results, gradients, scratch.
    """
    shape = SHAPES[name]
    data = peers.make_data(shape, seed)
    sizes = jnp.asarray(group_sizes("dirichlet", shape.experts, shape.rows, seed))
    program = make_variants()[variant](data)["forward+backward"]
    found: dict[str, Any] = {"shape": name, "variant": variant, "groups": "dirichlet"}
    if program.saved_per_row is not None:
        found["saved_bytes_per_row"] = program.saved_per_row(sizes)
    if program.wait is peers.wait_for_torch:
        cuda = peers.import_torch().cuda
        call_once(program, sizes)  # compiles; memory of the compilation is not the step's
        release()
        cuda.reset_peak_memory_stats()
        before = cuda.memory_allocated()
        call_once(program, sizes)
        return found | {"beyond_inputs_bytes": cuda.max_memory_allocated() - before}
    device = jax.devices()[0]
    statistics_before = device.memory_stats()
    if statistics_before is None:
        raise NotImplementedError(f"{device.device_kind} keeps no memory statistics")
    call_once(program, sizes)
    peak, before = device.memory_stats()["peak_bytes_in_use"], statistics_before["bytes_in_use"]
    if peak == statistics_before["peak_bytes_in_use"]:
        # The counter cannot be set back: making the inputs took more than the step.
        raise NotImplementedError("the step's peak is below that of making the inputs; it cannot be read")
    return found | {"beyond_inputs_bytes": peak - before}


def measure_memory(o: argparse.Namespace, result: dict[str, Any], save: Callable[[], None]) -> None:
    """Reads the memory of every variant in a process of its own, a few at a time."""

    def child(variant: str, shape: str) -> dict[str, Any]:
        command = [sys.executable, "-m", "bench.grouped_mlp", "--memory-of", variant, "--shapes", shape]
        run = subprocess.run([*command, "--seed", str(o.seed)], capture_output=True, text=True)
        lines = run.stdout.splitlines()
        if run.returncode == 0 and lines:
            return json.loads(lines[-1])
        last = (run.stderr.strip().splitlines() or [f"exit status {run.returncode}"])[-1]
        return {"shape": shape, "variant": variant, "error": last[:400]}

    for shape in o.shapes:
        with ThreadPoolExecutor(o.jobs) as pool:
            for found in pool.map(lambda variant, shape=shape: child(variant, shape), o.variants):
                result["memory"].append(found)
                say(found)
        save()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="The speed and memory of the grouped MLP and its peers.")
    parser.add_argument("--out", type=Path, help="the result file, JSON")
    parser.add_argument("--shapes", type=one_of(SHAPES), default=MEASURED, help=", ".join(SHAPES))
    parser.add_argument("--groups", type=one_of(GROUPS), default=("dirichlet", "zipf"))
    parser.add_argument("--variants", type=one_of(VARIANTS), help=", ".join(VARIANTS))
    parser.add_argument("--repeats", type=int, default=5, help="samples of each variant")
    parser.add_argument("--seed", type=int, default=0)
    parts = parser.add_mutually_exclusive_group()
    parts.add_argument(
        "--per-gemm", dest="products", action="store_const", const=PRODUCTS, help="the products only"
    )
    parts.add_argument("--products", type=one_of((*PRODUCTS, *WHOLE)), help=", ".join((*PRODUCTS, *WHOLE)))
    parts.add_argument(
        "--whole", dest="products", action="store_const", const=tuple(WHOLE), help="the whole op only"
    )
    parser.add_argument("--memory", action="store_true", help="the memory of a step instead of its speed")
    parser.add_argument(
        "--turns",
        type=Path,
        metavar="DIR",
        help="a folder shared by processes on one card: these compile side by side and measure one at a time",
    )
    parser.add_argument("--of", type=int, default=1, help="number of processes sharing DIR, a shape each")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time with --memory")
    parser.add_argument(
        "--memory-of", choices=MEMORY_VARIANTS, metavar="VARIANT", help="one variant's memory, as JSON"
    )
    parser.set_defaults(products=(*PRODUCTS, *WHOLE))
    o = parser.parse_args(arguments)
    if o.variants is None:
        o.variants = MEMORY_VARIANTS if o.memory else DEFAULT_VARIANTS
    if o.memory and (other := set(o.variants) - set(MEMORY_VARIANTS)):
        choices = ", ".join(MEMORY_VARIANTS)
        parser.error(f"--memory needs a whole step, got {', '.join(sorted(other))}; choose from {choices}")
    if o.out is None and o.memory_of is None:
        parser.error("--out is needed: the result file")
    if o.turns is not None and len(o.shapes) != 1:
        parser.error(f"--turns takes one shape a process, got {', '.join(o.shapes)}")
    if o.repeats < 1:
        parser.error(f"--repeats must be at least 1, got {o.repeats}")
    return o


def main(arguments: list[str] | None = None) -> None:
    # Before jax starts its device: torch needs room on the same device.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    o = parse(arguments)
    if o.memory_of:
        try:
            found = memory_of(o.memory_of, o.shapes[0], o.seed)
        except Exception as error:
            found = {"shape": o.shapes[0], "variant": o.memory_of, "error": describe(error)}
        print(json.dumps(found))
        return
    result: dict[str, Any] = {
        "peers": {package: _version(package) for package in ("torch", "triton", "tokamax")},
        "shapes": {name: vars(SHAPES[name]) for name in o.shapes},
        "rows": [],
        "checks": [],
        "memory": [],
    }

    def save() -> None:
        o.out.write_text(json.dumps(result, indent=1) + "\n")

    if o.memory:
        # Provenance starts jax's device in this process too, but allocates nothing there.
        measure_memory(o, result, save)
        result |= provenance(vars(o))
    else:
        result |= provenance(vars(o))
        variants = make_variants()
        for name in o.shapes:
            run_shape(name, variants, o, result, save)
            result["tokamax_tiles"] = variants["tokamax_tuned"].chosen_by_shape()
            save()
            release()
    save()
    failed = [found for found in result["checks"] if not found["ok"]]
    if failed:
        say(f"\n{len(failed)} COMPARISONS OF RESULTS FAILED:")
        for found in failed:
            say_check(found)


if __name__ == "__main__":
    main()
