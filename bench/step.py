"""A training step with offloaded residuals against its saved twin, stock offload and recomputation.

All variants of a workload are compiled side by side first, and then timed in balanced rounds in one process
on one GPU. Before the timing each variant runs in a process of its own, for the peak of its device memory.
Failures, and variants too large for the device, are recorded under their names while the run goes on; the
result file is rewritten after every row.

    python -m bench.step --out step.json
    python -m bench.step --out b4.json --workloads dense-b4-l12 --variants saved,stock_offload,auto
    python -m bench.step_table step.json --markdown step.md --chart step.png

Other modes of the same program:

    python -m bench.step --out bits.json --bits 50 --order 200 --seeds 0,1,2 --workloads dense-b1-l12
    python -m bench.step --out steady.json --steady 1000 --workloads dense-b1-l12

`--bits`: loss and gradients against the saved twin's, bit for bit, under deterministic kernels. `--order`:
the same for one program, under its own order of CUDA graphs (CONCURRENT for loops) and under SERIALIZE.
`--steady`: host memory over many steps. `--limit-s` ends any mode in time. `--tiny` runs on a CPU; GPU-only
figures are null there.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax

import jaxoff
from bench.grouped_mlp import describe, say, summary
from bench.options import one_of
from bench.provenance import provenance
from bench.rounds import order_of
from bench.step_checks import run_checks
from bench.step_figures import derive, merge_peaks
from bench.step_limits import (
    device_limit,
    fill_pinned_pool,
    gigabytes,
    groups,
    planned_host_bytes,
    set_defaults,
    too_large,
    too_large_beside,
)
from bench.step_models import Form, Workload
from bench.step_peaks import measure_peaks, peak_of
from bench.step_variants import VARIANTS, Program, compile_all, step_of
from bench.traced import trace_call
from jaxoff._runtime.program_memory import program_nbytes

WORKLOADS = (
    "dense-b4-l12", "dense-b16-l12", "dense-b4-l48", "dense-b16-l48", "nano-b4-l4", "nano_act-b4-l4",
)  # fmt: skip
TINY_WORKLOADS = ("dense-b2-l3", "nano-b2-l3")
OURS = tuple(name for name, variant in VARIANTS.items() if variant.role == "ours")
# Shorter steps are queued until a sample lasts this long, as in training: after a pause the card clocks
# higher than its power limit allows for long.
SAMPLE_MS = 600.0
TRACED_CALLS = 3

type Row = dict[str, Any]
type Save = Callable[[], None]


def sample_ms(program: Program, arguments: Any, calls: int) -> float:
    """Milliseconds a call, over so many queued calls."""
    result = None
    start = time.perf_counter()
    for _ in range(calls):
        result = program.call(*arguments)
    jax.block_until_ready(result)
    return (time.perf_counter() - start) * 1e3 / calls


def first_step(program: Program, arguments: Any, target_ms: float) -> Row:
    """The first call, which also loads kernels and records CUDA graphs, and how many calls make a sample."""
    first_ms = sample_ms(program, arguments, 1)
    once_ms = min(sample_ms(program, arguments, 1) for _ in range(2))
    first_s = None if program.same_as else first_ms / 1e3  # not its first call then
    return {"first_step_s": first_s, "calls": max(1, round(target_ms / once_ms))}


def time_variants(
    programs: dict[str, Program],
    arguments: dict[Form, Any],
    rows: dict[str, Row],
    repeats: int,
    target_ms: float,
    over: Callable[[], bool],
    save: Save,
) -> None:
    """Times variants against each other, in rounds; see `bench.rounds`.

    Args:
      programs: by variant.
      arguments: by form.
      rows: by variant; gains times, or an error.
      repeats: rounds.
      target_ms: how long a sample should last.
      over: whether time is up; checked after each round.
      save: called after each round.
    """
    times: dict[str, list[float]] = {}
    for variant, program in programs.items():
        try:
            rows[variant] |= first_step(program, arguments[program.form], target_ms)
            times[variant] = []
        except Exception as error:  # out of memory, or a failing kernel
            rows[variant]["error"] = describe(error)
        save()
    for repeat in range(repeats):
        for variant in order_of(list(times), repeat):
            program = programs[variant]
            try:
                times[variant].append(sample_ms(program, arguments[program.form], rows[variant]["calls"]))
                rows[variant] |= summary(times[variant]) | {"repeats": len(times[variant])}
            except Exception as error:
                rows[variant]["error"] = describe(error)
                del times[variant]
        save()
        if over():
            break


def measure_exposed(program: Program, arguments: Any) -> Row:
    """The figures of `trace_call` for the single GPU; None for each figure off a GPU."""
    keys = ("exposed_ms", "d2h_busy_ms", "h2d_busy_ms", "d2h_exposed_ms", "h2d_exposed_ms", "kernel_ms")
    gpus = trace_call(functools.partial(program.call, *arguments), TRACED_CALLS)
    if gpus is None:
        return dict.fromkeys(keys)
    (gpu,) = gpus
    return gpu


def compiled_facts(call: jax.stages.Compiled, *, ahead: bool = False) -> Row:
    """The compiler's figures of memory, and the schedule's figures of traffic with the host (for a GPU).

    Args:
      call: the program.
      ahead: whether the program is compiled for an absent GPU.
    """
    memory: Any = call.memory_analysis()
    found: Row = {
        "temp_bytes": memory.temp_size_in_bytes,
        "device_peak_bytes": program_nbytes(call),
        "host_bytes": memory.host_temp_size_in_bytes,
    }
    found |= dict.fromkeys(("d2h_bytes", "h2d_bytes", "kernel_host_bytes"))
    if ahead or jax.default_backend() == "gpu":
        try:
            facts = jaxoff.verify(call)
            kernels = sum(copy.total_bytes for copy in facts.copies if copy.via == "kernel")
            found |= {
                "d2h_bytes": facts.d2h_bytes,
                "h2d_bytes": facts.h2d_bytes,
                "kernel_host_bytes": kernels,
            }
        except Exception as error:  # an unreadable schedule costs its figures only
            found["facts_error"] = describe(error)
    found["moved_bytes"] = found["d2h_bytes"] or found["host_bytes"]
    return found


def new_rows(workload: Workload, variants: Iterable[str], result: dict[str, Any]) -> dict[str, Row]:
    """Adds a row for each variant to the result; the row of a variant too large for the device says so."""
    rows = {}
    for name in variants:
        variant = VARIANTS[name]
        rows[name] = {"workload": workload.name, "variant": name, "role": variant.role, "form": variant.form}
        result["rows"].append(rows[name])
        if variant.placement == "host":
            rows[name]["planned_host_bytes"] = planned_host_bytes(workload, variant)
        if reason := too_large(workload, name, device_limit()):
            rows[name]["error"] = reason
    return rows


def run_workload(
    workload: Workload, o: argparse.Namespace, result: dict[str, Any], over: Callable[[], bool], save: Save
) -> None:
    """Compiles, times and traces the variants of one workload, adding to the result."""
    say(f"\n{workload.name}")
    rows = new_rows(workload, o.variants, result)

    def report(name: str, found: Program | Row) -> None:
        if isinstance(found, Program):
            rows[name] |= {"lower_s": found.lower_s, "compile_s": found.compile_s, "same_as": found.same_as}
            rows[name] |= compiled_facts(found.call)
        else:
            rows[name] |= found
        save()

    steps = {name: step_of(workload, VARIANTS[name]) for name in rows if "error" not in rows[name]}
    programs = compile_all(workload, steps, o.jobs, report)
    for together in groups(workload, programs):
        time_group(workload, {name: programs[name] for name in together}, rows, o, result, over, save)
    for row in rows.values():
        say(line_of(row))


def time_group(
    workload: Workload,
    programs: dict[str, Program],
    rows: dict[str, Row],
    o: argparse.Namespace,
    result: dict[str, Any],
    over: Callable[[], bool],
    save: Save,
) -> None:
    """Times and traces programs whose arguments are on the device together."""
    for name, reason in too_large_beside(workload, programs).items():
        rows[name]["error"] = reason
    programs = {name: program for name, program in programs.items() if "error" not in rows[name]}
    try:
        forms: set[Form] = {program.form for program in programs.values()}
        arguments: dict[Form, Any] = dict.fromkeys(forms)
        for form in forms:
            arguments[form] = workload.arguments(form, o.seeds[0])
        jax.block_until_ready(arguments)
        most = max((rows[name]["host_bytes"] for name in programs), default=0)
        result["pinned_pool"].setdefault(workload.name, fill_pinned_pool(most))
    except Exception as error:  # out of memory
        for name in programs:
            rows[name]["error"] = f"inputs: {describe(error)}"
        return
    time_variants(programs, arguments, rows, o.repeats, o.sample_ms, over, save)
    for name, program in programs.items():
        if "error" not in rows[name] and not (o.no_trace or over()):
            try:
                rows[name] |= measure_exposed(program, arguments[program.form])
            except Exception as error:
                rows[name]["trace_error"] = describe(error)
            save()


def line_of(row: Row) -> str:
    """Formats a measured row for the terminal."""
    at = f"  {row['variant']:23}"
    if "ms" not in row:
        return f"{at} {row.get('error', 'not timed')}"
    parts = [f"{row['ms']:9.2f} ms ({row['q1_ms']:.2f} to {row['q3_ms']:.2f})"]
    parts.append(f"temp {gigabytes(row['temp_bytes'])}, host {gigabytes(row['host_bytes'])}")
    if row.get("overhead") is not None:
        parts.append(f"{row['overhead']:+.2%}")
    r = row["r"] if row.get("r") is not None else row.get("r_compiled")
    parts += [f"R {r:.1%}"] if r is not None else []
    parts += [f"exposed {row['exposed_ms']:.2f} ms"] if row.get("exposed_ms") is not None else []
    return f"{at} {', '.join(parts)}"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="A training step with offloaded residuals against its peers."
    )
    parser.add_argument("--out", type=Path, help="the result file, JSON")
    parser.add_argument("--workloads", help=f"by default {','.join(WORKLOADS)}")
    parser.add_argument("--variants", type=one_of(VARIANTS), help=", ".join(VARIANTS))
    parser.add_argument("--repeats", type=int, default=15, help="samples of each variant")
    parser.add_argument("--sample-ms", type=float, default=SAMPLE_MS, help="shorter steps are queued")
    parser.add_argument("--jobs", type=int, default=6, help="how many programs compile at a time")
    parser.add_argument("--limit-s", type=float, help="start nothing after this many seconds")
    parser.add_argument("--no-peaks", action="store_true", help="no processes for the memory of each variant")
    parser.add_argument("--no-times", action="store_true", help="only the memory of each variant")
    parser.add_argument("--no-trace", action="store_true", help="no profile of each variant")
    parser.add_argument(
        "--bits", type=int, default=0, metavar="STEPS", help="compare bits with the saved twin's"
    )
    parser.add_argument(
        "--order", type=int, default=0, metavar="STEPS", help="compare CONCURRENT and SERIALIZE"
    )
    parser.add_argument("--steady", type=int, default=0, metavar="STEPS", help="watch host memory")
    parser.add_argument("--seeds", default="0", help="of weights and inputs, with commas between")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    parser.add_argument(
        "--peak-of", choices=VARIANTS, metavar="VARIANT", help="one variant's memory, as JSON"
    )
    o = parser.parse_args(arguments)
    names = o.workloads.split(",") if o.workloads else TINY_WORKLOADS if o.tiny else WORKLOADS
    try:
        o.workloads = tuple(Workload.parse(name, tiny=o.tiny) for name in names)
        o.seeds = tuple(int(seed) for seed in o.seeds.split(","))
    except ValueError as error:
        parser.error(str(error))
    o.checks = bool(o.bits or o.order or o.steady)
    if o.variants is None:
        o.variants = OURS if o.checks else tuple(VARIANTS)
    if other := set(o.variants) - set(OURS) if o.order or o.bits else ():
        parser.error(f"--bits and --order compare {', '.join(OURS)}; got {', '.join(sorted(other))}")
    if o.out is None and o.peak_of is None:
        parser.error("--out is needed: the result file")
    if min(o.repeats, o.jobs) < 1 or min(o.bits, o.order, o.steady) < 0:
        parser.error("--repeats and --jobs must be at least 1, --bits, --order and --steady at least 0")
    return o


def main(arguments: list[str] | None = None) -> None:
    start = time.perf_counter()
    o = parse(arguments)
    set_defaults()
    if o.peak_of:
        # Only as much as the step needs: other processes may be compiling.
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        print(json.dumps(peak_of(o.workloads[0], o.peak_of)))
        return
    result: dict[str, Any] = {
        "rows": [],
        "peaks": [],
        "pinned_pool": {},
        "bits": [],
        "order": [],
        "steady": [],
    }

    def over() -> bool:
        return o.limit_s is not None and time.perf_counter() - start > o.limit_s

    def save() -> None:
        merge_peaks(result["rows"], result["peaks"])
        derive(result["rows"])
        o.out.write_text(json.dumps(result, indent=1) + "\n")

    def keep_peak(row: Row) -> None:
        result["peaks"].append(row)
        say(row)
        save()

    if not (o.checks or o.no_peaks):
        # First, while this process has not yet taken the device's memory.
        for workload in o.workloads:
            if not over():
                measure_peaks(workload, o.variants, o.jobs, over, keep_peak)
    options = vars(o) | {"workloads": ",".join(workload.name for workload in o.workloads)}
    result |= provenance(options)
    save()
    for workload in o.workloads:
        if not (over() or (o.no_times and not o.checks)):
            try:
                (run_checks if o.checks else run_workload)(workload, o, result, over, save)
            except Exception as error:  # for example, inputs larger than the memory
                say(f"  {workload.name}: {describe(error)}")
                result.setdefault("errors", {})[workload.name] = describe(error)
        save()
        gc.collect()
    result["seconds"] = time.perf_counter() - start
    save()


if __name__ == "__main__":
    main()
