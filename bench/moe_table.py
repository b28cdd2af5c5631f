"""Turns results of `bench.moe` into a page with a markdown table.

python -m bench.moe_table bench/results/moe/layer_h100_*.json --markdown docs/moe-layer.md
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.grouped_mlp_table import NONE, bold, table
from bench.moe_shapes import SHAPES

PEERS = {"separate": "separate", "sonicmoe": "SonicMoE 0.1.1"}
PASSES = {"forward": "forward", "forward+backward": "both"}
ACTIVATIONS = {"squared_relu": "squared ReLU", "swiglu": "SwiGLU"}
INTRODUCTION = """\
# The MoE layer beside its peers

`pallas_kernels.moe` after the router (sort, gather, experts, weighted sum) on one {device}, 16-bit, beside
the grouped MLP between gathers by XLA ("separate") and SonicMoE 0.1.1. Cells are milliseconds: `moe` in the
third column, then each peer with `moe`'s time over the peer's in brackets, bold where `moe` is slower.
Medians of samples in turn in one process; "both" is forward and backward. T tokens, E experts, k experts a
token, model width H, expert width I. A peer without a cell refuses the shape (SonicMoE: squared ReLU with I
no multiple of 128) or had no memory left beside the other processes on the card.

"""

type Times = dict[tuple[str, str, str, str], dict[str, float]]


def read_times(results: Iterable[Any]) -> Times:
    """The times of results: (shape, activation, routing, pass) -> variant -> ms."""
    times: Times = {}
    for result in results:
        for row in result["rows"]:
            if "ms" in row:
                case = row["shape"], row["activation"], row["routing"], row["part"]
                times.setdefault(case, {})[row["variant"]] = row["ms"]
    return times


def _name(shape: str) -> str:
    s = SHAPES[shape]
    return f"{s.tokens // 1024}k, {s.experts}, {s.top_k}, {s.width} x {s.hidden}"


def _cell(ours: float, peer: float | None) -> str:
    if peer is None:
        return NONE
    return bold(f"{peer:.3g} ({ours / peer:.2f})", ours > peer)


def _summary(times: Times) -> str:
    """The geometric mean of `moe`'s time over each peer's, by activation and pass."""
    lines = []
    for activation, label in ACTIVATIONS.items():
        for part, pass_ in PASSES.items():
            found = []
            for peer, peer_label in PEERS.items():
                cases = [t for (_, a, _, p), t in times.items() if (a, p) == (activation, part) and peer in t]
                if cases:
                    mean = statistics.geometric_mean(t["ours"] / t[peer] for t in cases)
                    most = max(t["ours"] / t[peer] for t in cases)
                    found.append(f"{peer_label} {mean:.2f} (most {most:.2f}, of {len(cases)})")
            lines.append(f"- {label}, {pass_}: {'; '.join(found)}")
    return "\n".join(lines)


def markdown(results: Iterable[Any]) -> str:
    """The page of results."""
    results = list(results)
    times = read_times(results)
    head = ["T, E, k, H x I", "activation, routing, pass", "`moe`", *PEERS.values()]
    order = list(SHAPES)
    rows = [
        [
            _name(shape),
            f"{ACTIVATIONS[activation]}, {routing}, {PASSES[part]}",
            f"{found['ours']:.3g}",
            *(_cell(found["ours"], found.get(peer)) for peer in PEERS),
        ]
        for (shape, activation, routing, part), found in sorted(
            times.items(), key=lambda item: (order.index(item[0][0]), item[0][1:3])
        )
    ]
    (device,) = {result["provenance"]["device"].removeprefix("1 x ") for result in results}
    means = f"Geometric means of `moe`'s time over a peer's:\n\n{_summary(times)}\n\n"
    return INTRODUCTION.format(device=device) + means + table(head, rows).rstrip() + "\n"


def main(arguments: list[str] | None = None) -> None:
    """Reads result files and writes or prints the page."""
    parser = argparse.ArgumentParser(description="The table of the MoE layer.")
    parser.add_argument("results", type=Path, nargs="+", help="result files, JSON")
    parser.add_argument("--markdown", type=Path, help="where the page goes; printed without")
    o = parser.parse_args(arguments)
    page = markdown(json.loads(path.read_text()) for path in sorted(o.results))
    if o.markdown is None:
        print(page)
    else:
        o.markdown.write_text(page)


if __name__ == "__main__":
    main()
