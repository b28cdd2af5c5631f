"""The speed and memory of the MoE layer after its router, beside its peers.

Sort, gather, experts and weighted sum of one layer, forward and forward with backward, in one process on one
GPU, variants interleaved. A sample is a queue of calls of about 20 ms and one wait, by the host's clock.
Before a shape is timed, results and gradients of every variant are compared with the first's. A failure is
recorded under the variant's name and the run goes on; the result file is rewritten after every shape.

    python -m bench.moe --out moe.json
    python -m bench.moe --shapes qwen3-30b-a3b --activations swiglu --routings zipf --out swiglu.json

Compiling takes most of the time. Processes of a shape each compile beside each other, and then measure alone:

    python -m bench.moe --shapes olmoe --turns /tmp/turns --of 2 --out olmoe.json &
    python -m bench.moe --shapes nano --turns /tmp/turns --of 2 --out nano.json

Peers are optional: torch, and SonicMoE 0.1.1 with nvidia-cutlass-dsl 4.4.2 and quack-kernels 0.2.5, or
0.1.2.post1 (gated only) with quack-kernels 0.3.11, are measured where they can be imported.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bench import moe_peers as peers
from bench.card_lock import hold_card
from bench.grouped_mlp import TOLERANCE, describe, measure, release, say
from bench.grouped_mlp_peers import Program, Programs, wait_for_torch
from bench.moe_shapes import MEASURED, ROUTINGS, SHAPES, draw_routing
from bench.options import one_of
from bench.provenance import provenance
from pallas_kernels._activation import ACTIVATIONS

PARTS = ("forward", "forward+backward")
SAMPLE_MS = 20.0
# The gradients that every variant lays out alike. SonicMoE keeps its weights transposed.
COMPARED = ("y", "dx", "dprobs")


def _as_jax(value: Any) -> jax.Array:
    return value if isinstance(value, jax.Array) else jnp.from_dlpack(value.detach().contiguous())


@jax.jit
def _relative_error(got: jax.Array, want: jax.Array) -> jax.Array:
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    return jnp.sqrt(jnp.sum(jnp.square(got - want)) / jnp.sum(jnp.square(want)))


def call_once(program: Program, routing: Any) -> Any:
    result = program.call(program.prepare(routing))
    program.wait(result)
    return result


def run_once(program: Program, routing: Any) -> tuple[dict[str, jax.Array], float]:
    """Returns the compared results of a call, and the bytes of device memory beyond its inputs."""
    y, (dx, dprobs, *_) = call_once(program, routing)
    found = {name: _as_jax(v) for name, v in zip(COMPARED, (y, dx, dprobs), strict=True)}
    del y, dx, dprobs
    return found, _peak_nbytes(program, routing)


def _peak_nbytes(program: Program, routing: Any) -> float:
    """Reads the growth of torch's memory in a call; NaN for JAX, whose counter cannot be set back."""
    if program.wait is not wait_for_torch:
        return float("nan")
    cuda = peers.import_torch().cuda
    release()
    cuda.reset_peak_memory_stats()
    before = cuda.memory_allocated()
    call_once(program, routing)
    return float(cuda.max_memory_allocated() - before)


def check(built: dict[str, Programs], routing: Any) -> dict[str, dict[str, Any]]:
    """Compares each variant with the first: by variant, errors in norm, or the error."""
    want: dict[str, jax.Array] = {}
    checks: dict[str, dict[str, Any]] = {}
    for variant, programs in built.items():
        try:
            got, nbytes = run_once(programs[PARTS[1]], routing)
            errors = {name: float(_relative_error(got[name], want.get(name, got[name]))) for name in COMPARED}
            # "not below" instead of "above": NaN fails.
            checks[variant] = {"errors": errors, "ok": all(e <= TOLERANCE for e in errors.values())}
            if nbytes == nbytes:
                checks[variant]["torch_peak_nbytes"] = nbytes
            want = want or got
        except Exception as error:  # whatever a compiler or a missing package raises
            checks[variant] = {"error": describe(error), "ok": False}
        release()
    return checks


class Prepared(NamedTuple):
    """A layer that is ready to be timed.

    Attributes:
      at: the shape and the activation, for a row of the result.
      data: the layer's arrays.
      built: variant -> programs, of the variants without an error.
      routings: kind -> routing.
    """

    at: dict[str, str]
    data: peers.Data
    built: dict[str, Programs]
    routings: dict[str, Any]


def prepare(name: str, activation: str, o: argparse.Namespace, result: dict[str, Any]) -> Prepared:
    """Compiles and checks a layer's variants."""
    shape = SHAPES[name]
    at = {"shape": name, "activation": activation}
    say(f"\n{shape}, {activation}")
    data = peers.make_data(shape, activation, o.seed)
    built: dict[str, Programs] = {}
    for variant in o.variants:
        try:
            built[variant] = peers.VARIANTS[variant](data)
        except Exception as error:  # not installed
            result["rows"].append(at | {"variant": variant, "error": describe(error)})
            say(f"  {variant}: {result['rows'][-1]['error']}")
    routings = {kind: draw_routing(shape, kind, o.seed) for kind in o.routings}
    for kind, routing in routings.items():
        checks = check(built, routing)
        for variant, found in checks.items():
            result["checks"].append(at | {"routing": kind, "variant": variant} | found)
            say(f"  {variant}: {found}")
        built = {variant: programs for variant, programs in built.items() if checks[variant]["ok"]}
    for programs in built.values():
        call_once(programs["forward"], routings[o.routings[0]])
    if "ours" in built:
        kept = peers.kept_nbytes_per_token(data, routings[o.routings[0]])
        result["kept"].append(at | {"nbytes_per_token": kept})
    release()
    return Prepared(at, data, built, routings)


def time_layer(layer: Prepared, o: argparse.Namespace, result: dict[str, Any]) -> None:
    """Times a layer's variants against each other, adding to the result."""
    shape = layer.data.shape
    for kind, routing in layer.routings.items():
        load = jnp.bincount(routing[1].reshape(-1), length=shape.experts)
        sizes = {"largest_group": int(load.max()), "smallest_group": int(load.min())}
        for part in PARTS:
            programs = {variant: parts[part] for variant, parts in layer.built.items()}
            flops = shape.flops(layer.data.activation, part)
            for variant, row in measure(programs, routing, flops, o.repeats, SAMPLE_MS).items():
                found = layer.at | {"routing": kind, "part": part, "variant": variant} | sizes | row
                result["rows"].append(found)
                say(f"  {layer.at} {kind} {part} {variant}: {row.get('ms', row.get('error'))} ms")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="The speed of the MoE layer and its peers.")
    parser.add_argument("--out", type=Path, help="the result file, JSON")
    parser.add_argument("--shapes", type=one_of(SHAPES), default=MEASURED)
    parser.add_argument("--activations", type=one_of(ACTIVATIONS), default=("squared_relu",))
    parser.add_argument("--routings", type=one_of(ROUTINGS), default=ROUTINGS)
    parser.add_argument("--variants", type=one_of(peers.VARIANTS), default=tuple(peers.VARIANTS))
    parser.add_argument("--repeats", type=int, default=8, help="samples of each variant")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--turns", type=Path, help="a folder for processes that compile side by side")
    parser.add_argument("--of", type=int, default=0, help="the number of these processes")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    o = parse(arguments)
    result: dict[str, Any] = {"provenance": provenance(vars(o)), "checks": [], "rows": [], "kept": []}

    def save() -> None:
        if o.out:
            o.out.write_text(json.dumps(result, indent=1))

    layers = [prepare(name, activation, o, result) for name in o.shapes for activation in o.activations]
    save()
    with hold_card(o.turns, o.of, "-".join((*o.shapes, *o.activations))):
        for layer in layers:
            time_layer(layer, o, result)
            save()
            release()


if __name__ == "__main__":
    main()
