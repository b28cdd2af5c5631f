"""Train steps in other people's styles: saved, offloaded by `jax.jit`, and by `jaxoff.jit`.

    python -m bench.clients --program decoder-scan --out results.json

Variants alternate in one process, each sample a few steps; times are medians. Peaks are the compiler's.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

import jaxoff
from bench.client_steps import ClientStep, Sizes, build_decoder, offload, save
from bench.provenance import provenance
from jaxoff._runtime.flags import COMMAND_BUFFER

NAMES = ("block_in", "attn")
TINY = Sizes(
    layers=3, width=64, hidden=128, heads=4, kv_heads=2, head_size=16, vocabulary=512, batch=2, length=64
)


@dataclasses.dataclass(frozen=True)
class Variant:
    """A way to run a step: whether residuals are offloaded, and the transform that compiles the step."""

    offloads: bool
    transform: Callable[..., Any]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


VARIANTS = {
    "saved": Variant(False, jax.jit),
    "stock": Variant(True, jax.jit),
    "stock-no-graphs": Variant(True, jax.jit, {"compiler_options": {COMMAND_BUFFER: ""}}),
    "jaxoff": Variant(True, jaxoff.jit),
    "concurrent": Variant(True, jaxoff.jit, {"recipe": "concurrent"}),
    "ordered": Variant(True, jaxoff.jit, {"recipe": "ordered"}),
    "recipe-stock": Variant(True, jaxoff.jit, {"recipe": "stock"}),
}


def build(program: str, sizes: Sizes, *, offloads: bool, attention: str) -> ClientStep:
    """The train step of a program, its residuals offloaded or saved."""
    style = program.removeprefix("decoder-")
    return build_decoder(sizes, (offload if offloads else save)(*NAMES), loop=style, attention=attention)


def compile_variant(variant: Variant, step: ClientStep, state: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
    """The step's function and its row: seconds to lower and to compile, peak, recipe, findings."""
    jitted = step.jit(variant.transform, **variant.options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        started = time.perf_counter()
        lowered = jitted.lower(state, batch)
        lowered_at = time.perf_counter()
        compiled = lowered.compile()
    row = {
        "lower_s": lowered_at - started,
        "compile_s": time.perf_counter() - lowered_at,
        "recipe": getattr(jitted, "recipe", ""),
        "findings": [str(finding) for finding in getattr(jitted, "findings", ())],
    }
    if jax.default_backend() == "gpu":
        facts = jaxoff.verify(
            compiled,
            compiler_options=getattr(jitted, "options", None) or variant.options.get("compiler_options"),
        )
        row |= {
            "peak_bytes": facts.device_peak_bytes,
            "temp_bytes": facts.device_temp_bytes,
            "host_bytes": facts.host_bytes,
            "copies": len(facts.copies),
            "exposed": sum(not copy.overlaps for copy in facts.copies),
            "kernels": sum(copy.via == "kernel" for copy in facts.copies),
        }
    return jitted, row


def main() -> None:
    """Runs a program in all variants and writes their rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--program", choices=["decoder-scan", "decoder-python"], default="decoder-scan")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--tiny", action="store_true", help="small sizes, for a CPU")
    parser.add_argument("--layers", type=int, help="the number of layers")
    parser.add_argument("--steps", type=int, default=3, help="steps of a sample")
    parser.add_argument("--samples", type=int, default=6)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    sizes = TINY if options.tiny else Sizes()
    if options.layers:
        sizes = dataclasses.replace(sizes, layers=options.layers)
    attention = "cudnn" if jax.default_backend() == "gpu" else "xla"
    steps = {n: build(options.program, sizes, offloads=n, attention=attention) for n in (False, True)}
    tokens = jax.random.randint(jax.random.key(1), steps[True].batch.shape, 0, sizes.vocabulary)
    state = jax.jit(steps[True].initialize)(jax.random.key(0))
    functions, rows = {}, {}
    for name in options.variants.split(","):
        functions[name], rows[name] = compile_variant(
            VARIANTS[name], steps[VARIANTS[name].offloads], state, tokens
        )
        print(name, rows[name], flush=True)
    times: dict[str, list[float]] = {name: [] for name in functions}
    losses = {}
    for sample in range(options.samples + 2):
        for name, function in functions.items():
            started = time.perf_counter()
            for _ in range(options.steps):
                state, loss = function(state, tokens)
            losses[name] = float(loss)
            if sample > 1:  # the first samples warm up
                times[name].append((time.perf_counter() - started) / options.steps * 1e3)
    for name, samples in times.items():
        rows[name] |= {"ms": statistics.median(samples), "samples_ms": samples, "loss": losses[name]}
        peak = rows[name].get("peak_bytes", 0) / 1e9
        print(f"{name:16s} {rows[name]['ms']:8.1f} ms {peak:6.2f} GB {rows[name]['recipe']}")
    if options.out:
        result = {"provenance": provenance(vars(options)), "sizes": dataclasses.asdict(sizes), "rows": rows}
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
