"""The Hopper kernels as functions of named operands, each with its product in float64."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels._activation import ACTIVATIONS
from pallas_kernels._mosaic import gated, row_products, tuning
from pallas_kernels._mosaic.row_tiling import tile_rows
from pallas_kernels._mosaic.weights import grad_weight
from tests.pallas_kernels.interpreter import interpreted
from tests.pallas_kernels.oracle import float64, norm_error

EXPERTS, ROWS, WIDTH, HIDDEN = 4, 152, 128, 192
BOUND = {jnp.bfloat16: 3e-3, jnp.float16: 4e-4, jnp.float32: 1e-6}


def operands(sizes, rows=ROWS, *, experts=EXPERTS, width=WIDTH, hidden=HIDDEN, dtype=jnp.bfloat16, seed=0):
    """Draws what the kernels take. Rows past the last group are NaN."""
    rng = np.random.default_rng(seed)
    past = np.arange(rows) >= sum(sizes)

    def of_rows(columns, draw=rng.normal):
        return np.where(past[:, None], np.nan, draw(size=(rows, columns)))

    values = dict(
        x=of_rows(width),
        dy=of_rows(width),
        a=np.square(np.maximum(of_rows(hidden), 0)),
        dz=of_rows(hidden),
        z=of_rows(2 * hidden),
        wg=rng.normal(size=(experts, width, 2 * hidden)) * width**-0.5,
        w1=rng.normal(size=(experts, width, hidden)) * width**-0.5,
        w2=rng.normal(size=(experts, hidden, width)) * hidden**-0.5,
    )
    wide = dict(
        p=of_rows(1, rng.random)[:, 0],
        b1=rng.normal(size=(experts, hidden)),
        b2=rng.normal(size=(experts, width)),
        acc=rng.normal(size=(experts, width, hidden)),
    )
    return {name: jnp.asarray(value, dtype) for name, value in values.items()} | {
        name: jnp.asarray(value, jnp.float32) for name, value in wide.items()
    }


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel as a function of its operands' names.

    Attributes:
      config: the field of `tuning.Configs`.
      takes: the names of its operands.
      run: the kernel, of operands by name, a schedule and a config; gives a tuple of arrays.
      oracle: the same for the rows of one expert, in float64, with that expert's matrices.
      roundings: how many times a result is rounded: a gated activation is computed from a rounded z.
    """

    config: str
    takes: tuple[str, ...]
    run: Callable[..., tuple[Any, ...]]
    oracle: Callable[..., tuple[np.ndarray, ...]]
    roundings: int = 1


def of_fc1(b1):
    return Kernel(
        "fc1",
        ("x", "w1", *("b1",) * b1),
        lambda tiling, config, x, w1, b1=None: (row_products.fc1(x, w1, b1, tiling, config),),
        lambda x, w1, b1=0.0: (np.square(np.maximum(x @ w1 + b1, 0)),),
    )


def of_fc2(b2, p):
    return Kernel(
        "fc2",
        ("a", "w2", *("b2",) * b2, *("p",) * p),
        lambda tiling, config, a, w2, b2=None, p=None: (row_products.fc2(a, w2, b2, p, tiling, config),),
        lambda a, w2, b2=0.0, p=1.0: (np.reshape(p, (-1, 1)) * (a @ w2 + b2),),
    )


def of_grad_act(p, scale_a):
    def oracle(dy, w2, a, p=1.0):
        p, da = np.reshape(p, (-1, 1)), dy @ w2.T
        return 2 * p * da * np.sqrt(a), p * a if scale_a else a, (da * a).sum(1)

    def run(tiling, config, dy, w2, a, p=None):
        dz, pa, dp = row_products.grad_act(dy, w2, a, p, tiling, config, scale_a=scale_a)
        return (dz, pa) if p is None else (dz, pa, dp)

    return Kernel("grad_act", ("dy", "w2", "a", *("p",) * p), run, oracle)


def of_grad_w1(dtype, *, accumulate=False):
    return Kernel(
        "grad_w1",
        ("x", "dz", *("acc",) * accumulate),
        lambda tiling, config, x, dz, acc=None: (grad_weight(x, dz, tiling, dtype, config, acc),),
        lambda x, dz, acc=0.0: (x.T @ dz + acc,),
    )


def of_grad_w2(dtype):
    """Its output is 192 rows high: in the last block of them one warpgroup has nothing to do."""
    return Kernel(
        "grad_w2",
        ("a", "dy"),
        lambda tiling, config, a, dy: (grad_weight(a, dy, tiling, dtype, config),),
        lambda a, dy: (a.T @ dy,),
    )


def shuffled(rows):
    """The rows in another order, and the index that puts them back: a kernel gathers them by it."""
    order = np.random.default_rng(1).permutation(rows.shape[0])
    return rows[order], jnp.asarray(np.argsort(order), jnp.int32)


def of_gated_fc1():
    swiglu = ACTIVATIONS["swiglu"]

    def run(tiling, config, x, wg):
        x, index = shuffled(x)
        return gated.fc1_gated(x, wg, None, tiling, config, swiglu, index, save=True)

    def oracle(x, wg):
        g, u = np.split(x @ wg, 2, axis=1)
        return g / (1 + np.exp(-g)) * u, np.concatenate([g, u], axis=1)

    return Kernel("fc1", ("x", "wg"), run, oracle, roundings=2)


def of_gated_grad_act():
    swiglu = ACTIVATIONS["swiglu"]

    def run(tiling, config, dy, w2, z, p):
        dy, index = shuffled(dy)
        dz, pa, dp = gated.grad_act_gated(dy, w2, z, p, tiling, config, swiglu, index)
        return dz, pa, dp

    def oracle(dy, w2, z, p):
        (g, u), p, da = np.split(z, 2, axis=1), p.reshape(-1, 1), dy @ w2.T
        s = 1 / (1 + np.exp(-g))
        a = g * s * u
        return np.concatenate([p * da * u * (s + g * s * (1 - s)), p * da * g * s], 1), p * a, (da * a).sum(1)

    return Kernel("grad_act", ("dy", "w2", "z", "p"), run, oracle, roundings=2)


def of_gathered_weight(side):
    def run(tiling, config, a, dy):
        index = {}
        if side == "left":
            a, index["left_index"] = shuffled(a)
        else:
            dy, index["right_index"] = shuffled(dy)
        return (grad_weight(a, dy, tiling, jnp.float32, config, **index),)

    return Kernel("grad_w2", ("a", "dy"), run, lambda a, dy: (a.T @ dy,))


KERNELS = {
    "fc1": of_fc1(b1=False),
    "fc1, bias": of_fc1(b1=True),
    "fc2, bias, probs": of_fc2(b2=True, p=True),
    "fc2": of_fc2(b2=False, p=False),
    "grad_act, probs, p a": of_grad_act(p=True, scale_a=True),
    "grad_act, probs": of_grad_act(p=True, scale_a=False),
    "grad_act": of_grad_act(p=False, scale_a=False),
    "grad_x": Kernel(
        "grad_x",
        ("dz", "w1"),
        lambda tiling, config, dz, w1: (row_products.grad_x(dz, w1, tiling, config),),
        lambda dz, w1: (dz @ w1.T,),
    ),
    "grad_w2": of_grad_w2(jnp.bfloat16),
    "grad_w2, float32": of_grad_w2(jnp.float32),
    "grad_w1, accumulator": of_grad_w1(jnp.float32, accumulate=True),
    "fc1, swiglu, index": of_gated_fc1(),
    "grad_act, swiglu, index": of_gated_grad_act(),
    "grad_w2, left index": of_gathered_weight("left"),
    "grad_w2, right index": of_gathered_weight("right"),
}


class Program:
    """A kernel compiled once for any group sizes."""

    def __init__(self, kernel: Kernel, given: dict[str, Any], *, programs=3, **changes):
        self.kernel, (self.rows, _) = kernel, given["x"].shape
        experts, width, hidden = given["w1"].shape
        of_shape = getattr(tuning.choose_configs((experts, width, hidden), self.rows), kernel.config)
        config = dataclasses.replace(of_shape, **changes)

        def run(group_sizes, *operands):
            tiling = tile_rows(group_sizes, self.rows)
            return kernel.run(tiling, config, **dict(zip(kernel.takes, operands, strict=True)))

        zeros = jnp.zeros(experts, jnp.int32)
        self.compiled = interpreted(run, zeros, *self.of(given), programs=programs)

    def of(self, given):
        return [given[name] for name in self.kernel.takes]

    def __call__(self, sizes, given):
        return self.compiled(jnp.asarray(sizes, jnp.int32), *self.of(given))

    def check(self, sizes, given):
        """Compares with the oracle, expert by expert: a wrong row of a small expert is not lost in a norm."""
        got = self(sizes, given)
        wide = {name: float64(value) for name, value in zip(self.kernel.takes, self.of(given), strict=True)}
        stops = np.minimum(np.cumsum(sizes), self.rows)
        for e, (first, stop) in enumerate(zip([0, *stops[:-1]], stops, strict=True)):
            own = {
                name: value[first:stop] if len(value) == self.rows else value[e]
                for name, value in wide.items()
            }
            for value, want in zip(got, self.kernel.oracle(**own), strict=False):
                part = value[first:stop] if len(value) == self.rows else value[e]
                error = norm_error(part, want)
                dtype = value.dtype.type if self.kernel.roundings == 1 else jnp.bfloat16
                assert error <= self.kernel.roundings * BOUND[dtype], (list(sizes), e, error)
        return got
