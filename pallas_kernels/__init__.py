"""Grouped matrix products for mixture-of-experts layers. Imports jax only."""

from pallas_kernels._grouped_mlp import grouped_mlp as grouped_mlp
from pallas_kernels._implementation import Implementation as Implementation
from pallas_kernels._implementation import choose_implementation as choose_implementation

__all__ = ["Implementation", "choose_implementation", "grouped_mlp"]
