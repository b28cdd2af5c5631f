"""The MoE layer after its router and its peers, each as programs to time, on the same arrays.

A variant is a function from `Data` to its programs: "forward", and "forward+backward" with the gradients of
x, the probabilities and both weights. A program's state is the routing: probabilities and experts.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import jaxoff
import pallas_kernels
from bench.grouped_mlp_peers import Program, Programs, as_torch, import_torch, wait_for_torch
from bench.moe_shapes import Shape
from models.moe import combine, dispatch, dispatch_probs, expert_load, sort_by_expert


@dataclass(frozen=True)
class Data:
    """A layer's arrays: x, dy (T, H), weights w1 (E, H, F) and w2 (E, I, H), in bfloat16."""

    shape: Shape
    activation: str
    x: jax.Array
    dy: jax.Array
    w1: jax.Array
    w2: jax.Array


def make_data(shape: Shape, activation: str, seed: int = 0) -> Data:
    """Draws random arrays. Weights have the scale of their fan-in."""
    keys = iter(jax.random.split(jax.random.key(seed), 4))
    T, E, H, W = shape.tokens, shape.experts, shape.width, shape.hidden
    columns = W if activation == "squared_relu" else 2 * W

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def normal(key, dims, scale):
        return (jax.random.normal(key, dims, jnp.bfloat16) * scale).astype(jnp.bfloat16)

    x, dy = normal(next(keys), (T, H), 1.0), normal(next(keys), (T, H), 1.0)
    w1, w2 = normal(next(keys), (E, H, columns), H**-0.5), normal(next(keys), (E, W, H), W**-0.5)
    return Data(shape, activation, x, dy, w1, w2)


def _jax_parts(op: Callable[..., Any], data: Data) -> Programs:
    def both_of(x, w1, w2, dy, p, e):
        y, pull = jax.vjp(lambda x, p, w1, w2: op(x, p, e, w1, w2), x, p, w1, w2)
        return y, pull(dy)

    forward = jax.jit(lambda x, w1, w2, p, e: op(x, p, e, w1, w2))
    both = jax.jit(both_of)
    given = data.x, data.w1, data.w2
    return {
        "forward": Program(lambda routing: routing, lambda routing: forward(*given, *routing)),
        "forward+backward": Program(lambda routing: routing, lambda routing: both(*given, data.dy, *routing)),
    }


def kept_nbytes_per_token(data: Data, routing: tuple[jax.Array, jax.Array]) -> float:
    """Counts the bytes a token of the wide values that `pallas_kernels.moe` keeps for its gradient."""
    p, e = routing

    def op(x, w1, w2, p):
        return pallas_kernels.moe(x, p, e, w1, w2, activation=data.activation)

    kept = jaxoff.residuals(op, data.x, data.w1, data.w2, p)
    tall = (data.shape.tokens, data.shape.rows)
    wide = [r for r in kept if len(r.shape) == 2 and r.shape[0] in tall and r.shape[1] > data.shape.top_k]
    return sum(r.nbytes for r in wide) / data.shape.tokens


def ours(data: Data) -> Programs:
    """The layer as one operation."""

    def op(x, p, e, w1, w2):
        return pallas_kernels.moe(x, p, e, w1, w2, activation=data.activation)

    return _jax_parts(op, data)


def separate(data: Data) -> Programs:
    """The grouped MLP between gathers by XLA, which keeps the gathered rows."""

    def op(x, p, e, w1, w2):
        order, load = sort_by_expert(e), expert_load(e, w1.shape[0])
        probs = dispatch_probs(p, order)
        rows = dispatch(x, order)
        y = pallas_kernels.grouped_mlp(rows, w1, w2, load, probs=probs, activation=data.activation)
        return combine(y, order, e.shape[1])

    return _jax_parts(op, data)


def _torch_activation(activation: str) -> Callable[[Any], Any]:
    torch = import_torch()
    if activation == "squared_relu":
        return lambda z: torch.relu(z).square()
    gate = {
        "swiglu": torch.nn.functional.silu,
        "geglu": functools.partial(torch.nn.functional.gelu, approximate="tanh"),
        "squared_reglu": lambda g: torch.relu(g).square(),
    }[activation]

    def gated(z):
        g, u = z.chunk(2, dim=1)
        return gate(g) * u

    return gated


def _torch_layer(activation: str) -> Callable[..., Any]:
    torch, act = import_torch(), _torch_activation(activation)

    def layer(x, p, e, w1, w2):
        flat = e.flatten()
        order = torch.argsort(flat, stable=True)
        sizes = (flat[:, None] == torch.arange(w1.shape[0], device=x.device)[None]).sum(0)
        offs = torch.cumsum(sizes, 0, dtype=torch.int32)
        token = order // e.shape[1]
        a = act(torch._grouped_mm(x[token], w1, offs=offs))
        y = torch._grouped_mm(a, w2, offs=offs) * p.flatten()[order][:, None].to(x.dtype)
        return torch.zeros_like(x).index_add(0, token, y)

    return layer


def torch_eager(data: Data) -> Programs:
    """torch's grouped products, gathers and sums, eager."""
    return _torch_parts(_torch_layer(data.activation), data)


def torch_compiled(data: Data) -> Programs:
    """`torch_eager` under `torch.compile`."""
    return _torch_parts(import_torch().compile(_torch_layer(data.activation), dynamic=False), data)


def _torch_parts(layer: Callable[..., Any], data: Data, w1: Any = None, w2: Any = None) -> Programs:
    torch = import_torch()
    x = as_torch(data.x).detach().requires_grad_()
    w1 = (as_torch(data.w1) if w1 is None else w1).detach().requires_grad_()
    w2 = (as_torch(data.w2) if w2 is None else w2).detach().requires_grad_()
    dy = as_torch(data.dy)

    def prepare(routing):
        p, e = map(as_torch, routing)
        return p.detach().requires_grad_(), e

    def forward(state):
        with torch.no_grad():
            return layer(x, *state, w1, w2)

    def both(state):
        p, e = state
        y = layer(x, p, e, w1, w2)
        dx, dp, dw1, dw2 = torch.autograd.grad(y, (x, p, w1, w2), dy)
        return y, (dx, dp, dw1, dw2)

    return {
        "forward": Program(prepare, forward, wait_for_torch),
        "forward+backward": Program(prepare, both, wait_for_torch),
    }


def sonicmoe(data: Data) -> Programs:
    """SonicMoE after its router: metadata kernels, products and sum. Gated weights are interleaved.

    Version 0.1.1 has squared ReLU; later versions have gated activations only, by QuACK's tuned products.
    """
    torch = import_torch()
    _restore_names()
    library = importlib.import_module("sonicmoe.functional")
    kind = importlib.import_module("sonicmoe.enums").ActivationType(
        {"squared_relu": "relu_sq"}.get(data.activation, data.activation)
    )
    shape = data.shape
    E, k = shape.experts, shape.top_k
    is_first = importlib.metadata.version("sonic-moe").startswith("0.1.1")

    def layer(x, p, e, w1, w2):
        def empty(count):
            return torch.empty(count, dtype=torch.int32, device=x.device)

        scatter, back, gather = empty(shape.rows), empty(shape.rows), empty(shape.rows)
        count, offset = empty(E), empty(E + 1)
        library.TC_topk_router_metadata_triton(e, E, count, offset, gather, scatter, back)
        stream = [torch.cuda.current_stream().cuda_stream] if is_first else []
        inference = not torch.is_grad_enabled()
        shared = *stream, gather, scatter, back, None, False, kind
        a, z = library._UpProjection.apply(
            x, w1.permute(1, 2, 0), None, offset, shape.rows, k, *shared, inference
        )
        return library._DownProjection.apply(
            a, z, w2.permute(1, 2, 0), None, p, offset, shape.tokens, k, *shared
        )

    # Stored as (E, F, H) and (E, H, I).
    w1, w2 = (as_torch(w).transpose(1, 2).contiguous() for w in (data.w1, data.w2))
    if data.activation != "squared_relu":
        g, u = w1.chunk(2, dim=1)
        w1 = torch.stack([g, u], dim=2).reshape(w1.shape).contiguous()
    return _torch_parts(layer, data, w1, w2)


def _restore_names() -> None:
    """Puts names back into `cutlass.cute.arch` that cutlass-dsl 4.4.2 no longer exports and SonicMoE uses."""
    arch = importlib.import_module("cutlass.cute").arch
    enums = importlib.import_module("cutlass._mlir.dialects.nvvm")
    for name in ("ProxyKind", "SharedSpace", "RoundingModeKind"):
        if not hasattr(arch, name):
            setattr(arch, name, getattr(enums, name))


VARIANTS: dict[str, Callable[[Data], Programs]] = {
    "ours": ours,
    "separate": separate,
    "torch": torch_eager,
    "torch_compiled": torch_compiled,
    "sonicmoe": sonicmoe,
}
