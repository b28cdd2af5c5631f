"""The train step of `bench.clients --program decoder-scan` in PyTorch, under activation memory budgets.

    python -m bench.budget_torch --budgets 1 0.75 0.5 0.25 0 --out torch.json

Runs PyTorch alone, on a GPU. `torch.compile` partitions the joint graph of each layer's forward and backward
pass: `torch._functorch.config.activation_memory_budget` is the part of a step's activation memory that it may
keep, 1 without recomputation. Weights are float32, compute is bfloat16 by autocast, AdamW is fused, attention
is causal with grouped queries, the loss is the cross entropy of float32 logits.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import statistics
import time
from pathlib import Path
from typing import Any

from bench.client_steps.step import Sizes
from bench.grouped_mlp_peers import import_torch
from bench.provenance import provenance

WARMUPS = 2


def build(sizes: Sizes) -> Any:
    """The decoder, with weights on the GPU."""
    torch = import_torch()
    nn, functional = torch.nn, torch.nn.functional

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            s, narrow = sizes, sizes.kv_heads * sizes.head_size
            make = {"bias": False, "device": "cuda"}
            self.norm1, self.norm2 = (nn.RMSNorm(s.width, eps=1e-6, device="cuda") for _ in range(2))
            self.q, self.o = nn.Linear(s.width, s.width, **make), nn.Linear(s.width, s.width, **make)
            self.k, self.v = nn.Linear(s.width, narrow, **make), nn.Linear(s.width, narrow, **make)
            self.gate, self.up = (nn.Linear(s.width, s.hidden, **make) for _ in range(2))
            self.down = nn.Linear(s.hidden, s.width, **make)

        def forward(self, x: Any) -> Any:
            batch, length, _ = x.shape
            h = self.norm1(x)
            q, k, v = (
                p(h).view(batch, length, -1, sizes.head_size).transpose(1, 2)
                for p in (self.q, self.k, self.v)
            )
            a = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = x + self.o(a.transpose(1, 2).reshape(batch, length, -1))
            h = self.norm2(x)
            return x + self.down(functional.silu(self.gate(h)) * self.up(h))

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(sizes.vocabulary, sizes.width, device="cuda")
            self.layers = nn.ModuleList(Layer() for _ in range(sizes.layers))
            self.norm = nn.RMSNorm(sizes.width, eps=1e-6, device="cuda")
            self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False, device="cuda")

        def forward(self, tokens: Any) -> Any:
            x = self.embed(tokens[:, :-1]).to(torch.bfloat16)
            for layer in self.layers:
                x = layer(x)
            logits = self.head(self.norm(x)).float()
            return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    torch.manual_seed(0)
    return Decoder()


def measure(sizes: Sizes, budget: float, steps: int) -> dict[str, Any]:
    """The milliseconds and the peak of a step within a budget."""
    torch = import_torch()
    config: Any = importlib.import_module("torch._functorch.config")
    config.activation_memory_budget = budget
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    model = build(sizes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=1e-4, fused=True)
    tokens = torch.randint(0, sizes.vocabulary, sizes.tokens.shape, device="cuda")

    @torch.compile
    def loss_of(tokens: Any) -> Any:
        with torch.autocast("cuda", torch.bfloat16):
            return model(tokens)

    def step() -> None:
        loss_of(tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    samples, started = [], time.perf_counter()
    for i in range(WARMUPS + steps):
        torch.cuda.synchronize()
        before = time.perf_counter()
        step()
        torch.cuda.synchronize()
        if i >= WARMUPS:
            samples.append(1e3 * (time.perf_counter() - before))
    return {
        "budget": budget,
        "ms": statistics.median(samples),
        "samples_ms": samples,
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "seconds": time.perf_counter() - started,
    }


def main(arguments: list[str] | None = None) -> None:
    """Measures each budget and writes the rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--budgets", type=float, nargs="+", default=[1.0, 0.75, 0.5, 0.25, 0.0])
    parser.add_argument("--layers", type=int, default=Sizes().layers)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    sizes = dataclasses.replace(Sizes(), layers=options.layers)
    rows = []
    for budget in options.budgets:
        rows.append(measure(sizes, budget, options.steps))
        print(rows[-1], flush=True)
        if options.out:
            result = {"provenance": provenance(vars(options)), "sizes": dataclasses.asdict(sizes)}
            options.out.write_text(json.dumps(result | {"torch": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
