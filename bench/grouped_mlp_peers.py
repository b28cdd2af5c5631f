"""The peers of the grouped MLP, each as programs to time, on the same arrays.

A variant is a function from `Data` to its programs, by product ("F1" ... "B4") or part of the whole op
("forward", "backward", "forward+backward"). Peers are called as a careful user would call them: routing
weights in the narrow type, activations fused where the peer can, offsets computed once a layer.
"""

from __future__ import annotations

import functools
import importlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import jaxoff
from bench.grouped_mlp_shapes import Shape


@dataclass(frozen=True)
class Data:
    """A layer's arrays: rows x, dy (R, H); a, pa, dz (R, I); p (R,); weights w1 (E, H, I), w2 (E, I, H)."""

    shape: Shape
    x: jax.Array
    dy: jax.Array
    a: jax.Array
    pa: jax.Array
    dz: jax.Array
    p: jax.Array
    w1: jax.Array
    w2: jax.Array

    @property
    def arguments(self) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        return self.x, self.w1, self.w2, self.p


@dataclass(frozen=True)
class Program:
    """A program to time.

    Attributes:
      prepare: group sizes -> state of a call, outside of the clock.
      call: state -> results, queued on the device.
      wait: waits until given results are computed.
      once: whether a state serves one call only, as an autograd graph does.
      state_nbytes: bytes of a single-use state on the device.
      saved_per_row: counts the bytes a row waiting for the backward pass: x and values made from x,
        without weights and routing weights.
    """

    prepare: Callable[[jax.Array], Any]
    call: Callable[[Any], Any]
    wait: Callable[[Any], Any] = jax.block_until_ready
    once: bool = False
    state_nbytes: int = 0
    saved_per_row: Callable[[jax.Array], float] | None = None


type Programs = dict[str, Program]


def is_of_rows(dims: tuple[int, ...], shape: Shape) -> bool:
    """Whether an array holds wide rows, upright or transposed, and not weights or one number a row."""
    return len(dims) == 2 and shape.rows in dims and 1 not in dims


def make_data(shape: Shape, seed: int = 0) -> Data:
    """Draws random arrays; half of `a` is zero, as after a ReLU, and so is dz there."""
    R, H, W, E = shape.rows, shape.width, shape.hidden, shape.experts
    keys = iter(jax.random.split(jax.random.key(seed), 8))

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def normal(key, dims, scale):
        return (jax.random.normal(key, dims, jnp.bfloat16) * scale).astype(jnp.bfloat16)

    x, dy = normal(next(keys), (R, H), 1.0), normal(next(keys), (R, H), 1.0)
    w1, w2 = normal(next(keys), (E, H, W), H**-0.5), normal(next(keys), (E, W, H), W**-0.5)
    a = jax.jit(lambda z: jnp.square(jax.nn.relu(z)))(normal(next(keys), (R, W), 1.0))
    # Representable in bfloat16: peers with narrow routing weights compute the same function.
    p = jax.random.uniform(next(keys), (R,), jnp.bfloat16, 0.05, 1.0)
    pa = jax.jit(lambda a, p: a * p[:, None])(a, p)
    dz = jax.jit(lambda g, a, p: 2 * p[:, None] * g * jnp.sqrt(a))(normal(next(keys), (R, W), 1.0), a, p)
    return Data(shape, x, dy, a, pa, dz, p.astype(jnp.float32), w1, w2)


def jax_product(function: Callable[..., Any], *operands: jax.Array, schedule=lambda sizes: sizes) -> Program:
    """Times `function(*operands, schedule(sizes))` under jit, the schedule computed outside of the clock."""
    run, plan = jax.jit(function), jax.jit(schedule)
    return Program(plan, lambda state: run(*operands, state))


def jax_parts(op: Callable[..., jax.Array], data: Data, p: jax.Array | None = None) -> Programs:
    """Times `op(x, w1, w2, p, sizes)` and its gradient; the backward pass alone takes the residuals."""
    arguments = (*data.arguments[:3], data.p if p is None else p)

    def pull_of(x, w1, w2, p, sizes):
        return jax.vjp(lambda *a: op(*a, sizes), x, w1, w2, p)

    def saved_per_row(sizes):
        kept = jaxoff.residuals(lambda *a: op(*a, sizes), *arguments)
        return sum(r.nbytes for r in kept if is_of_rows(r.shape, data.shape)) / data.shape.rows

    def both_of(x, w1, w2, p, sizes, dy):
        y, pull = pull_of(x, w1, w2, p, sizes)
        return y, pull(dy)

    forward, residuals = jax.jit(op), jax.jit(lambda *a: pull_of(*a)[1])
    backward, both = jax.jit(lambda pull, dy: pull(dy)), jax.jit(both_of)
    return {
        "forward": Program(lambda sizes: sizes, lambda sizes: forward(*arguments, sizes)),
        "backward": Program(lambda sizes: residuals(*arguments, sizes), lambda pull: backward(pull, data.dy)),
        "forward+backward": Program(
            lambda sizes: sizes, lambda sizes: both(*arguments, sizes, data.dy), saved_per_row=saved_per_row
        ),
    }


def square_relu(z: jax.Array) -> jax.Array:
    return jnp.square(jax.nn.relu(z))


def _dense_operands(data: Data) -> dict[str, tuple[jax.Array, jax.Array, str]]:
    """One expert's weights for all rows: the same operations and layouts, "T" for a transposed operand."""
    w1, w2 = data.w1[0], data.w2[0]
    return {
        "F1": (data.x, w1, "NN"),
        "F2": (data.a, w2, "NN"),
        "B1": (data.dy, w2, "NT"),
        "B2": (data.pa, data.dy, "TN"),
        "B3": (data.dz, w1, "NT"),
        "B4": (data.x, data.dz, "TN"),
    }


def dense_xla(data: Data) -> Programs:
    """The ceiling by XLA: one dense product of equal work, tuned by XLA among cuBLAS and its own kernels."""

    def program(left, right, layout):
        contract = ((int(layout[0] == "N"),), (int(layout[1] == "T"),))
        return jax_product(lambda a, b, _: lax.dot_general(a, b, (contract, ((), ()))), left, right)

    return {name: program(*operands) for name, operands in _dense_operands(data).items()}


def dense_torch(data: Data) -> Programs:
    """The ceiling by torch: one dense product of equal work, in cuBLAS."""
    torch = import_torch()

    def program(left, right, layout):
        left, right = as_torch(left), as_torch(right)
        left, right = left.mT if layout[0] == "T" else left, right.mT if layout[1] == "T" else right
        return Program(lambda _: None, lambda _: torch.matmul(left, right), wait_for_torch)

    return {name: program(*operands) for name, operands in _dense_operands(data).items()}


# XLA turns a ragged product into a dense product over every expert, with a copy of the rows for each.
RAGGED_DOT_LIMIT = 32 * 2**30


def ragged_dot(data: Data) -> Programs:
    """`jax.lax.ragged_dot`, forward, where the copies fit."""
    shape = data.shape
    needed = 2 * shape.experts * shape.rows * max(shape.width, shape.hidden)
    if needed > RAGGED_DOT_LIMIT:
        raise NotImplementedError(f"lax.ragged_dot needs about {needed / 1e9:.0f} GB for this shape")

    def op(x, w1, w2, p, sizes):
        a = square_relu(lax.ragged_dot(x, w1, sizes))
        return lax.ragged_dot(a, w2, sizes) * p[:, None]

    narrow = data.p.astype(data.x.dtype)
    return {
        "F1": jax_product(lax.ragged_dot, data.x, data.w1),
        "F2": jax_product(lax.ragged_dot, data.a, data.w2),
        "forward": jax_parts(op, data, narrow)["forward"],
    }


def tokamax(data: Data) -> Programs:
    """tokamax's Mosaic kernels as shipped, with the activation fused where tokamax can."""
    library = importlib.import_module("tokamax")
    # tokamax logs at length for each product without tuned tiles for this GPU.
    logging.getLogger("absl").setLevel(logging.ERROR)

    def dot(x, w, sizes, activation=None):
        return library.ragged_dot(x, w, sizes, activation=activation, implementation="mosaic")

    return _tokamax_parts(dot, data)


def _tokamax_parts(dot: Callable[..., jax.Array], data: Data) -> Programs:
    def op(x, w1, w2, p, sizes):
        return dot(dot(x, w1, sizes, square_relu), w2, sizes) * p[:, None]

    return jax_parts(op, data, data.p.astype(data.x.dtype))


# tokamax ships tuned tiles for an H100 but none for an H200, and falls back to 64 x 64 there. These are the
# H100's for large shapes, and two of its own kind with more operations a byte.
_TOKAMAX_ROWS = (
    dict(block_m=128, block_n=64, block_k=128, num_stages=4, split_k=1, grid_minor_dim=1, grid_tile_width=8),
    dict(block_m=128, block_n=128, block_k=64, num_stages=4, split_k=1, grid_minor_dim=1, grid_tile_width=8),
)
_TOKAMAX_WEIGHTS = (
    dict(block_m=64, block_n=64, block_k=128, num_stages=2, split_k=1),
    dict(block_m=128, block_n=64, block_k=128, num_stages=2, split_k=1),
    dict(block_m=128, block_n=128, block_k=64, num_stages=4, split_k=1),
)


class TokamaxTuned:
    """tokamax's Mosaic kernels with the fastest of a few tiles, chosen once for each (E, H, I).

    Attributes:
      chosen: by (E, H, I), the tiles for products with weights and for weight gradients.
    """

    def __init__(self) -> None:
        self.chosen: dict[tuple[int, int, int], tuple[dict[str, Any], dict[str, Any]]] = {}

    def __call__(self, data: Data) -> Programs:
        base = importlib.import_module("tokamax._src.ops.ragged_dot.base")
        kernels = importlib.import_module("tokamax._src.ops.ragged_dot.pallas_mosaic_gpu")

        def op(tiles, **options):
            config = kernels.Config(**tiles)
            return kernels.PallasMosaicGpuRaggedDot(config=config, bypass_device_check=True, **options)

        key = (data.shape.experts, data.shape.width, data.shape.hidden)
        if key not in self.chosen:
            sizes = jnp.full(key[0], data.shape.rows_per_expert, jnp.int32)

            def run(numbers):
                return lambda tiles: (
                    lambda left, right: op(tiles)(
                        left, right, group_sizes=sizes, ragged_dot_dimension_numbers=numbers
                    )
                )

            rows, weights = (
                run(n) for n in (base.DEFAULT_RAGGED_DOT_DIM_NUMS, base.RAGGED_CONTRACTING_DOT_DIM_NUMS)
            )
            self.chosen[key] = (
                _fastest(rows, _TOKAMAX_ROWS, data.x, data.w1),
                _fastest(weights, _TOKAMAX_WEIGHTS, data.x, data.dz),
            )
        rows_tiles, weights_tiles = self.chosen[key]
        vjp = functools.partial(base.vjp, dlhs_ragged_dot=op(rows_tiles), drhs_ragged_dot=op(weights_tiles))
        product = op(rows_tiles, vjp=vjp)

        def dot(x, w, sizes, activation=None):
            return product(x, w, group_sizes=sizes, activation=activation)

        return _tokamax_parts(dot, data)

    def chosen_by_shape(self) -> dict[str, Any]:
        """`chosen`, ready for JSON."""
        return {"x".join(map(str, key)): tiles for key, tiles in self.chosen.items()}


def _fastest(program_of: Callable[[Any], Callable[..., jax.Array]], candidates, *operands) -> dict[str, Any]:
    """Times the candidates; failed candidates are left out, and the first error is raised if all fail."""
    times, errors = {}, []
    for index, candidate in enumerate(candidates):
        try:
            run = jax.jit(program_of(candidate))
            run(*operands).block_until_ready()
            start = time.perf_counter()
            jax.block_until_ready([run(*operands) for _ in range(3)])
            times[index] = time.perf_counter() - start
        except Exception as error:  # a compiler may raise anything
            errors.append(error)
    if not times:
        raise errors[0]
    return candidates[min(times, key=times.__getitem__)]


def import_torch() -> Any:
    """Imports torch, which this project does not depend on."""
    return importlib.import_module("torch")


def as_torch(array: jax.Array) -> Any:
    """The same memory as a torch tensor."""
    # Of a capsule, torch asks nothing about streams; the values are there.
    return import_torch().from_dlpack(jax.block_until_ready(array).__dlpack__())


def wait_for_torch(_: Any) -> None:
    torch = import_torch()
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def torch_products(data: Data, *, with_activation: bool) -> Programs:
    """`torch._grouped_mm` for the six products, alone or with the element-wise work around them, eager."""
    torch = import_torch()
    x, dy, a, pa, dz, w1, w2 = map(as_torch, (data.x, data.dy, data.a, data.pa, data.dz, data.w1, data.w2))
    p = as_torch(data.p.astype(data.x.dtype))[:, None]

    def program(left, right, after=lambda out: out):
        return Program(
            _torch_offsets, lambda offs: after(torch._grouped_mm(left, right, offs=offs)), wait_for_torch
        )

    def gradients(da):
        return 2 * p * da * torch.sqrt(a), p * a, (da * a).sum(1)

    operands = {"F1": (x, w1), "F2": (a, w2), "B1": (dy, w2.mT)}
    if with_activation:
        after = {"F1": lambda z: torch.relu(z).square(), "F2": lambda y: y * p, "B1": gradients}
        return {name: program(*operands[name], after[name]) for name in operands}
    operands |= {"B2": (pa.mT, dy), "B3": (dz, w1.mT), "B4": (x.mT, dz)}
    return {name: program(*pair) for name, pair in operands.items()}


def _torch_offsets(sizes: jax.Array) -> Any:
    return as_torch(jnp.cumsum(sizes, dtype=jnp.int32))


def torch_eager(data: Data) -> Programs:
    """torch, eager, with autograd; the products and the parts."""
    return torch_products(data, with_activation=False) | _torch_parts(_torch_op, data)


def torch_with_activation(data: Data) -> Programs:
    """torch's three products with their element-wise work."""
    return torch_products(data, with_activation=True)


def torch_compiled(data: Data) -> Programs:
    """`torch_eager` under `torch.compile`, for this shape."""
    return _torch_parts(_compile(_torch_op, dynamic=False), data)


def torch_function(data: Data) -> Programs:
    """torch as an expert would write the op: a hand-written gradient keeping x and a, compiled."""
    return _torch_parts(_torch_function(), data)


def _compile(function: Callable[..., Any], *, dynamic: bool) -> Callable[..., Any]:
    torch = import_torch()
    dynamo = importlib.import_module("torch._dynamo")
    dynamo.config.recompile_limit = 64  # each shape is a program of its own; past 8 torch would run eagerly
    return torch.compile(function, dynamic=dynamic)


def _torch_op(x, w1, w2, p, sizes):
    torch = import_torch()
    offs = torch.cumsum(sizes, 0, dtype=torch.int32)
    a = torch.relu(torch._grouped_mm(x, w1, offs=offs)).square()
    return torch._grouped_mm(a, w2, offs=offs) * p[:, None]


@functools.cache
def _torch_function() -> Callable[..., Any]:
    torch = import_torch()
    product = torch._grouped_mm

    def square_relu(z):
        return torch.relu(z).square()

    def scale(y, p):
        return y * p[:, None]

    def gradients(da, a, p):
        da, wide, p = da.float(), a.float(), p.float()[:, None]
        return (2 * p * da * wide.sqrt()).to(a.dtype), (p * wide).to(a.dtype), (da * wide).sum(1)

    square_relu, scale, gradients = (
        _compile(function, dynamic=True) for function in (square_relu, scale, gradients)
    )

    class GroupedMLP(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w1, w2, p, sizes):
            offs = torch.cumsum(sizes, 0, dtype=torch.int32)
            a = square_relu(product(x, w1, offs=offs))
            ctx.save_for_backward(x, a, w1, w2, p, offs)
            return scale(product(a, w2, offs=offs), p)

        @staticmethod
        def backward(ctx, *grad_outputs):
            (dy,) = grad_outputs
            x, a, w1, w2, p, offs = ctx.saved_tensors
            dz, pa, dp = gradients(product(dy, w2.mT, offs=offs), a, p)
            dw2 = product(pa.mT, dy, offs=offs)
            dx = product(dz, w1.mT, offs=offs)
            return dx, product(x.mT, dz, offs=offs), dw2, dp.to(p.dtype), None

    return GroupedMLP.apply


def _torch_parts(op: Callable[..., Any], data: Data) -> Programs:
    torch = import_torch()
    shape = data.shape
    narrow = data.p.astype(data.x.dtype)
    leaves = [as_torch(v).detach().requires_grad_() for v in (data.x, data.w1, data.w2, narrow)]
    dy = as_torch(data.dy)

    def forward(sizes):
        # Without autograd: the cost of a forward pass alone in torch at its best.
        with torch.no_grad():
            return op(*leaves, sizes)

    def backward(y):
        return torch.autograd.grad(y, leaves, dy)

    def both(sizes):
        y = op(*leaves, sizes)
        return y, torch.autograd.grad(y, leaves, dy)

    def saved_per_row(sizes):
        kept = {}

        def pack(tensor):
            if is_of_rows(tensor.shape, shape):
                kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            op(*leaves, as_torch(sizes))
        return sum(kept.values()) / shape.rows

    graph_nbytes = 2 * shape.rows * (2 * shape.width + 3 * shape.hidden)
    return {
        "forward": Program(as_torch, forward, wait_for_torch),
        "backward": Program(
            lambda sizes: op(*leaves, as_torch(sizes)),
            backward,
            wait_for_torch,
            once=True,
            state_nbytes=graph_nbytes,
        ),
        "forward+backward": Program(as_torch, both, wait_for_torch, saved_per_row=saved_per_row),
    }
