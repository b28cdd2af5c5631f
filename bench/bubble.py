"""The bubble of a pipeline: the part of a step beyond its microbatches.

Steps of a mesh with several numbers m of microbatches, and V of stages on each of the mesh's P ranks,
alternate in a process. A line is fitted to the times; its slope is the time of a microbatch, and the bubble
is the rest of the step's time over m microbatches. A rank idle in P - 1 of its ticks gives a bubble
of (P - 1) / (V m). Work done once a step, such as adding up gradients between ranks, counts as bubble here;
work done for each microbatch outside of stages, such as the head, makes the bubble smaller than the formula.

    python -m bench.bubble --out bubble.json --pipe 2 --virtual 1 2 --microbatches 4 8 16

`--tiny` runs on a CPU.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxoff
from bench.grouped_mlp import say, summary
from bench.parallel_programs import (
    OFFLOAD,
    SAVE,
    VARIANTS,
    Workload,
    add_options,
    allow_pinned_memory,
    compile_lowered,
    shrink,
)
from bench.provenance import provenance
from bench.rounds import time_in_rounds
from bench.step_variants import Program
from models.divided import Layout
from models.mesh import MeshShape
from models.pipeline import Schedule

type Row = dict[str, Any]


def derive(rows: Sequence[Row]) -> None:
    """Adds the time of a microbatch, and the bubble, to rows of a pipeline with different microbatches."""
    m = np.array([row["microbatches"] for row in rows], float)
    slope = np.polyfit(m, [row["ms"] for row in rows], 1)[0]
    for row in rows:
        row["microbatch_ms"] = float(slope)
        row["bubble"] = float(row["ms"] / (row["microbatches"] * slope) - 1)


def workloads(o: argparse.Namespace) -> list[Workload]:
    """A workload for each number of stages and of microbatches."""
    policy = jaxoff.policy(offload=OFFLOAD.split(","), save=SAVE.split(","))
    mesh = MeshShape(pipe=o.pipe)
    return [
        Workload(o.widths, o.layers, Layout(mesh, virtual), m, o.batch, o.seq, policy)
        for virtual in o.virtual
        for m in o.microbatches
    ]


def measure(o: argparse.Namespace) -> list[Row]:
    """A row for each workload.

    Raises:
      RuntimeError: if a workload does not compile.
    """

    def lower(workload: Workload) -> Callable[[], jax.stages.Lowered]:
        return lambda: workload.jit_step(VARIANTS[o.variant]).lower(*workload.shapes())

    def report(name: str, found: Program | Row) -> None:
        if not isinstance(found, Program):
            raise RuntimeError(f"{name}: {found['error']}")
        say(f"  {name}: lowered in {found.lower_s:.0f} s, compiled in {found.compile_s:.0f} s")

    programs = compile_lowered({w.name: lower(w) for w in o.workloads}, o.jobs, report)
    by_stages = {workload.layout.virtual: workload for workload in o.workloads}
    weights = {virtual: workload.weights() for virtual, workload in by_stages.items()}
    calls = {}
    for workload in o.workloads:
        virtual, call = workload.layout.virtual, programs[workload.name].call
        calls[virtual, workload.microbatches] = functools.partial(call, weights[virtual], workload.inputs())
    for call in calls.values():
        jax.block_until_ready(call())
    rows = []
    for (virtual, m), times in time_in_rounds(calls, o.repeats).items():
        schedule = Schedule(o.pipe, virtual, m)
        row = {"virtual": virtual, "microbatches": m, "ticks": schedule.ticks, "formula": schedule.bubble}
        rows.append(row | summary(times) | {"repeats": len(times)})
    for virtual in o.virtual:
        derive([row for row in rows if row["virtual"] == virtual])
    return rows


def line_of(row: Row) -> str:
    """Formats a measured row for the terminal."""
    return (
        f"  {row['virtual']} stages a rank, {row['microbatches']:3} microbatches  {row['ms']:9.2f} ms  "
        f"bubble {row['bubble']:6.1%}, by formula {row['formula']:6.1%}"
    )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="The bubble of a pipeline against its formula.")
    parser.add_argument("--out", type=Path, required=True, help="the result file, JSON")
    parser.add_argument("--pipe", type=int, default=2, help="ranks")
    parser.add_argument("--virtual", type=int, nargs="+", default=[1, 2], help="stages of each")
    parser.add_argument(
        "--microbatches", type=int, nargs="+", default=[4, 8, 16], help="at least two numbers"
    )
    parser.add_argument("--variant", choices=VARIANTS, default="jaxoff", help="how the step is compiled")
    add_options(parser, batch=2, repeats=6, jobs=6)
    o = parser.parse_args(arguments)
    if len(set(o.microbatches)) < 2:
        parser.error(f"--microbatches takes at least two different numbers, got {o.microbatches}")
    shrink(o)
    try:
        o.workloads = workloads(o)
    except ValueError as error:
        parser.error(str(error))
    return o


def main(arguments: list[str] | None = None) -> None:
    o = parse(arguments)
    allow_pinned_memory(o.pipe)
    result = provenance({key: value for key, value in vars(o).items() if key != "workloads"})
    result["rows"] = measure(o)
    o.out.write_text(json.dumps(result, indent=1) + "\n")
    for row in result["rows"]:
        say(line_of(row))


if __name__ == "__main__":
    main()
