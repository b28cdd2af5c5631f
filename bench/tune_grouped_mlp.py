"""Finds the tiles of the grouped MLP's kernels for given shapes, and the rule's distance from these.

For each shape and each of the six products: candidates are compiled one after the other, compared with the
rule's result, and timed in balanced rounds (a sample is a queue of calls of about 30 ms, and one wait). First
the tiles are timed, then the orders of walking the best tiles, at last the fastest few against the rule and
against the tiles in use, with more samples. The result file is rewritten after every product; products in the
file are not measured again, so an interrupted run continues. Most of the time is compiling: on a machine with
many cores run one process a shape, each with the same `--turns DIR`; the processes compile side by side and
time one at a time.

    python -m bench.tune_grouped_mlp --out tiles.json
    python -m bench.tune_grouped_mlp --out tiles.json --shapes nano-16k --products F1
    python -m bench.tune_grouped_mlp --table tiles.json more.json

Each prints the device's file for `pallas_kernels/_mosaic/tiles/`, an entry for each (H, I, `bucket_rows`),
and two times over the best: of the rule, and of the tiles in use, the table's entry if there is an entry.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from bench import grouped_mlp_peers as peers
from bench.card_lock import hold_card
from bench.grouped_mlp import call_once, describe, measure, release, say
from bench.grouped_mlp_peers import Data, Program
from bench.grouped_mlp_shapes import GROUPS, MEASURED, PRODUCTS, SHAPES, Shape, group_sizes
from bench.options import one_of
from bench.provenance import provenance
from pallas_kernels._mosaic import tuning
from pallas_kernels._mosaic.tuning import Config, Configs

# Widths of other models, for which no tile is chosen by hand: OLMoE, gpt-oss-20b, Llama 4 Scout.
OFF_TABLE = (
    Shape("olmoe", experts=64, width=2048, hidden=1024, rows=64 * 1024),
    Shape("gpt-oss", experts=32, width=2880, hidden=2880, rows=32 * 1024),
    Shape("scout", experts=16, width=5120, hidden=8192, rows=16 * 2048),
)
ALL_SHAPES = SHAPES | {shape.name: shape for shape in OFF_TABLE}

# The field of `tuning.Configs` for each product.
FIELDS = {"F1": "fc1", "F2": "fc2", "B1": "grad_act", "B2": "grad_w2", "B3": "grad_x", "B4": "grad_w1"}
WEIGHTS = ("B2", "B4")
# The allowed loss of a rule, on shapes off the table too.
GOAL = 1.07

SMEM_LIMIT = 232_448
_SMEM_RESERVE = 2048
_ROWS, _STEP, _CHUNK = 128, 64, 64
_STAGES = range(3, 7)
_MORE = dataclasses.fields(Config)[1:]
# (minor axis, width); widths past the last block mean all blocks.
_ORDERS = ((1, 64), (1, 2), (1, 4), (0, 2), (0, 4), (0, 8))
# Two runs of one product on equal operands, in norm: only the order of dp's partial sums may differ.
_TOLERANCE = 1e-3

type Key = tuple[int, int, int]


def key_of(shape: Shape) -> Key:
    return shape.width, shape.hidden, tuning.bucket_rows(shape.rows, shape.experts)


def of_shape(choose: Callable[..., Configs], shape: Shape, product: str) -> Config:
    """The config of a product, chosen by `tuning.apply_rule` or `tuning.choose_configs`."""
    return getattr(choose((shape.experts, shape.width, shape.hidden), shape.rows), FIELDS[product])


def scales_a(shape: Shape) -> bool:
    """Whether B1 writes the scaled activations, too."""
    return not tuning.scales_dy((shape.experts, shape.width, shape.hidden))


def output_blocks(product: str, shape: Shape, config: Config) -> tuple[int, int]:
    """How many blocks a product's output has: of rows (at most a group's, or of the weights), of columns."""
    columns = shape.hidden if product in ("F1", "B1", "B4") else shape.width
    wide = -(-columns // config.block_columns)
    if product not in WEIGHTS:
        return wide, wide  # the kernel takes the number of columns for both
    return -(-(shape.width if product == "B4" else shape.hidden) // _ROWS), wide


def smem_nbytes(product: str, shape: Shape, config: Config) -> int:
    """An upper bound on a kernel's bytes of shared memory."""
    block, chunks = config.block_columns, config.block_columns // _CHUNK
    ring = config.stages * (_ROWS + block) * _STEP * 2
    slots, barriers = config.slots, 2 * config.stages
    if product in WEIGHTS:
        barriers += 2 * slots
    if product == "B1":
        slots = chunks + (slots if scales_a(shape) else 0)
        barriers += 2 * chunks
    return ring + 2 * slots * 64 * 128 + 8 * barriers + _SMEM_RESERVE


def tile_candidates(product: str, shape: Shape, *, thorough: bool) -> list[Config]:
    """Tiles worth measuring for a product, all in one order of walking.

    Args:
      product: "F1" to "B4".
      shape: the shape of the product.
      thorough: also rings with one step less than fits.

    Returns:
      Configs that fit into shared memory, widest first.
    """
    found = []
    for block in (256, 192, 128):
        chunks = block // _CHUNK
        slots_matter = product != "B1" or scales_a(shape)
        for slots in (s for s in range(1, chunks + 1 if slots_matter else 2) if chunks % s == 0):
            configs = [Config(block, stages=stages, slots=slots) for stages in _STAGES]
            fitting = [config for config in configs if smem_nbytes(product, shape, config) <= SMEM_LIMIT]
            found += fitting[::-1][: 2 if thorough else 1]
    return found


def order_candidates(product: str, shape: Shape, config: Config) -> list[Config]:
    """The other orders in which a config's tiles can be walked, each once."""
    blocks = output_blocks(product, shape, config)

    def effect(c: Config) -> tuple[int, int]:
        return c.minor, min(c.width, blocks[c.minor])

    found = {effect(config): config}
    for minor, width in _ORDERS:
        other = dataclasses.replace(config, minor=minor, width=width)
        found.setdefault(effect(other), other)
    return [c for c in found.values() if c != config]


def program_of(product: str, config: Config, data: Data) -> Program:
    """A product under a config, with the schedule made outside of the clock."""
    # Here, since the candidates and the table need no Mosaic GPU, which sets environment variables.
    from pallas_kernels._mosaic import row_products
    from pallas_kernels._mosaic.row_tiling import tile_rows
    from pallas_kernels._mosaic.weights import grad_weight

    kernels: dict[str, tuple[Callable[..., Any], tuple[jax.Array, ...]]] = {
        "F1": (lambda x, w1, plan: row_products.fc1(x, w1, None, plan, config), (data.x, data.w1)),
        "F2": (
            lambda a, w2, p, plan: row_products.fc2(a, w2, None, p, plan, config),
            (data.a, data.w2, data.p),
        ),
        "B1": (
            lambda dy, w2, a, p, plan: row_products.grad_act(
                dy, w2, a, p, plan, config, scale_a=scales_a(data.shape)
            ),
            (data.dy, data.w2, data.a, data.p),
        ),
        "B2": (lambda pa, dy, plan: grad_weight(pa, dy, plan, pa.dtype, config), (data.pa, data.dy)),
        "B3": (lambda dz, w1, plan: row_products.grad_x(dz, w1, plan, config), (data.dz, data.w1)),
        "B4": (lambda x, dz, plan: grad_weight(x, dz, plan, x.dtype, config), (data.x, data.dz)),
    }
    kernel, operands = kernels[product]
    return peers.jax_product(kernel, *operands, schedule=lambda sizes: tile_rows(sizes, data.shape.rows))


@jax.jit
def _largest_error(got: Any, want: Any) -> jax.Array:
    """The largest relative error in norm of several arrays; NaN where an array has any."""

    def error(got, want):
        got, want = got.astype(jnp.float32), want.astype(jnp.float32)
        return jnp.sqrt(jnp.sum(jnp.square(got - want)) / jnp.sum(jnp.square(want)))

    return jnp.max(jnp.stack(jax.tree.leaves(jax.tree.map(error, got, want))))


class Search:
    """The candidates of a product of a shape, compiled, checked and timed.

    Attributes:
      results: by config, its median time "ms" with its spread and "compile_s", or an "error".
    """

    def __init__(self, product: str, data: Data, sizes: jax.Array, turns: Path | None = None):
        self._product, self._data, self._sizes, self._turns = product, data, sizes, turns
        self._programs: dict[Config, Program] = {}
        self._want: Any = None
        self.results: dict[Config, dict[str, Any]] = {}

    def compile(self, configs: Iterable[Config]) -> None:
        """Compiles the new candidates; the others must agree with the first running candidate."""
        for config in configs:
            if config in self.results:
                continue
            start = time.perf_counter()
            try:
                program = program_of(self._product, config, self._data)
                got = call_once(program, self._sizes)
                self.results[config] = {"compile_s": time.perf_counter() - start}
                self._want = got if self._want is None else self._want
                # "not below" instead of "above": NaN fails.
                if not (error := float(_largest_error(got, self._want))) <= _TOLERANCE:
                    raise ArithmeticError(f"its result differs from the rule's by {error:.1e} in norm")
                self._programs[config] = program
            except Exception as error:  # whatever a compiler or an allocator raises
                self.results[config] = {"error": describe(error)}
                say(f"    {config_literal(config)}: {describe(error)[:140]}")

    def time(self, configs: Iterable[Config], repeats: int, kind: str) -> None:
        """Times compiled configs against each other, in balanced rounds; the newest times count."""
        programs = {str(i): c for i, c in enumerate(configs) if c in self._programs}
        flops = self._data.shape.flops(self._product)
        able = {name: self._programs[c] for name, c in programs.items()}
        with hold_card(self._turns):
            rows = measure(able, self._sizes, flops, repeats)
        for name, row in rows.items():
            result, config = self.results[programs[name]], programs[name]
            result.pop("ms", None)  # an error now outweighs a time before
            result |= row | {"phase": kind}
            said = f"{row['ms']:8.3f} ms {row['tflops']:5.0f} TFLOP/s" if "ms" in row else row["error"][:140]
            say(f"    {kind:8} {config_literal(config):58} {said}")

    def best(self, count: int) -> list[Config]:
        """The fastest."""
        timed = {config: row["ms"] for config, row in self.results.items() if "ms" in row}
        return sorted(timed, key=timed.__getitem__)[:count]


def tune(
    product: str,
    data: Data,
    sizes: jax.Array,
    *,
    repeats: int,
    thorough: bool,
    turns: Path | None = None,
) -> dict[str, Any]:
    """Searches the best config of a product.

    Args:
      product: "F1" to "B4".
      data: of the shape.
      sizes: (E,) int32 on the device.
      repeats: samples of each candidate; the last comparison takes three times as many.
      thorough: more tiles, and orders for the best three tiles instead of the best.
      turns: the folder shared by processes of one card, which time one at a time.

    Returns:
      The configs of the rule, in use and best, their times, and every candidate, JSON-ready.
    """
    chosen = {
        "rule": of_shape(tuning.apply_rule, data.shape, product),
        "in_use": of_shape(tuning.choose_configs, data.shape, product),
    }
    rule, search = chosen["rule"], Search(product, data, sizes, turns)
    candidates = tile_candidates(product, data.shape, thorough=thorough)
    tiles = [dataclasses.replace(c, minor=rule.minor, width=rule.width) for c in candidates]
    tiles = list(dict.fromkeys([*chosen.values(), *tiles]))
    search.compile(tiles)
    search.time(tiles, repeats, "tiles")
    leaders = search.best(3 if thorough else 1)
    orders = [other for leader in leaders for other in order_candidates(product, data.shape, leader)]
    search.compile(orders)
    search.time([*leaders, *orders], repeats, "orders")
    finalists = list(dict.fromkeys([*chosen.values(), *search.best(4)]))
    search.time(finalists, 3 * repeats, "final")
    final = {c: row["ms"] for c in finalists if "ms" in (row := search.results[c])}
    found: dict[str, Any] = {
        "product": product,
        **{kind: dataclasses.asdict(config) for kind, config in chosen.items()},
        "candidates": [{"config": dataclasses.asdict(c), **row} for c, row in search.results.items()],
    }
    if not final:
        return found | {"error": "no candidate ran"}
    best = min(final, key=final.__getitem__)
    found |= {"best": dataclasses.asdict(best), "best_ms": final[best]}
    for kind, config in chosen.items():
        found[f"{kind}_over_best"] = final[config] / final[best] if config in final else None
    return found


def choices(rows: Iterable[dict[str, Any]]) -> dict[Key, dict[str, Config]]:
    """The best configs by key and field of `Configs`; of two rows for one place the last counts."""
    found: dict[Key, dict[str, Config]] = {}
    for row in rows:
        if "best" in row:
            fields = found.setdefault(key_of(ALL_SHAPES[row["shape"]]), {})
            fields[FIELDS[row["product"]]] = Config(**row["best"])
    return found


def config_literal(config: Config) -> str:
    """Python text of a config, without the default fields."""
    more = [f"{f.name}={v}" for f in _MORE if (v := getattr(config, f.name)) != f.default]
    return f"Config({', '.join([str(config.block_columns), *more])})"


def table_json(found: dict[Key, dict[str, Config]], made: dict[str, Any]) -> str:
    """The file of a device in `pallas_kernels/_mosaic/tiles`, of keys whose six products are known.

    Args:
      found: the best configs by key and field of `Configs`.
      made: the run that measured, for the origin: its device, date, commit and command.
    """
    origin = {
        "device": made["device"].removeprefix("1 x "),
        **{field: made[field] for field in ("date", "commit", "command")},
    }
    fields = [f.name for f in dataclasses.fields(Configs)]
    entries = []
    for key, configs in sorted(found.items()):
        if len(configs) == len(fields):
            values = dict(zip(("width", "hidden", "rows_bucket"), key, strict=True))
            values |= {field: dataclasses.asdict(configs[field]) for field in fields}
            lines = [f"   {json.dumps(name)}: {json.dumps(value)}" for name, value in values.items()]
            entries.append("  {\n" + ",\n".join(lines) + "\n  }")
    lines = [f" {json.dumps(name)}: {json.dumps(value)}," for name, value in origin.items()]
    return "\n".join(["{", *lines, ' "tiles": [', ",\n".join(entries), " ]", "}"])


def report(rows: list[dict[str, Any]], made: dict[str, Any]) -> str:
    """The table, and how far from the best the rule and what is in use are, the worst first."""
    found = choices(rows)
    text = [table_json(found, made)]
    text += [f"# {key}: {', '.join(f)} only" for key, f in sorted(found.items()) if len(f) < len(FIELDS)]
    for kind, words in {"rule": "the rule's", "in_use": "the used configs'"}.items():
        far = {f"{row['shape']} {row['product']}": row.get(f"{kind}_over_best") for row in rows}
        known = {place: ratio for place, ratio in far.items() if ratio is not None}
        text.append(f"\n{words} time over the best, at most {GOAL} is wanted:")
        for place, ratio in sorted(known.items(), key=lambda item: -item[1]):
            text.append(f"  {ratio:.3f}  {place}" + ("  TOO FAR" if ratio > GOAL else ""))
        text += [f"  missing  {place}: it did not run" for place in far if place not in known]
    return "\n".join(text)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Tiles for the grouped MLP's kernels.")
    parser.add_argument("--out", type=Path, help="the result file, JSON; continued if it exists")
    default = (*MEASURED, *(shape.name for shape in OFF_TABLE))
    parser.add_argument("--shapes", type=one_of(ALL_SHAPES), default=default, help=", ".join(ALL_SHAPES))
    parser.add_argument("--products", type=one_of(PRODUCTS), default=PRODUCTS, help=", ".join(PRODUCTS))
    parser.add_argument("--groups", choices=tuple(GROUPS), default="dirichlet")
    parser.add_argument("--repeats", type=int, default=3, help="samples of each candidate")
    parser.add_argument("--thorough", action="store_true", help="more tiles, and orders for the best three")
    parser.add_argument(
        "--turns",
        type=Path,
        metavar="DIR",
        help="a folder shared by processes on one card, which time one at a time",
    )
    parser.add_argument("--limit-s", type=float, help="start no product after this many seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--table", type=Path, nargs="+", metavar="JSON", help="print the table of results")
    o = parser.parse_args(arguments)
    if (o.out is None) == (o.table is None):
        parser.error("give either --out, the result file, or --table, result files to read")
    if o.repeats < 1:
        parser.error(f"--repeats must be at least 1, got {o.repeats}")
    return o


def load(path: Path, made: dict[str, Any]) -> dict[str, Any]:
    """The content of a result file, with this run added to its runs.

    Raises:
      SystemExit: the file was measured on another device or with other versions.
    """
    result = json.loads(path.read_text()) if path.exists() else {"runs": [], "rows": []}
    for run in result["runs"]:
        for field in ("device", "versions"):
            if run[field] != made[field]:
                raise SystemExit(
                    f"{path} holds results of another {field}: {run[field]}, and this is {made[field]}. "
                    "Give another --out."
                )
    result["runs"].append(made)
    return result


def run(o: argparse.Namespace) -> dict[str, Any]:
    """Measures the products missing in the result file. Returns the runs and all rows."""
    result = load(o.out, provenance(vars(o)))
    start = time.perf_counter()

    def is_done(name: str, product: str) -> bool:
        at = {"shape": name, "groups": o.groups, "product": product}
        return any(at.items() <= row.items() and "best" in row for row in result["rows"])

    for name in o.shapes:
        shape, data = ALL_SHAPES[name], None
        for product in o.products:
            if is_done(name, product):
                continue
            if o.limit_s is not None and time.perf_counter() - start > o.limit_s:
                say(f"\n{o.limit_s:g} s are over before {name} {product}; the same command goes on there")
                return result
            data = data or peers.make_data(shape, o.seed)
            sizes = jnp.asarray(group_sizes(o.groups, shape.experts, shape.rows, o.seed))
            say(f"\n{name} {product}: E {shape.experts}, H {shape.width}, I {shape.hidden}, R {shape.rows}")
            row = tune(product, data, sizes, repeats=o.repeats, thorough=o.thorough, turns=o.turns)
            result["rows"].append({"shape": name, "groups": o.groups, "run": len(result["runs"]) - 1, **row})
            o.out.write_text(json.dumps(result, indent=1) + "\n")
            say(f"  best: {config_literal(Config(**row['best']))}" if "best" in row else f"  {row['error']}")
        del data
        release()
    return result


def main(arguments: list[str] | None = None) -> None:
    # Before jax starts its device: the same state of the allocator as in the benchmark.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    o = parse(arguments)
    results = [run(o)] if o.out else [json.loads(path.read_text()) for path in o.table]
    say(report([row for result in results for row in result["rows"]], results[-1]["runs"][-1]))


if __name__ == "__main__":
    main()
