"""The shapes of the grouped MLP's benchmark, the distribution of rows over experts, and operation counts.

R rows (one a routed token), H model width, I expert width, E experts. The six products, 2 R H I operations
each:
F1 = x W1, F2 = a W2, B1 = dy W2^T, B2 = (p a)^T dy, B3 = dz W1^T, B4 = x^T dz.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

PRODUCTS = ("F1", "F2", "B1", "B2", "B3", "B4")
# The parts of the whole op, and the products of each part.
WHOLE = {"forward": PRODUCTS[:2], "backward": PRODUCTS[2:], "forward+backward": PRODUCTS}


@dataclass(frozen=True)
class Shape:
    """A layer's expert part on a device."""

    name: str
    experts: int
    width: int
    hidden: int
    rows: int

    @property
    def rows_per_expert(self) -> int:
        return self.rows // self.experts

    def flops(self, product: str) -> int:
        """Operations of a product, or of a part of the whole op."""
        return 2 * self.rows * self.width * self.hidden * len(WHOLE.get(product, (product,)))

    def weight_nbytes(self) -> int:
        """Bytes of w1 and w2 in 16 bits."""
        return 2 * 2 * self.experts * self.width * self.hidden

    def peak_nbytes(self) -> int:
        """An upper bound on the bytes of a measurement of this shape.

        The inputs and the operands of the products (x, dy; a, p a, dz), two sets of results (correctness is
        two variants side by side: y, dx, weight gradients), and the values of eager autograd.
        """
        wide, narrow = 2 * self.rows * self.width, 2 * self.rows * self.hidden
        return (2 + 4 + 4) * wide + (3 + 6) * narrow + 4 * self.weight_nbytes()


def _tokens(name: str, tokens: int) -> Shape:
    return Shape(name, experts=128, width=2688, hidden=1856, rows=6 * tokens)


# Nemotron-3 Nano at top 6; 64 local experts of Super and of Ultra; Mixtral 8x7B; a slice of DeepSeek-V3.
_ALL = (
    _tokens("nano-8k", 8192),
    _tokens("nano-16k", 16384),
    _tokens("nano-32k", 32768),
    Shape("super-4k", experts=64, width=1024, hidden=2688, rows=64 * 4096),
    Shape("super-512", experts=64, width=1024, hidden=2688, rows=64 * 512),
    Shape("ultra-4k", experts=64, width=2048, hidden=5120, rows=64 * 4096),
    Shape("ultra-512", experts=64, width=2048, hidden=5120, rows=64 * 512),
    Shape("mixtral", experts=8, width=4096, hidden=14336, rows=32768),
    Shape("dsv3", experts=8, width=7168, hidden=2048, rows=32768),
)
# Small enough for any machine: the program itself, not a figure.
TINY = Shape("tiny", experts=4, width=64, hidden=128, rows=256)
SHAPES = {shape.name: shape for shape in (*_ALL, TINY)}
MEASURED = tuple(shape.name for shape in _ALL)


def group_sizes(kind: str, experts: int, rows: int, seed: int = 0) -> np.ndarray:
    """Draws how many rows each expert gets.

    Args:
      kind: "dirichlet" (shares from a symmetric Dirichlet of concentration 2), "zipf" (shares proportional to
        1 / rank, ranks in random order) or "even".
      experts: number of experts E.
      rows: number of rows R.
      seed: of the draw; equal arguments give equal sizes.

    Returns:
      (E,) int32, summing to `rows` exactly.

    Raises:
      ValueError: the kind is unknown.

    Example:
      >>> from bench.grouped_mlp_shapes import group_sizes
      >>> int(group_sizes("zipf", experts=8, rows=1000).sum())
      1000
    """
    if kind not in GROUPS:
        raise ValueError(f"group_sizes: unknown kind {kind!r}; choose from {', '.join(GROUPS)}")
    shares = GROUPS[kind](np.random.default_rng([seed, experts, rows]), experts)
    return _round_to_sum(shares / shares.sum() * rows, rows)


def _round_to_sum(wanted: np.ndarray, total: int) -> np.ndarray:
    """Rounds down, then adds 1 to each of the largest remainders until the sum is right."""
    sizes = np.floor(wanted).astype(np.int64)
    rest = total - int(sizes.sum())
    sizes[np.argsort(sizes - wanted, kind="stable")[:rest]] += 1
    return sizes.astype(np.int32)


GROUPS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "dirichlet": lambda rng, experts: rng.dirichlet(np.full(experts, 2.0)),
    "zipf": lambda rng, experts: rng.permutation(1.0 / np.arange(1, experts + 1)),
    "even": lambda rng, experts: np.ones(experts),
}
