"""Turns results of `bench.grouped_mlp` into markdown tables and a bar chart.

    python -m bench.grouped_mlp_table speed.json memory.json --markdown table.md --chart chart.png

Losing cases are bold: a product below its floor against cuBLAS or torch, a part of the op with a faster
peer.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.grouped_mlp_shapes import PRODUCTS, WHOLE
from bench.tables import show

# Floors of a product: of one dense product by cuBLAS, and of torch's grouped product.
DENSE_FLOOR, TORCH_FLOOR = 0.85, 1.05
# The dense floor holds where each expert has this many rows; with fewer, weights are most of the traffic.
DENSE_FLOOR_ROWS = 512
CEILINGS = ("cublas", "xla_dense")
PEERS = ("torch", "torch_compiled", "torch_function", "tokamax", "tokamax_tuned", "ragged_dot")
LABELS = {
    "ours": "fused (this project)",
    "torch": "torch, eager",
    "torch_compiled": "torch.compile",
    "torch_function": "torch, hand-written gradient",
    "tokamax": "tokamax",
    "tokamax_tuned": "tokamax, tuned tiles",
    "ragged_dot": "lax.ragged_dot",
}
_PALETTE = ("#d62728", "#1f77b4", "#5fa2d3", "#9ecae1", "#7f7f7f", "#b0b0b0", "#d9d9d9")
COLOURS = dict(zip(LABELS, _PALETTE, strict=True))
NONE = "-"

type Case = tuple[str, str]  # shape, group sizes


@dataclass(frozen=True)
class Results:
    """The content of one or more result files.

    Attributes:
      sources: the provenance of each file.
      shapes: name -> a shape's dimensions.
      times: case, then product or part, then variant -> the measured row.
      failures: each failure once, as a sentence.
      memory: shape, then variant -> the measured row.
    """

    sources: list[dict[str, Any]] = field(default_factory=list)
    shapes: dict[str, dict[str, Any]] = field(default_factory=dict)
    times: dict[Case, dict[str, dict[str, dict[str, Any]]]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    memory: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)

    def tflops(self, case: Case, product: str, variant: str) -> float | None:
        return self.times[case].get(product, {}).get(variant, {}).get("tflops")

    def dense(self, case: Case, product: str) -> float | None:
        """The ceiling of a product or part: the fastest dense products of equal work."""
        parts = WHOLE.get(product, (product,))
        best = [max((self.tflops(case, p, c) or 0.0 for c in CEILINGS), default=0.0) for p in parts]
        # All products are equal work, so rates add up as times do.
        return statistics.harmonic_mean(best) if all(best) else None


def combine(files: Iterable[dict[str, Any]]) -> Results:
    """Joins result files; of two rows for the same thing the later file's holds."""
    results = Results()
    for content in files:
        results.sources.append(content)
        results.shapes.update(content.get("shapes", {}))
        for row in content.get("rows", ()):
            if "tflops" in row:
                case = results.times.setdefault((row["shape"], row["groups"]), {})
                case.setdefault(row["product"], {})[row["variant"]] = row
            else:
                results.failures.append(_failure(row))
        results.failures.extend(_failure(found) for found in content.get("checks", ()) if not found["ok"])
        for row in content.get("memory", ()):
            if "beyond_inputs_bytes" in row:
                results.memory.setdefault(row["shape"], {})[row["variant"]] = row
            else:
                results.failures.append(_failure(row))
    results.failures[:] = dict.fromkeys(results.failures)
    return results


def _failure(row: dict[str, Any]) -> str:
    at = ", ".join(row[key] for key in ("shape", "groups", "product", "variant") if key in row)
    return f"{at}: {row['error'] if 'error' in row else 'results differ: ' + _errors_of(row)}"


def _errors_of(row: dict[str, Any]) -> str:
    return ", ".join(f"{name} {error:.1e}" for name, error in row["errors"].items())


def bold(text: str, losing: bool) -> str:
    return f"**{text}**" if losing else text


def ratio(ours: float | None, theirs: float | None) -> float | None:
    return ours / theirs if ours and theirs else None


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def mean(values: Iterable[float | None]) -> float | None:
    """The geometric mean of the measured values."""
    known = [value for value in values if value]
    return statistics.geometric_mean(known) if known else None


def number(value: float | None, digits: int = 2) -> str:
    return NONE if value is None else f"{value:.{digits}f}"


def products_table(results: Results) -> str:
    """TFLOP/s of each fused kernel, with its ratios to cuBLAS and to torch."""
    rows = []
    for shape, groups in results.times:
        case = (shape, groups)
        cells = [_product_cell(results, case, product) for product in PRODUCTS]
        if any(cell != NONE for cell in cells):
            rows.append([shape, groups, *cells])
    if not rows:
        return ""
    means = []
    for product in PRODUCTS:
        ratios = [_product_ratios(results, case, product) for case in results.times]
        to_dense, to_torch = (mean(column) for column in zip(*ratios, strict=True))
        means.append(f"{number(to_dense)}; {number(to_torch)}")
    rows.append(["geometric mean", "", *means])
    return table(["shape", "groups", *PRODUCTS], rows)


def _product_ratios(results: Results, case: Case, product: str) -> tuple[float | None, float | None]:
    ours = results.tflops(case, product, "ours")
    return ratio(ours, results.dense(case, product)), ratio(ours, results.tflops(case, product, "torch"))


def _product_cell(results: Results, case: Case, product: str) -> str:
    ours = results.tflops(case, product, "ours")
    if ours is None:
        return NONE
    to_dense, to_torch = _product_ratios(results, case, product)
    shape = results.shapes[case[0]]
    floor = DENSE_FLOOR if shape["rows"] // shape["experts"] >= DENSE_FLOOR_ROWS else 0.0
    losing = (to_dense is not None and to_dense < floor) or (to_torch is not None and to_torch < TORCH_FLOOR)
    numbers = [number(to_dense), number(to_torch)]
    if to_both := ratio(ours, results.tflops(case, product, "torch_with_activation")):
        numbers.append(number(to_both))
    return bold(f"{ours:.0f} ({'; '.join(numbers)})", losing)


def whole_table(results: Results, part: str) -> str:
    """Times of a part of the op, and how many times longer each peer takes."""
    measured = {v for case in results.times.values() for v in case.get(part, {})}
    peers = [peer for peer in PEERS if peer in measured]
    cases = [case for case in results.times if results.tflops(case, part, "ours")]
    if not cases:
        return ""

    def speedup(case: Case, peer: str) -> float | None:
        return ratio(results.tflops(case, part, "ours"), results.tflops(case, part, peer))

    rows = []
    for case in cases:
        ours = results.times[case][part]["ours"]
        cells = []
        for peer in peers:
            times, factor = results.times[case][part].get(peer), speedup(case, peer)
            if times is None or factor is None:
                cells.append(NONE)
            else:
                cells.append(bold(f"{times['ms']:.2f} ms, {factor:.2f}x", factor < 1))
        to_dense = number(ratio(ours["tflops"], results.dense(case, part)))
        rows.append([*case, f"{ours['ms']:.2f} ms", f"{ours['tflops']:.0f}", to_dense, *cells])
    to_dense = mean(ratio(results.tflops(case, part, "ours"), results.dense(case, part)) for case in cases)
    factors = [mean(speedup(case, peer) for case in cases) for peer in peers]
    means = [NONE if f is None else bold(f"{f:.2f}x", f < 1) for f in factors]
    rows.append(["geometric mean", "", "", "", number(to_dense), *means])
    header = ["shape", "groups", "fused", "TFLOP/s", "of cuBLAS", *(LABELS[peer] for peer in peers)]
    return table(header, rows)


def memory_table(results: Results) -> str:
    """Device memory of a step beyond its inputs, and bytes waiting for the backward pass."""
    variants = [v for v in LABELS if any(v in rows for rows in results.memory.values())]
    if not variants:
        return ""

    def cell(rows: dict[str, dict[str, Any]], variant: str) -> str:
        if variant not in rows:
            return NONE
        row = rows[variant]
        text = f"{row['beyond_inputs_bytes'] / 1e9:.2f} GB"
        if variant != "ours" and "ours" in rows:
            text = bold(text, row["beyond_inputs_bytes"] < rows["ours"]["beyond_inputs_bytes"])
        return text + (f", {row['saved_bytes_per_row']:.0f} B" if "saved_bytes_per_row" in row else "")

    rows = [[shape, *(cell(by, v) for v in variants)] for shape, by in results.memory.items()]
    return table(["shape", *(LABELS[v] for v in variants)], rows)


def markdown(results: Results) -> str:
    """All tables, with the origin of the figures and the failures."""
    return "\n".join(_sections(results))


def _sections(results: Results) -> Iterator[str]:
    for source in results.sources:
        versions = (source.get("versions") or {}) | (source.get("peers") or {})
        known = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
        yield f"{source.get('device')}, {source.get('date')}; {known}; commit {source.get('commit')}:\n"
        yield f"    {source.get('command')}\n"
    if products := products_table(results):
        yield "### Products\n"
        yield (
            "TFLOP/s of the fused kernels, their element-wise work included (ratio to one dense product by "
            "cuBLAS; ratio to `torch._grouped_mm` alone; where there is such work, ratio to torch with it as "
            f"operations of their own). Bold: below {DENSE_FLOOR} of cuBLAS (at {DENSE_FLOOR_ROWS} or more "
            f"rows an expert) or {TORCH_FLOOR} of torch.\n"
        )
        yield products
    for part in WHOLE:
        if whole := whole_table(results, part):
            yield f"### Whole op: {part}\n"
            yield "Median times, and how many times longer a peer takes. Bold: the peer is faster.\n"
            yield whole
    if memory := memory_table(results):
        yield "### Memory of forward and backward\n"
        yield (
            "Peak beyond the inputs (activations, results, gradients, scratch), and bytes a row that wait "
            "for the backward pass, x among them. Bold: less than the fused op.\n"
        )
        yield memory
    if results.failures:
        yield "### Not measured\n"
        yield "\n".join(f"- {failure}" for failure in results.failures) + "\n"


def draw(results: Results, path: Path, part: str = "forward+backward") -> None:
    """Draws TFLOP/s of a part of the op as bars, a panel for each distribution of group sizes.

    Raises:
      ValueError: no result file has a time of the part.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    cases = [case for case in results.times if results.times[case].get(part)]
    if not cases:
        raise ValueError(f"draw: no result has a time of {part!r}; run bench.grouped_mlp without --per-gemm")
    groups = list(dict.fromkeys(groups for _, groups in cases))
    figure, axes = plt.subplots(len(groups), 1, figsize=(11, 3.6 * len(groups)), squeeze=False, sharey=True)
    for ax, kind in zip(axes[:, 0], groups, strict=True):
        shapes = [shape for shape, groups in cases if groups == kind]
        present = {v for shape in shapes for v in results.times[shape, kind][part]}
        variants = [v for v in LABELS if v in present]
        width = 0.84 / len(variants)
        for index, variant in enumerate(variants):
            heights = [results.tflops((shape, kind), part, variant) or 0.0 for shape in shapes]
            at = [x + (index - (len(variants) - 1) / 2) * width for x in range(len(shapes))]
            bars = ax.bar(at, heights, width, label=LABELS[variant], color=COLOURS[variant])
            if variant == "ours":
                ax.bar_label(bars, [f"{h:.0f}" if h else "" for h in heights], fontsize=7, padding=1)
        ceilings = [(x, results.dense((shape, kind), part)) for x, shape in enumerate(shapes)]
        for number_drawn, (x, height) in enumerate((x, h) for x, h in ceilings if h):
            label = None if number_drawn else "cuBLAS, dense, equal work"
            ax.hlines(height, x - 0.45, x + 0.45, colors="black", linestyles="dashed", lw=1, label=label)
        ax.set_xticks(range(len(shapes)), shapes)
        ax.set_ylabel("TFLOP/s")
        ax.set_title(f"Grouped MLP, {part}, {kind} group sizes", fontsize=10)
        ax.spines[["top", "right"]].set_visible(False)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=4, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.08 if len(groups) > 1 else 0.14, 1, 1))
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> None:
    show(
        "Tables and a chart of results of bench.grouped_mlp.", "bar chart", combine, markdown, draw, arguments
    )


if __name__ == "__main__":
    main()
