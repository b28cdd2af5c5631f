"""Plans of `jaxoff.plan` for six budgets against stock policies, MaxText's and single names: memory and time.

Memory: each point runs in a process of its own; a plan runs for many steps with
XLA_PYTHON_CLIENT_MEM_FRACTION at its budget. Times: all points that fit the device together alternate in a
process. The result file is rewritten after every point; `--resume` reads an earlier file, whose memory is not
measured again. Times come first, since the other processes then find their programs in jax's compilation
cache, if there is one.

    python -m bench.frontier --out a.json --workloads dense-b4-l12 --no-peaks
    python -m bench.frontier --out b.json --resume a.json --workloads dense-b4-l12 --no-times --limit-s 200
    python -m bench.frontier_table b.json --markdown frontier.md --chart frontier.png

The role `every` is all placements of a layer with few names, to compare plans with the fastest placement:

    python -m bench.frontier --out c.json --workloads mlp-b4-l6 --roles plan,stock,every --no-peaks

On a GPU each plan is checked by compiling its step there (`compile_step` of `jaxoff.plan`). `--ahead`
compiles for an H200 on a machine without a GPU, and leaves memory for kernels that differ on the card;
`--resume` then measures the plans.

`--predict` replaces the predictions in a file by the planner's current predictions, without a GPU:

    python -m bench.frontier --predict --resume a.json --workloads dense-b4-l12 --out d.json

`--tiny` runs on a CPU; GPU-only figures are null there.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

import jaxoff
from bench.frontier_points import (
    EVERY,
    FEW_NAMES,
    ROLES,
    Point,
    budgets_of,
    compiled_for,
    planner_of,
    points_of,
    predicted_anew,
    predicted_ms,
)
from bench.grouped_mlp import describe, say
from bench.options import one_of
from bench.provenance import provenance
from bench.step import compiled_facts, time_variants
from bench.step_limits import fill_pinned_pool, set_defaults, too_large_beside
from bench.step_models import Workload
from bench.step_peaks import run_child, wait_for_turn
from bench.step_variants import compile_all

_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"

type Row = dict[str, Any]


def measure(workload: Workload, point: Point, steps: int) -> Row:
    """Runs steps in this otherwise idle process, after the permission to run."""
    found: Row = {}
    programs = compile_all(
        workload, {point.name: point.step(workload)}, 1, lambda _, result: found.update(_failure(result))
    )
    wait_for_turn()
    if point.name not in programs:
        return found
    try:
        call = programs[point.name].call
        found |= compiled_facts(call)
        # By way of the host: temporaries of drawing the weights leave holes in the device's memory.
        arguments = jax.device_put(jax.device_get(workload.arguments("scanned")))
        for step in range(steps):
            jax.block_until_ready(call(*arguments))
            found["steps"] = step + 1
        found["peak_bytes"] = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    except Exception as error:  # the budget is not kept
        found["error"] = describe(error)
    stats = jax.devices()[0].memory_stats() or {}
    return found | {
        key: stats.get(key) for key in ("bytes_limit", "bytes_in_use", "largest_free_block_bytes")
    }


def _failure(result: Any) -> Row:
    return result if isinstance(result, dict) else {}


def device_bytes() -> int | None:
    """All of the device's memory, which the fraction is of; None off a GPU. Asked in another process."""
    code = "import jax, json; s = jax.devices()[0].memory_stats() or {}; print(json.dumps(s))"
    fraction = "0.5"
    environment = {_FRACTION: fraction, _PREALLOCATE: "false"}
    found = run_child([sys.executable, "-c", code], threading.Lock(), environment)
    limit = found.get("bytes_limit")
    return None if limit is None else int(limit / float(fraction))


def measure_memory(
    workload: Workload,
    rows: list[Row],
    o: argparse.Namespace,
    over: Callable[[], bool],
    save: Callable[[], None],
) -> None:
    """Measures points without memory figures, each in a process of its own, within its budget if any."""
    whole, running = device_bytes(), threading.Lock()

    def measure_memory(row: Row) -> None:
        if over():
            return
        point, environment, steps = row["point"], {_PREALLOCATE: "false"}, 2
        if point["budget"] is not None:
            steps = o.steps
            if whole is not None:
                environment = {_PREALLOCATE: "true", _FRACTION: f"{point['budget'] / whole:.6f}"}
        command = [
            sys.executable,
            "-m",
            "bench.frontier",
            "--workloads",
            workload.name,
            "--steps",
            str(steps),
        ]
        command += ["--tiny"] * workload.tiny + ["--measure", json.dumps(point)]
        row["memory"] = run_child(command, running, environment)
        say(f"  {point['name']:34} {row['memory'].get('peak_bytes')} {row['memory'].get('error', '')}")
        save()

    for group in _groups([row for row in rows if "memory" not in row], whole):
        with ThreadPoolExecutor(o.jobs) as pool:
            list(pool.map(measure_memory, group))


def _groups(rows: list[Row], whole: int | None) -> list[list[Row]]:
    """Rows without a budget, and then rows whose budgets fit the device together."""
    groups: list[list[Row]] = [[row for row in rows if row["point"]["budget"] is None], []]
    taken = 0
    for row in rows:
        if (budget := row["point"]["budget"]) is None:
            continue
        if whole is not None and taken + budget > 0.9 * whole:
            groups.append([])
            taken = 0
        groups[-1].append(row)
        taken += budget
    return groups


def measure_times(
    workload: Workload,
    rows: list[Row],
    o: argparse.Namespace,
    over: Callable[[], bool],
    save: Callable[[], None],
    card: jaxoff.Device | None,
) -> None:
    """Times the points in balanced rounds, and predicts the times by the rates of this card."""
    points = {row["point"]["name"]: Point(**row["point"]) for row in rows}
    planner = None if card is None else planner_of(workload, card)
    times: dict[str, Row] = {
        name: {"predicted_ms": predicted_ms(planner, point)} if planner else {}
        for name, point in points.items()
    }
    steps = {name: point.step(workload) for name, point in points.items()}

    def keep() -> None:
        for row in rows:
            row["time"] = times[row["point"]["name"]]
        save()

    def report(name: str, result: Any) -> None:
        times[name] |= _failure(result)
        keep()

    programs = compile_all(workload, steps, o.jobs, report)
    for name, reason in too_large_beside(workload, programs).items():
        times[name]["error"] = reason
    programs = {name: program for name, program in programs.items() if "error" not in times[name]}
    arguments: Any = {"scanned": workload.arguments("scanned")}
    jax.block_until_ready(arguments)
    facts = {name: compiled_facts(program.call) for name, program in programs.items()}
    for name, known in facts.items():
        times[name]["device_peak_bytes"] = known["device_peak_bytes"]
    fill_pinned_pool(max((known["host_bytes"] for known in facts.values()), default=0))
    time_variants(programs, arguments, times, o.repeats, o.sample_ms, over, keep)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Plans against other placements: memory and time.")
    parser.add_argument("--out", type=Path, help="the result file, JSON")
    parser.add_argument(
        "--resume", type=Path, help="an earlier result file, whose points are not measured again"
    )
    parser.add_argument("--workloads", default="dense-b4-l12", help="with commas between")
    roles = (*ROLES, EVERY)
    parser.add_argument("--roles", type=one_of(roles), default=ROLES, help=", ".join(roles))
    parser.add_argument("--budgets", type=int, default=6, help="how many")
    parser.add_argument("--steps", type=int, default=100, help="of a planned point within its budget")
    parser.add_argument("--repeats", type=int, default=9, help="samples of each point")
    parser.add_argument("--sample-ms", type=float, default=600.0, help="shorter steps are queued")
    parser.add_argument("--jobs", type=int, default=6, help="how many programs compile at a time")
    parser.add_argument("--limit-s", type=float, help="start nothing after this many seconds")
    parser.add_argument("--no-peaks", action="store_true", help="no memory")
    parser.add_argument("--no-times", action="store_true", help="no times")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    parser.add_argument("--ahead", action="store_true", help="only find points, where there is no GPU")
    parser.add_argument("--predict", action="store_true", help="only predict anew the points of --resume")
    parser.add_argument("--measure", metavar="POINT", help="one point's memory, as JSON")
    o = parser.parse_args(arguments)
    try:
        o.workloads = tuple(Workload.parse(name, tiny=o.tiny) for name in o.workloads.split(","))
    except ValueError as error:
        parser.error(str(error))
    many = [workload.name for workload in o.workloads if workload.kind not in FEW_NAMES]
    if EVERY in o.roles and many:
        parser.error(
            f"`{EVERY}` is all placements of a layer that has few names, which is {', '.join(FEW_NAMES)}; "
            f"got {', '.join(many)}. Leave `{EVERY}` out of --roles, or take mlp-b4-l6"
        )
    if o.out is None and o.measure is None:
        parser.error("--out is needed: the result file")
    if min(o.budgets, o.steps, o.repeats, o.jobs) < 1:
        parser.error("--budgets, --steps, --repeats and --jobs must be at least 1")
    if o.ahead and o.tiny:
        parser.error("--ahead finds points for a GPU, and --tiny has sizes for a CPU: leave one of them out")
    if o.predict and not o.resume:
        parser.error("--predict says what the planner predicts for the points of a file: name it by --resume")
    if o.ahead or o.predict:
        o.no_peaks = o.no_times = True
    return o


def rows_of(workload: Workload, o: argparse.Namespace, earlier: list[Row]) -> list[Row]:
    """The points of a workload: the points of an earlier file, and the points of roles missing there."""
    known = [row for row in earlier if row["workload"] == workload.name and row["point"]["role"] in o.roles]
    roles = [role for role in o.roles if role not in {row["point"]["role"] for row in known}]
    if o.predict or not roles:
        return known
    target = jaxoff.target("h200") if o.ahead else None
    with target.tracing() if target else contextlib.nullcontext():
        planner = planner_of(workload)
        is_known = o.ahead or jax.default_backend() == "gpu"  # whether XLA assigns memory as on a GPU
        compile_step = compiled_for(workload, target) if is_known else None
        budgets = budgets_of(planner, o.budgets)
        points = points_of(workload, planner, roles, budgets, compile_step, ahead=o.ahead)
    return known + [{"workload": workload.name, "point": dataclasses.asdict(point)} for point in points]


def predict_anew(workload: Workload, rows: list[Row], tiny: bool) -> None:
    """Replaces the predictions of the points by the planner's current ones, for the shipped profile."""
    with contextlib.nullcontext() if tiny else jaxoff.target("h200").tracing():
        planner = planner_of(workload)
    for row in rows:
        row["point"] = dataclasses.asdict(predicted_anew(planner, Point(**row["point"])))
        row.get("time", {}).pop("predicted_ms", None)  # by an earlier model and a card's rates


def main(arguments: list[str] | None = None) -> None:
    start = time.perf_counter()
    o = parse(arguments)
    set_defaults()
    if o.measure:
        print(json.dumps(measure(o.workloads[0], Point(**json.loads(o.measure)), o.steps)))
        return
    earlier = json.loads(o.resume.read_text()) if o.resume else {"rows": []}
    result: Row = {"earlier": earlier.get("sources", []), "rows": []}

    def over() -> bool:
        return o.limit_s is not None and time.perf_counter() - start > o.limit_s

    def save() -> None:
        o.out.write_text(json.dumps(result, indent=1) + "\n")

    if not o.no_peaks:
        # Tracing chooses kernels by the device: children measure, and this process allocates little.
        os.environ[_PREALLOCATE] = "false"
    by_workload = {workload: rows_of(workload, o, earlier["rows"]) for workload in o.workloads}
    taken = [row for rows in by_workload.values() for row in rows]
    result["rows"] = [row for row in earlier["rows"] if row not in taken] + taken
    this = provenance(vars(o) | {"workloads": ",".join(workload.name for workload in o.workloads)})
    result["sources"] = [*result.pop("earlier"), this]
    save()
    card: jaxoff.Device | None = None  # unlike the profile by which the points were planned
    for workload, rows in by_workload.items():
        say(f"\n{workload.name}")
        if o.predict:
            predict_anew(workload, rows, o.tiny)
        if not (o.no_peaks or over()):
            measure_memory(workload, rows, o, over, save)
        if not (o.no_times or over()):
            if card is None and jax.default_backend() == "gpu":
                card = jaxoff.Device.measure()
                this["card"] = card.to_dict()
            measure_times(workload, rows, o, over, save, card)
    this["seconds"] = time.perf_counter() - start
    save()


if __name__ == "__main__":
    main()
