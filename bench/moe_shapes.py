"""The shapes of the MoE layer's benchmark, and the routing of its tokens.

T tokens, E experts, k experts a token, H model width, I expert width.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Shape:
    """A layer: T tokens, E experts, k experts a token, H model width, I expert width."""

    name: str
    tokens: int
    experts: int
    top_k: int
    width: int
    hidden: int

    @property
    def rows(self) -> int:
        return self.tokens * self.top_k

    def flops(self, activation: str, part: str) -> int:
        """Operations of the products: of "forward", or of "forward+backward" with three times as many."""
        products = 2 if activation == "squared_relu" else 3
        return (1 if part == "forward" else 3) * 2 * products * self.rows * self.width * self.hidden


# SonicMoE's figure 14 is at 24k, 32k and 32k tokens; then models by name; then shapes of no model.
_ALL = (
    Shape("7b-256", 24576, 128, 8, 1536, 256),
    Shape("7b-512", 24576, 64, 4, 1536, 512),
    Shape("7b-1024", 24576, 32, 2, 1536, 1024),
    Shape("30b-256", 32768, 256, 16, 4096, 256),
    Shape("30b-512", 32768, 128, 8, 4096, 512),
    Shape("30b-1024", 32768, 64, 4, 4096, 1024),
    Shape("qwen3-30b-a3b", 16384, 128, 8, 2048, 768),
    Shape("olmoe", 16384, 64, 8, 2048, 1024),
    Shape("gpt-oss-20b", 16384, 32, 4, 2880, 2880),
    Shape("mixtral", 8192, 8, 2, 4096, 14336),
    Shape("nano", 16384, 128, 6, 2688, 1856),
    Shape("fine", 32768, 64, 8, 1536, 256),
    Shape("wide", 8192, 128, 8, 4096, 1024),
    Shape("tiny", 64, 4, 2, 64, 128),
)
SHAPES = {shape.name: shape for shape in _ALL}
MEASURED = tuple(shape.name for shape in _ALL if shape.name != "tiny")
ROUTINGS = ("balanced", "zipf")


def draw_routing(shape: Shape, kind: str, seed: int = 0) -> tuple[jax.Array, jax.Array]:
    """Draws each token's experts, all different, and their probabilities.

    Args:
      shape: the layer.
      kind: "balanced" (each expert is as likely as the others) or "zipf" (likelihood proportional to
        1 / rank, ranks in random order).
      seed: of the draw.

    Returns:
      (T, k) float32 probabilities, which sum to one a token, and (T, k) int32 experts.
    """
    if kind not in ROUTINGS:
        raise ValueError(f"draw_routing: unknown kind {kind!r}; choose from {', '.join(ROUTINGS)}")
    keys = jax.random.split(jax.random.key(seed), 2)
    logits = jax.random.gumbel(keys[0], (shape.tokens, shape.experts))
    if kind == "zipf":
        rank = jax.random.permutation(keys[1], jnp.arange(1, shape.experts + 1))
        logits -= jnp.log(rank.astype(jnp.float32))[None]
    best, experts = jax.lax.top_k(logits, shape.top_k)
    return jax.nn.softmax(best, axis=1), experts.astype(jnp.int32)
